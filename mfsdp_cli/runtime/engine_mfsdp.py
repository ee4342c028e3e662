"""Engine ``mfsdp``: the plan's actions on sharded chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from mfsdp_cli.cost.activations import sequences_after
from mfsdp_cli.fsdp import (
    AdamSettings,
    Context,
    LocalMember,
    Orientation,
    ShardedOptimizer,
    ShardMesh,
    SharedParameter,
    Use,
    full_gradients,
    full_weights,
    fully_shard,
    fully_shard_context,
    persistent_bytes,
    sharded_state_dict,
    unit_of,
)
from mfsdp_cli.fsdp.chunk import Chunk as Sharded
from mfsdp_cli.fsdp.unit import Unit
from mfsdp_cli.runtime import forward
from mfsdp_cli.runtime.chunks import (
    Chunk,
    build_chunks,
    global_experts,
    global_name,
    router_biases,
    set_initial_weights,
)
from mfsdp_cli.runtime.engine import StepResult
from mfsdp_cli.runtime.executor import Batches, Executor, Stages
from mfsdp_cli.runtime.loss import weighed_mean, weighed_sum
from mfsdp_cli.runtime.observe import Observer, Records
from mfsdp_cli.runtime.pieces import Pieces, state_name
from mfsdp_cli.runtime.pipe import Pipe
from mfsdp_cli.runtime.stage_runner import StageRunner
from mfsdp_cli.runtime.trace import Trace
from mfsdp_cli.schedule.actions import Action, Kind
from mfsdp_cli.schedule.build import build_evaluation

if TYPE_CHECKING:
    from mfsdp_cli.plan import Plan
    from mfsdp_cli.runtime.data import Data
    from mfsdp_cli.runtime.settings import TrainSettings
    from mfsdp_cli.runtime.topology import Topology

EMBEDDING = "embedding"
EXPERTS = ".mlp.experts"
ROOT = "root"
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class MfsdpEngine:
    """Fully sharded data parallelism under the plan's pipeline schedule."""

    def __init__(self, plan: Plan, topology: Topology, settings: TrainSettings, data: Data) -> None:
        self._plan = plan
        self._topology = topology
        self._settings = settings
        self._data = data
        self._trace = Trace(settings.trace)
        self._actions = plan.schedule.actions[topology.pp_rank]
        self._dtype = _DTYPES[settings.precision]
        self.chunks = build_chunks(
            plan.model,
            plan.layout,
            topology.pp_rank,
            seed=settings.seed,
            dtype=self._dtype,
            device=topology.device,
            ep=topology.ep,
            ep_rank=topology.ep_rank,
            recompute=plan.settings.recompute_granularity,
            per_token_loss=settings.calculate_per_token_loss,
        )
        _make_main_weights(self.chunks, settings.seed)
        self.context = _shard(self.chunks, plan, topology, settings)
        self.context.on_event = self._trace.event
        self.optimizer = ShardedOptimizer(
            [chunk.module for chunk in self.chunks],
            AdamSettings(
                lr=settings.lr,
                betas=(settings.adam_beta1, settings.adam_beta2),
                eps=settings.adam_eps,
                weight_decay=settings.weight_decay,
            ),
            shared=_shared_parameters(self.chunks, plan, topology),
            norm_group=topology.world if topology.world_size > 1 else None,
        )
        self._observer = _observer(self.chunks, topology) if settings.observe else None
        self._per_token = settings.calculate_per_token_loss
        # By token, losses are added up as they are, and divided once at the end of the step.
        self._loss_scale = 1.0 if self._per_token else 1.0 / plan.parallel.num_microbatches
        self._runners = {
            chunk.stage.stage: StageRunner(
                chunk, self._loss_scale, self._observer, per_token=self._per_token
            )
            for chunk in self.chunks
        }
        self._executor = self._make_executor()
        # The plan's own UNSHARD begins a step.
        uses = planned_uses(self._actions, self._sharded())
        self.context.plan_order(uses, prefetch_first=False)
        self._step = 0
        self._norm = self._loss = torch.zeros((), dtype=torch.float64, device=topology.device)
        self._kept: dict[str, torch.Tensor] = {}

    def _sharded(self) -> dict[int, Sharded]:
        return {
            chunk.stage.stage: sharded
            for chunk, sharded in zip(self.chunks, self.context.chunks, strict=True)
        }

    def _make_executor(self) -> Executor:
        plan, topology = self._plan, self._topology
        parallel = plan.parallel
        shape = (parallel.seq_length, parallel.micro_batch_size, plan.model.hidden_size)
        pp_rank_of = {stage.stage: stage.pp_rank for stage in plan.layout.stages}
        stages = Stages(
            self._runners,
            self._sharded(),
            lambda stage: topology.rank_of(pp_rank_of[stage]),
            sequences_after(plan.layout),
        )
        return Executor(
            self._actions,
            build_evaluation(plan.schedule.spec)[topology.pp_rank],
            stages,
            self.context,
            Pipe(topology.pp_forward, shape, self._dtype, topology.device),
            Pipe(topology.pp_backward, shape, self._dtype, topology.device),
            resident=plan.settings.resident_chunks > 0,
            end_of_step={
                Kind.ROUTER_BIAS: self._update_router_bias,
                Kind.TIED_ALLREDUCE: self._sum_shared_gradients,
                Kind.GRAD_NORM: self._grad_norm,
                Kind.CLIP: self._clip,
                Kind.OPTIMIZER: self._update,
                Kind.REFRESH_WEIGHTS: self._refresh,
            },
            before_backward=self._set_loss_scales,
            trace=self._trace,
        )

    # -- a step ----------------------------------------------------------------------------

    def train_step(self, step: int) -> StepResult:
        self._step = step
        self._trace.begin_step(step)
        self.context.zero_grad()
        if self._observer is not None:
            self._observer.begin_step()
        for runner in self._runners.values():
            runner.losses.clear()
        self._executor.run(self._batches_of(step, self._data.training))
        forward.clear_statistics()
        # Read once, here: within the step nothing waits for the device.
        loss, norm = torch.stack([self._loss, self._norm]).tolist()
        return StepResult(loss, norm)

    def _batches_of(self, step: int, source: Any) -> Batches:
        topology = self._topology

        def batch(microbatch: int) -> Any:
            index = microbatch * topology.dp + topology.dp_rank
            return source(step, index).to(topology.device)

        return batch

    def _set_loss_scales(self) -> None:
        if self._plan.model.moe is not None or self._plan.model.mtp_num_layers:
            forward.set_auxiliary_loss_scale(self._loss_scale, self._topology.device)

    def _update_router_bias(self) -> None:
        self.context.finish_reductions()
        moe = self._plan.model.moe
        assert moe is not None
        modules = [chunk.module for chunk in self.chunks]
        group = self._topology.dp_group
        forward.update_router_bias(modules, moe.moe_router_bias_update_rate, group)

    def _sum_shared_gradients(self) -> None:
        self.context.finish_reductions()
        self.optimizer.sum_shared_gradients()

    def _grad_norm(self) -> None:
        """The norm and the loss, summed over all ranks in one collective.

        By token, gradients are sums so far. The number of tokens comes with the same collective;
        they are scaled by a tensor, so that nothing waits for the device.
        """
        self.context.finish_reductions()
        weighed = self._weighed_losses(per_token=self._per_token)
        totals = torch.cat([self.optimizer.local_squared_norm(), weighed])
        if self._topology.world_size > 1:
            dist.all_reduce(totals, group=self._topology.world)
        self._norm, self._loss = totals[0].sqrt(), weighed_mean(totals[1:])
        if self._per_token:
            factor = totals[2].clamp(min=1).reciprocal()
            self.optimizer.scale_gradients(factor)
            self._norm = self._norm * factor
        if self._settings.keep_gradients:
            self._kept = self._named(full_gradients)

    def _weighed_losses(self, *, per_token: bool) -> torch.Tensor:
        """Losses of this rank's last forward passes and their weights, two elements."""
        losses = [loss for runner in self._runners.values() for loss in runner.losses]
        return weighed_sum(losses, per_token=per_token, device=self._topology.device)

    def _clip(self) -> None:
        self.optimizer.clip(self._settings.clip_grad, self._norm)

    def _update(self) -> None:
        self.optimizer.update(self._settings.learning_rate(self._step))

    def _refresh(self) -> None:
        self.context.refresh_weights()

    # -- evaluation ------------------------------------------------------------------------

    def evaluate(self) -> float:
        self._set_training(False)
        for runner in self._runners.values():
            runner.losses.clear()
        for step in range(1, self._settings.eval_steps + 1):
            self._executor.evaluate(self._batches_of(step, self._data.evaluation))
        self._set_training(True)
        return forward.loss_over_ranks(self._weighed_losses(per_token=True))

    def _set_training(self, training: bool) -> None:
        for chunk in self.chunks:
            chunk.module.train(training)

    # -- what others look at ---------------------------------------------------------------

    def named_weights(self) -> dict[str, torch.Tensor]:
        return self._named(full_weights)

    def named_gradients(self) -> dict[str, torch.Tensor]:
        return self._kept

    def clipped_gradients(self) -> dict[str, torch.Tensor]:
        return self._named(full_gradients)

    def router_biases(self) -> dict[str, torch.Tensor]:
        return {name: b for chunk in self.chunks for name, b in router_biases(chunk).items()}

    def observed(self) -> Records:
        return {} if self._observer is None else self._observer.records

    def _named(self, whole: Any) -> dict[str, torch.Tensor]:
        return {
            _weight_name(chunk, unit, name): tensor.float().cpu()
            for chunk, sharded in zip(self.chunks, self.context.chunks, strict=True)
            for unit in sharded.units
            for name, tensor in whole(unit)
        }

    def state(self, *, saving: bool) -> dict[str, Pieces]:
        names, copies = self._state_names(), self._copies()
        parts: dict[str, list[tuple[int, torch.Tensor]]] = {}
        shapes = {}
        for local, shard in sharded_state_dict(self.optimizer).items():
            if saving and local in copies:
                continue
            for kind in ("weight", "exp_avg", "exp_avg_sq"):
                if kind in shard.tensors:
                    name = state_name(kind, names[local])
                    shapes[name] = shard.shape
                    parts.setdefault(name, []).append((shard.range.start, shard.tensors[kind]))
        found = {name: Pieces(shapes[name], parts[name]) for name in parts}
        for chunk in self.chunks:
            found |= forward.router_bias_pieces(chunk)
        return found

    def loaded(self, step: int) -> None:
        for shard in sharded_state_dict(self.optimizer).values():
            if "step" in shard.tensors:
                shard.tensors["step"].fill_(step)
        self.context.refresh_weights()

    def _state_names(self) -> dict[str, str]:
        """The global name of each parameter, by its name in the sharded state."""
        return {
            f"{index}.{name}": global_name(chunk, name)
            for index, chunk in enumerate(self.chunks)
            for name, _ in chunk.module.named_parameters()
        }

    def _copies(self) -> set[str]:
        """Parameters here that another member of a shared group owns, by name in the state."""
        copies = {
            id(member.group.parameters[member.index])
            for shared in self.optimizer.shared
            for member in shared.local
            if member.member != 0
        }
        return {
            f"{index}.{name}"
            for index, chunk in enumerate(self.chunks)
            for name, parameter in chunk.module.named_parameters()
            if id(parameter) in copies
        }

    def persistent_bytes(self) -> int:
        """Bytes of weights, main gradients and optimizer state on this rank."""
        return persistent_bytes(self.context.groups) + self.optimizer.state_bytes

    def trace(self) -> list[dict[str, Any]]:
        return self._trace.records

    def close(self) -> None:
        """Nothing outlives the object."""


