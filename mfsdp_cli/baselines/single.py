"""The reference: one rank, the unsplit model, plain torch.

Whatever the plan's layout, this engine trains the same model on the same global batches, as
``global_batch_size / micro_batch_size`` microbatches one after another. It shares nothing with
the sharding engine, so that agreement of the two means something.
"""

from __future__ import annotations

import math
import random
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.runtime import forward
from mfsdp_cli.runtime.chunks import build_unsplit, router_biases
from mfsdp_cli.runtime.engine import StepResult
from mfsdp_cli.runtime.loss import MicrobatchLoss, weighed_mean, weighed_sum
from mfsdp_cli.runtime.observe import Observer, Records, sketch
from mfsdp_cli.runtime.pieces import Pieces, state_name
from mfsdp_cli.runtime.weights import initial_weight

if TYPE_CHECKING:
    from mfsdp_cli.plan import Plan
    from mfsdp_cli.runtime.data import Data
    from mfsdp_cli.runtime.settings import TrainSettings
    from mfsdp_cli.runtime.topology import Topology


_MOMENTS = ("exp_avg", "exp_avg_sq")


class SingleEngine:
    """One rank, unsharded.

    Main weights and gradients are fp32. With ``bf16`` the model computes on rounded copies of the
    main weights and its gradients are added up in fp32, microbatch by microbatch.

    Args:
        order: the order in which a step's microbatches are added up (:func:`in_order`). Another
            order of the same sums: what it changes is rounding, and no engine can be expected
            closer to the reference.
    """

    def __init__(
        self,
        plan: Plan,
        topology: Topology,
        settings: TrainSettings,
        data: Data,
        *,
        order: int = 0,
    ) -> None:
        if topology.world_size != 1:
            raise MfsdpError("MF501", f"engine single runs on 1 rank, not {topology.world_size}")
        self._moe = plan.model.moe
        self._order = order
        self._settings = settings
        self._data = data
        self._device = topology.device
        dtype = torch.bfloat16 if settings.precision == "bf16" else torch.float32
        chunk = build_unsplit(
            plan.model,
            seed=settings.seed,
            dtype=dtype,
            device=self._device,
            per_token_loss=settings.calculate_per_token_loss,
        )
        self._model = chunk.module
        self._chunk = chunk
        self._observer = Observer() if settings.observe else None
        if self._observer is not None:
            self._observer.attach(chunk)
        self._contributions: dict[str, list[torch.Tensor]] = {}
        self._weights = dict(self._model.named_parameters())
        self._main = {name: self._main_weight(plan, name) for name in self._weights}
        self._kept: dict[str, torch.Tensor] = {}
        self._optimizer = forward.adamw(self._main.items(), settings)

    def _main_weight(self, plan: Plan, name: str) -> torch.Tensor:
        weight = self._weights[name]
        if weight.dtype == torch.float32:
            return weight
        value = initial_weight(plan.model, name, weight.shape, self._settings.seed)
        return value.to(self._device).requires_grad_()

    def train_step(self, step: int) -> StepResult:
        self._optimizer.zero_grad(set_to_none=False)
        self._contributions = {}
        loss = self._accumulate(step)
        norm = self._norm()
        if self._settings.keep_gradients:
            self._kept = {name: self._gradient(name).clone() for name in self._main}
        self._clip(norm)
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.learning_rate(step)
        self._optimizer.step()
        self._refresh()
        if self._moe is not None:
            forward.update_router_bias([self._model], self._moe.moe_router_bias_update_rate, None)
        forward.clear_statistics()
        return StepResult(loss, norm)

    def _accumulate(self, step: int) -> float:
        """Forward and backward of every microbatch; returns the loss of the step."""
        per_token = self._settings.calculate_per_token_loss
        divisor = self._valid_tokens(step) if per_token else self._data.microbatches
        forward.set_auxiliary_loss_scale(1.0 / divisor, self._device)
        losses = []
        if self._observer is not None:
            self._observer.begin_step()
        for index in in_order(self._data.microbatches, self._order):
            batch = self._data.training(step, index).to(self._device)
            with nullcontext() if self._observer is None else self._observer.microbatch(index):
                loss = forward.batch_loss(self._model, batch)
            (loss.objective(per_token) / divisor).backward()
            losses.append(MicrobatchLoss(loss.total.detach(), loss.tokens))
            self._add_up()
            if self._observer is not None:
                self._note_sums()
        return self._loss_of(losses, per_token=per_token)

    def _valid_tokens(self, step: int) -> int:
        """The valid tokens of a step's global batch, at least 1.

        Counted beforehand: engines that divide at the end of the step are held against this.
        """
        batches = (self._data.training(step, index) for index in range(self._data.microbatches))
        return max(1, sum(int(batch.loss_mask.sum()) for batch in batches))

    def _loss_of(self, losses: list[MicrobatchLoss], *, per_token: bool) -> float:
        return float(weighed_mean(weighed_sum(losses, per_token=per_token, device=self._device)))

    def _note_sums(self) -> None:
        """Sketch the sums of gradients up to this microbatch."""
        for name in self._main:
            self._contributions.setdefault(name, []).append(sketch(self._gradient(name)))

    @torch.no_grad()
    def _add_up(self) -> None:
        """Add the gradients of rounded weights to the main gradients (bf16 only)."""
        for name, weight in self._weights.items():
            main = self._main[name]
            if main is weight or weight.grad is None:
                continue
            gradient = weight.grad.float()
            main.grad = gradient if main.grad is None else main.grad.add_(gradient)
            weight.grad = None

    def _gradient(self, name: str) -> torch.Tensor:
        gradient = self._main[name].grad
        return torch.zeros_like(self._main[name]) if gradient is None else gradient

    def _norm(self) -> float:
        squares = [
            torch.linalg.vector_norm(weight.grad, dtype=torch.float64) ** 2
            for weight in self._main.values()
            if weight.grad is not None
        ]
        return math.sqrt(float(torch.stack(squares).sum()))

    def _clip(self, norm: float) -> None:
        coefficient = self._settings.clip_coefficient(norm)
        if coefficient < 1.0:
            for weight in self._main.values():
                if weight.grad is not None:
                    weight.grad.mul_(coefficient)

    @torch.no_grad()
    def _refresh(self) -> None:
        for name, weight in self._weights.items():
            if self._main[name] is not weight:
                weight.copy_(self._main[name])

    @torch.no_grad()
    def evaluate(self) -> float:
        self._model.eval()
        losses = []
        for step in range(1, self._settings.eval_steps + 1):
            for index in range(self._data.microbatches):
                batch = self._data.evaluation(step, index).to(self._device)
                losses.append(forward.batch_loss(self._model, batch))
        self._model.train()
        return self._loss_of(losses, per_token=True)

    def named_weights(self) -> dict[str, torch.Tensor]:
        return {name: weight.detach().cpu().clone() for name, weight in self._main.items()}

    def clipped_gradients(self) -> dict[str, torch.Tensor]:
        return {name: self._gradient(name).cpu().clone() for name in self._main}

    def router_biases(self) -> dict[str, torch.Tensor]:
        return router_biases(self._chunk)

    def observed(self) -> Records:
        return {} if self._observer is None else self._observer.records

    def contributions(self) -> dict[str, torch.Tensor]:
        """What each microbatch of the last step added to each gradient.

        Sketches, (microbatches, buckets); microbatches in the order they ran. Empty unless the
        settings ask to observe.
        """
        return {
            name: torch.stack(sums).diff(dim=0, prepend=torch.zeros_like(sums[0])[None])
            for name, sums in self._contributions.items()
        }

    def named_gradients(self) -> dict[str, torch.Tensor]:
        return {name: gradient.cpu() for name, gradient in self._kept.items()}

    def state(self, *, saving: bool) -> dict[str, Pieces]:
        found = forward.router_bias_pieces(self._chunk)
        for name, weight in self._main.items():
            state = self._optimizer.state[weight]
            if not state:
                state["step"] = torch.tensor(0.0)
                state.update({kind: torch.zeros_like(weight) for kind in _MOMENTS})
            found[state_name("weight", name)] = Pieces.whole(weight)
            for kind in _MOMENTS:
                found[state_name(kind, name)] = Pieces.whole(state[kind])
        return found

    def loaded(self, step: int) -> None:
        for state in self._optimizer.state.values():
            state["step"] = torch.tensor(float(step))
        self._refresh()

    def persistent_bytes(self) -> int:
        weights = {id(w): w for w in (*self._main.values(), *self._weights.values())}
        gradients = [w.grad for w in self._main.values() if w.grad is not None]
        return forward.total_bytes(
            [*weights.values(), *gradients, *forward.optimizer_state(self._optimizer)]
        )

    def trace(self) -> list[dict[str, Any]]:
        return []

    def close(self) -> None:
        """Nothing outlives the object."""


def in_order(count: int, order: int) -> list[int]:
    """The numbers below ``count``: ascending (order 0), descending (1), or shuffled (others)."""
    numbers = list(range(count))
    if order == 1:
        numbers.reverse()
    elif order > 1:
        random.Random(order).shuffle(numbers)
    return numbers
