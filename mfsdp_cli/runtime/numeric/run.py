"""Run a layout and the reference as processes of their own, and judge what they captured."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mfsdp_cli.errors import ExitCode, Finding, MfsdpError, Severity
from mfsdp_cli.runtime.backend import choose_backend, rehearsal_note
from mfsdp_cli.runtime.hosts import Hosts
from mfsdp_cli.runtime.launch import COMPLETED, INTERRUPTED, run_workers
from mfsdp_cli.runtime.limits import refuse_unbuildable
from mfsdp_cli.runtime.numeric.explain import Setup, explain
from mfsdp_cli.runtime.numeric.job import ENVIRONMENT, FLOORS, Capture
from mfsdp_cli.runtime.numeric.proxy import full_plan, proxy_plan

if TYPE_CHECKING:
    from mfsdp_cli.plan import Plan
    from mfsdp_cli.runtime.numeric.captured import Step
    from mfsdp_cli.runtime.numeric.compare import Comparison

MODULE = "mfsdp_cli.runtime.numeric.capture"
CODE = "MF520"
FEW_STEPS = "MF524"


@dataclass(frozen=True)
class NumericResult:
    """What numeric validation found.

    Args:
        document: the contract's ``numeric`` object.
        findings: one error where something diverged, else none.
    """

    document: dict[str, Any]
    findings: tuple[Finding, ...]


def run_numeric(
    plan: Plan,
    plan_file: Path,
    *,
    steps: int = 10,
    backend: str = "gloo",
    tolerance: float | None = None,
    full: bool = False,
    engine: str = "mfsdp",
    ranks_per_device: int = 1,
    say: Callable[[str], None] = lambda _text: None,
) -> NumericResult:
    """Train a few steps of the layout and of the one-rank reference, and compare them.

    Args:
        plan_file: the plan as a file; the ranks read it.
        backend: ``gloo``, ``nccl`` or ``auto``.
        tolerance: largest relative difference; None: :class:`.compare.Tolerances`' own.
        full: the plan's own model and sizes; default: a proxy of the same structure.
        ranks_per_device: ranks that share one GPU (NCCL).
        say: told what goes on.

    Raises:
        MfsdpError: MF521 for more ranks than fit here, MF502 for a model that cannot be built,
            MF511 for a backend without devices, MF522 where a rank failed, MF901 for a tolerance
            that is none.
    """
    if tolerance is not None and not 0 < tolerance < math.inf:
        raise MfsdpError(
            "MF901", f"{tolerance} is not a finite number above 0", where="--tolerance"
        )
    used = full_plan(plan) if full else proxy_plan(plan)
    refuse_unbuildable(used.model)
    backend = choose_backend(backend, used.parallel.world_size, ranks_per_device)
    if note := rehearsal_note(backend, ranks_per_device):
        say(note)
    with tempfile.TemporaryDirectory(prefix="mfsdp-numeric-") as folder:
        shutil.copyfile(plan_file, Path(folder, "plan.json"))
        ranks = {"single": 1, engine: used.parallel.world_size}
        captured = {}
        for name, count in ranks.items():
            say(f"{name}: {steps} steps on {count} rank{'s' * (count > 1)} ({used.model.name})")
            captured[name] = capture_steps(
                Capture(folder, name, steps, backend, full, ranks_per_device=ranks_per_device),
                count,
            )
        floors = load_floors(Capture(folder, "single", steps, backend, full))
    result = judge(used, captured[engine], captured["single"], tolerance, *floors)
    _say_unjudged(result, say)
    return result


def _say_unjudged(result: NumericResult, say: Callable[[str], None]) -> None:
    judged, steps = result.document["judged_steps"], result.document["steps"]
    if judged < steps:
        say(f"judged: {judged} of {steps} steps; rounding decides what happens in the others")


def load_floors(capture: Capture) -> list[list[Step]]:
    """The reference's further trainings, as many as it did."""
    from mfsdp_cli.runtime.numeric.load import load_steps

    runs = [capture.of(name) for name in FLOORS]
    return [load_steps(run, 1) for run in runs if run.file(0, run.steps).exists()]


