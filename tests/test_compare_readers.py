"""Which reader reads what: the content decides, not the name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mfsdp_cli.compare.readers import LINE_READERS, read_run
from mfsdp_cli.errors import ExitCode, MfsdpError
from tests.helpers.runs import DATA, losses, megatron_line, run_folder, write_rows


def refused(path: Path, code: str = "MF601") -> MfsdpError:
    with pytest.raises(MfsdpError, match=code) as caught:
        read_run(str(path))
    assert caught.value.exit_code == ExitCode.USAGE
    return caught.value


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("c01_healthy.log", "megatron-log"),
        ("c13_titan.log", "torchtitan-log"),
        ("c13_swift.jsonl", "jsonl"),
        ("c09_wandb_history.jsonl", "wandb-history"),
        ("c07_tb_tags", "tensorboard"),
    ],
)
def test_the_content_tells_the_format(tmp_path: Path, name: str, expected: str) -> None:
    source = DATA / name
    if source.is_dir():
        source = next(source.iterdir())
    path = tmp_path / "metrics.csv"  # a name that says nothing, or the wrong thing
    shutil.copy(source, path)
    assert read_run(str(path)).format == expected


def test_a_run_folder_is_known_by_its_files(tmp_path: Path) -> None:
    assert read_run(str(run_folder(tmp_path / "run", {1: 5.0}))).format == "run-folder"


def test_a_log_with_a_long_preamble_and_stray_json(tmp_path: Path) -> None:
    path = tmp_path / "log"
    noise = "warning: something\n" * 3000 + '{"step": 1, "loss": 99.0}\n'
    path.write_text(noise + "".join(megatron_line(step, 5.0) for step in range(1, 6)))
    run = read_run(str(path))
    assert run.format == "megatron-log"
    assert list(run.train.finite()) == [(step, 5.0) for step in range(1, 6)]


def test_what_was_looked_for_is_said(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("nothing here\n")
    message = refused(path).finding.message
    for reader in LINE_READERS:
        assert reader.looked_for in message
    assert "TensorBoard events" in message


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n\n\n",
        b"\x00" * 100_000,
        bytes(range(256)) * 500,
        b"{" * 200_000,
        b"[" * 200_000,
        b'{"step": 1}\n',
        b'{"loss": 1.0}\n',
        b'[{"step": 1, "loss": 2.0}]\n',
        b'"step"\n',
        b"null\n",
        b"step,loss\n1,5.0\n",
        b"\x89PNG\r\n\x1a\n" + b"\x00" * 500,
    ],
)
def test_rubbish_is_no_run(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rubbish"
    path.write_bytes(content)
    refused(path)


def test_an_empty_file_is_called_empty(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.touch()
    assert "an empty file" in refused(path).finding.message


def test_a_megabyte_line_without_a_record(tmp_path: Path) -> None:
    path = tmp_path / "long"
    path.write_bytes(b"iteration step: loss: " * 60_000)
    refused(path)


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "loop").symlink_to(tmp_path)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "this folder is no run" in refused(tmp_path).finding.message


def test_nothing_there(tmp_path: Path) -> None:
    refused(tmp_path / "none")


def test_metrics_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    refused(tmp_path, "MF602")


def test_a_run_that_died_before_its_first_step_is_a_run(tmp_path: Path) -> None:
    run = read_run(str(run_folder(tmp_path / "run", {}, status="failed")))
    assert (run.train.points, run.status, run.last_step) == (0, "failed", None)


def test_a_run_folder_with_run_json_alone(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"status": "failed", "seed": 1}))
    run = read_run(str(tmp_path))
    assert (run.format, run.status, run.settings["seed"]) == ("run-folder", "failed", 1)


def test_another_trainers_folder_of_metrics(tmp_path: Path) -> None:
    losses(tmp_path / "metrics.jsonl", {1: 5.0, 2: 4.0})
    run = read_run(str(tmp_path))
    assert list(run.train.finite()) == [(1, 5.0), (2, 4.0)]
    assert run.status is None


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe\x00", b"[]", b"[" * 100_000, b""])
def test_a_broken_run_json_does_not_hide_the_metrics(tmp_path: Path, content: bytes) -> None:
    folder = run_folder(tmp_path / "run", {1: 5.0})
    (folder / "run.json").write_bytes(content)
    run = read_run(str(folder))
    assert (run.train.points, run.settings) == (1, {})
    assert bool(run.notes) == (content != b"[]")


def test_settings_come_from_run_json_and_the_plan(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", {1: 5.0}, settings={"lr": 1e-3, "adam": {"eps": 1e-8}})
    plan = {"model": {"name": "tiny", "parameters": {"total": 7}, "assumptions": ["x"]}}
    (folder / "plan.json").write_text(json.dumps(plan))
    run = read_run(str(folder))
    assert run.settings == {
        "lr": 1e-3,
        "adam.eps": 1e-8,
        "seed": 1234,
        "data_digest": "d",
        "precision": "fp32",
        "seq_length": 16,
        "global_batch_size": 8,
        "model.name": "tiny",
        "model.parameters.total": 7,
    }
    assert run.batch_sizes == (8,)
    assert (run.samples.at(3), run.tokens.at(3)) == (24, 3 * 128)


def test_a_metric_that_is_not_there_is_answered_with_those_that_are(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"step": 1, "loss": 5.0, "grad_norm": 1.0}])
    with pytest.raises(MfsdpError, match=r"MF603.*'nope'.*'grad_norm', 'loss'"):
        read_run(str(path), "nope")


def test_a_run_without_any_loss(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"step": 1, "grad_norm": 1.0}])
    run = read_run(str(path))  # every record lacks its loss
    assert (run.train.points, run.train.missing()) == (0, [1])
    path = write_rows(tmp_path / "b.jsonl", [{"step": 1, "test_loss": 1.0, "aux_loss": 2.0}])
    refused(path, "MF601")


def test_losses_that_could_both_be_meant(tmp_path: Path) -> None:
    rows = [{"step": 1, "eval_c4_loss": 1.0, "eval_wiki_loss": 2.0, "loss": 3.0}]
    path = write_rows(tmp_path / "a.jsonl", rows)
    message = refused(path, "MF604").finding.message
    assert message.endswith("eval_c4_loss, eval_wiki_loss")
    assert list(read_run(str(path), "eval_wiki_loss").eval.finite()) == [(1, 2.0)]
