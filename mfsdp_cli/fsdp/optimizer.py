"""One AdamW over the shards of all chunks of a rank, and the norm that counts each element once.

The optimizer is torch's own. What it updates are slices of flat shards, one an optimizer class
and group, so nothing here loops over parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from mfsdp_cli.fsdp.context import Context
from mfsdp_cli.fsdp.flat_buffer import Range
from mfsdp_cli.fsdp.module import context_of, unit_of
from mfsdp_cli.fsdp.parameter_group import DECAY, NO_DECAY, ParameterGroup
from mfsdp_cli.fsdp.shared_parameters import SharedParameter

#: Added to the norm before dividing, as Megatron-Core's clip_grads does.
CLIP_EPSILON = 1.0e-6


@dataclass(frozen=True)
class AdamSettings:
    """Settings of AdamW (decoupled weight decay, arXiv:1711.05101)."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.01


class ShardedOptimizer:
    """AdamW over the shards of all chunks of a rank.

    Args:
        chunks: the outermost wrapped modules of this rank: every chunk of their context.
        shared: shared parameters of this rank; their gradients are summed by
            :meth:`sum_shared_gradients` and their copies left out of the norm.
        norm_group: all ranks of the model; None: this rank alone.

    Raises:
        ValueError: no chunk, one that is not wrapped or not outermost, one given twice or left
            out, or chunks of several contexts.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        settings: AdamSettings,
        *,
        shared: Sequence[SharedParameter] = (),
        norm_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.context = _context_of_all(chunks)
        self.shared = tuple(shared)
        self.norm_group = norm_group
        self._groups = [group for group in self.context.groups if group.requires_grad]
        self._slices: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._slice_of: dict[tuple[int, str], torch.Tensor] = {}
        self._counted = self._counted_gradients()
        self._adam = torch.optim.AdamW(
            self._parameter_groups(settings),
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
        )

    def _parameter_groups(self, settings: AdamSettings) -> list[dict[str, object]]:
        decays = {DECAY: settings.weight_decay, NO_DECAY: 0.0}
        return [
            {"params": self._take_slices(optimizer_class), "weight_decay": decay}
            for optimizer_class, decay in decays.items()
        ]

    def _take_slices(self, optimizer_class: str) -> list[torch.Tensor]:
        weights = []
        for group in self._groups:
            owned = group.class_range(optimizer_class)
            if owned.numel:  # a rank may own no element of a group
                assert group.main_grad is not None
                weight = owned.within(group.main_weight)
                self._slices.append((weight, owned.within(group.main_grad)))
                self._slice_of[id(group), optimizer_class] = weight
                weights.append(weight)
        return weights

    def _counted_gradients(self) -> list[torch.Tensor]:
        """Slices of main gradients that this rank counts: each logical element once.

        Copies of shared parameters count nowhere but at their first member, shards that replicas
        hold too (hybrid sharding) nowhere but in the first replica.
        """
        copies: dict[int, list[Range]] = {}
        for shared in self.shared:
            for member in shared.local:
                if member.member != 0:
                    owned = member.group.layout.owned_in_shard(member.index)
                    copies.setdefault(id(member.group), []).append(owned)
        counted = []
        for group in self._groups:
            if group.mesh.replica:
                continue
            assert group.main_grad is not None
            whole = Range(0, group.layout.shard().numel)
            for part in _without(whole, copies.get(id(group), [])):
                counted.append(part.within(group.main_grad))
        return counted

    # -- the end of a step, in this order --------------------------------------------------

    def sum_shared_gradients(self) -> None:
        """After the reductions, before the norm."""
        for shared in self.shared:
            shared.sum_gradients()

    def local_squared_norm(self) -> torch.Tensor:
        """Sum of squares of this rank's share, float64, one element."""
        total = torch.zeros(1, dtype=torch.float64, device=self.context.device)
        if self._counted:
            # In fp32 the sum over a large shard is off by 3e-6 on the CPU.
            norms = torch._foreach_norm(self._counted, 2, dtype=torch.float64)
            total += torch.stack(norms).square().sum()
        return total

    def grad_norm(self) -> torch.Tensor:
        """Global L2 norm of the gradient, each logical element counted once (float64, no dims).

        It stays on the device: reading it is for the caller, who may have more to do first.
        """
        total = self.local_squared_norm()
        if self.norm_group is not None:
            dist.all_reduce(total, group=self.norm_group)
        return total.sqrt().squeeze()

    def clip(self, max_norm: float, norm: torch.Tensor | float) -> torch.Tensor:
        """Scale gradients so that their norm is at most ``max_norm``; 0 or less: do nothing.

        Returns:
            The factor applied, at most 1, on the device (float64, no dims).
        """
        norm = torch.as_tensor(norm, dtype=torch.float64, device=self.context.device)
        if max_norm <= 0:
            return torch.ones_like(norm)
        factor = (max_norm / (norm + CLIP_EPSILON)).clamp(max=1.0)
        self.scale_gradients(factor)
        return factor

    def scale_gradients(self, factor: torch.Tensor) -> None:
        """Multiply every main gradient by a factor of no dims; waits for nothing."""
        gradients = [gradient for _, gradient in self._slices]
        if gradients:
            torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))

    def step(self, lr: float | None = None) -> None:
        """Update the weights and make the next gathers see them."""
        self.update(lr)
        self.context.refresh_weights()

    def update(self, lr: float | None = None) -> None:
        """Update the sharded main weights alone; ``context.refresh_weights()`` must follow."""
        self.context.end_step()
        for settings in self._adam.param_groups:
            if lr is not None:
                settings["lr"] = lr
        for weight, gradient in self._slices:
            weight.grad = gradient.to(weight.dtype)
        self._adam.step()
        for weight, _ in self._slices:
            weight.grad = None  # where it was widened, the copy goes with the step

    def state_of(self, group: ParameterGroup, optimizer_class: str) -> dict[str, torch.Tensor]:
        """Adam's ``step``, ``exp_avg`` and ``exp_avg_sq`` of a slice; writing changes them.

        Before the first step they are made as zeros. Empty where this rank owns no element.
        """
        weight = self._slice_of.get((id(group), optimizer_class))
        if weight is None:
            return {}
        state: dict[str, torch.Tensor] = self._adam.state[weight]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(weight)
            state["exp_avg_sq"] = torch.zeros_like(weight)
        return state

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state on this rank."""
        return sum(
            value.numel() * value.element_size()
            for state in self._adam.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.ndim
        )


def _context_of_all(chunks: Sequence[nn.Module]) -> Context:
    """The one context of some chunks, which are all that it has."""
    if not chunks:
        raise ValueError("Expected at least one chunk, got an empty list")
    contexts = [context_of(chunk) for chunk in chunks]
    for chunk, context in zip(chunks, contexts, strict=True):
        if context is None:
            raise ValueError(
                f"Expected chunks wrapped by fully_shard, got a {type(chunk).__name__}"
            )
    context = contexts[0]
    assert context is not None
    if any(other is not context for other in contexts):
        raise ValueError("Expected chunks of one fully_shard_context, got several")
    roots = [chunk.units[0] for chunk in context.chunks]
    given = [unit_of(chunk) for chunk in chunks]
    for chunk, unit in zip(chunks, given, strict=True):
        if unit not in roots:
            raise ValueError(f"Expected outermost modules, got {type(chunk).__name__} within one")
        if given.count(unit) > 1:
            raise ValueError(f"Expected each chunk once, got {type(chunk).__name__} twice")
    missing = [root.name for root in roots if root not in given]
    if missing:
        raise ValueError(f"Expected every chunk of the context, but {missing} were left out")
    return context


def persistent_bytes(groups: Sequence[ParameterGroup]) -> int:
    """Bytes of weights and main gradients that live between steps on this rank."""
    total = 0
    for group in groups:
        buffers = [group.main_weight, group.main_grad]
        if group.model_weight is not group.main_weight:
            buffers.append(group.model_weight)
        total += sum(b.numel() * b.element_size() for b in buffers if b is not None)
    return total


def _without(whole: Range, holes: Sequence[Range]) -> list[Range]:
    """The parts of a range outside of some others."""
    parts, start = [], whole.start
    for hole in sorted(holes, key=lambda hole: hole.start):
        if hole.numel == 0:
            continue
        if hole.start > start:
            parts.append(Range(start, hole.start))
        start = max(start, hole.stop)
    if start < whole.stop:
        parts.append(Range(start, whole.stop))
    return parts