def _observer(chunks: list[Chunk], topology: Topology) -> Observer:
    observer = Observer(topology.dp, topology.dp_rank)
    for chunk in chunks:
        observer.attach(chunk)
    return observer


# -- sharding Megatron's chunks --------------------------------------------------------------


def _shard(chunks: list[Chunk], plan: Plan, topology: Topology, settings: TrainSettings) -> Context:
    """Wrap every chunk: its embedding where that is a unit, its layers, then the rest."""
    # An expert's gradient holds the samples of all data-parallel ranks already, through the
    # dispatch: the mean is over those, not over the ranks that hold the expert. By token there is
    # no mean over ranks: sums are divided by the tokens of the batch at the end of the step.
    divisor = 1 if settings.calculate_per_token_loss else topology.dp
    mesh = ShardMesh(
        topology.dp_gather, topology.dp_reduce, topology.dp_replicate, gradient_divisor=divisor
    )
    experts = ShardMesh(topology.expert_gather, topology.expert_reduce, gradient_divisor=divisor)
    with fully_shard_context(
        topology.device, gradient_reduction=plan.settings.gradient_reduction
    ) as context:
        for chunk in chunks:
            for module, name in unit_modules(chunk, own_experts=topology.ep > 1):
                fully_shard(
                    module,
                    experts if name.endswith(EXPERTS) else mesh,
                    name=name,
                    compute_dtype=_DTYPES[settings.precision],
                )
    return context


