"""The split by cost: the heaviest pipeline rank as light as it can be.

Costs are additive and in any one unit. First the heaviest rank's cost is made smallest (a rank's
cost is the sum of its chunks'), then the sum of squares over the ranks, then over the stages.

Without interleaving both steps are dynamic programming over the ranks, exact. With interleaving
a rank's chunks lie apart, so that exactness needs every split: few enough are all tried; else the
split that is best by stage is improved layer by layer until no move helps.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise

from mfsdp_cli.layout.layout import Layout
from mfsdp_cli.layout.split import check_sizes, layout_of_counts, require_a_layer_each
from mfsdp_cli.model.parameters import Role, layer_roles, mtp_roles
from mfsdp_cli.model.spec import ModelSpec

_TRY_ALL = 2_000
"""Splits that are tried one by one: about 20 ms."""
_SLACK = 1 + 1e-9
"""Rounding that sums of costs are allowed."""
_MATRICES = (Role.ATTENTION, Role.MLP, Role.ROUTER, Role.SHARED_EXPERT, Role.MTP_PROJECTION)


@dataclass(frozen=True)
class SplitCosts:
    """What the parts of a model cost, all in one unit (seconds, operations, bytes).

    Args:
        layers: each decoder layer.
        first: what the first stage has beside its layers (the embedding).
        last: what the last stage has beside its layers (MTP, head and loss).
    """

    layers: tuple[float, ...]
    first: float = 0.0
    last: float = 0.0


def auto_split(spec: ModelSpec, pp: int, vpp: int = 1, costs: SplitCosts | None = None) -> Layout:
    """The split by cost; the last stage may be left with the head alone.

    Args:
        costs: default: weights that multiply activations (:func:`default_costs`).

    Raises:
        MfsdpError: MF114 where there are fewer layers than stages, MF116 for impossible sizes.
    """
    check_sizes(pp, vpp)
    require_a_layer_each(spec, pp, vpp)
    problem = _Problem(costs or default_costs(spec), pp, vpp)
    return layout_of_counts(problem.solve(), pp, spec.mtp_num_layers)


def default_costs(spec: ModelSpec) -> SplitCosts:
    """Elements of the matrices that one token is multiplied with: half its forward operations.

    The embedding is a look-up and costs nothing; an MTP layer calls the head once more.
    """
    head = float(spec.padded_vocab_size * spec.hidden_size)
    layers = tuple(
        _layer_cost(spec, is_moe=spec.is_moe_layer(layer)) for layer in range(spec.num_layers)
    )
    mtp = spec.mtp_num_layers
    return SplitCosts(layers, last=head + mtp * (_active(spec, mtp_roles(spec)) + head))


def _layer_cost(spec: ModelSpec, *, is_moe: bool) -> float:
    return _active(spec, layer_roles(spec, is_moe))


def _active(spec: ModelSpec, roles: dict[Role, int]) -> float:
    cost = float(sum(roles.get(role, 0) for role in _MATRICES))
    if spec.moe is not None:
        chosen = spec.moe.moe_router_topk / spec.moe.num_moe_experts
        cost += roles.get(Role.ROUTED_EXPERT, 0) * chosen
    return cost


class _Problem:
    """A split as cuts: stage ``s`` holds the layers from ``cuts[s]`` up to ``cuts[s + 1]``.

    Every stage but the last holds at least one layer.
    """

    def __init__(self, costs: SplitCosts, pp: int, vpp: int) -> None:
        self.pp, self.vpp, self.stages = pp, vpp, pp * vpp
        self.layers = len(costs.layers)
        self.before = [0.0, *accumulate(costs.layers)]
        self.costs = costs
        self.scale = max((self.before[-1] + costs.first + costs.last) / pp, 1e-300)

    def solve(self) -> list[int]:
        """Decoder layers a stage."""
        if self.vpp > 1 and math.comb(self.layers, self.stages - 1) <= _TRY_ALL:
            cuts = min(self._all(), key=self._badness)
        else:
            cuts = self._by_stage()
            if self.vpp > 1:
                cuts = self._improve(cuts)
        return [end - start for start, end in pairwise(cuts)]

    def _cost(self, stage: int, start: int, end: int) -> float:
        cost = self.before[end] - self.before[start]
        if stage == 0:
            cost += self.costs.first
        if stage == self.stages - 1:
            cost += self.costs.last
        return cost

    def _all(self) -> Iterator[list[int]]:
        for inner in combinations(range(1, self.layers + 1), self.stages - 1):
            yield [0, *inner, self.layers]

    def _badness(self, cuts: Sequence[int]) -> tuple[float, float, float, Sequence[int]]:
        """What is made small, in this order; rounded, so that order of summation cannot decide."""
        stages = [self._cost(s, cuts[s], cuts[s + 1]) / self.scale for s in range(self.stages)]
        ranks = [sum(stages[pp_rank :: self.pp]) for pp_rank in range(self.pp)]
        squares = math.fsum(cost * cost for cost in ranks)
        alone = math.fsum(cost * cost for cost in stages)
        return round(max(ranks), 9), round(squares, 9), round(alone, 9), cuts

    def _by_stage(self) -> list[int]:
        """The split whose heaviest stage is lightest, then whose squares are smallest, then with
        fewer layers on earlier stages (which hold more microbatches in flight).
        """
        bound = self._lightest_maximum() * _SLACK
        last = self.stages - 1
        best: list[list[float]] = [[math.inf] * (self.layers + 1) for _ in range(self.stages)]
        follow = [[0] * (self.layers + 1) for _ in range(self.stages)]
        for start in range(self.layers + 1):
            if (cost := self._cost(last, start, self.layers)) <= bound:
                best[last][start] = (cost / self.scale) ** 2
        for stage in range(last - 1, -1, -1):
            for start in range(stage, self._furthest(stage)):
                for end in range(start + 1, self._furthest(stage) + 1):
                    if (cost := self._cost(stage, start, end)) > bound:
                        break
                    total = (cost / self.scale) ** 2 + best[stage + 1][end]
                    if total < best[stage][start] * (1 - 1e-12):
                        best[stage][start], follow[stage][start] = total, end
        cuts = [0]
        for stage in range(last):
            cuts.append(follow[stage][cuts[-1]])
        return [*cuts, self.layers]

    def _lightest_maximum(self) -> float:
        """The smallest possible cost of the heaviest stage.

        ``rest[start]`` is that of the stages from one on that share the layers from ``start`` on.
        """
        last = self.stages - 1
        rest = [self._cost(last, start, self.layers) for start in range(self.layers + 1)]
        for stage in range(last - 1, -1, -1):
            rest = [self._best_end(stage, start, rest) for start in range(self.layers + 1)]
        return rest[0]

    def _best_end(self, stage: int, start: int, rest: Sequence[float]) -> float:
        """Own cost grows with the end, the rest's falls: the best end is where they cross."""
        low, high = start + 1, self._furthest(stage)
        if low > high:
            return math.inf
        crossing = bisect_left(
            range(low, high), 0.0, key=lambda end: self._cost(stage, start, end) - rest[end]
        )
        ends = (end for end in (low + crossing - 1, low + crossing) if low <= end <= high)
        return min(max(self._cost(stage, start, end), rest[end]) for end in ends)

    def _furthest(self, stage: int) -> int:
        """Where a stage must end so that every later one but the last still gets a layer."""
        return self.layers - max(0, self.stages - 2 - stage)

    def _improve(self, cuts: list[int]) -> list[int]:
        """Move single layers away from the heaviest rank or to the lightest while that helps."""
        current = self._badness(cuts)
        while True:
            better = next((b for m in self._moves(cuts) if (b := self._badness(m)) < current), None)
            if better is None:
                return cuts
            current, cuts = better, list(better[3])

    def _moves(self, cuts: Sequence[int]) -> Iterator[list[int]]:
        stages = range(self.stages)
        costs = [self._cost(stage, cuts[stage], cuts[stage + 1]) for stage in stages]
        ranks = [sum(costs[pp_rank :: self.pp]) for pp_rank in range(self.pp)]
        heaviest, lightest = ranks.index(max(ranks)), ranks.index(min(ranks))
        for giver in stages:
            if cuts[giver + 1] - cuts[giver] <= (giver < self.stages - 1):
                continue
            for taker in stages:
                away, towards = giver % self.pp == heaviest, taker % self.pp == lightest
                if giver != taker and (away or towards):
                    yield _moved(cuts, giver, taker)


def _moved(cuts: Sequence[int], giver: int, taker: int) -> list[int]:
    """The cuts after one stage gave a layer's worth to another and all between shifted."""
    moved = list(cuts)
    step = 1 if giver > taker else -1
    for cut in range(min(giver, taker) + 1, max(giver, taker) + 1):
        moved[cut] += step
    return moved
