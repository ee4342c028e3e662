"""Units of a stage, their order of use, and what each rank's context sees."""

from __future__ import annotations

from typing import Any

from mfsdp_cli.layout.grammar import parse_layout
from mfsdp_cli.model.parameters import Sharding, rank_counts
from mfsdp_cli.model.presets import preset
from mfsdp_cli.planning.units import UnitSize, backward_order, stage_units
from tests.helpers.inline import inline


def units(model: str, layout: str, pp: int, stage: int, **sharding: int) -> list[UnitSize]:
    spec = preset(model)
    parsed = parse_layout(
        layout,
        num_layers=spec.num_layers,
        mtp_num_layers=spec.mtp_num_layers,
        pp=pp,
        vpp=None,
    )
    return stage_units(spec, parsed, parsed.stages[stage], Sharding(**sharding))


def names(found: list[UnitSize]) -> list[str]:
    return [unit.name for unit in found]


def test_an_untied_embedding_is_a_unit_of_its_own() -> None:
    assert names(units("llama-tiny", "Ett|tt|tt|ttL", 2, 0)) == [
        "embedding",
        "decoder.layers.0",
        "decoder.layers.1",
    ]


def test_the_root_opens_first_in_both_directions() -> None:
    last = units("llama-tiny", "Ett|tt|tt|ttL", 2, 3)
    assert names(last) == ["root", "decoder.layers.6", "decoder.layers.7"]
    assert names(backward_order(last)) == ["root", "decoder.layers.7", "decoder.layers.6"]


def test_learned_positions_belong_to_the_embedding() -> None:
    spec = preset("gpt2-tiny")
    first = units("gpt2-tiny", "Et*4|t*4L", 2, 0)
    assert names(first)[0] == names(backward_order(first))[-1] == "embedding"
    rows = spec.padded_vocab_size + spec.max_position_embeddings
    assert first[0].parameters == rows * spec.hidden_size


def test_a_head_tied_on_its_own_chunk_keeps_the_embedding_in_the_root() -> None:
    assert "embedding" not in names(units("gpt2-tiny", "Et*8L", 1, 0))


def test_mtp_keeps_its_copy_of_the_embedding_in_the_root() -> None:
    found = units("deepseek-v3", "Et*3|(tt|)*29,m|L", 16, 30)
    assert names(found) == ["root", "mtp.layers.0"]
    assert found[0].parameters == 129280 * 7168


def test_experts_under_expert_parallelism_open_inside_their_layer() -> None:
    spec = preset("deepseek-v3-proxy-tiny")
    found = units("deepseek-v3-proxy-tiny", "Et*8L", 1, 0, expert_parallel=2)
    assert names(found)[2:5] == [
        "decoder.layers.0",
        "decoder.layers.1",
        "decoder.layers.1.mlp.experts",
    ]
    assert names(backward_order(found))[1:3] == [
        "decoder.layers.7",
        "decoder.layers.7.mlp.experts",
    ]
    assert spec.moe is not None
    expert = 3 * spec.hidden_size * spec.moe.moe_ffn_hidden_size
    assert found[4].parameters == expert * spec.moe.num_moe_experts // 2


def test_units_hold_all_parameters_of_a_rank() -> None:
    spec = preset("deepseek-v3")
    layout = parse_layout("Et*3|(tt|)*29,m|L", num_layers=61, mtp_num_layers=1, pp=16, vpp=2)
    for sharding in (Sharding(), Sharding(expert_parallel=8)):
        for rank in (0, 5, 13, 14, 15):
            held = [
                unit.parameters
                for stage in layout.stages_of(rank)
                for unit in stage_units(spec, layout, stage, sharding)
            ]
            assert sum(held) == rank_counts(spec, layout, rank, sharding).parameters


# The context of a rank.


def contexts(*flags: str) -> list[dict[str, Any]]:
    return inline("plan", "llama-tiny", *flags, "--json").document["context"]


def test_orders_follow_the_schedule() -> None:
    flags = ["--pp", "2", "--vpp", "2", "--gbs", "2", "--num-layers", "4"]
    first, second = contexts(*flags)
    assert [(use["unit"], use["stage"], use["microbatch"]) for use in first["forward_order"]] == [
        ("embedding", 0, 0),
        ("decoder.layers.0", 0, 0),
        ("embedding", 0, 1),
        ("decoder.layers.0", 0, 1),
        ("decoder.layers.2", 2, 0),
        ("decoder.layers.2", 2, 1),
    ]
    assert [(use["unit"], use["microbatch"]) for use in second["backward_order"]] == [
        ("root", 0),
        ("decoder.layers.3", 0),
        ("root", 1),
        ("decoder.layers.3", 1),
        ("decoder.layers.1", 0),
        ("decoder.layers.1", 1),
    ]


def test_context_lists_chunks_units_and_residency() -> None:
    (first, _) = contexts("--pp", "2", "--vpp", "2")
    assert first["chunks"] == [{"stage": 0, "vp_stage": 0}, {"stage": 2, "vp_stage": 1}]
    assert [unit["unit"] for unit in first["units"]] == [
        "embedding",
        "decoder.layers.0",
        "decoder.layers.1",
        "decoder.layers.4",
        "decoder.layers.5",
    ]
    assert first["residency"] == {
        "resident_chunks": 2,
        "gradient_reduction": "microbatch",
        "gathers_per_step": 2,
        "peak_gathered_bytes": 213_504 * 4,
    }


def test_gathers_with_two_resident_chunks() -> None:
    flags = ["--num-layers", "16", "--pp", "4", "--vpp", "4", "--gbs", "16", "--json"]
    document = inline("plan", "llama-tiny", *flags).document
    assert document["schedule"]["gathers_per_step"] == 20
    none = inline("plan", "llama-tiny", *flags, "--resident-chunks", "0").document
    assert none["schedule"]["gathers_per_step"] == 2 * 16 * 4
