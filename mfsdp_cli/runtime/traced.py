"""Whether a run that was traced executed its plan, action by action. Knows no torch."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mfsdp_cli.errors import Finding, MfsdpError, Severity
from mfsdp_cli.runtime.record import PLAN, TRACE, is_run_folder, read_run
from mfsdp_cli.schedule.actions import Action, Kind
from mfsdp_cli.schedule.proof import FAIL, PASS, Check

if TYPE_CHECKING:
    from mfsdp_cli.plan import Plan

ACTIONS = ("MF341", "executed actions are the plan's")
GATHERS = ("MF342", "gathered units are the plan's")
REDUCTIONS = ("MF343", "reduced units are the plan's")


def check_run(run_dir: Path) -> list[Check]:
    """Compare the trace of a run with the plan in its folder.

    Raises:
        MfsdpError: MF523 where the folder is no run, was not traced, or its trace is unreadable.
    """
    from mfsdp_cli.plan import Plan

    if not is_run_folder(run_dir):
        raise MfsdpError("MF523", f"{run_dir} is not a run folder", where=str(run_dir))
    plan = Plan.load(run_dir / PLAN)
    traces = [_read(path) for path in sorted((run_dir / TRACE).glob("rank-*.json"))]
    engine = read_run(run_dir).get("engine")
    if engine != "mfsdp" or not traces:
        raise MfsdpError(
            "MF523",
            f"{run_dir} holds no trace (engine {engine})",
            where=str(run_dir),
            hint="train with --engine mfsdp --trace",
        )
    return [
        _check(ACTIONS, _ranks(plan, traces) or _first(_actions, plan, traces)),
        _check(GATHERS, _first(_gathers, plan, traces)),
        _check(REDUCTIONS, _first(_reductions, plan, traces)),
    ]


def _read(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_text())
        document["steps"] = _by_step(document["records"])
        return document
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MfsdpError("MF523", f"the trace {path} is unreadable: {error}") from error


def _by_step(records: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    steps: dict[int, list[dict[str, Any]]] = {}
    for record in records:
        steps.setdefault(int(record["step"]), []).append(record)
    return steps


def _check(check: tuple[str, str], problem: tuple[str, str] | None) -> Check:
    code, name = check
    if problem is None:
        return Check(code, name, PASS, None)
    message, where = problem
    return Check(code, name, FAIL, Finding(code, Severity.ERROR, message, where=where))


def _ranks(plan: Plan, traces: list[dict[str, Any]]) -> tuple[str, str] | None:
    found = sorted(trace["rank"] for trace in traces)
    wanted = list(range(plan.parallel.world_size))
    if found == wanted:
        return None
    return f"traces of ranks {found}, the plan has {len(wanted)} ranks", "trace/"


def _first(find: Any, plan: Plan, traces: list[dict[str, Any]]) -> tuple[str, str] | None:
    """The first problem on any rank and step."""
    for trace in traces:
        for step, records in trace["steps"].items():
            problem = find(plan, trace["pp_rank"], records)
            if problem is not None:
                return problem, f"rank {trace['rank']}, step {step}"
    return None


def _actions(plan: Plan, pp_rank: int, records: list[dict[str, Any]]) -> str | None:
    planned = [str(action) for action in plan.schedule.actions[pp_rank]]
    executed = [record["action"] for record in records]
    for position, (wanted, found) in enumerate(zip(planned, executed, strict=False)):
        if wanted != found:
            return f"action {position} was {found}, the plan has {wanted}"
    if len(planned) != len(executed):
        return f"{len(executed)} actions ran, the plan has {len(planned)}"
    return None


def _gathers(plan: Plan, pp_rank: int, records: list[dict[str, Any]]) -> str | None:
    resident = plan.settings.resident_chunks > 0
    kinds = {Kind.UNSHARD} if resident else {Kind.FORWARD, Kind.BACKWARD}
    return _differ("gather", planned_units(plan, pp_rank, kinds), records)


def _reductions(plan: Plan, pp_rank: int, records: list[dict[str, Any]]) -> str | None:
    return _differ("reduce", planned_units(plan, pp_rank, {Kind.REDUCE_GRAD}), records)


def planned_units(plan: Plan, pp_rank: int, kinds: set[Kind]) -> Counter[str]:
    """How often a step uses each unit of a rank in actions of these kinds."""
    units: dict[int, list[str]] = {}
    for unit in plan.document["context"][pp_rank]["units"]:
        units.setdefault(unit["stage"], []).append(unit["unit"])
    actions: list[Action] = plan.schedule.actions[pp_rank]
    return Counter(
        name
        for action in actions
        if action.kind in kinds and action.stage is not None
        for name in units.get(action.stage, ())
    )


def _differ(operation: str, wanted: Counter[str], records: list[dict[str, Any]]) -> str | None:
    found = Counter(
        event["unit"]
        for record in records
        for event in record["events"]
        if event["operation"] == operation
    )
    for name in sorted(wanted.keys() | found.keys()):
        if wanted[name] != found[name]:
            return f"{found[name]} x {operation} of {name}, the plan has {wanted[name]}"
    return None
