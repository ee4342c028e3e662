"""torch's own: FSDP2 (``fully_shard``) under ``ScheduleInterleaved1F1B``, as an engine.

The same chunks, initial weights, batches and settings as the other engines; sharding, schedule,
communication and optimizer are torch's. Set up as torchtitan sets up the two together: layers,
embedding and the rest of a chunk are wrapped, nothing is resharded after forward (the schedule
gathers chunks before use and frees them), gradients are reduced once a step.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor

from mfsdp_cli.plan import Plan
from mfsdp_cli.runtime import forward
from mfsdp_cli.runtime.chunks import Chunk, build_chunks
from mfsdp_cli.runtime.data import Data
from mfsdp_cli.runtime.engine import StepResult
from mfsdp_cli.runtime.engine_mfsdp import unit_modules
from mfsdp_cli.runtime.settings import TrainSettings
from mfsdp_cli.runtime.topology import Topology


class StageModule(nn.Module):
    """A chunk that takes and returns activations, as torch's pipeline stages do."""

    def __init__(self, chunk: Chunk) -> None:
        super().__init__()
        self.stage = chunk.stage
        self.model: Any = chunk.module

    def forward(
        self, received: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        """Tokens (b, s) on the first stage, else activations (s, b, h); on the last stage the
        loss of every token (b, s)."""
        tokens = received if self.stage.embedding else None
        if tokens is None:
            self.model.set_input_tensor(received)
        output: torch.Tensor = self.model(
            tokens, positions, None, labels=labels if self.stage.loss else None
        )
        self.model.set_input_tensor(None)
        return output


class TorchEngine:
    """One rank of it; fp32, no parameter shared between stages, PP and DP above 1."""

    def __init__(self, plan: Plan, topology: Topology, settings: TrainSettings, data: Data) -> None:
        if plan.shared_groups:
            raise ValueError("Expected untied embeddings: torch has nothing that sums their copies")
        self._plan = plan
        self._topology = topology
        self._settings = settings
        self._data = data
        chunks = build_chunks(plan.model, plan.layout, topology.pp_rank, seed=settings.seed)
        self._modules = [StageModule(chunk) for chunk in chunks]
        assert topology.dp_gather is not None
        mesh = DeviceMesh.from_group(topology.dp_gather, "cpu")
        for chunk, module in zip(chunks, self._modules, strict=True):
            for part, _ in unit_modules(chunk)[:-1]:
                fully_shard(part, mesh=mesh, reshard_after_forward=False)
            fully_shard(module, mesh=mesh, reshard_after_forward=False)
        self._schedule = ScheduleInterleaved1F1B(
            [self._stage(module) for module in self._modules],
            n_microbatches=plan.parallel.num_microbatches,
            loss_fn=lambda losses, _target: losses.float().mean(),
        )
        # Fused is the fastest here: a loop over distributed tensors costs 3 ms each.
        named = [pair for module in self._modules for pair in module.named_parameters()]
        self._optimizer = forward.adamw(named, settings, fused=True)

    def _stage(self, module: StageModule) -> PipelineStage:
        parallel, model = self._plan.parallel, self._plan.model
        tokens = torch.zeros(parallel.micro_batch_size, parallel.seq_length, dtype=torch.int64)
        hidden = torch.zeros(parallel.seq_length, parallel.micro_batch_size, model.hidden_size)
        hidden.requires_grad_()
        return PipelineStage(
            module,
            module.stage.stage,
            len(self._plan.layout.stages),
            self._topology.device,
            input_args=tokens if module.stage.embedding else hidden,
            output_args=tokens.float() if module.stage.loss else hidden,
            group=self._topology.pp_forward,
        )

    def train_step(self, step: int) -> StepResult:
        """Run one optimizer step (counted from 1)."""
        self._optimizer.zero_grad()
        # The schedule divides all gradients by the number of microbatches at the end.
        forward.set_auxiliary_loss_scale(1.0, self._topology.device)
        losses = self._run(step)
        moe = self._plan.model.moe
        if moe is not None:
            group = self._topology.dp_reduce
            forward.update_router_bias(self._modules, moe.moe_router_bias_update_rate, group)
            forward.clear_statistics()
        result = self._loss_and_norm(losses)
        coefficient = self._settings.clip_coefficient(result.grad_norm)
        if coefficient < 1.0:
            torch._foreach_mul_(self._gradients(), coefficient)
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.learning_rate(step)
        self._optimizer.step()
        return result

    def _run(self, step: int) -> list[torch.Tensor]:
        topology, losses = self._topology, []
        batches = [
            self._data.training(step, microbatch * topology.dp + topology.dp_rank)
            for microbatch in range(self._plan.parallel.num_microbatches)
        ]
        tokens, labels, positions = (
            torch.cat([getattr(batch, name) for batch in batches])
            for name in ("tokens", "labels", "position_ids")
        )
        first = any(module.stage.embedding for module in self._modules)
        self._schedule.step(
            *([tokens] if first else []),
            target=labels,
            losses=losses,
            return_outputs=False,
            positions=positions,
            labels=labels,
        )
        return [loss.detach() for loss in losses]

    def _gradients(self) -> list[torch.Tensor]:
        """This rank's part of every gradient."""
        return [
            weight.grad.to_local()
            for group in self._optimizer.param_groups
            for weight in group["params"]
            if isinstance(weight.grad, DTensor)
        ]

    def _loss_and_norm(self, losses: list[torch.Tensor]) -> StepResult:
        norms = torch._foreach_norm(self._gradients(), 2, dtype=torch.float64)
        totals = torch.zeros(2, dtype=torch.float64)
        totals[0] = torch.stack(norms).square().sum()
        if losses:
            totals[1] = torch.stack(losses).double().mean() / self._topology.dp
        dist.all_reduce(totals, group=self._topology.world)
        squared, loss = totals.tolist()
        return StepResult(loss, squared**0.5)

    def persistent_bytes(self) -> int:
        """Bytes of this rank's weights, gradients and optimizer state."""
        weights = [
            weight.to_local()
            for module in self._modules
            for weight in module.parameters()
            if isinstance(weight, DTensor)
        ]
        states = [
            value.to_local() if isinstance(value, DTensor) else value
            for value in forward.optimizer_state(self._optimizer)
        ]
        return forward.total_bytes([*weights, *self._gradients(), *states])
