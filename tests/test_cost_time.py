"""Operations, traffic and step time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mfsdp_cli.cost.communication import Traffic, rank_traffic, ring
from mfsdp_cli.cost.flops import Flops
from mfsdp_cli.cost.hardware import load_hardware
from mfsdp_cli.cost.memory import StageMemory
from mfsdp_cli.cost.state import UnitShare
from mfsdp_cli.cost.time import RankLoad, exposed, stage_time, step_seconds
from mfsdp_cli.layout.layout import StageLayout
from mfsdp_cli.model.presets import preset
from mfsdp_cli.schedule.actions import parse_action
from tests.helpers.inline import inline

LLAMA = preset("llama3-8b")


def test_operations_of_a_dense_layer() -> None:
    """2 x tokens x weights, and half of the positions twice over for attention."""
    flops = Flops(LLAMA, micro_batch=2, length=1024)
    weights = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    attention = 2 * 2048 * 512 * 32 * (128 + 128)
    assert flops.layer(is_moe=False) == 2 * 2048 * weights + attention


def test_experts_count_as_often_as_they_are_chosen() -> None:
    spec = preset("deepseek-v3-proxy-tiny")
    assert spec.moe is not None
    every = replace(spec, moe=replace(spec.moe, moe_router_topk=spec.moe.num_moe_experts))
    few, all_ = Flops(spec, 1, 64).layer(is_moe=True), Flops(every, 1, 64).layer(is_moe=True)
    expert = 3 * spec.hidden_size * spec.moe.moe_ffn_hidden_size
    idle = spec.moe.num_moe_experts - spec.moe.moe_router_topk
    assert all_ - few == 2 * 64 * expert * idle


def test_the_loss_stage_multiplies_with_the_head() -> None:
    flops = Flops(LLAMA, 1, 128)
    with_head = StageLayout(1, 1, 0, layers=(31,), loss=True)
    head = 2 * 128 * 4096 * LLAMA.padded_vocab_size
    assert flops.forward(with_head) - flops.forward(replace(with_head, loss=False)) == head
    assert flops.recomputed(with_head, "full") == flops.layer(is_moe=False)
    assert flops.recomputed(with_head, "none") == 0
    assert 0 < flops.recomputed(with_head, "selective") < flops.recomputed(with_head, "full")


def test_ring() -> None:
    assert ring(80, 1) == 0
    assert ring(80, 4) == 60


def test_traffic_of_a_rank() -> None:
    stages = {
        0: StageMemory(0, 0, 0, (UnitShare(8, 4),), boundary=10, received=0),
        2: StageMemory(0, 0, 0, (UnitShare(4, 1),), boundary=10, received=20),
    }
    text = "0UNSHARD 0F0 0SEND_F0 2RECV_F0 2F0 2B0 2SEND_B0 0UNSHARD 0B0 0REDUCE_GRAD"
    traffic = rank_traffic(
        [parse_action(word) for word in text.split()],
        stages,
        compute_bytes=2,
        gradient_bytes=4,
        shared_bytes=7,
        all_to_all={0: 3},
    )
    assert traffic == Traffic(
        all_gather=2 * ring(8 * 2, 4),
        reduce_scatter=ring(8 * 4, 4),
        point_to_point=10 + 20,
        shared_parameters=7,
        expert_all_to_all=4 * 3,
    )
    assert (traffic + traffic).to_json()["total"] == 2 * sum(traffic.values())
    assert traffic.times(3).point_to_point == 90


def test_a_stage_takes_as_long_as_its_arithmetic_or_its_weights() -> None:
    h100 = load_hardware("h100")

    def times(flops: float, weights: int):
        return stage_time(
            forward_flops=flops,
            recomputed_flops=0.0,
            weight_bytes=weights,
            routed_bytes=0,
            hardware=h100,
            precision="bf16",
            expert_ranks=1,
        )

    busy = times(h100.flops("bf16"), 0)
    assert (busy.forward, busy.backward) == (1.0, 2.0)
    reading = times(0.0, int(h100.memory_bandwidth))
    assert (reading.forward, reading.backward) == (1.0, 2.0)


def test_only_what_compute_does_not_hide_is_exposed() -> None:
    h100 = load_hardware("h100")
    second = int(h100.link(8))
    hidden = RankLoad(busy=5.0, traffic=Traffic(all_gather=second), first_gather=0, owned=0)
    shown = replace(hidden, busy=0.25)
    first = replace(hidden, first_gather=second)
    assert exposed(hidden, h100, 8) == 0.0
    assert exposed(shown, h100, 8) == pytest.approx(0.75)
    assert exposed(first, h100, 8) == pytest.approx(1.0)
    whole = step_seconds(3.0, [hidden, shown], h100, sharding_ranks=8, world=8)
    assert whole == pytest.approx(3.75)


def test_prediction_through_the_command_line() -> None:
    flags = ["plan", "llama3-8b", "--pp", "4", "--world-size", "32", "--bf16", "--json"]
    document = inline(*flags).document
    predicted, parallel = document["predicted"], document["parallel"]
    tokens = parallel["global_batch_size"] * parallel["seq_length"]
    assert predicted["tokens_per_s_per_gpu"] == pytest.approx(
        tokens / predicted["step_time_s"] / 32
    )
    assert 0.1 < predicted["model_flops_utilization"] < 0.5
    moved = predicted["communication_bytes"]
    # Every chunk stays gathered: once a step, 7/8 of it to each of 32 ranks' groups.
    total = document["model"]["parameters"]["total"]
    assert moved["all_gather"] == pytest.approx(total * 2 * 7, rel=1e-6)
    microbatches = parallel["num_microbatches"]
    assert moved["reduce_scatter"] == pytest.approx(total * 4 * 7 * microbatches, rel=1e-6)
    sent = parallel["seq_length"] * 4096 * 2
    assert moved["point_to_point"] == 3 * 2 * microbatches * 8 * sent


def test_faster_hardware_is_faster() -> None:
    def seconds(hardware: str) -> float:
        flags = ["--pp", "4", "--bf16", "--hardware", hardware, "--memory-limit", "1000"]
        predicted = inline("plan", "llama3-8b", *flags, "--json").document["predicted"]
        return float(predicted["step_time_s"])

    assert seconds("b200") < seconds("h100") < seconds("a100") < seconds("cpu")


def test_recomputation_takes_longer_and_holds_less() -> None:
    def plan(granularity: str) -> tuple[float, int]:
        flags = ["--pp", "4", "--bf16", "--recompute-granularity", granularity, "--json"]
        document = inline("plan", "llama3-8b", *flags).document
        return document["predicted"]["step_time_s"], document["ranks"][0]["memory"]["activations"]

    (none, most), (selective, some), (full, least) = map(plan, ("none", "selective", "full"))
    assert none < selective < full
    assert most > some > least
