"""What one microbatch does in a Megatron-Core model, and the state that goes with it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from mfsdp_cli.runtime.chunks import Chunk, global_name, routers_with_bias
from mfsdp_cli.runtime.data import Batch
from mfsdp_cli.runtime.loss import MicrobatchLoss, weighed_mean
from mfsdp_cli.runtime.pieces import Pieces, state_name

if TYPE_CHECKING:
    from mfsdp_cli.runtime.settings import TrainSettings


def batch_loss(module: nn.Module, batch: Batch) -> MicrobatchLoss:
    """The loss of a microbatch in a model that holds embedding and head."""
    losses = module(
        batch.tokens, batch.position_ids, None, labels=batch.labels, loss_mask=batch.loss_mask
    )
    return MicrobatchLoss.of(losses, batch.loss_mask)


def set_auxiliary_loss_scale(scale: float, device: torch.device) -> None:
    """Set what the gradients of router balancing losses and of MTP losses are multiplied with.

    Neither is part of the loss that backward starts from: each hangs on an activation and adds its
    own gradient when the pass comes by. Megatron's ``forward_step`` sets both scales before each
    backward pass: 1 / microbatches, or 1 under per-token loss, where each loss counts by the tokens
    of its microbatch and all gradients are divided by those of the global batch at the end.
    """
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    value = torch.full((1,), scale, device=device)
    MoEAuxLossAutoScaler.set_loss_scale(value)
    MTPLossAutoScaler.set_loss_scale(value)


def clear_statistics() -> None:
    """Forget what routers and MTP layers recorded for Megatron's own log.

    Both add up until someone logs them, one entry a layer. They are dropped, not zeroed: those of
    another model in the same process would not fit.
    """
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    destroy_moe_metrics_tracker()
    MTPLossLoggingHelper.tracker.clear()


@torch.no_grad()
def update_router_bias(
    modules: Iterable[nn.Module], rate: float, group: dist.ProcessGroup | None
) -> None:
    """Move every router's expert bias towards balance, once a step, and reset its counters.

    An expert that got fewer tokens of the global batch than the average gains ``rate``, one that
    got more loses it (arXiv:2408.15664), as Megatron-Core's ``_update_router_expert_bias``.

    Args:
        modules: this rank's chunks.
        group: the ranks whose tokens count together (data parallel); None: this rank alone.
    """
    routers = [router for module in modules for _, router in routers_with_bias(module)]
    if not routers:
        return
    tokens = torch.stack([router.local_tokens_per_expert for router in routers])
    if group is not None:
        dist.all_reduce(tokens, group=group)
    direction = torch.sign(tokens.mean(dim=-1, keepdim=True) - tokens)
    for router, step in zip(routers, direction, strict=True):
        router.expert_bias += step * rate
        router.local_tokens_per_expert.zero_()


def router_bias_pieces(chunk: Chunk) -> dict[str, Pieces]:
    """The expert biases of a chunk's routers, for a checkpoint: buffers that no optimizer sees."""
    return {
        state_name("weight", global_name(chunk, f"{name}.expert_bias")): Pieces.whole(
            router.expert_bias
        )
        for name, router in routers_with_bias(chunk.module)
    }


def loss_over_ranks(weighed: torch.Tensor) -> float:
    """The loss that the :func:`.loss.weighed_sum` of all ranks comes to; every rank gets it."""
    if dist.get_world_size() > 1:
        dist.all_reduce(weighed)
    return float(weighed_mean(weighed))


def total_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of all elements of some tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def adamw(
    named: Iterable[tuple[str, torch.Tensor]], settings: TrainSettings, *, fused: bool = False
) -> torch.optim.AdamW:
    """torch's AdamW over named weights, weight decay where the settings want it."""
    classes: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for name, weight in named:
        classes[settings.decays(name, weight.dim())].append(weight)
    decay = {True: settings.weight_decay, False: 0.0}
    return torch.optim.AdamW(
        [{"params": classes[key], "weight_decay": decay[key]} for key in classes],
        lr=settings.lr,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_eps,
        fused=fused,
    )


def optimizer_state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The moments that an optimizer keeps (its step counters left out)."""
    return [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim()
    ]
