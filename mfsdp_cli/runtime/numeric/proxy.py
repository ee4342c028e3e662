"""A small model of the same structure as a plan's, with the same stages and schedule.

What makes layouts go wrong stays: which layers are where, which are mixtures of experts, the tie,
norms, biases, latent attention, the order of the schedule, several data-parallel ranks, experts
spread over them, replicas of shards. What only makes it slow goes: widths, vocabulary, sequence,
most experts, most data-parallel ranks, samples of a microbatch and rounds of microbatches beyond
the second.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.model.spec import LatentAttention, MixtureOfExperts, ModelSpec
from mfsdp_cli.schedule.build import build_schedule

if TYPE_CHECKING:
    from mfsdp_cli.plan import Plan

WIDTH = 64
HEADS = 4
HEAD_WIDTH = 16
FFN = 128
#: Half of 1/sqrt(WIDTH). With a wide model's 0.02 a step of 1e-3 would be 5% of a weight here, and
#: rounding would grow tenfold a step.
LEAST_STD = 0.06
VOCABULARY = 256
EXPERTS = 8
SEQUENCE = 32
#: Processes that a machine without GPUs can be expected to hold.
MAX_RANKS = 16
_FEW_RANKS = 8


def proxy_model(spec: ModelSpec) -> ModelSpec:
    """The model with small dimensions; one that is small already stays as it is."""
    heads = min(spec.num_attention_heads, HEADS)
    ratio = max(1, spec.num_attention_heads // max(1, spec.num_query_groups))
    return replace(
        spec,
        hidden_size=min(spec.hidden_size, WIDTH),
        ffn_hidden_size=min(spec.ffn_hidden_size, FFN),
        num_attention_heads=heads,
        num_query_groups=max(1, heads // min(ratio, heads)),
        kv_channels=min(spec.kv_channels, HEAD_WIDTH),
        vocab_size=min(spec.vocab_size, VOCABULARY),
        padded_vocab_size=min(spec.padded_vocab_size, VOCABULARY),
        max_position_embeddings=min(spec.max_position_embeddings, VOCABULARY),
        init_method_std=max(spec.init_method_std, LEAST_STD),
        latent_attention=_small_latent(spec.latent_attention),
        moe=_small_moe(spec.moe),
    )


def _small_latent(attention: LatentAttention | None) -> LatentAttention | None:
    if attention is None:
        return None
    lora = attention.q_lora_rank
    return replace(
        attention,
        q_lora_rank=None if lora is None else min(lora, 2 * HEAD_WIDTH),
        kv_lora_rank=min(attention.kv_lora_rank, 2 * HEAD_WIDTH),
        qk_head_dim=min(attention.qk_head_dim, HEAD_WIDTH),
        qk_pos_emb_head_dim=min(attention.qk_pos_emb_head_dim, HEAD_WIDTH // 2),
        v_head_dim=min(attention.v_head_dim, HEAD_WIDTH),
    )


def _small_moe(moe: MixtureOfExperts | None) -> MixtureOfExperts | None:
    if moe is None or moe.num_moe_experts <= EXPERTS:
        return None if moe is None else _narrow(moe)
    groups = moe.moe_router_num_groups
    return replace(
        _narrow(moe),
        num_moe_experts=EXPERTS,
        moe_router_topk=min(moe.moe_router_topk, 2),
        moe_router_num_groups=None if groups is None else 4,
        moe_router_group_topk=_groups_of_a_token(moe),
    )


def _groups_of_a_token(moe: MixtureOfExperts) -> int | None:
    """At most one group for each expert: Megatron ranks groups by topk // groups experts each."""
    groups = moe.moe_router_group_topk
    return None if groups is None else min(groups, moe.moe_router_topk, 2)


def _narrow(moe: MixtureOfExperts) -> MixtureOfExperts:
    return replace(
        moe,
        moe_ffn_hidden_size=min(moe.moe_ffn_hidden_size, FFN // 2),
        moe_shared_expert_intermediate_size=min(moe.moe_shared_expert_intermediate_size, FFN // 2),
    )


def proxy_plan(plan: Plan) -> Plan:
    """The plan for the proxy: same layout, fewer data-parallel ranks and microbatches.

    Raises:
        MfsdpError: MF521 where the pipeline alone has more ranks than one machine can hold.
    """
    parallel = plan.parallel
    pp = parallel.pipeline_model_parallel_size
    if pp > MAX_RANKS:
        raise MfsdpError(
            "MF521",
            f"numeric validation would start {pp} processes here; at most {MAX_RANKS} are",
            where="--numeric",
            hint=f"validate a plan of the same kind with --pp {MAX_RANKS} or less",
        )
    dp, ep, replicas = _data_parallel(plan)
    microbatches = _few_microbatches(
        parallel.num_microbatches, parallel.microbatch_group_size_per_virtual_pipeline_stage, pp
    )
    samples = min(parallel.micro_batch_size, 2)  # two, lest samples and positions be mixed up
    sizes = replace(
        parallel,
        world_size=pp * dp,
        data_parallel_size=dp,
        expert_model_parallel_size=ep,
        micro_batch_size=samples,
        num_microbatches=microbatches,
        global_batch_size=samples * microbatches * dp,
        seq_length=min(parallel.seq_length, SEQUENCE),
    )
    settings = replace(plan.settings, num_distributed_optimizer_instances=replicas)
    return with_microbatches(
        replace(plan, model=proxy_model(plan.model), parallel=sizes, settings=settings)
    )


def _data_parallel(plan: Plan) -> tuple[int, int, int]:
    """Data-parallel ranks, expert-parallel size and replicas (hybrid sharding) of the proxy.

    Two of each where the plan has several: two ranks show what one cannot. Hybrid sharding takes
    four ranks where they fit, so that each replica is sharded too. Ranks that hold other experts or
    replicas are worth more processes than plain ones.
    """
    parallel = plan.parallel
    pp, given = parallel.pipeline_model_parallel_size, parallel.data_parallel_size
    ep = min(2, parallel.expert_model_parallel_size)
    replicas = min(2, plan.settings.num_distributed_optimizer_instances)
    if pp * 2 > (MAX_RANKS if ep * replicas > 1 else _FEW_RANKS) or given == 1:
        return 1, 1, 1
    if replicas > 1 and given > plan.settings.num_distributed_optimizer_instances:
        return (4 if pp * 4 <= _FEW_RANKS else 2), 1, replicas
    return 2, ep, replicas


def full_plan(plan: Plan) -> Plan:
    """The plan's model and sizes as they are; refused where this machine cannot hold the ranks."""
    ranks = plan.parallel.world_size
    if ranks > MAX_RANKS:
        raise MfsdpError(
            "MF521",
            f"numeric validation in full would start {ranks} processes here; at most {MAX_RANKS}",
            where="--full",
            hint="leave --full out to validate a proxy of the same structure",
        )
    return plan


def with_microbatches(plan: Plan) -> Plan:
    """The plan with its schedule rebuilt for its number of microbatches."""
    spec = replace(plan.schedule.spec, num_microbatches=plan.parallel.num_microbatches)
    return replace(plan, built=build_schedule(spec))


def _few_microbatches(count: int, group: int, pp: int) -> int:
    """At most two rounds, with the same remainder as the plan's."""
    round_ = max(group, pp)
    rounds, remainder = divmod(count, round_)
    return min(rounds, 2) * round_ + remainder if rounds else count
