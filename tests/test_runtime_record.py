from __future__ import annotations

import json
import math
import os
import resource
import threading
from pathlib import Path
from typing import Any

import pytest

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.runtime.record import (
    RunRecord,
    create_run_folder,
    finish,
    last_values,
    read_run,
    update_run,
)


def _strict(line: str) -> Any:
    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} is not strict JSON")

    return json.loads(line, parse_constant=refuse)


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [_strict(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _new(folder: Path, overwrite: bool = False) -> Path:
    create_run_folder(folder, {"engine": "single"}, '{"a": 1}', overwrite)
    return folder


def _train(record: RunRecord, step: int, loss: float = 2.5, grad_norm: float = 1.0) -> None:
    record.train(
        step,
        loss=loss,
        grad_norm=grad_norm,
        lr=1e-3,
        tokens=step * 100,
        step_time_s=0.5,
        peak_bytes=7,
        step_tokens=100,
    )


class _Scalars:
    def __init__(self) -> None:
        self.values: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.values.append((tag, scalar_value, global_step))

    def flush(self) -> None: ...

    def close(self) -> None: ...


def test_a_run_leaves_strict_lines_in_the_contracts_form(tmp_path: Path) -> None:
    folder = _new(tmp_path / "run")
    assert read_run(folder) == {"schema": "mfsdp.run/1", "engine": "single", "status": "running"}
    assert (folder / "plan.json").read_text() == '{"a": 1}'
    record = RunRecord(folder)
    _train(record, 1, loss=1 / 3)
    record.evaluation(1, 2.25)
    record.end("completed", step=1)
    assert _lines(folder) == [
        {
            "kind": "train",
            "step": 1,
            "loss": 1 / 3,
            "grad_norm": 1.0,
            "lr": 1e-3,
            "tokens": 100,
            "step_time_s": 0.5,
            "peak_bytes": 7,
        },
        {"kind": "eval", "step": 1, "loss": 2.25},
        {"kind": "end", "status": "completed", "step": 1},
    ]
    assert read_run(folder)["status"] == "completed"


@pytest.mark.parametrize(
    ("value", "name"), [(math.nan, "nan"), (math.inf, "+inf"), (-math.inf, "-inf")]
)
def test_what_is_not_finite_is_null_and_named(tmp_path: Path, value: float, name: str) -> None:
    folder = _new(tmp_path / "run")
    record = RunRecord(folder)
    _train(record, 1, loss=value, grad_norm=value)
    record.evaluation(1, value)
    train, evaluation = _lines(folder)
    assert train["loss"] is None
    assert train["nonfinite"] == name
    assert train["grad_norm"] is None
    assert evaluation == {"kind": "eval", "step": 1, "loss": None, "nonfinite": name}


def test_tensorboard_gets_megatrons_tags(tmp_path: Path) -> None:
    scalars = _Scalars()
    record = RunRecord(_new(tmp_path / "run"), scalars)
    _train(record, 3, loss=2.0, grad_norm=4.0)
    record.evaluation(3, 1.5)
    assert {tag: value for tag, value, _ in scalars.values} == {
        "lm loss": 2.0,
        "grad-norm": 4.0,
        "learning-rate": 1e-3,
        "iteration-time": 0.5,
        "tokens-per-second": 200.0,
        "peak-memory-bytes": 7,
        "lm loss validation": 1.5,
    }
    assert {step for _, _, step in scalars.values} == {3}


def test_nothing_follows_the_end_whoever_writes_it(tmp_path: Path) -> None:
    folder = _new(tmp_path / "run")
    record = RunRecord(folder)
    _train(record, 1)
    threads = [threading.Thread(target=record.end, args=("interrupted",)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _train(record, 2)
    record.end("completed")
    assert [line["kind"] for line in _lines(folder)] == ["train", "end"]
    assert read_run(folder)["status"] == "interrupted"


def test_a_run_that_was_cut_off_is_finished_by_who_outlives_it(tmp_path: Path) -> None:
    folder = _new(tmp_path / "run")
    _train(RunRecord(folder), 1)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "step": 2, "lo')
    assert finish(folder, "failed", reason="rank 1: gone") == "failed"
    assert [line["kind"] for line in _lines(folder)] == ["train", "end"]
    assert _lines(folder)[-1] == {"kind": "end", "status": "failed", "reason": "rank 1: gone"}
    assert read_run(folder)["status"] == "failed"


def test_a_run_that_ended_keeps_its_own_word(tmp_path: Path) -> None:
    folder = _new(tmp_path / "run")
    RunRecord(folder).end("nan", step=1)
    update_run(folder, status="running")  # it died between its line and its status
    assert finish(folder, "failed") == "nan"
    assert read_run(folder)["status"] == "nan"
    assert len(_lines(folder)) == 1


def test_the_last_of_each_kind_is_found(tmp_path: Path) -> None:
    record = RunRecord(_new(tmp_path / "run"))
    for step in (1, 2):
        _train(record, step)
    record.evaluation(2, 1.0)
    found = last_values(tmp_path / "run")
    assert found["train"]["step"] == 2
    assert found["eval"] == {"kind": "eval", "step": 2, "loss": 1.0}
    assert "end" not in found


def test_an_existing_run_is_refused_and_replaced_only_on_demand(tmp_path: Path) -> None:
    folder = _new(tmp_path / "run")
    _train(RunRecord(folder), 1)
    with pytest.raises(MfsdpError, match=r"the run folder .* exists") as caught:
        _new(folder)
    assert "--overwrite" in caught.value.finding.hint
    _new(folder, overwrite=True)
    assert _lines(folder) == []


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_no_run_folder_is_never_replaced(tmp_path: Path, overwrite: bool) -> None:
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter").write_text("words")
    for taken in (folder, folder / "chapter"):
        with pytest.raises(MfsdpError, match="is not a run folder"):
            _new(taken, overwrite)
    assert (folder / "chapter").read_text() == "words"


def test_an_empty_folder_may_become_a_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert read_run(_new(tmp_path / "run"))["status"] == "running"


def test_a_link_to_a_run_folder_is_replaced_behind_the_link(tmp_path: Path) -> None:
    folder = _new(tmp_path / "run")
    (folder / "trace").mkdir()
    (folder / "elsewhere").symlink_to(tmp_path)
    (tmp_path / "link").symlink_to(folder)
    _new(tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    names = {item.name for item in folder.iterdir()}
    assert names == {"run.json", "plan.json", "metrics.jsonl"}


def test_a_line_that_is_cut_off_is_an_error(tmp_path: Path) -> None:
    """The system may take a part of what is written, as it does where a disk fills up."""
    folder = _new(tmp_path / "run")
    record = RunRecord(folder)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            _train(record, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (folder / "metrics.jsonl").stat().st_size == 100
    assert finish(folder, "failed") == "failed"
    assert _lines(folder) == [{"kind": "end", "status": "failed"}]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MfsdpError) as caught:
        _new(tmp_path / "file" / "run")
    assert caught.value.finding.code == "MF507"
    assert os.listdir(tmp_path) == ["file"]
