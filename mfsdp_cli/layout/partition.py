"""Layers in a row over the stages of pipeline ranks: the problem, in whole numbers.

Pipeline rank ``r`` holds the stages ``r``, ``r + pp``, ``r + 2 pp``, ... What counts is the sum
over a rank's stages: first the heaviest rank's cost is made smallest, then the sum of squares over
the ranks, then over the stages. A rank may have a limit of bytes as well::

    bytes of a rank = sum over its stages of   fixed[stage]
                      + sum over its layers of   state + in_flight[stage] * held

Costs are whole numbers, so that neither rounding nor the order of summation decides a tie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple


class Part(NamedTuple):
    """What one layer costs, and its bytes: kept whatever happens, kept a microbatch in flight."""

    cost: int
    state: int = 0
    held: int = 0


class Score(NamedTuple):
    """What is made small, in this order. Of equals the one with fewer layers on earlier stages,
    which hold more microbatches in flight.
    """

    heaviest: int
    squares: int
    alone: int
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Found:
    """Layers of each stage; ``proven``: no other split has a lighter heaviest rank or, of those
    equal in that, fewer squares.
    """

    score: Score
    proven: bool


@dataclass(frozen=True)
class Problem:
    """One split to be found.

    Args:
        parts: the layers in order.
        extra: cost that a stage has beside its layers, by stage.
        least: layers that a stage must hold, by stage; 1 in general, none beside MTP and loss.
        open_stages: stages from the first on that may hold layers.
        in_flight: microbatches that each stage keeps at its rank's peak.
        fixed: bytes of each stage beside its layers.
        limits: bytes of each rank; None: no limits.
    """

    parts: tuple[Part, ...]
    pp: int
    vpp: int
    extra: tuple[int, ...]
    least: tuple[int, ...]
    open_stages: int
    in_flight: tuple[int, ...] = ()
    fixed: tuple[int, ...] = ()
    limits: tuple[int, ...] | None = None

    @property
    def stages(self) -> int:
        return self.pp * self.vpp

    def costs_before(self) -> list[int]:
        """Cost of all layers before each place; one more than there are layers."""
        return [0, *accumulate(part.cost for part in self.parts)]

    def bytes_of(self, part: Part, stage: int) -> int:
        """Bytes of a layer on a stage."""
        return part.state + self.in_flight[stage] * part.held if self.limits else 0

    def fits(self, counts: Sequence[int]) -> bool:
        """Whether every rank stays within its limit, and every stage holds what it must."""
        if any(count < least for count, least in zip(counts, self.least, strict=True)):
            return False
        if any(counts[self.open_stages :]):
            return False
        if self.limits is None:
            return True
        used, layer = [0] * self.pp, 0
        for stage, count in enumerate(counts):
            held = self.parts[layer : layer + count]
            used[stage % self.pp] += self.fixed[stage]
            used[stage % self.pp] += sum(self.bytes_of(part, stage) for part in held)
            layer += count
        return all(mine <= limit for mine, limit in zip(used, self.limits, strict=True))

    def score(self, counts: Sequence[int]) -> Score:
        """How good a split is; the smallest score is the best."""
        stages, layer = [], 0
        for count, extra in zip(counts, self.extra, strict=True):
            stages.append(extra + sum(part.cost for part in self.parts[layer : layer + count]))
            layer += count
        ranks = [sum(stages[rank :: self.pp]) for rank in range(self.pp)]
        squares = sum(cost * cost for cost in ranks)
        alone = sum(cost * cost for cost in stages)
        return Score(max(ranks), squares, alone, tuple(counts))
