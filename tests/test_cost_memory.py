"""Memory: sharded state in closed form, and the walk through a schedule by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mfsdp_cli.cost.memory import Residency, StageMemory, pipeline_buffers, walk
from mfsdp_cli.cost.state import (
    UnitShare,
    persistent_state,
    precision_of,
    sharding_ranks,
    two_largest,
)
from mfsdp_cli.parallel import Parallel
from mfsdp_cli.schedule.actions import parse_action
from tests.helpers.inline import inline

SIZES = Parallel(16, 2, 1, 8, 1, 1, 1, 1, 16, 2, 64, 2)
#: Two stages of one rank: 100 and 40 bytes a microbatch, 10 and 6 elements.
STAGES = {
    0: StageMemory(held=100, working=5, gathered=40, units=(UnitShare(6, 2), UnitShare(4, 2)),
                   boundary=8),
    2: StageMemory(held=40, working=0, gathered=24, units=(UnitShare(6, 2),), boundary=8,
                   received=16),
}  # fmt: skip
EVERY = Residency(1, "microbatch", compute_bytes=4, gradient_bytes=4)


def actions(text: str) -> list:
    return [parse_action(word) for word in text.split()]


# State.


@pytest.mark.parametrize(("precision", "model", "compute"), [("fp32", 0, 4), ("bf16", 2, 2)])
def test_state_is_sharded_by_element(precision: str, model: int, compute: int) -> None:
    state = persistent_state([UnitShare(10, 4), UnitShare(3, 4)], precision_of(precision))
    owned = 3 + 1  # ceil(10 / 4) + ceil(3 / 4)
    assert precision_of(precision).compute == compute
    assert state == {
        "main_weights": owned * 4,
        "model_weights": owned * model,
        "main_gradients": owned * 4,
        "optimizer_state": owned * 8,
    }


def test_experts_are_sharded_over_the_ranks_that_hold_the_same_ones() -> None:
    assert sharding_ranks(SIZES, experts=False) == 8
    assert sharding_ranks(replace(SIZES, expert_model_parallel_size=4), experts=True) == 2
    assert sharding_ranks(replace(SIZES, expert_model_parallel_size=4), experts=False) == 8
    assert sharding_ranks(replace(SIZES, context_parallel_size=2), experts=False) == 16


def test_two_largest() -> None:
    assert two_largest([UnitShare(3, 1), UnitShare(9, 1), UnitShare(5, 1)]) == 14
    assert two_largest([UnitShare(3, 1)]) == 3
    assert two_largest([]) == 0


# The walk.


def test_activations_live_from_forward_to_backward() -> None:
    peak = walk(
        actions("0F0 0F1 2F0 0B0 2F1 2B0 0B1 2B1"), STAGES, replace(EVERY, resident_chunks=0)
    )
    # Before the first backward 100 + 100 + 40 are held; that backward adds its own needs.
    assert peak.at.activations == 240
    assert peak.at.working_set == 5
    assert peak.at.gathered_parameters == (6 + 4) * 4
    assert peak.at.unsharded_gradients == (6 + 4) * 4
    assert peak.at.total == 240 + 5 + 40 + 40


def test_gathered_chunks_follow_unshard_and_reshard() -> None:
    both = walk(actions("0UNSHARD 0F0 2UNSHARD 2F0 2B0 2RESHARD 0B0 0RESHARD"), STAGES, EVERY)
    assert both.gathered == 40 + 24
    one = walk(
        actions("0UNSHARD 0F0 0RESHARD 2UNSHARD 2F0 2B0 2RESHARD 0UNSHARD 0B0 0RESHARD"),
        STAGES,
        EVERY,
    )
    assert one.gathered == 40


def test_gradients_pile_up_where_they_are_reduced_last() -> None:
    last = replace(EVERY, gradient_reduction="last")
    text = "0F0 2F0 2B0 0B0 2F1 2B1 2REDUCE_GRAD 0F1 0B1 0REDUCE_GRAD"
    piled = walk(actions(text), STAGES, last)
    assert piled.at.unsharded_gradients == (6 + 10) * 4
    apart = walk(actions("2F0 2B0 2REDUCE_GRAD 0F0 0B0 0REDUCE_GRAD"), STAGES, last)
    assert apart.at.unsharded_gradients == 10 * 4


def test_split_backwards_keep_activations_to_the_weight_gradient() -> None:
    peak = walk(actions("0F0 0I0 0F1 0W0 0I1 0W1"), STAGES, replace(EVERY, resident_chunks=0))
    assert peak.at.activations == 200


def test_a_rank_without_actions_needs_nothing() -> None:
    assert walk([], STAGES, EVERY).at.total == 0


def test_pipeline_buffers() -> None:
    assert pipeline_buffers(STAGES, pp=2) == 2 * 2 * 16
    assert pipeline_buffers(STAGES, pp=1) == 0


# Through the command line.


def memory(*flags: str) -> list[dict]:
    said = inline("plan", "llama-tiny", "--pp", "2", "--vpp", "2", *flags, "--json")
    return [rank["memory"] for rank in said.document["ranks"]]


def test_components_add_up_to_the_peak() -> None:
    for rank in memory():
        assert rank["peak_bytes"] == sum(rank.values()) - rank["peak_bytes"]


def test_state_halves_when_data_parallelism_doubles() -> None:
    few, many = memory("--world-size", "4"), memory("--world-size", "8")
    for name in ("main_weights", "main_gradients", "optimizer_state"):
        assert [rank[name] for rank in few] == [2 * rank[name] for rank in many]


def test_residency_and_reduction_change_what_is_gathered() -> None:
    two, none = memory("--resident-chunks", "2")[0], memory("--resident-chunks", "0")[0]
    assert none["gathered_parameters"] == 2 * 49_280 * 4
    assert two["gathered_parameters"] == 213_504 * 4
    last = memory("--gradient-reduction", "last")[0]
    assert last["unsharded_gradients"] == 213_504 * 4


def test_bf16_keeps_compute_weights_beside_the_main_ones() -> None:
    rank = memory("--bf16")[0]
    assert rank["model_weights"] * 2 == rank["main_weights"]
    assert rank["gathered_parameters"] * 2 == memory()[0]["gathered_parameters"]
