"""Forward passes compared layer by layer: what comes first is named, ties are no fault."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mfsdp_cli.layout.layout import StageLayout
from mfsdp_cli.model.presets import preset
from mfsdp_cli.runtime.chunks import Chunk
from mfsdp_cli.runtime.numeric.divergence import Forward
from mfsdp_cli.runtime.numeric.layers import compare_layers, stage_of_layers
from mfsdp_cli.runtime.observe import (
    CHOSEN,
    GIVEN,
    TAKEN,
    Observer,
    Records,
    chosen_experts,
    sketch,
)
from tests.helpers.plans import plan_of

LAYERS = ("decoder.layers.2", "decoder.layers.10")
ROUTER = "decoder.layers.10.mlp.router"


def records() -> Records:
    """Two layers, the second with a router, two microbatches."""
    generator = torch.Generator().manual_seed(0)
    found: Records = {}
    for index in (0, 1):
        for layer in LAYERS:
            for side in (TAKEN, GIVEN):
                found[index, layer, side, 0] = torch.randn(128, generator=generator)
        found[index, ROUTER, TAKEN, 0] = torch.randn(128, generator=generator)
        found[index, ROUTER, CHOSEN, 0] = torch.arange(64, dtype=torch.int16) % 8
    return found


def test_equal_forward_passes_differ_nowhere() -> None:
    found = compare_layers(records(), records(), 1e-5, ties=False)
    assert (found.first, found.tie, found.largest) == (None, None, 0.0)


def test_the_earliest_layer_is_the_cause() -> None:
    ours = records()
    for key in ours:
        if key[0] == 1 and key[2] != CHOSEN and key[1:3] != (LAYERS[0], TAKEN):
            ours[key] = ours[key] * 1.5  # everything after the first layer's input
    first = compare_layers(ours, records(), 1e-5, ties=True).first
    assert first is not None
    assert (first.layer, first.microbatch, first.what) == (LAYERS[0], 1, Forward.GIVEN)
    assert first.difference == pytest.approx(0.5)


def test_another_microbatch_is_recognized_by_its_input() -> None:
    ours = records()
    ours[1, LAYERS[1], TAKEN, 0] = ours[0, LAYERS[1], TAKEN, 0]
    first = compare_layers(ours, records(), 1e-5, ties=True).first
    assert first is not None
    assert (first.what, first.microbatch, first.taken_from) == (Forward.TAKEN, 1, 0)


def test_layers_that_run_twice_or_never_are_named() -> None:
    ours = records()
    ours[0, LAYERS[0], GIVEN, 1] = ours[0, LAYERS[0], GIVEN, 0]
    first = compare_layers(ours, records(), 1e-5, ties=True).first
    assert first is not None
    assert first.what is Forward.TWICE
    ours = records()
    del ours[1, LAYERS[1], TAKEN, 0]
    first = compare_layers(ours, records(), 1e-5, ties=True).first
    assert first is not None
    assert (first.layer, first.what) == (LAYERS[1], Forward.MISSING)


def test_a_choice_or_two_is_a_tie_where_ties_may_be_and_more_is_a_fault() -> None:
    ours = records()
    ours[1, ROUTER, CHOSEN, 0][3] = 7
    ours[1, LAYERS[1], GIVEN, 0] = ours[1, LAYERS[1], GIVEN, 0] + 1  # what follows from it
    found = compare_layers(ours, records(), 1e-5, ties=True)
    assert (found.first, found.tie) == (None, LAYERS[1])
    first = compare_layers(ours, records(), 1e-5, ties=False).first
    assert first is not None
    assert first.what is Forward.CHOSEN
    ours[1, ROUTER, CHOSEN, 0][:8] = 0
    first = compare_layers(ours, records(), 1e-5, ties=True).first
    assert first is not None
    assert first.what is Forward.CHOSEN


def test_layers_belong_to_the_stages_of_the_layout() -> None:
    layout = plan_of("llama-tiny", pp=2, layers=4, mtp=1, layout="Et|tttmL").layout
    assert stage_of_layers(layout) == {
        "embedding": 0,
        "decoder.layers.0": 0,
        **{f"decoder.layers.{layer}": 1 for layer in (1, 2, 3)},
        "mtp.layers.0": 1,
    }


# -- what is recorded ------------------------------------------------------------------------------


def test_a_sketch_is_linear_and_keeps_distances() -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(40, 64, generator=generator) for _ in range(2))
    assert torch.allclose(sketch(a) + 2 * sketch(b), sketch(a + 2 * b), atol=1e-4)
    assert float((sketch(a) - sketch(b)).norm()) == pytest.approx(float((a - b).norm()), rel=0.3)
    assert not torch.allclose(sketch(a), sketch(a.flip(0)))


def test_experts_of_tokens_are_listed_in_order() -> None:
    routing = torch.tensor([[False, True, True], [True, False, True]])
    assert chosen_experts(routing).tolist() == [1, 2, 0, 2]


class _Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = _Decoder()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.decoder.layers[0](x)
        return output


def test_layers_are_recorded_under_global_names_inside_a_microbatch_only() -> None:
    model = _Model()
    observer = Observer(dp=2, dp_rank=1)
    observer.attach(Chunk(preset("llama-tiny"), StageLayout(1, 1, 0, layers=(1,)), model))
    x = torch.randn(3, 4)
    model(x)  # evaluation, or recomputation in a backward pass
    assert observer.records == {}
    with observer.microbatch(3):
        model(x)
    name = "decoder.layers.1"
    assert set(observer.records) == {(7, name, TAKEN, 0), (7, name, GIVEN, 0)}
    assert torch.equal(observer.records[7, name, TAKEN, 0], sketch(x))
    observer.begin_step()
    assert observer.records == {}
