"""How a numeric run ends when its ranks do not: always by a named error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mfsdp_cli.errors import ExitCode, MfsdpError
from mfsdp_cli.runtime import backend
from mfsdp_cli.runtime.launch import FAILED, INTERRUPTED
from mfsdp_cli.runtime.numeric import run
from mfsdp_cli.runtime.numeric.job import Capture
from mfsdp_cli.runtime.report import Report
from tests.helpers.plans import plan_of


def _ending(monkeypatch: pytest.MonkeyPatch, status: str, reports: list[Report]) -> None:
    def ended(*_: Any) -> tuple[str, list[Report]]:
        return status, reports

    monkeypatch.setattr(run, "run_workers", ended)


def _capture(folder: Path) -> Capture:
    return Capture(str(folder), "mfsdp", 1, "gloo", full=False)


def test_ranks_that_end_without_a_word_are_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _ending(monkeypatch, FAILED, [])
    with pytest.raises(MfsdpError, match=r"MF522.*engine mfsdp: the ranks were ended"):
        run.capture_steps(_capture(tmp_path), 2)


def test_the_first_failure_is_shown_with_its_own_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain = Report(1, "ValueError", "no such thing", "", 0)
    _ending(monkeypatch, FAILED, [plain])
    with pytest.raises(MfsdpError) as caught:
        run.capture_steps(_capture(tmp_path), 2)
    assert caught.value.finding.code == "MF522"
    assert caught.value.finding.message == "engine mfsdp, rank 1: ValueError: no such thing"
    ours = Report(0, "MfsdpError", "too big", "", 0, code="MF502", exit_code=ExitCode.USAGE)
    _ending(monkeypatch, FAILED, [ours, plain])
    with pytest.raises(MfsdpError) as caught:
        run.capture_steps(_capture(tmp_path), 2)
    assert caught.value.finding.code == "MF502"
    assert caught.value.finding.message == "engine mfsdp, rank 0: too big"
    assert caught.value.exit_code == ExitCode.USAGE


def test_a_killed_rank_is_said_to_be_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _ending(monkeypatch, FAILED, [Report(3, "", "was killed by SIGKILL", "", 0)])
    with pytest.raises(MfsdpError) as caught:
        run.capture_steps(_capture(tmp_path), 4)
    assert caught.value.finding.message == "engine mfsdp, rank 3: was killed by SIGKILL"


@pytest.mark.parametrize("tolerance", [0.0, -1e-5, float("nan"), float("inf")])
def test_a_tolerance_that_would_pass_anything_or_nothing_is_refused(
    tolerance: float, tmp_path: Path
) -> None:
    with pytest.raises(MfsdpError, match="MF901") as caught:
        run.run_numeric(plan_of("gpt2-tiny"), tmp_path / "plan.json", tolerance=tolerance)
    assert caught.value.finding.where == "--tolerance"


def test_nccl_without_gpus_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(backend, "count_gpus", lambda: 1)
    with pytest.raises(MfsdpError, match=r"MF511.*2 ranks on this host and 1 GPUs"):
        run.run_numeric(plan_of("gpt2-tiny", pp=2), tmp_path / "plan.json", backend="nccl")


def test_an_interrupt_stays_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _ending(monkeypatch, INTERRUPTED, [])
    with pytest.raises(KeyboardInterrupt):
        run.capture_steps(_capture(tmp_path), 2)
