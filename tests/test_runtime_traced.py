"""Whether a traced run executed its plan: what passes, what fails, what is no trace at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.plan import Plan
from mfsdp_cli.runtime.traced import check_run, planned_units
from mfsdp_cli.schedule.actions import Kind
from tests.helpers.plans import plan_of

Document = dict[str, Any]


def _records(plan: Plan, pp_rank: int, steps: int) -> list[Document]:
    """What a rank that executes its plan records; communication in each step's first action."""
    gathers = planned_units(plan, pp_rank, {Kind.UNSHARD})
    reductions = planned_units(plan, pp_rank, {Kind.REDUCE_GRAD})
    records: list[Document] = []
    for step in range(1, steps + 1):
        events = [{"operation": "gather", "unit": unit} for unit in gathers.elements()]
        events += [{"operation": "reduce", "unit": unit} for unit in reductions.elements()]
        for action in plan.schedule.actions[pp_rank]:
            records.append({"step": step, "action": str(action), "events": events})
            events = []
    return records


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two traced steps on 2 pipeline ranks with 2 data-parallel ranks each."""
    plan = plan_of("gpt2-tiny", pp=2, vpp=2, dp=2)
    folder = tmp_path / "run"
    (folder / "trace").mkdir(parents=True)
    plan.save(folder / "plan.json")
    (folder / "run.json").write_text(json.dumps({"engine": "mfsdp"}))
    for rank in range(4):
        document = {"rank": rank, "records": _records(plan, rank // 2, 2)}
        (folder / "trace" / f"rank-{rank}.json").write_text(json.dumps(document))
    return folder


def change(run: Path, rank: int, edit: Callable[[Document], object]) -> None:
    path = run / "trace" / f"rank-{rank}.json"
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))


def statuses(run: Path) -> dict[str, str]:
    return {check.code: check.status for check in check_run(run)}


def problem(run: Path) -> str:
    return next(
        f"{check.finding.code} {check.finding.where}: {check.finding.message}"
        for check in check_run(run)
        if check.finding is not None
    )


def test_a_run_of_the_plan_passes(run: Path) -> None:
    assert statuses(run) == {"MF341": "pass", "MF342": "pass", "MF343": "pass"}


def test_an_action_too_many_or_another_one_fails(run: Path) -> None:
    change(run, 2, lambda d: d["records"].append({"step": 2, "action": "CLIP", "events": []}))
    assert "MF341 rank 2, step 2" in problem(run)
    change(run, 1, lambda d: d["records"][7].update(action="9F9"))
    assert "MF341 rank 1, step 1: action 7 was 9F9" in problem(run)


def test_a_gather_or_reduction_more_or_less_fails(run: Path) -> None:
    change(run, 3, lambda d: d["records"][0]["events"].pop())
    assert statuses(run) == {"MF341": "pass", "MF342": "pass", "MF343": "fail"}
    change(run, 3, lambda d: d["records"][0]["events"].pop(0))
    assert statuses(run) == {"MF341": "pass", "MF342": "fail", "MF343": "fail"}


def test_a_trace_without_steps_or_of_fewer_steps_fails(run: Path) -> None:
    change(run, 1, lambda d: d.update(records=[r for r in d["records"] if r["step"] == 1]))
    assert problem(run) == "MF341 rank 1: rank 1 traced 1 steps, rank 0 2"
    for rank in range(4):
        change(run, rank, lambda d: d.update(records=[]))
    assert problem(run) == "MF341 rank 0: rank 0 traced 0 steps, rank 0 0"


def test_a_missing_or_unknown_rank_fails(run: Path) -> None:
    change(run, 3, lambda d: d.update(rank=9))
    assert "traces of ranks [0, 1, 2, 9], the plan has 4 ranks" in problem(run)
    (run / "trace" / "rank-3.json").unlink()
    assert "traces of ranks [0, 1, 2]" in problem(run)


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"[]",
        b'"trace"',
        b"{",
        b"\xff\xfe",
        b'{"rank": 0}',
        b'{"records": []}',
        b'{"rank": 0, "records": [1]}',
        b'{"rank": 0, "records": [{"step": 1, "action": "CLIP"}]}',
        b'{"rank": 0, "records": [{"step": "x", "action": "CLIP", "events": []}]}',
        b'{"rank": 0, "records": [{"step": 1, "action": "CLIP", "events": [[]]}]}',
    ],
)
def test_a_damaged_trace_is_named(run: Path, damage: bytes) -> None:
    (run / "trace" / "rank-0.json").write_bytes(damage)
    with pytest.raises(MfsdpError, match=r"MF523.*rank-0\.json is unreadable"):
        check_run(run)


@pytest.mark.parametrize("damage", [b"", b"[]", b"{}", b"\xff"])
def test_a_damaged_run_document_is_named(run: Path, damage: bytes) -> None:
    (run / "run.json").write_bytes(damage)
    with pytest.raises(MfsdpError, match=r"MF523.*run\.json is unreadable"):
        check_run(run)


def test_a_folder_without_trace_says_how_to_make_one(run: Path, tmp_path: Path) -> None:
    with pytest.raises(MfsdpError, match=r"MF523.*is not a run folder"):
        check_run(tmp_path / "nowhere")
    (run / "run.json").write_text(json.dumps({"engine": "single"}))
    with pytest.raises(MfsdpError) as caught:
        check_run(run)
    assert "--trace" in caught.value.finding.hint
