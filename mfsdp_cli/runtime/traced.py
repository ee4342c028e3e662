"""Whether a run that was traced executed its plan, action by action. Knows no torch."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mfsdp_cli.errors import Finding, MfsdpError, Severity
from mfsdp_cli.runtime.record import PLAN, RUN, TRACE, is_run_folder, read_run
from mfsdp_cli.schedule.actions import Action, Kind
from mfsdp_cli.schedule.proof import FAIL, PASS, Check

if TYPE_CHECKING:
    from mfsdp_cli.plan import Plan

ACTIONS = ("MF341", "executed actions are the plan's")
GATHERS = ("MF342", "gathered units are the plan's")
REDUCTIONS = ("MF343", "reduced units are the plan's")


@dataclass(frozen=True)
class Record:
    """An action that ran, and what was communicated in it: (operation, unit)."""

    action: str
    events: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Trace:
    """What one rank executed, by step."""

    rank: int
    steps: dict[int, list[Record]]


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
    engine = _engine(run_dir)
    if engine != "mfsdp" or not traces:
        raise MfsdpError(
            "MF523",
            f"{run_dir} holds no trace (engine {engine})",
            where=str(run_dir),
            hint="train with --engine mfsdp --trace",
        )
    if problem := _ranks(plan, traces):
        return [_check(check, problem) for check in (ACTIONS, GATHERS, REDUCTIONS)]
    return [
        _check(ACTIONS, _first(_actions, plan, traces)),
        _check(GATHERS, _first(_gathers, plan, traces)),
        _check(REDUCTIONS, _first(_reductions, plan, traces)),
    ]


def _engine(run_dir: Path) -> str:
    try:
        return str(read_run(run_dir)["engine"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MfsdpError("MF523", f"{run_dir / RUN} is unreadable: {error!r}") from error


def _read(path: Path) -> Trace:
    try:
        document = json.loads(path.read_text())
        return Trace(int(document["rank"]), _by_step(document["records"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MfsdpError("MF523", f"the trace {path} is unreadable: {error!r}") from error


def _by_step(records: list[dict[str, Any]]) -> dict[int, list[Record]]:
    steps: dict[int, list[Record]] = {}
    for record in records:
        events = tuple((str(e["operation"]), str(e["unit"])) for e in record["events"])
        steps.setdefault(int(record["step"]), []).append(Record(str(record["action"]), events))
    return steps


def _check(check: tuple[str, str], problem: tuple[str, str] | None) -> Check:
    code, name = check
    if problem is None:
        return Check(code, name, PASS, None)
    message, where = problem
    return Check(code, name, FAIL, Finding(code, Severity.ERROR, message, where=where))


def _ranks(plan: Plan, traces: list[Trace]) -> tuple[str, str] | None:
    """Every rank of the plan left a trace, and all of the same steps."""
    found = sorted(trace.rank for trace in traces)
    wanted = list(range(plan.parallel.world_size))
    if found != wanted:
        return f"traces of ranks {found}, the plan has {len(wanted)} ranks", f"{TRACE}/"
    steps = list(traces[0].steps)
    for trace in traces:
        if not trace.steps or list(trace.steps) != steps:
            message = f"rank {trace.rank} traced {len(trace.steps)} steps"
            return f"{message}, rank {traces[0].rank} {len(steps)}", f"rank {trace.rank}"
    return None


def _first(find: Any, plan: Plan, traces: list[Trace]) -> tuple[str, str] | None:
    """The first problem on any rank and step."""
    for trace in traces:
        pp_rank = trace.rank // plan.parallel.data_parallel_size
        for step, records in trace.steps.items():
            problem = find(plan, pp_rank, records)
            if problem is not None:
                return problem, f"rank {trace.rank}, step {step}"
    return None


def _actions(plan: Plan, pp_rank: int, records: list[Record]) -> str | None:
    planned = [str(action) for action in plan.schedule.actions[pp_rank]]
    executed = [record.action for record in records]
    for position, (wanted, found) in enumerate(zip(planned, executed, strict=False)):
        if wanted != found:
            return f"action {position} was {found}, the plan has {wanted}"
    if len(planned) != len(executed):
        return f"{len(executed)} actions ran, the plan has {len(planned)}"
    return None


def _gathers(plan: Plan, pp_rank: int, records: list[Record]) -> str | None:
    resident = plan.settings.resident_chunks > 0
    kinds = {Kind.UNSHARD} if resident else {Kind.FORWARD, Kind.BACKWARD}
    return _differ("gather", planned_units(plan, pp_rank, kinds), records)


def _reductions(plan: Plan, pp_rank: int, records: list[Record]) -> str | None:
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


def _differ(operation: str, wanted: Counter[str], records: list[Record]) -> str | None:
    found = Counter(unit for record in records for what, unit in record.events if what == operation)
    for name in sorted(wanted.keys() | found.keys()):
        if wanted[name] != found[name]:
            return f"{found[name]} x {operation} of {name}, the plan has {wanted[name]}"
    return None
