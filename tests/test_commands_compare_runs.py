from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from mfsdp_cli.cli import app
from mfsdp_cli.errors import ExitCode, MfsdpError
from tests.helpers.cli import mfsdp
from tests.helpers.runs import DATA, losses, run_folder


def invoke(*arguments: str | Path) -> Result:
    environment = {"COLUMNS": "100", "NO_COLOR": "1"}
    return CliRunner().invoke(app, ["compare-runs", *map(str, arguments)], env=environment)


def error_of(*arguments: str | Path) -> MfsdpError:
    result = invoke(*arguments)
    assert isinstance(result.exception, MfsdpError), result.output
    assert result.stdout == ""
    return result.exception


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    train = {step: 5.0 - step / 100 for step in range(1, 201)}
    evaluations = {step: 5.0 - step / 90 for step in (50, 100, 150, 200)}
    a = run_folder(tmp_path / "demo-mfsdp", train, evaluations, engine="mfsdp")
    near = {step: loss + 0.001 for step, loss in evaluations.items()}
    return a, run_folder(tmp_path / "demo-distopt", train, near, engine="distopt")


def test_runs_that_agree(folders: tuple[Path, Path], tmp_path: Path) -> None:
    picture = tmp_path / "demo-losses.png"
    result = invoke(*folders, "--abs-tolerance", "0.002", "--rel-tolerance", "0", "--png", picture)
    assert result.exit_code == ExitCode.OK
    assert result.stderr == ""
    assert "same: within tolerance (0.002): 4 of 4 common evaluations" in result.stdout
    assert picture.stat().st_size > 10_000


def test_runs_that_differ(folders: tuple[Path, Path]) -> None:
    result = invoke(*folders, "--abs-tolerance", "0.0005")
    assert result.exit_code == ExitCode.PROBLEM
    assert "different: beyond tolerance (0.0005): 4 of 4 common evaluations" in result.stdout


def test_json_is_one_strict_document_and_nothing_else(folders: tuple[Path, Path]) -> None:
    result = invoke(*folders, "--json")
    assert (result.exit_code, result.stderr) == (ExitCode.OK, "")

    def refuse(literal: str) -> None:
        raise AssertionError(literal)

    document = json.loads(result.stdout, parse_constant=refuse)
    assert (document["schema"], document["ok"]) == ("mfsdp.compare/1", True)
    assert [run["eval_points"] for run in document["runs"]] == [4, 4]
    assert document["eval"]["mean_signed"] == pytest.approx(0.001)


def test_one_tolerance_sets_the_other_to_zero(folders: tuple[Path, Path]) -> None:
    document = json.loads(invoke(*folders, "--rel-tolerance", "0.01", "--json").stdout)
    assert document["tolerance"] == {"absolute": 0.0, "relative": 0.01}
    document = json.loads(invoke(*folders, "--abs-tolerance", "0.5", "--json").stdout)
    assert document["tolerance"] == {"absolute": 0.5, "relative": 0.0}


def test_no_common_step_prints_the_document_and_fails() -> None:
    result = invoke(DATA / "c11_a.jsonl", DATA / "c11_b.jsonl", "--json")
    assert result.exit_code == ExitCode.PROBLEM
    assert json.loads(result.stdout)["train"]["common"] == 0


def test_nan_is_equal_to_nothing_unless_allowed(tmp_path: Path) -> None:
    a = losses(tmp_path / "a.jsonl", {1: 5.0, 2: "nan"})
    assert invoke(a, a).exit_code == ExitCode.PROBLEM
    assert invoke(a, a, "--allow-nan").exit_code == ExitCode.OK


def test_a_metric_and_an_axis() -> None:
    result = invoke(DATA / "c07_tb_tags", DATA / "c07_tb_tags", "--metric", "grad-norm")
    assert result.exit_code == ExitCode.OK
    assert "10 of 10 common values of grad-norm" in " ".join(result.stdout.split())
    files = (DATA / "c16_gbs256.log", DATA / "c16_gbs512.log")
    assert invoke(*files).exit_code == ExitCode.PROBLEM
    assert invoke(*files, "--x", "samples").exit_code == ExitCode.OK
    assert invoke(*files, "--x", "tokens").exit_code == ExitCode.PROBLEM


def test_warnings_are_on_stderr(tmp_path: Path) -> None:
    a = run_folder(tmp_path / "a", {1: 5.0})
    b = run_folder(tmp_path / "b", {1: 5.0}, seed=7)
    result = invoke(a, b)
    assert result.stderr == "warning[MF613]: the runs differ in seed: A 1234, B 7\n"
    assert "MF613" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ((DATA / "c11_a.jsonl",), "MF607"),
        ((DATA / "c11_a.jsonl", "/nowhere"), "MF601"),
        ((DATA / "c11_a.jsonl", DATA / "c13_hf.log"), "MF601"),
        ((DATA / "c11_a.jsonl", "/dev/null"), "MF602"),
        ((DATA / "c11_a.jsonl", DATA), "MF605"),
        ((DATA / "c11_a.jsonl", DATA / "c11_c.jsonl", "--metric", "nope"), "MF603"),
        ((DATA / "c11_a.jsonl", DATA / "c11_c.jsonl", "--abs-tolerance", "-1"), "MF606"),
        ((DATA / "c11_a.jsonl", DATA / "c11_c.jsonl", "--rel-tolerance", "nan"), "MF606"),
        ((DATA / "c11_a.jsonl", DATA / "c11_c.jsonl", "--html", "a.html"), "MF608"),
        ((DATA / "c11_a.jsonl", DATA / "c11_c.jsonl", "--png", "/nowhere/a.png"), "MF609"),
    ],
)
def test_wrong_usage_has_a_code_and_a_hint(arguments: tuple[str | Path, ...], code: str) -> None:
    error = error_of(*arguments)
    assert (error.finding.code, error.exit_code) == (code, ExitCode.USAGE)
    assert error.finding.where
    assert error.finding.hint or code == "MF601"


@pytest.mark.parametrize("arguments", [(), ("--x", "epochs"), ("--abs-tolerance", "small")])
def test_usage_that_typer_refuses(arguments: tuple[str, ...]) -> None:
    files = (DATA / "c11_a.jsonl", DATA / "c11_c.jsonl") if arguments else ()
    result = invoke(*files, *arguments)
    assert (result.exit_code, result.stdout) == (ExitCode.USAGE, "")


def test_as_a_person_runs_it(tmp_path: Path) -> None:
    a, c = DATA / "c11_a.jsonl", DATA / "c11_c.jsonl"
    assert "\nsame: within tolerance" in mfsdp("compare-runs", a, c).stdout
    differ = mfsdp("compare-runs", a, DATA / "c11_b.jsonl", code=1)
    assert "\ndifferent: no common step" in differ.stdout
    refused = mfsdp("compare-runs", a, tmp_path / "none", code=2)
    assert refused.stdout == ""
    assert refused.stderr.startswith("error[MF601]: no such file or folder\n  where: ")
    assert "Traceback" not in refused.stderr


def test_a_file_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = losses(tmp_path / "a.jsonl", {1: 5.0})

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")  # as for anyone but root

    monkeypatch.setattr(Path, "open", refuse)
    finding = error_of(path, path).finding
    assert (finding.code, finding.message) == ("MF602", "cannot be read: Permission denied")
