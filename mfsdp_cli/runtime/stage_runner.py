"""One chunk as the executor sees it: forward and backward of a microbatch, state in between.

[Note: outputs are freed, not pseudo-freed]
Backward needs the graph behind a stage's output, not the output itself. The runner keeps the
graph's edge and hands the tensor out; once it is sent, its memory goes unless an operation saved
it. Nothing is replaced under the hood, so an output that is a view of something else is as safe
as any other.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from mfsdp_cli.runtime.chunks import Chunk
from mfsdp_cli.runtime.data import Batch
from mfsdp_cli.runtime.loss import MicrobatchLoss
from mfsdp_cli.runtime.observe import Observer


@dataclass
class _InFlight:
    received: torch.Tensor | None
    edge: GradientEdge


class StageRunner:
    """Runs microbatches through one chunk.

    Args:
        chunk: the stage's part of the model.
        loss_scale: what the loss of a microbatch is multiplied with for backward.
        observer: told which microbatch runs forward, where somebody watches the layers.
        per_token: that loss is the sum over its valid tokens, not their mean.
    """

    def __init__(
        self,
        chunk: Chunk,
        loss_scale: float,
        observer: Observer | None = None,
        *,
        per_token: bool = False,
    ) -> None:
        self.stage = chunk.stage
        self.module: Any = chunk.module
        self.losses: list[MicrobatchLoss] = []
        self._loss_scale = loss_scale
        self._observer = observer
        self._per_token = per_token
        self._in_flight: dict[int, _InFlight] = {}

    def forward(
        self, microbatch: int, received: torch.Tensor | None, batch: Batch | None
    ) -> torch.Tensor | None:
        """Run a microbatch forward.

        Args:
            received: the previous stage's output, ((1 + k) * sequence, micro batch, hidden)
                behind k MTP layers; None on the first stage.
            batch: tokens and labels; None on stages that hold neither embedding, MTP nor loss.

        Returns:
            What the next stage needs; None on the loss stage, whose loss is appended to
            ``losses``.
        """
        if received is not None and torch.is_grad_enabled():
            received.requires_grad_()
        with self._observed(microbatch):
            output = self._call(received, batch)
        if torch.is_grad_enabled():
            self._in_flight[microbatch] = _InFlight(received, get_gradient_edge(output))
        if self.stage.loss:
            return None
        return output.detach()

    def _observed(self, microbatch: int) -> AbstractContextManager[None]:
        return nullcontext() if self._observer is None else self._observer.microbatch(microbatch)

    def _call(self, received: torch.Tensor | None, batch: Batch | None) -> torch.Tensor:
        if received is not None:
            self.module.set_input_tensor(received)
        tokens = positions = labels = mask = None
        if batch is not None and (self.stage.embedding or self.stage.mtp):
            tokens, positions = batch.tokens, batch.position_ids
        if batch is not None and self.stage.loss:
            labels, mask = batch.labels, batch.loss_mask
        output: torch.Tensor = self.module(tokens, positions, None, labels=labels, loss_mask=mask)
        if received is not None:
            self.module.set_input_tensor(None)  # Megatron would keep it to the next microbatch
        return output if mask is None else self._loss(output, mask)

    def _loss(self, losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """What backward starts from; the loss stage's report is kept beside."""
        loss = MicrobatchLoss.of(losses, mask)
        self.losses.append(MicrobatchLoss(loss.total.detach(), loss.tokens))
        return loss.objective(self._per_token)

    def backward(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Run a microbatch backward.

        Args:
            gradient: of the stage's output; None on the loss stage.

        Returns:
            The gradient of what the stage received; None on the first stage.
        """
        state = self._in_flight.pop(microbatch)
        if gradient is None:
            gradient = torch.full((), self._loss_scale, device=self.losses[0].total.device)
        torch.autograd.backward(state.edge, gradient)
        return None if state.received is None else state.received.grad