def _make_main_weights(chunks: list[Chunk], seed: int) -> None:
    """Give the engine fp32 weights to shard, not ones that were rounded to the compute dtype."""
    for chunk in chunks:
        rounded = [p for p in chunk.module.parameters() if p.dtype != torch.float32]
        for parameter in rounded:
            parameter.data = parameter.data.float()
        if rounded:
            set_initial_weights(chunk, seed)


def unit_modules(chunk: Chunk, *, own_experts: bool = False) -> list[tuple[nn.Module, str]]:
    """The modules of a chunk that form units, inner ones first, with their global names.

    The embedding is a unit of its own only where it is called once and its weight belongs to no
    other module of the chunk. A tied head on the same chunk keeps it in the root, and so do MTP
    layers, which call it again.

    Args:
        own_experts: the routed experts of a layer are a unit, within the layer's (expert
            parallelism: other ranks hold other experts).
    """
    model: Any = chunk.module
    modules: list[tuple[nn.Module, str]] = []
    tied = not chunk.spec.untie_embeddings_and_output_weights
    stage = chunk.stage
    if stage.embedding and not (tied and stage.loss) and not stage.mtp:
        modules.append((model.embedding, EMBEDDING))
    layers = [
        (module, f"decoder.layers.{layer}")
        for module, layer in zip(model.decoder.layers, stage.layers, strict=True)
    ]
    if stage.mtp:
        layers += [
            (module, f"mtp.layers.{depth}")
            for module, depth in zip(model.mtp.layers, stage.mtp, strict=True)
        ]
    for module, name in layers:
        if own_experts:
            modules += [(experts, name + EXPERTS) for experts in _routed_experts(module)]
        modules.append((module, name))
    return [*modules, (model, ROOT)]


