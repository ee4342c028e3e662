from __future__ import annotations

import random
import time
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.layout.auto import SplitCosts, auto_split, default_costs
from mfsdp_cli.model.presets import preset
from mfsdp_cli.model.spec import ModelSpec

SHAPES = [(2, 1), (3, 1), (4, 1), (6, 1), (2, 2), (2, 3), (3, 2), (4, 2), (2, 5)]


def _model(layers: int) -> ModelSpec:
    return replace(preset("llama-tiny"), num_layers=layers)


def _heaviest(counts: list[int], costs: SplitCosts, pp: int) -> tuple[float, float]:
    """The heaviest rank and the sum of squares over ranks, straight from the definition."""
    ranks, layer = [0.0] * pp, 0
    for stage, count in enumerate(counts):
        ranks[stage % pp] += sum(costs.layers[layer : layer + count])
        layer += count
    ranks[0] += costs.first
    ranks[-1] += costs.last
    return max(ranks), sum(cost * cost for cost in ranks)


def _best(costs: SplitCosts, pp: int, vpp: int) -> tuple[float, float]:
    layers = len(costs.layers)
    found = []
    for inner in combinations(range(1, layers + 1), pp * vpp - 1):
        counts = [end - start for start, end in pairwise([0, *inner, layers])]
        found.append(_heaviest(counts, costs, pp))
    return min(found)


@pytest.mark.parametrize(("pp", "vpp"), SHAPES)
def test_equal_to_brute_force_up_to_12_layers(pp: int, vpp: int) -> None:
    draw = random.Random(pp * 10 + vpp)
    for _ in range(12):
        layers = draw.randrange(pp * vpp, 13)
        kinds = [draw.choice([1.0, 1.0, 3.0, draw.random()]) for _ in range(layers)]
        costs = SplitCosts(tuple(kinds), first=draw.random(), last=4 * draw.random())
        layout = auto_split(_model(layers), pp, vpp, costs)
        counts = [len(stage.layers) for stage in layout.stages]
        found = _heaviest(counts, costs, pp)
        assert found == pytest.approx(_best(costs, pp, vpp), rel=1e-6)


@pytest.mark.parametrize(("pp", "vpp"), [(4, 2), (4, 4), (8, 2), (16, 2)])
def test_interleaved_is_near_the_bound_for_equal_layers(pp: int, vpp: int) -> None:
    """61 equal layers: no rank needs more than the rounded-up share."""
    costs = SplitCosts((1.0,) * 61, last=1.0)
    layout = auto_split(_model(61), pp, vpp, costs)
    counts = [len(stage.layers) for stage in layout.stages]
    assert sum(counts) == 61
    assert _heaviest(counts, costs, pp)[0] == -(-62 // pp)


def test_every_layer_once() -> None:
    for name, pp, vpp in (("deepseek-v3", 16, 2), ("llama3-70b", 8, 5), ("gpt2", 4, 1)):
        spec = preset(name)
        layout = auto_split(spec, pp, vpp)
        assert [layer for stage in layout.stages for layer in stage.layers] == list(
            range(spec.num_layers)
        )
        assert layout.stages[-1].mtp == tuple(range(spec.mtp_num_layers))


def test_a_heavy_head_lightens_the_last_stage() -> None:
    costs = SplitCosts((1.0,) * 12, last=3.0)
    assert auto_split(_model(12), 3, 1, costs).decoder_layers_per_pp_rank() == [5, 5, 2]
    costs = SplitCosts((1.0,) * 6, last=9.0)
    assert auto_split(_model(6), 2, 1, costs).decoder_layers_per_pp_rank() == [6, 0]


def test_on_a_tie_earlier_stages_take_fewer() -> None:
    """They hold more microbatches in flight."""
    costs = SplitCosts((1.0,) * 10)
    assert auto_split(_model(10), 4, 1, costs).decoder_layers_per_pp_rank() == [2, 2, 3, 3]


def test_default_costs_count_what_a_token_goes_through() -> None:
    costs = default_costs(preset("deepseek-v3"))
    dense = 187_105_280 + 3 * 7168 * 18432
    moe = 187_105_280 + 9 * 3 * 7168 * 2048 + 256 * 7168
    assert costs.layers[0] == dense
    assert costs.layers[60] == moe
    assert costs.first == 0
    assert costs.last == 2 * 129280 * 7168
    assert costs.mtp == moe + 2 * 7168**2


def test_61_layers_on_16_stages_at_once() -> None:
    spec = preset("deepseek-v3")
    auto_split(spec, 16)  # counts are remembered
    best = min(_timed(spec, 16, 1) for _ in range(5))
    assert best < 0.05


def _timed(spec: ModelSpec, pp: int, vpp: int) -> float:
    start = time.process_time()
    auto_split(spec, pp, vpp)
    return time.process_time() - start


def test_more_stages_than_layers() -> None:
    with pytest.raises(MfsdpError, match="8 layers cannot fill 9 stages"):
        auto_split(_model(8), 9)
    with pytest.raises(MfsdpError, match="MF116"):
        auto_split(_model(8), 0)
