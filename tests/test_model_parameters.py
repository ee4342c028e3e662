"""Sums per stage and rank for real models and recipes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.layout.grammar import parse_layout
from mfsdp_cli.layout.layout import Layout
from mfsdp_cli.layout.split import layout_of_counts, uneven_ends
from mfsdp_cli.model.huggingface import read_config
from mfsdp_cli.model.parameters import (
    Role,
    Sharding,
    count_parameters,
    rank_counts,
    stage_counts,
    stage_roles,
    stage_tensors,
)
from mfsdp_cli.model.presets import preset
from mfsdp_cli.model.spec import MixtureOfExperts, ModelSpec
from mfsdp_cli.model.vocabulary import with_padding

CONFIGS = Path(__file__).parent / "data" / "configs"


def _model(name: str) -> ModelSpec:
    document = json.loads((CONFIGS / f"{name}.json").read_text())
    return read_config(document, name=name, where=name)


def _ranks(spec: ModelSpec, layout: Layout) -> list[int]:
    """Parameters a rank, MTP and its copies left out."""
    spec = replace(spec, mtp_num_layers=0)
    stages = tuple(replace(stage, mtp=()) for stage in layout.stages)
    layout = Layout(layout.pp, layout.vpp, stages)
    return [rank_counts(spec, layout, pp_rank).parameters for pp_rank in range(layout.pp)]


@pytest.mark.parametrize(
    ("name", "pp", "first", "last", "sums"),
    [
        (
            "qwen3-235b-a22b", 4, None, 22,
            [60_328_450_048, *[59_706_120_192] * 2, 55_352_944_128],
        ),
        (
            "kimi-k2-instruct", 8, None, 5,
            [121_087_459_328, *[136_474_918_912] * 6, 86_471_236_608],
        ),
        (
            "deepseek-v3", 8, 7, 6,
            [48_706_273_280, *[92_058_288_128] * 6, 69_970_402_304],
        ),
        (
            "deepseek-v3", 4, None, 13,
            [152_271_847_424, *[184_116_576_256] * 2, 150_521_404_416],
        ),
        (
            "glm-4.5-air", 4, None, 10,
            [26_620_731_392, *[28_097_912_832] * 2, 24_035_688_448],
        ),
    ],
)  # fmt: skip
def test_real_uneven_recipes(
    name: str, pp: int, first: int | None, last: int | None, sums: list[int]
) -> None:
    spec = _model(name)
    layout = uneven_ends(spec, pp, first=first, last=last)
    assert _ranks(spec, layout) == sums
    assert sum(sums) == count_parameters(spec).total  # nothing is held twice


@pytest.mark.parametrize(
    ("name", "counts", "sums", "unique"),
    [
        (
            "llama-3.2-1b", [4, 4, 4, 4],
            [505_954_304, 243_286_016, 243_286_016, 505_956_352], 1_235_814_400,
        ),
        (
            "gpt2", [3, 3, 3, 3],
            [60_647_424, 21_263_616, 21_263_616, 59_862_528], 124_439_808,
        ),
        (
            "smollm2-135m", [8, 8, 7, 7],
            [56_632_320, 28_320_768, 24_780_672, 53_092_800], 134_515_008,
        ),
    ],
)  # fmt: skip
def test_tied_embeddings_count_on_both_ends(
    name: str, counts: list[int], sums: list[int], unique: int
) -> None:
    spec = _model(name)
    layout = layout_of_counts(counts, 4, 0)
    ranks = [rank_counts(spec, layout, pp_rank) for pp_rank in range(4)]
    assert [rank.parameters for rank in ranks] == sums
    embedding = spec.vocab_size * spec.hidden_size
    assert [rank.copied_parameters for rank in ranks] == [0, 0, 0, embedding]
    assert sum(sums) - embedding == unique == count_parameters(spec).total


def test_a_duplicated_embedding_shows_in_the_sum_of_ranks() -> None:
    spec = _model("llama-3.2-1b")
    layout = layout_of_counts([4, 4, 4, 4], 4, 0)
    assert sum(_ranks(spec, layout)) == 1_498_482_688


def test_mtp_and_its_copy_of_the_embedding() -> None:
    spec = preset("deepseek-v3")
    layout = parse_layout("Et*3|(tt|)*29,m|L", num_layers=61, mtp_num_layers=1, pp=16, vpp=2)
    ranks = [rank_counts(spec, layout, pp_rank) for pp_rank in range(16)]
    mtp, embedding = 11_610_067_968, 926_679_040
    assert [rank.mtp_parameters for rank in ranks] == [0] * 14 + [mtp, 0]
    assert [rank.copied_parameters for rank in ranks] == [0] * 14 + [embedding, 0]
    whole = sum(rank.parameters for rank in ranks)
    assert whole == count_parameters(spec).total + mtp + embedding
    assert whole == 683_563_151_360


def test_the_average_hides_the_heaviest_rank() -> None:
    spec = ModelSpec(
        name="toy", num_layers=8, hidden_size=16, ffn_hidden_size=64, num_attention_heads=4,
        num_query_groups=4, kv_channels=4, vocab_size=32, padded_vocab_size=32,
        max_position_embeddings=64, gated_linear_unit=False, activation="gelu",
        normalization="LayerNorm",
    )  # fmt: skip
    layout = layout_of_counts([1, 2, 2, 3], 4, 0)
    ranks = _ranks(spec, layout)
    assert ranks[3] == max(ranks) == 9_952
    assert sum(ranks) / 4 == 6_536
    kinds = (0, 1, 0, 0, 1, 0, 1, 1)
    experts = MixtureOfExperts(2, 1, 32, 0, tuple(kind == 1 for kind in kinds))
    heaviest = rank_counts(replace(spec, moe=experts), layout, 3)
    assert heaviest.routed_parameters == 4_096
    assert heaviest.parameters - heaviest.routed_parameters == 5_920


@pytest.mark.parametrize(
    ("divisor", "tp", "size", "total"),
    [
        (128, 1, 50304, 124_475_904),
        (128, 2, 50432, 124_574_208),
        (128, 4, 50688, 124_770_816),
        (128, 8, 51200, 125_164_032),
        (1, 2, 50258, 124_440_576),
        (1, 1, 50257, 124_439_808),
    ],
)
def test_vocabulary_padding(divisor: int, tp: int, size: int, total: int) -> None:
    spec = with_padding(preset("gpt2"), divisor, tp)
    assert (spec.vocab_size, spec.padded_vocab_size) == (50257, size)
    assert count_parameters(spec).total == total


def test_padding_twice_changes_nothing() -> None:
    spec = with_padding(_model("qwen3-0.6b"), 128, 2)
    assert spec.padded_vocab_size == 152064
    assert with_padding(spec, 128, 2) is spec


def test_expert_parallelism_divides_routed_experts_alone() -> None:
    spec = _model("qwen3-30b-a3b")
    layout = layout_of_counts([48], 1, 0)
    whole = rank_counts(spec, layout, 0)
    assert whole.routed_parameters == 28_991_029_248
    shared = rank_counts(spec, layout, 0, Sharding(expert_parallel=8))
    assert shared.routed_parameters == 3_623_878_656
    rest = whole.parameters - whole.routed_parameters
    assert shared.parameters - shared.routed_parameters == rest
    with pytest.raises(MfsdpError, match=r"MF403.*128 experts do not divide over 7"):
        rank_counts(spec, layout, 0, Sharding(expert_parallel=7))


def test_tensor_parallelism_divides_neither_norms_nor_routers() -> None:
    spec = _model("qwen3-30b-a3b")
    layout = layout_of_counts([48], 1, 0)
    one = stage_roles(spec, layout, layout.stages[0])
    two = stage_roles(spec, layout, layout.stages[0], Sharding(tensor_parallel=2))
    for role in (Role.ATTENTION, Role.EMBEDDING, Role.HEAD):
        assert two[role] * 2 == one[role]
    for role in (Role.NORM, Role.ROUTER, Role.ROUTED_EXPERT):
        assert two[role] == one[role]
    split = stage_roles(spec, layout, layout.stages[0], Sharding(expert_tensor_parallel=4))
    assert split[Role.ROUTED_EXPERT] * 4 == one[Role.ROUTED_EXPERT]


def test_row_parallel_biases_stay_whole() -> None:
    spec = preset("gpt2")
    layout = layout_of_counts([12], 1, 0)
    two = rank_counts(spec, layout, 0, Sharding(tensor_parallel=2)).parameters
    whole = rank_counts(spec, layout, 0).parameters
    replicated = 12 * (6 * 768) + 2 * 768 + 1024 * 768  # norms, row biases; final norm; positions
    assert two == (whole - replicated) // 2 + replicated


@pytest.mark.parametrize("name", ["deepseek-v3-proxy-tiny", "llama-tiny", "gpt2-tiny", "gpt2"])
def test_sums_agree_with_the_tensors_named(name: str) -> None:
    spec = preset(name)
    layers = spec.num_layers
    counts = [layers // 4, layers // 4, layers - layers // 2, 0]
    layout = layout_of_counts(counts, 2, 0)
    for stage in layout.stages:
        tensors = stage_tensors(spec, layout, stage)
        found = stage_counts(spec, layout, stage)
        assert found.parameters == sum(t.numel for t in tensors if t.trainable)
        assert found.router_bias == sum(t.numel for t in tensors if not t.trainable)
        assert found.copied_parameters == sum(t.numel for t in tensors if t.copy_of)
        routed = [t.numel for t in tensors if t.role is Role.ROUTED_EXPERT]
        assert found.routed_parameters == sum(routed)
