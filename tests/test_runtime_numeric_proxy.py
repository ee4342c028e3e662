"""The proxy of a plan: small where size only costs time, the same where layouts go wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.model.presets import preset
from mfsdp_cli.runtime.limits import unbuildable
from mfsdp_cli.runtime.numeric.proxy import full_plan, proxy_model, proxy_plan
from tests.helpers.plans import plan_of


def test_layers_schedule_and_remainders_stay() -> None:
    sizes = {"dp": 4, "mbs": 4, "gbs": 4 * 4 * 11, "seq": 64, "group": 3}
    plan = plan_of("gpt2-tiny", pp=2, layout="Et*3|t|tt|ttL", **sizes)
    proxy = proxy_plan(plan)
    assert proxy.layout == plan.layout
    assert proxy.shared_groups == plan.shared_groups
    parallel = proxy.parallel
    assert (parallel.world_size, parallel.data_parallel_size) == (4, 2)
    # 11 microbatches in groups of 3 leave 2; two groups do, and the last one stays short.
    assert parallel.num_microbatches == 8
    assert proxy.schedule.spec.num_microbatches == 8
    assert parallel.micro_batch_size == 2
    assert parallel.global_batch_size == 8 * 2 * 2
    assert parallel.seq_length == 32


def test_expert_parallelism_and_replicas_stay() -> None:
    experts = "deepseek-v3-proxy-tiny"
    spread = proxy_plan(plan_of(experts, pp=4, dp=8, ep=8, gbs=32)).parallel
    assert (spread.world_size, spread.data_parallel_size) == (8, 2)
    assert spread.expert_model_parallel_size == 2
    # Sixteen processes are few enough to see experts on two ranks, too many for plain replicas.
    assert proxy_plan(plan_of(experts, pp=8, dp=2, ep=2, gbs=16)).parallel.world_size == 16
    assert proxy_plan(plan_of(experts, pp=8, dp=2, gbs=16)).parallel.world_size == 8

    def hybrid(pp: int, dp: int, replicas: int) -> tuple[int, int]:
        plan = plan_of("llama-tiny", pp=pp, dp=dp, num_distributed_optimizer_instances=replicas)
        proxy = proxy_plan(plan)
        instances = proxy.settings.num_distributed_optimizer_instances
        return proxy.parallel.data_parallel_size, instances

    assert hybrid(2, 8, 4) == (4, 2)  # two replicas of two shards each
    assert hybrid(2, 4, 4) == (2, 2)  # the plan replicates all of it
    assert hybrid(4, 4, 2) == (2, 2)
    assert hybrid(1, 1, 1) == (1, 1)


def test_one_sample_stays_one() -> None:
    assert proxy_plan(plan_of("llama-tiny", dp=2)).parallel.micro_batch_size == 1


def test_a_wide_model_becomes_narrow_with_its_parts() -> None:
    spec = preset("deepseek-v3")
    proxy = proxy_model(spec)
    assert proxy.num_layers == spec.num_layers
    assert proxy.mtp_num_layers == spec.mtp_num_layers == 1
    assert proxy.hidden_size == 64
    assert proxy.moe is not None
    assert spec.moe is not None
    assert proxy.moe.moe_layer_pattern == spec.moe.moe_layer_pattern
    assert proxy.moe.num_moe_experts == 8
    assert (proxy.moe.moe_router_num_groups, proxy.moe.moe_router_group_topk) == (4, 2)
    assert unbuildable(proxy) == []


def test_no_more_groups_of_experts_than_experts_a_token_goes_to() -> None:
    moe = preset("deepseek-v3").moe
    assert moe is not None
    spec = replace(
        preset("deepseek-v3"),
        moe=replace(moe, moe_router_topk=1, moe_router_group_topk=4),
    )
    proxy = proxy_model(spec).moe
    assert proxy is not None
    # Megatron adds up the best topk // groups experts of a group: with two groups none at all.
    assert (proxy.moe_router_topk, proxy.moe_router_group_topk) == (1, 1)


def test_more_ranks_than_a_machine_holds_are_refused() -> None:
    with pytest.raises(MfsdpError, match="MF521"):
        proxy_plan(plan_of("deepseek-v3", pp=32, dp=1, gbs=64, layout="Et*2|(tt|)*29t|mL"))
    with pytest.raises(MfsdpError, match="MF521"):
        full_plan(plan_of("llama-tiny", dp=32, gbs=32))