def capture_steps(capture: Capture, ranks: int) -> list[Step]:
    """Train a few steps of one engine, as processes of their own, and read what they did."""
    from mfsdp_cli.runtime.numeric.load import load_steps

    _run(capture, ranks)
    return load_steps(capture, ranks)


def _run(capture: Capture, ranks: int) -> None:
    status, failures = run_workers(MODULE, {ENVIRONMENT: capture.to_json()}, ranks, Hosts())
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    if status != COMPLETED and not failures:
        raise MfsdpError(
            "MF522",
            f"engine {capture.engine}: the ranks were ended before they had saved their steps",
            where="--numeric",
        )
    if failures:
        first = failures[0]
        plain = first.code or not first.kind  # ours, or a rank that was killed
        what = first.message if plain else f"{first.kind}: {first.message}"
        raise MfsdpError(
            first.code or "MF522",
            f"engine {capture.engine}, rank {first.rank}: {what}",
            where=first.where or "--numeric",
            hint=first.hint or "MFSDP_DEBUG=1 shows the rank's traceback",
            exit_code=first.exit_code if first.code else ExitCode.PROBLEM,
        )


def judge(
    plan: Plan,
    mine: Sequence[Step],
    reference: Sequence[Step],
    tolerance: float | None,
    *other_orders: Sequence[Step],
) -> NumericResult:
    """Compare what a layout did with what the reference did.

    Args:
        other_orders: the reference again, adding up in other orders: the noise floor.
    """
    from mfsdp_cli.runtime.numeric.compare import compare, measure_floor
    from mfsdp_cli.runtime.numeric.layers import stage_of_layers
    from mfsdp_cli.runtime.numeric.tolerances import NoiseFloor, Tolerances

    floor = measure_floor(reference, *other_orders) if other_orders else NoiseFloor()
    stages = stage_of_layers(plan.layout)
    comparison = compare(mine, reference, Tolerances.at(tolerance), floor, stages)
    found = (_divergence(comparison, plan), _too_few(comparison))
    return NumericResult(
        comparison.to_json(), tuple(finding for finding in found if finding is not None)
    )


def _divergence(comparison: Comparison, plan: Plan) -> Finding | None:
    first = comparison.first_divergence
    if first is None:
        return None
    return Finding(
        CODE,
        Severity.ERROR,
        f"the layout diverges from the one-rank reference in step {first.step}, {first.phase}"
        f" of {first.name}: relative difference {first.difference:.2e}, allowed"
        f" {first.tolerance:.0e}",
        hint=explain(first, _setup(plan)),
        where=f"step {first.step}, {first.name}",
    )


def _setup(plan: Plan) -> Setup:
    from mfsdp_cli.model.parameters import WORD_EMBEDDING

    parallel = plan.parallel
    members = max((len(group.members) for group in plan.shared_groups), default=0)
    return Setup(
        microbatches=parallel.num_microbatches,
        dp=parallel.data_parallel_size,
        ep=parallel.expert_model_parallel_size,
        shared={WORD_EMBEDDING: members} if members else {},
    )


def _too_few(comparison: Comparison) -> Finding | None:
    """An error where rounding leaves too little to judge: what is not judged is not proven."""
    from mfsdp_cli.runtime.numeric.tolerances import LEAST_STEPS

    judged, steps = comparison.judged_steps, comparison.steps
    if comparison.first_divergence is not None or judged >= min(steps, LEAST_STEPS):
        return None
    return Finding(
        FEW_STEPS,
        Severity.ERROR,
        f"only {judged} of {steps} steps can be judged: {comparison.unjudged}",
        hint="rounding grows too fast in this model; validate with fewer layers (--num-layers)",
        where="--numeric",
    )
