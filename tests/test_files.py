"""Files written whole or not at all: full disks, links, devices, and the files a command reads."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from mfsdp_cli.files import write_whole
from tests.helpers.cli import mfsdp

CONFIG = Path(__file__).parent / "data/configs/gpt2.json"
RUN = Path(__file__).parent / "data/runs/c12_a.jsonl"


def names(folder: Path) -> list[str]:
    return sorted(item.name for item in folder.iterdir())


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "plan.json"
    file.write_text("old")

    def full(_source: object, _target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mfsdp_cli.files.os.replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(file, "new")
    assert file.read_text() == "old"
    assert names(tmp_path) == ["plan.json"]


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_whole(tmp_path / "link", "first")
    write_whole(tmp_path / "link", "second")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "second"


def test_the_permissions_of_a_file_stay(tmp_path: Path) -> None:
    file = tmp_path / "file"
    write_whole(file, "new")
    mask = os.umask(0)
    os.umask(mask)
    assert file.stat().st_mode & 0o777 == 0o666 & ~mask
    file.chmod(0o640)
    write_whole(file, "newer")
    assert file.stat().st_mode & 0o777 == 0o640


def test_the_longest_file_name_can_be_written(tmp_path: Path) -> None:
    write_whole(tmp_path / ("a" * 255), "whole")
    assert names(tmp_path) == ["a" * 255]


def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_whole(pipe, "through")
    reader.join(10)
    assert read == ["through"]
    assert pipe.is_fifo()


@pytest.mark.parametrize("suffix", ["json", "csv", "trace.json", "graphml", "svg"])
def test_a_graph_that_cannot_be_written_leaves_nothing(suffix: str, tmp_path: Path) -> None:
    folder = tmp_path / f"graph.{suffix}"
    folder.mkdir()
    done = mfsdp("plan", "llama-tiny", "--pp", "1", "--graph", folder, "--json", code=2)
    assert done.stdout == ""
    assert "error[MF309]: cannot write the schedule graph: Is a directory" in done.stderr
    assert names(tmp_path) == [folder.name]


@pytest.mark.parametrize("flag", ["--out", "--graph"])
def test_the_model_is_not_overwritten(flag: str, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    shutil.copy(CONFIG, config)
    for model in (config, tmp_path):
        done = mfsdp("plan", model, flag, f"{tmp_path}/./config.json", code=2)
        assert f"error[MF207]: {flag} {config} would overwrite the model" in done.stderr
    assert config.read_bytes() == CONFIG.read_bytes()


def test_a_preset_takes_no_name_away(tmp_path: Path) -> None:
    mfsdp("plan", "llama-tiny", "--out", "llama-tiny", cwd=tmp_path)
    assert json.loads((tmp_path / "llama-tiny").read_text())["schema"] == "mfsdp.plan/1"


def test_plan_and_graph_are_two_files(tmp_path: Path) -> None:
    same = tmp_path / "plan.json"
    done = mfsdp("plan", "llama-tiny", "--out", same, "--graph", same, code=2)
    assert "error[MF207]: plan and schedule graph would be written to the same" in done.stderr
    assert names(tmp_path) == []


def test_a_run_that_is_compared_is_not_overwritten(tmp_path: Path) -> None:
    run = tmp_path / "run.jsonl"
    shutil.copy(RUN, run)
    done = mfsdp("compare-runs", RUN, run, "--png", run, code=2)
    assert f"error[MF207]: --png {run} would overwrite a run that is compared" in done.stderr
    assert run.read_bytes() == RUN.read_bytes()
