"""The bench of engines runs, and its contenders agree before they are timed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent / "bench" / "bench_engines.py"
SHORT = ["--rounds", "1", "--steps", "1", "--seq", "32", "--json"]
TWO = ["--contender", "mfsdp", "--contender", "torch"]


@pytest.mark.sweep
def test_torchs_engine_computes_what_ours_does() -> None:
    """The bench ends with an error where losses or norms of the first steps differ by 1e-5."""
    # An MoE model: router bias and balancing losses are scaled in a way of torch's own.
    result = subprocess.run(
        [sys.executable, str(BENCH), "--model", "deepseek-v3-proxy-tiny", *TWO, *SHORT],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)["models"]["deepseek-v3-proxy-tiny"]
    assert [f["contender"] for f in figures] == ["mfsdp", "distopt", "torch"]
    for figure in figures:
        assert figure["tokens_per_s"] > 0
        assert figure["peak_bytes"] > figure["persistent_bytes"] > 0
    mine, distopt, torch = (figure["persistent_bytes"] for figure in figures)
    assert mine < distopt
    # The same ZeRO-3: what differs is padding, to a unit's end or to a row of each parameter.
    assert abs(mine - torch) < 0.01 * torch


def test_engines_that_disagree_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH.parent))
    from bench_engines import check
    from contender import Report

    good = Report(1.0, 1.0, [5.0, 4.0], [2.0, 1.0], 1, 1)
    bad = Report(1.0, 1.0, [5.0, 4.0], [2.0, 1.0001], 1, 1)
    check({"distopt": [good], "torch": [good]})
    with pytest.raises(SystemExit, match="torch: norms of the first steps differ"):
        check({"distopt": [good], "torch": [bad]})
