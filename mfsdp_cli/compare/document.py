"""The JSON document of a comparison (``mfsdp.compare/1``): strict JSON, raw numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mfsdp_cli.compare.caveats import all_warnings, warnings
from mfsdp_cli.compare.judge import Comparison, Verdict

SCHEMA = "mfsdp.compare/1"


def verdict_of(comparisons: Sequence[Comparison]) -> Verdict:
    """The verdict over all pairs: passed if each passed.

    With several, the reasons name the run; where one does not pass, they are the failures alone.
    """
    if len(comparisons) == 1:
        return comparisons[0].verdict
    passed = all(c.verdict.passed for c in comparisons)
    reasons = [
        f"{c.letters[1]} against {c.letters[0]}: {reason}"
        for c in comparisons
        for reason in c.verdict.reasons
        if c.verdict.passed == passed
    ]
    return Verdict(passed, tuple(reasons))


def document(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """The contract's document.

    ``train`` and ``eval`` are those of the first pair; with more than two runs ``pairs`` has
    every pair (each run against the first), and ``verdict`` and ``warnings`` speak of all.
    """
    first, verdict = comparisons[0], verdict_of(comparisons)
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "ok": verdict.passed,
        "x": first.policy.axis.value,
        "tolerance": {
            "absolute": first.policy.tolerance.absolute,
            "relative": first.policy.tolerance.relative,
        },
        "runs": [run.to_json() for run in (first.a, *(c.b for c in comparisons))],
        "judged": "eval" if first.judges_eval else "train",
        "train": first.train.alignment.to_json(),
        "eval": first.eval.alignment.to_json(points=True),
        "verdict": _verdict(verdict),
        "warnings": [warning.message for warning in all_warnings(comparisons)],
    }
    if len(comparisons) > 1:
        found["pairs"] = [_pair(comparison) for comparison in comparisons]
    return found


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {"pass": verdict.passed, "reasons": list(verdict.reasons)}


def _pair(comparison: Comparison) -> dict[str, Any]:
    return {
        "a": comparison.a.path,
        "b": comparison.b.path,
        "judged": "eval" if comparison.judges_eval else "train",
        "train": comparison.train.alignment.to_json(),
        "eval": comparison.eval.alignment.to_json(points=True),
        "verdict": _verdict(comparison.verdict),
        "warnings": [warning.message for warning in warnings(comparison)],
    }
