"""The split by cost: the heaviest pipeline rank as light as it can be, within memory limits.

Costs are additive and in any one unit. First the heaviest rank's cost is made smallest (a rank's
cost is the sum of its chunks'), then the sum of squares over the ranks, then over the stages: by
dynamic programming where ranks hold one stage each (:mod:`mfsdp_cli.layout.contiguous`), else by
branch and bound (:mod:`mfsdp_cli.layout.interleaved`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mfsdp_cli.layout.checks import build_layout
from mfsdp_cli.layout.contiguous import contiguous
from mfsdp_cli.layout.interleaved import interleaved
from mfsdp_cli.layout.layout import Layout
from mfsdp_cli.layout.partition import Part, Problem, Score
from mfsdp_cli.layout.split import check_sizes, require_a_layer_each
from mfsdp_cli.model.parameters import Role, layer_roles, mtp_roles
from mfsdp_cli.model.spec import ModelSpec

_WHOLE = 10**9
"""The cost of the whole model in whole numbers: finer than any cost is known."""
_MATRICES = (Role.ATTENTION, Role.MLP, Role.ROUTER, Role.SHARED_EXPERT, Role.MTP_PROJECTION)


@dataclass(frozen=True)
class SplitCosts:
    """What the parts of a model cost, all in one unit (seconds, operations, bytes).

    Args:
        layers: each decoder layer.
        first: what the first stage has beside its layers (the embedding).
        last: what the last stage has beside its layers (head and loss, those of MTP included).
        mtp: the MTP layers, which lie together.
    """

    layers: tuple[float, ...]
    first: float = 0.0
    last: float = 0.0
    mtp: float = 0.0


@dataclass(frozen=True)
class SplitMemory:
    """Bytes of the parts, and how many a rank has.

    Args:
        limits: bytes of each pipeline rank.
        state: of each decoder layer, whatever runs (weights, gradients, optimizer).
        held: of each decoder layer for one microbatch in flight.
        in_flight: by stage, microbatches that wait for their backward at the rank's peak.
        first, last, mtp: state and held bytes of what lies beside decoder layers.
    """

    limits: tuple[int, ...]
    state: tuple[int, ...]
    held: tuple[int, ...]
    in_flight: tuple[int, ...]
    first: tuple[int, int] = (0, 0)
    last: tuple[int, int] = (0, 0)
    mtp: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Split:
    """A split and how good it is.

    Args:
        proven: no other split has a lighter heaviest rank or, of those equal in that, a smaller
            sum of squares over the ranks.
    """

    layout: Layout
    score: Score
    proven: bool


def auto_split(spec: ModelSpec, pp: int, vpp: int = 1, costs: SplitCosts | None = None) -> Layout:
    """The split by cost, MTP layers on the last stage; that may be left with the head alone.

    Args:
        costs: default: weights that multiply activations (:func:`default_costs`).

    Raises:
        MfsdpError: MF114 where there are fewer layers than stages, MF116 for impossible sizes.
    """
    best = best_split(spec, pp, vpp, costs or default_costs(spec))
    assert best is not None  # without limits there always is one
    return best.layout


def best_split(
    spec: ModelSpec,
    pp: int,
    vpp: int,
    costs: SplitCosts,
    *,
    memory: SplitMemory | None = None,
    mtp_stage: int | None = None,
) -> Split | None:
    """The best split with the MTP layers on a given stage, or None where none keeps the limits.

    Every stage holds a decoder layer but that of the MTP layers and the last, which need none;
    stages between those two hold nothing.

    Args:
        memory: bytes and limits; None: no limits.
        mtp_stage: one of :func:`mtp_stages`; None: the last.
    """
    check_sizes(pp, vpp)
    require_a_layer_each(spec, pp, vpp)
    place = pp * vpp - 1 if mtp_stage is None or not spec.mtp_num_layers else mtp_stage
    problem = _problem(spec, pp, vpp, costs, memory, place)
    found = interleaved(problem) if vpp > 1 else contiguous(problem)
    if found is None:
        return None
    return Split(_layout(spec, pp, found.score.counts, place), found.score, found.proven)


def mtp_stages(spec: ModelSpec, pp: int, vpp: int) -> Iterator[int]:
    """Stages that can hold the MTP layers, the last first: Megatron wants them in the last chunk
    of a rank other than the first.
    """
    last = pp * vpp - 1
    first = last - pp + 2 if pp > 1 and spec.mtp_num_layers else last
    yield from range(last, first - 1, -1)


def default_costs(spec: ModelSpec) -> SplitCosts:
    """Elements of the matrices that one token is multiplied with: half its forward operations.

    The embedding is a look-up and costs nothing; each MTP layer calls the head once more.
    """
    head = float(spec.padded_vocab_size * spec.hidden_size)
    layers = tuple(
        _layer_cost(spec, is_moe=spec.is_moe_layer(layer)) for layer in range(spec.num_layers)
    )
    mtp = spec.mtp_num_layers
    return SplitCosts(layers, last=(1 + mtp) * head, mtp=mtp * _active(spec, mtp_roles(spec)))


def _layer_cost(spec: ModelSpec, *, is_moe: bool) -> float:
    return _active(spec, layer_roles(spec, is_moe))


def _active(spec: ModelSpec, roles: dict[Role, int]) -> float:
    cost = float(sum(roles.get(role, 0) for role in _MATRICES))
    if spec.moe is not None:
        chosen = spec.moe.moe_router_topk / spec.moe.num_moe_experts
        cost += roles.get(Role.ROUTED_EXPERT, 0) * chosen
    return cost


def _problem(
    spec: ModelSpec,
    pp: int,
    vpp: int,
    costs: SplitCosts,
    memory: SplitMemory | None,
    mtp_stage: int,
) -> Problem:
    stages = pp * vpp
    unit = (sum(costs.layers) + costs.first + costs.last + costs.mtp) / _WHOLE or 1.0
    extra = [0] * stages
    for stage, cost in ((0, costs.first), (stages - 1, costs.last), (mtp_stage, costs.mtp)):
        extra[stage] += round(cost / unit)
    parts = [Part(round(cost / unit)) for cost in costs.layers]
    least = [int(stage < min(mtp_stage, stages - 1)) for stage in range(stages)]
    if memory is None:
        return Problem(tuple(parts), pp, vpp, tuple(extra), tuple(least), mtp_stage + 1)
    bytes_ = zip(parts, memory.state, memory.held, strict=True)
    fixed = [0] * stages
    beside = ((0, memory.first), (stages - 1, memory.last), (mtp_stage, memory.mtp))
    for stage, (state, held) in beside:
        fixed[stage] += state + memory.in_flight[stage] * held
    return Problem(
        tuple(Part(part.cost, state, held) for part, state, held in bytes_),
        pp,
        vpp,
        tuple(extra),
        tuple(least),
        mtp_stage + 1,
        memory.in_flight,
        tuple(fixed),
        memory.limits,
    )


def _layout(spec: ModelSpec, pp: int, counts: Sequence[int], mtp_stage: int) -> Layout:
    signs = ["t" * count for count in counts]
    signs[0] = f"E{signs[0]}"
    signs[mtp_stage] += "m" * spec.mtp_num_layers
    signs[-1] += "L"
    return build_layout(signs, pp)