def _routed_experts(layer: nn.Module) -> list[nn.Module]:
    """The module that holds a layer's routed experts, if it has any."""
    return [
        module for name, module in layer.named_modules() if name.endswith(EXPERTS.removeprefix("."))
    ]


def _weight_name(chunk: Chunk, unit: Unit, name: str) -> str:
    """The global name of a parameter, by its name in the unit's module."""
    if unit.name == ROOT:
        return global_name(chunk, name)
    path = unit.name
    if path.startswith("mtp.") and path.endswith(EXPERTS):
        # The plan's name of the unit leaves out that an MTP layer wraps a decoder layer.
        path = f"{path.removesuffix(EXPERTS)}.mtp_model_layer{EXPERTS}"
    return global_experts(chunk, f"{path}.{name}")


def planned_uses(actions: list[Action], sharded: dict[int, Sharded]) -> list[Use]:
    """The order in which a step uses units, chunk by chunk as the actions run them."""
    uses: list[Use] = []
    for action in actions:
        if action.kind is Kind.FORWARD and action.stage is not None:
            units = sharded[action.stage].units
            uses += [Use(unit.index, Orientation.FORWARD) for unit in units if unit.groups]
        elif action.kind is Kind.BACKWARD and action.stage is not None:
            units = sharded[action.stage].backward_order
            uses += [Use(unit.index, Orientation.BACKWARD) for unit in units if unit.groups]
    return uses


def _shared_parameters(
    chunks: list[Chunk], plan: Plan, topology: Topology
) -> list[SharedParameter]:
    """The shared parameters that this rank holds a member of."""
    shared = []
    for group in plan.shared_groups:
        local = [
            _local_member(position, chunk, member.parameter)
            for position, member in enumerate(group.members)
            for chunk in chunks
            if (member.pp_rank, member.vp_stage) == (topology.pp_rank, chunk.stage.vp_stage)
        ]
        if local:
            ranks = topology.shared_group(group.pp_ranks)
            shared.append(SharedParameter(group.name, ranks, len(group.members), local))
    return shared


def _local_member(position: int, chunk: Chunk, parameter: str) -> LocalMember:
    """Find a parameter of a chunk, by its local name, in the unit that took it."""
    wanted = dict(chunk.module.named_parameters())[parameter]
    for module in chunk.module.modules():
        unit = unit_of(module)
        for group in unit.groups if unit is not None else ():
            for index, candidate in enumerate(group.parameters):
                if candidate is wanted:
                    return LocalMember(position, group, index)
    raise KeyError(parameter)
