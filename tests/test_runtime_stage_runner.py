"""A stage between its neighbours: what it hands out, what it keeps, what its backward gives."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from mfsdp_cli.layout.layout import StageLayout
from mfsdp_cli.model.presets import preset
from mfsdp_cli.runtime.chunks import Chunk
from mfsdp_cli.runtime.data import Batch
from mfsdp_cli.runtime.stage_runner import StageRunner

SHAPE = (5, 1, 4)  # (sequence, micro batch, hidden)


class Middle(nn.Module):
    """A stage in the middle, with Megatron's way to receive its input."""

    def __init__(self, as_view: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up = nn.Linear(4, 4)
        self.as_view = as_view
        self.received: torch.Tensor | None = None

    def set_input_tensor(self, tensor: torch.Tensor | None) -> None:
        self.received = tensor

    def forward(
        self, tokens: object, positions: object, mask: object, **labels: object
    ) -> torch.Tensor:
        assert tokens is None
        assert self.received is not None
        output = self.received + torch.sigmoid(self.up(self.received)) * 2
        return output.view(5, 4)[:, :].view(SHAPE) if self.as_view else output


class Last(Middle):
    """The loss stage: a loss a token."""

    def forward(self, *given: object, **labels: object) -> torch.Tensor:
        assert labels["labels"] is not None
        return super().forward(*given).square().sum(-1).transpose(0, 1)


def runner(module: nn.Module, *, loss: bool = False, scale: float = 1.0) -> StageRunner:
    layout = StageLayout(stage=1, pp_rank=1, vp_stage=0, layers=(0,), loss=loss)
    return StageRunner(Chunk(preset("llama-tiny"), layout, module), scale)


@pytest.mark.parametrize("as_view", [False, True])
def test_backward_is_right_whether_or_not_the_output_is_a_view(as_view: bool) -> None:
    module = Middle(as_view)
    stage = runner(module)
    received = torch.randn(SHAPE)
    gradient = torch.randn(SHAPE)
    expected_input = received.clone().requires_grad_()
    reference = Middle(False)
    reference.set_input_tensor(expected_input)
    reference(None, None, None).backward(gradient)

    output = stage.forward(0, received.clone(), None)
    assert output is not None
    del output  # it was sent: backward must not need it
    upstream = stage.backward(0, gradient)
    assert upstream is not None
    assert torch.equal(upstream, expected_input.grad)
    assert torch.equal(module.up.weight.grad, reference.up.weight.grad)


@pytest.mark.parametrize("as_view", [False, True])
def test_nothing_but_the_tensor_handed_out_keeps_an_output(as_view: bool) -> None:
    module = Middle(as_view)
    made: list[weakref.ref[torch.Tensor]] = []
    module.register_forward_hook(lambda _module, _args, output: made.append(weakref.ref(output)))
    stage = runner(module)
    sent = stage.forward(0, torch.randn(SHAPE), None)
    # A tensor that autograd still owned would keep its Python object alive too.
    assert made[0]() is None
    del sent
    assert stage.backward(0, torch.ones(SHAPE)) is not None


def test_what_was_received_goes_with_its_backward() -> None:
    stage = runner(Middle(False))
    received = torch.randn(SHAPE)
    alive = weakref.ref(received)
    stage.forward(0, received, None)
    del received
    upstream = stage.backward(0, torch.ones(SHAPE))
    assert upstream is not None
    assert alive() is None


def test_microbatches_in_flight_keep_apart() -> None:
    stage = runner(Middle(False))
    inputs = [torch.full(SHAPE, float(n)) for n in range(3)]
    for index, received in enumerate(inputs):
        stage.forward(index, received, None)
    gradients = [stage.backward(index, torch.ones(SHAPE)) for index in (0, 1, 2)]
    slope = [float(g.mean()) for g in gradients if g is not None]
    assert len(set(slope)) == 3


def test_the_loss_stage_scales_its_gradient_and_reports_the_mean() -> None:
    labels = torch.zeros(1, 5, dtype=torch.int64)
    batch = Batch(labels, labels, labels, torch.ones(1, 5))
    received = torch.randn(SHAPE)
    whole, quarter = (runner(Last(False), loss=True, scale=scale) for scale in (1.0, 0.25))
    assert whole.forward(0, received.clone(), batch) is None
    assert quarter.forward(0, received.clone(), batch) is None
    assert torch.equal(whole.losses[0].total, quarter.losses[0].total)  # the report is not scaled
    one, other = whole.backward(0, None), quarter.backward(0, None)
    assert one is not None
    assert other is not None
    assert torch.equal(one * 0.25, other)


def test_evaluation_keeps_nothing() -> None:
    stage = runner(Middle(False))
    with torch.no_grad():
        stage.forward(0, torch.randn(SHAPE), None)
    with pytest.raises(KeyError):
        stage.backward(0, torch.ones(SHAPE))
