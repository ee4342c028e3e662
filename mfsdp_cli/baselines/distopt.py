"""The baseline: Megatron-Core's own schedule, data parallelism and distributed optimizer (ZeRO-1).

Everything between the weights and the loss is Megatron-Core's: its ``DistributedDataParallel``,
``get_megatron_optimizer`` with the distributed optimizer (torch's AdamW where neither Transformer
Engine nor Apex is installed), ``get_forward_backward_func`` and ``finalize_model_grads``. Ours are
the initial weights and the batches, so that a comparison compares engines and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.runtime import forward
from mfsdp_cli.runtime.chunks import Chunk, build_chunks, global_names, router_biases
from mfsdp_cli.runtime.engine import StepResult
from mfsdp_cli.runtime.loss import MicrobatchLoss, weighed_sum

if TYPE_CHECKING:
    from mfsdp_cli.plan import Plan
    from mfsdp_cli.runtime.data import Batch, Data
    from mfsdp_cli.runtime.observe import Records
    from mfsdp_cli.runtime.pieces import Pieces
    from mfsdp_cli.runtime.settings import TrainSettings
    from mfsdp_cli.runtime.topology import Topology


class DistOptEngine:
    """Megatron-Core's distributed optimizer under its own pipeline schedule."""

    def __init__(self, plan: Plan, topology: Topology, settings: TrainSettings, data: Data) -> None:
        from megatron.core.distributed import finalize_model_grads

        self._parallel = plan.parallel
        self._topology = topology
        self._settings = settings
        self._data = data
        dtype = torch.bfloat16 if settings.precision == "bf16" else torch.float32
        self._chunks = build_chunks(
            plan.model,
            plan.layout,
            topology.pp_rank,
            seed=settings.seed,
            dtype=dtype,
            device=topology.device,
            ep=topology.ep,
            ep_rank=topology.ep_rank,
            recompute=plan.settings.recompute_granularity,
            per_token_loss=settings.calculate_per_token_loss,
        )
        config: Any = self._chunks[0].module.config
        self._kept: dict[str, torch.Tensor] = {}
        self._model = [self._wrap(chunk, index) for index, chunk in enumerate(self._chunks)]
        self._optimizer = self._make_optimizer(dtype)
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self._optimizer.scale_loss
        config.microbatch_group_size_per_vp_stage = (
            plan.parallel.microbatch_group_size_per_virtual_pipeline_stage
        )

    def _wrap(self, chunk: Chunk, index: int) -> Any:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )
        from megatron.core.transformer.module import Float16Module

        module: Any = chunk.module
        config = module.config
        if (head := _idle_head(chunk)) is not None:
            head.requires_grad_(False)
        if config.bf16:
            module = Float16Module(config, module)
        return DistributedDataParallel(
            config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
            module,
            disable_bucketing=index > 0,  # as Megatron-LM's training loop
        )

    def _make_optimizer(self, dtype: torch.dtype) -> Any:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        settings = self._settings
        config = OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.adam_beta1,
            adam_beta2=settings.adam_beta2,
            adam_eps=settings.adam_eps,
            clip_grad=max(0.0, settings.clip_grad),
            params_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            use_distributed_optimizer=True,
        )
        return get_megatron_optimizer(config, self._model, use_gloo_process_groups=False)

    def train_step(self, step: int) -> StepResult:
        for chunk in self._model:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        losses = self._run(lambda index: self._data.training(step, index), forward_only=False)
        if self._settings.keep_gradients:
            self._kept = self._whole_gradients()
        self._schedule(step)
        _, norm, _ = self._optimizer.step()
        forward.clear_statistics()
        loss = self._loss_of(losses, per_token=self._settings.calculate_per_token_loss)
        return StepResult(loss, float(norm))

    def _schedule(self, step: int) -> None:
        """Set rates and decay of every group, as Megatron's ``OptimizerParamScheduler`` does.

        Megatron's optimizer alone would decay norms and biases: a group's ``wd_mult`` of 0 takes
        effect in its scheduler.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.learning_rate(step) * group.get("lr_mult", 1.0)
            group["weight_decay"] = self._settings.weight_decay * group.get("wd_mult", 1.0)

    def evaluate(self) -> float:
        for chunk in self._model:
            chunk.eval()
        losses: list[MicrobatchLoss] = []
        with torch.no_grad():
            for step in range(1, self._settings.eval_steps + 1):
                losses += self._run(self._evaluation(step), forward_only=True)
        for chunk in self._model:
            chunk.train()
        return self._loss_of(losses, per_token=True)

    def _evaluation(self, step: int) -> Any:
        return lambda index: self._data.evaluation(step, index)

    def _loss_of(self, losses: list[MicrobatchLoss], *, per_token: bool) -> float:
        device = self._topology.device
        return forward.loss_over_ranks(weighed_sum(losses, per_token=per_token, device=device))

    def _run(self, batch_of: Any, *, forward_only: bool) -> list[MicrobatchLoss]:
        """Megatron's schedule over one global batch; the losses that this rank computed."""
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        parallel = self._parallel
        reduced = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=[self._batches(batch_of) for _ in self._model],
            model=self._model,
            num_microbatches=parallel.num_microbatches,
            seq_length=parallel.seq_length,
            micro_batch_size=parallel.micro_batch_size,
            forward_only=forward_only,
        )
        return [losses["lm loss"] for losses in reduced]

    def _batches(self, batch_of: Any) -> Iterator[Batch]:
        topology = self._topology
        for microbatch in range(self._parallel.num_microbatches):
            yield batch_of(microbatch * topology.dp + topology.dp_rank).to(topology.device)

    @torch.no_grad()
    def _whole_gradients(self) -> dict[str, torch.Tensor]:
        """The reduced gradients by global name, gathered from the ranks' parts of each bucket."""
        gradients: dict[str, torch.Tensor] = {}
        for chunk, model in zip(self._chunks, self._model, strict=True):
            names = global_names(chunk)
            name_of = {id(p): names[name] for name, p in chunk.module.named_parameters()}
            experts = self._topology.expert_gather
            groups = [(self._topology.dp_gather, buffer) for buffer in model.buffers]
            groups += [(experts, buffer) for buffer in model.expert_parallel_buffers]
            for group, buffer in groups:
                for bucket in buffer.buckets:
                    whole = _gather(bucket.grad_data, group)
                    for parameter in bucket.params_list:
                        start, end = bucket.param_to_index[parameter]
                        value = whole[start:end].view(parameter.shape)
                        gradients[name_of[id(parameter)]] = value.float().cpu().clone()
        return gradients

    def named_weights(self) -> dict[str, torch.Tensor]:
        weights = {}
        for chunk in self._chunks:
            names = global_names(chunk)
            idle = _idle_head(chunk)
            for name, parameter in chunk.module.named_parameters():
                if parameter is idle:
                    continue
                weights[names[name]] = parameter.detach().float().cpu().clone()
        return weights

    def clipped_gradients(self) -> dict[str, torch.Tensor]:
        return {}  # Megatron-Core clips copies of its own where dtypes differ

    def router_biases(self) -> dict[str, torch.Tensor]:
        return {name: b for chunk in self._chunks for name, b in router_biases(chunk).items()}

    def observed(self) -> Records:
        return {}  # Megatron-Core's schedule does not say which microbatch a chunk runs

    def named_gradients(self) -> dict[str, torch.Tensor]:
        return self._kept

    def state(self, *, saving: bool) -> dict[str, Pieces]:
        raise MfsdpError("MF533", "engine distopt does not save or load checkpoints here")

    def loaded(self, step: int) -> None:
        raise MfsdpError("MF533", "engine distopt does not save or load checkpoints here")

    def persistent_bytes(self) -> int:
        """Whole weights and gradients, as ZeRO-1 keeps them, and this rank's optimizer part."""
        weights = [p for chunk in self._chunks for p in chunk.module.parameters()]
        gradients = [
            buffer.grad_data
            for model in self._model
            for buffer in [*model.buffers, *model.expert_parallel_buffers]
        ]
        parts = getattr(self._optimizer, "chained_optimizers", [self._optimizer])
        inner = [part.optimizer for part in parts if part.optimizer is not None]
        states = [tensor for adam in inner for tensor in forward.optimizer_state(adam)]
        main = [p for adam in inner for group in adam.param_groups for p in group["params"]]
        # In fp32 the optimizer updates views of the weights themselves: no copy to count.
        own = [p for p in main if p.dtype != weights[0].dtype]
        return forward.total_bytes([*weights, *gradients, *own, *states])

    def trace(self) -> list[dict[str, Any]]:
        return []

    def close(self) -> None:
        """Nothing outlives the object."""


