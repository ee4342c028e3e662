"""Many plans against the one-rank reference in one start of the ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mfsdp_cli.plan import Plan
from mfsdp_cli.runtime.settings import TrainSettings
from mfsdp_cli.runtime.topology import Topology
from tests.helpers.ranks import run_ranks
from tests.helpers.training import (
    SETTINGS,
    Trained,
    engine_of,
    largest_difference,
    reconnect,
    train,
)


@dataclass(frozen=True)
class Difference:
    """The worst relative differences of all ranks.

    Args:
        first_loss, first_norm, gradients: of the first step.
        loss, norm: of all steps.
        weights: after the last step.
        evaluations: before the first step and after the last.
        where: the tensor whose gradient differs most.
        router_biases: largest difference of an expert's bias; None in a dense model.
    """

    first_loss: float
    first_norm: float
    gradients: float
    loss: float
    norm: float
    weights: float
    evaluations: float
    where: str
    router_biases: float | None

    def check(self) -> None:
        """The numbers to hold in fp32 with Adam eps 1e-6 and learning rate 1e-3."""
        assert self.first_loss < 1e-6, self
        assert self.first_norm < 1e-6, self
        assert self.gradients < 1e-5, self
        assert max(self.loss, self.norm) < 1e-5, self
        assert self.weights < 1e-5, self
        assert self.evaluations < 1e-5, self


def differences(
    cases: dict[str, Plan],
    ranks: int,
    folder: Path,
    *,
    steps: int = 4,
    engine: str = "mfsdp",
    settings: TrainSettings = SETTINGS,
) -> dict[str, Difference]:
    """Train every plan on these ranks, and its reference on one; how far apart they are."""
    files = {}
    for name, plan in cases.items():
        files[name] = str(folder / f"{name}.json")
        plan.save(Path(files[name]))
    run_ranks(1, _references, files, str(folder), steps, asdict(settings))
    found = run_ranks(ranks, _compared, files, str(folder), steps, engine, asdict(settings))
    return {name: _worst([of_rank[name] for of_rank in found]) for name in cases}


def _worst(of_ranks: list[Difference]) -> Difference:
    """That of the rank whose weights differ most, with the worst router bias of any rank."""
    biases = [d.router_biases for d in of_ranks if d.router_biases is not None]
    worst = max(of_ranks, key=lambda d: d.weights)
    return replace(worst, router_biases=max(biases, default=None))


def _references(
    _rank: int, _world: int, files: dict[str, str], folder: str, steps: int, settings: Any
) -> None:
    for name, file in files.items():
        plan = Plan.load(Path(file))
        topology: Topology = reconnect(plan, "single")
        trained = train(engine_of("single", plan, topology, TrainSettings(**settings)), steps)
        torch.save(asdict(trained), Path(folder, f"{name}.pt"))


def _compared(
    _rank: int,
    _world: int,
    files: dict[str, str],
    folder: str,
    steps: int,
    engine: str,
    settings: Any,
) -> dict[str, Difference]:
    found = {}
    for name, file in files.items():
        plan = Plan.load(Path(file))
        topology = reconnect(plan, engine)
        mine = train(engine_of(engine, plan, topology, TrainSettings(**settings)), steps)
        reference = Trained(**torch.load(Path(folder, f"{name}.pt"), weights_only=True))
        found[name] = difference(mine, reference)
        dist.barrier()
    return found


def difference(mine: Trained, reference: Trained) -> Difference:
    """How far one rank of a training is from its reference."""
    losses = [_relative(a, b) for (a, _), (b, _) in zip(mine.steps, reference.steps, strict=True)]
    norms = [_relative(a, b) for (_, a), (_, b) in zip(mine.steps, reference.steps, strict=True)]
    gradients, where = largest_difference(mine.gradients, reference.gradients)
    weights, _ = largest_difference(mine.weights, reference.weights)
    return Difference(
        first_loss=losses[0],
        first_norm=norms[0],
        gradients=gradients,
        loss=max(losses),
        norm=max(norms),
        weights=weights,
        evaluations=max(
            _relative(mine.before, reference.before), _relative(mine.after, reference.after)
        ),
        where=where,
        router_biases=max(
            (
                (bias - reference.router_biases[name]).abs().max().item()
                for name, bias in mine.router_biases.items()
            ),
            default=None,
        ),
    )


def _relative(a: float, b: float) -> float:
    return abs(a - b) / abs(b)
