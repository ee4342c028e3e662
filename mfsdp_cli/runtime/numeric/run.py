"""Run a layout and the reference as processes of their own, and judge what they captured."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mfsdp_cli.errors import ExitCode, Finding, MfsdpError, Severity
from mfsdp_cli.runtime.backend import choose_backend
from mfsdp_cli.runtime.hosts import Hosts
from mfsdp_cli.runtime.launch import COMPLETED, INTERRUPTED, run_workers
from mfsdp_cli.runtime.limits import refuse_unbuildable
from mfsdp_cli.runtime.numeric.explain import explain
from mfsdp_cli.runtime.numeric.job import ENVIRONMENT, FLOOR, Capture
from mfsdp_cli.runtime.numeric.proxy import full_plan, proxy_plan

if TYPE_CHECKING:
    from mfsdp_cli.plan import Plan
    from mfsdp_cli.runtime.numeric.compare import Comparison, Step

MODULE = "mfsdp_cli.runtime.numeric.capture"
CODE = "MF520"


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
    say: Callable[[str], None] = lambda _text: None,
) -> NumericResult:
    """Train a few steps of the layout and of the one-rank reference, and compare them.

    Args:
        plan_file: the plan as a file; the ranks read it.
        backend: ``gloo``, ``nccl`` or ``auto``.
        tolerance: largest relative difference; None: :class:`.compare.Tolerances`' own.
        full: the plan's own model and sizes; default: a proxy of the same structure.
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
    backend = choose_backend(backend, used.parallel.world_size)
    with tempfile.TemporaryDirectory(prefix="mfsdp-numeric-") as folder:
        shutil.copyfile(plan_file, Path(folder, "plan.json"))
        ranks = {"single": 1, engine: used.parallel.world_size}
        captured = {}
        for name, count in ranks.items():
            say(f"{name}: {steps} steps on {count} rank{'s' * (count > 1)} ({used.model.name})")
            captured[name] = capture_steps(Capture(folder, name, steps, backend, full), count)
        floor = load_steps(Capture(folder, FLOOR, steps, backend, full), 1)
    return judge(used, captured[engine], captured["single"], tolerance, floor)


def capture_steps(capture: Capture, ranks: int) -> list[Step]:
    """Train a few steps of one engine, as processes of their own, and read what they did."""
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


def load_steps(capture: Capture, ranks: int) -> list[Step]:
    """The steps an engine captured; tensors of all ranks together."""
    import torch

    from mfsdp_cli.runtime.numeric.compare import Step

    steps = []
    for step in range(1, capture.steps + 1):
        files = [capture.file(rank, step) for rank in range(ranks)]
        parts = [torch.load(file, weights_only=True) for file in files if file.exists()]
        weights: dict[str, torch.Tensor] = {}
        gradients: dict[str, torch.Tensor] = {}
        differing = set()
        for part in parts:
            for name, weight in part["weights"].items():
                if name in weights and not torch.equal(weights[name], weight):
                    differing.add(name)
                weights.setdefault(name, weight)
            for name, gradient in part["gradients"].items():
                gradients.setdefault(name, gradient)
        steps.append(
            Step(
                parts[0]["loss"],
                parts[0]["grad_norm"],
                gradients,
                weights,
                tuple(sorted(differing)),
            )
        )
    return steps


def judge(
    plan: Plan,
    mine: list[Step],
    reference: list[Step],
    tolerance: float | None,
    other_order: list[Step],
) -> NumericResult:
    """Compare what a layout did with what the reference did.

    Args:
        other_order: the reference once more, adding up in another order: the noise floor.
    """
    from mfsdp_cli.runtime.numeric.compare import Tolerances, compare, measure_floor

    floor = measure_floor(other_order, reference)
    comparison = compare(mine, reference, Tolerances.at(tolerance), floor)
    finding = _finding(comparison, plan)
    return NumericResult(comparison.to_json(), () if finding is None else (finding,))


def _finding(comparison: Comparison, plan: Plan) -> Finding | None:
    first = comparison.first_divergence
    if first is None:
        return None
    parallel = plan.parallel
    return Finding(
        CODE,
        Severity.ERROR,
        f"the layout diverges from the one-rank reference in step {first.step}, {first.phase}"
        f" of {first.name}: relative difference {first.difference:.2e}, allowed"
        f" {first.tolerance:.0e}",
        hint=explain(
            first.phase,
            first.name,
            first.ratio,
            microbatches=parallel.num_microbatches,
            dp=parallel.data_parallel_size,
        ),
        where=f"step {first.step}, {first.name}",
    )