def _idle_head(chunk: Chunk) -> nn.Parameter | None:
    """The head of a tied model beside MTP layers: Megatron-Core allocates it and never uses it.

    There the logits come from MTP's copy of the embedding. Nothing would sum the idle matrix with
    the other copies, and weight decay alone would shrink it.
    """
    stage = chunk.stage
    if chunk.spec.untie_embeddings_and_output_weights or not (stage.mtp and stage.loss):
        return None
    module: Any = chunk.module
    head: nn.Parameter | None = module.output_layer.weight
    return head


def _forward_step(batches: Iterator[Batch], model: nn.Module) -> tuple[torch.Tensor, Any]:
    """One microbatch in one chunk, in the form that Megatron's schedules call."""
    batch = next(batches)
    output = model(
        batch.tokens, batch.position_ids, None, labels=batch.labels, loss_mask=batch.loss_mask
    )
    return output, partial(_loss, batch.loss_mask)


def _gather(data: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """A bucket whole: after the reduce-scatter each rank holds one equal part of it."""
    if group is None:
        return data
    part = data.chunk(group.size())[group.rank()].contiguous()
    whole = torch.empty_like(data)
    dist.all_gather_into_tensor(whole, part, group=group)
    return whole


def _loss(
    mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, MicrobatchLoss]]:
    """Sum over a microbatch's valid tokens, their number, and a copy of both.

    The schedule divides the first in place: by the tokens and the number of microbatches, or under
    per-token loss not at all; ``finalize_model_grads`` then divides by the tokens of the batch.
    """
    loss = MicrobatchLoss.of(losses, mask)
    report = MicrobatchLoss(loss.total.detach().clone(), loss.tokens)
    return loss.total, loss.tokens.int(), {"lm loss": report}
