"""What the tensors of :mod:`mfsdp_cli.model.tensors` add up to, without naming every expert.

All sums are in elements. A model's layers are of at most two kinds, dense and MoE, each counted
once and remembered; a stage adds up its kinds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.layout.layout import Layout, StageLayout
from mfsdp_cli.model.spec import ModelSpec
from mfsdp_cli.model.tensors import (
    OUTPUT_LAYER,
    WORD_EMBEDDING,
    Role,
    TensorSpec,
    embedding_tensors,
    final_norm_tensors,
    head_tensors,
    holds_final_norm,
    layer_tensors,
    model_tensors,
    mtp_tensors,
    stage_tensors,
)

__all__ = [
    "OUTPUT_LAYER",
    "WHOLE",
    "WORD_EMBEDDING",
    "ParameterTotals",
    "Role",
    "Sharding",
    "StageCounts",
    "TensorSpec",
    "count_parameters",
    "embedding_tensors",
    "head_tensors",
    "layer_roles",
    "model_tensors",
    "mtp_roles",
    "rank_counts",
    "stage_counts",
    "stage_roles",
    "stage_tensors",
    "trainable",
]


@dataclass(frozen=True)
class ParameterTotals:
    """The model as a whole, every parameter once.

    Args:
        total: trainable parameters without MTP; a tied matrix counts once.
        mtp: the MTP layers' own, without copies of embedding and head.
        router_bias: elements of the router bias buffers, those of MTP layers left out.
        embedding: the word embedding as allocated (padded vocabulary).
        active: of ``total``, what one token goes through.
    """

    total: int
    mtp: int
    router_bias: int
    embedding: int
    active: int


@dataclass(frozen=True)
class Sharding:
    """How many ranks divide a tensor, beside data parallelism.

    Attention, dense layers, embedding and head are divided by TP, routed experts by ETP x EP,
    norms, routers and MLA's down projections by nothing.
    """

    tensor_parallel: int = 1
    expert_parallel: int = 1
    expert_tensor_parallel: int = 1

    def share(self, tensor: TensorSpec) -> int:
        """Elements of a tensor on a rank that has it (rounded up where it does not divide)."""
        if not tensor.tensor_parallel:
            return tensor.numel
        routed = tensor.role is Role.ROUTED_EXPERT
        ranks = self.expert_tensor_parallel if routed else self.tensor_parallel
        return -(-tensor.numel // ranks)


WHOLE = Sharding()


@dataclass(frozen=True)
class StageCounts:
    """What a stage or a rank holds, copies and MTP included.

    Args:
        parameters: trainable elements, of which
        mtp_parameters: the MTP layers' own,
        copied_parameters: copies of a parameter that another stage owns,
        routed_parameters: routed experts (MTP's included).
        router_bias: elements of router bias buffers.
    """

    parameters: int = 0
    mtp_parameters: int = 0
    copied_parameters: int = 0
    routed_parameters: int = 0
    router_bias: int = 0

    def __add__(self, other: StageCounts) -> StageCounts:
        return StageCounts(
            self.parameters + other.parameters,
            self.mtp_parameters + other.mtp_parameters,
            self.copied_parameters + other.copied_parameters,
            self.routed_parameters + other.routed_parameters,
            self.router_bias + other.router_bias,
        )


def count_parameters(spec: ModelSpec) -> ParameterTotals:
    """The totals of a model."""
    layers = layer_kinds(spec)
    everything = StageLayout(0, 0, 0, embedding=True, loss=True)
    ends = (
        *embedding_tensors(spec, everything),
        *final_norm_tensors(spec),
        *head_tensors(spec, everything),
    )
    total = sum(tensor.numel for tensor in ends)
    bias = idle = 0
    for is_moe, number in layers.items():
        roles = layer_roles(spec, is_moe)
        total += number * trainable(roles)
        bias += number * roles[Role.ROUTER_BIAS]
        idle += number * _idle_experts(spec, roles[Role.ROUTED_EXPERT])
    mtp = spec.mtp_num_layers * trainable(mtp_roles(spec)) if spec.mtp_num_layers else 0
    embedding = spec.padded_vocab_size * spec.hidden_size
    return ParameterTotals(total, mtp, bias, embedding, total - idle)


def stage_counts(
    spec: ModelSpec, layout: Layout, stage: StageLayout, sharding: Sharding = WHOLE
) -> StageCounts:
    """What one stage holds on one rank (before data parallelism shards it).

    Raises:
        MfsdpError: MF403 where expert parallelism does not divide the experts.
    """
    ends = _ends(spec, layout, stage)
    copied = sum(sharding.share(t) for t in ends if t.copy_of)
    counts = StageCounts(
        parameters=sum(sharding.share(t) for t in ends if t.trainable), copied_parameters=copied
    )
    for is_moe in (False, True):
        if number := sum(spec.is_moe_layer(layer) == is_moe for layer in stage.layers):
            counts += _counts(layer_roles(spec, is_moe, sharding), number)
    if stage.mtp:
        counts += _counts(mtp_roles(spec, sharding), len(stage.mtp), mtp=True)
    return counts


def rank_counts(
    spec: ModelSpec, layout: Layout, pp_rank: int, sharding: Sharding = WHOLE
) -> StageCounts:
    """The sum over a pipeline rank's stages."""
    stages = layout.stages_of(pp_rank)
    return sum((stage_counts(spec, layout, stage, sharding) for stage in stages), StageCounts())


def stage_roles(
    spec: ModelSpec, layout: Layout, stage: StageLayout, sharding: Sharding = WHOLE
) -> Counter[Role]:
    """Elements a role on one rank of a stage, MTP, copies and buffers included."""
    roles = _sum_roles(_ends(spec, layout, stage), sharding)
    for layer in stage.layers:
        roles += layer_roles(spec, spec.is_moe_layer(layer), sharding)
    for _ in stage.mtp:
        roles += mtp_roles(spec, sharding)
    return roles


def layer_kinds(spec: ModelSpec) -> Counter[bool]:
    """How many decoder layers are MoE (True) and dense (False)."""
    return Counter(spec.is_moe_layer(layer) for layer in range(spec.num_layers))


@lru_cache(maxsize=256)
def layer_roles(spec: ModelSpec, is_moe: bool, sharding: Sharding = WHOLE) -> Counter[Role]:
    """Elements a role of one decoder layer of a kind; do not change the result."""
    _check_experts(spec, sharding)
    return _sum_roles(layer_tensors(spec, is_moe), sharding)


@lru_cache(maxsize=256)
def mtp_roles(spec: ModelSpec, sharding: Sharding = WHOLE) -> Counter[Role]:
    """Elements a role of one MTP layer; do not change the result."""
    _check_experts(spec, sharding)
    return _sum_roles(mtp_tensors(spec), sharding)


def trainable(roles: Counter[Role]) -> int:
    """Trainable elements among counts by role."""
    return sum(number for role, number in roles.items() if role is not Role.ROUTER_BIAS)


def _ends(spec: ModelSpec, layout: Layout, stage: StageLayout) -> list[TensorSpec]:
    norm = final_norm_tensors(spec) if holds_final_norm(spec, layout, stage) else ()
    return [*embedding_tensors(spec, stage), *norm, *head_tensors(spec, stage)]


def _sum_roles(tensors: Iterable[TensorSpec], sharding: Sharding) -> Counter[Role]:
    roles: Counter[Role] = Counter()
    for tensor in tensors:
        roles[tensor.role] += sharding.share(tensor)
    if roles[Role.ROUTED_EXPERT]:
        roles[Role.ROUTED_EXPERT] //= sharding.expert_parallel
    return +roles


def _check_experts(spec: ModelSpec, sharding: Sharding) -> None:
    if spec.moe is not None and spec.moe.num_moe_experts % sharding.expert_parallel:
        raise MfsdpError(
            "MF403",
            f"{spec.moe.num_moe_experts} experts do not divide over "
            f"{sharding.expert_parallel} expert-parallel ranks",
            where=f"--expert-model-parallel-size {sharding.expert_parallel}, model {spec.name}",
        )


def _counts(roles: Counter[Role], number: int, *, mtp: bool = False) -> StageCounts:
    own = number * trainable(roles)
    return StageCounts(
        parameters=own,
        mtp_parameters=own if mtp else 0,
        routed_parameters=number * roles[Role.ROUTED_EXPERT],
        router_bias=number * roles[Role.ROUTER_BIAS],
    )


def _idle_experts(spec: ModelSpec, routed: int) -> int:
    """Elements of the experts of one layer that a token does not go to."""
    if spec.moe is None:
        return 0
    experts = spec.moe.num_moe_experts
    return routed // experts * (experts - spec.moe.moe_router_topk)
