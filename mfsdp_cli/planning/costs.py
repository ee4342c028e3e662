"""Memory, communication and time of an assembled plan, rank by rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from mfsdp_cli.cost.activations import Activations
from mfsdp_cli.cost.communication import Traffic, rank_traffic, ring
from mfsdp_cli.cost.flops import Flops
from mfsdp_cli.cost.hardware import Hardware
from mfsdp_cli.cost.memory import Peak, Residency, StageMemory, pipeline_buffers, walk
from mfsdp_cli.cost.state import (
    UnitShare,
    buffers,
    persistent_state,
    precision_of,
    sharding_ranks,
)
from mfsdp_cli.cost.time import RankLoad, StageTime, stage_time, step_seconds
from mfsdp_cli.layout.layout import StageLayout
from mfsdp_cli.model.parameters import rank_counts
from mfsdp_cli.planning.assemble import Assembly
from mfsdp_cli.planning.units import UnitSize
from mfsdp_cli.schedule.actions import Action
from mfsdp_cli.schedule.simulate import simulate

GRADIENT_BYTES = 4


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank by component, and the peak they add up to."""

    components: Mapping[str, int]
    gathered_peak: int

    @property
    def peak(self) -> int:
        return sum(self.components.values())

    def to_json(self) -> dict[str, int]:
        return {**self.components, "peak_bytes": self.peak}


@dataclass(frozen=True)
class Prediction:
    """A step as predicted; None where the schedule cannot be built."""

    step_time: float
    traffic: Traffic
    tokens_per_s_per_gpu: float
    model_flops_utilization: float


class Costs:
    """All costs of one assembly on one kind of hardware."""

    def __init__(self, plan: Assembly, hardware: Hardware) -> None:
        self.plan, self.hardware = plan, hardware
        parallel, settings = plan.parallel, plan.settings
        self.precision = precision_of(settings.precision)
        self.activations = Activations(
            plan.model,
            parallel.micro_batch_size,
            parallel.seq_length // parallel.context_parallel_size,
            self.precision.compute,
            settings.recompute_granularity,
        )
        self.flops = Flops(plan.model, parallel.micro_batch_size, parallel.seq_length)

    def sharding_ranks(self, *, experts: bool) -> int:
        """Ranks over which a unit is sharded."""
        replicas = self.plan.settings.num_distributed_optimizer_instances
        return sharding_ranks(self.plan.parallel, experts=experts, replicas=replicas)

    @cached_property
    def stages(self) -> list[StageMemory]:
        """What every stage adds to memory, by stage."""
        sent = self.activations.boundaries(self.plan.layout)
        received = [0, *sent[:-1]]
        return [
            self._stage(stage, units, sent[stage.stage], received[stage.stage])
            for stage, units in zip(self.plan.layout.stages, self.plan.units, strict=True)
        ]

    def memory(self, rank: int) -> RankMemory:
        """Memory of a pipeline rank at its peak."""
        mine = self._of(rank)
        shares = [unit for stage in mine.values() for unit in stage.units]
        bias = rank_counts(self.plan.model, self.plan.layout, rank, self.plan.sharding).router_bias
        peak = self._peak(rank)
        components = {
            **persistent_state(shares, self.precision),
            "buffers": buffers(self.plan.model, bias),
            "gathered_parameters": peak.at.gathered_parameters,
            "unsharded_gradients": peak.at.unsharded_gradients,
            "activations": peak.at.activations,
            "working_set": peak.at.working_set,
            "pipeline_buffers": pipeline_buffers(mine, self.plan.layout.pp),
            "framework_overhead": self.hardware.framework_bytes,
        }
        return RankMemory(components, peak.gathered)

    def prediction(self) -> Prediction | None:
        """Time and traffic of a step."""
        schedule, parallel = self.plan.schedule, self.plan.parallel
        if schedule is None:
            return None
        times = [self.stage_time(stage) for stage in self.plan.layout.stages]
        boundary = max((stage.boundary for stage in self.stages), default=0)
        timeline = simulate(
            schedule.actions,
            rank_of=schedule.spec.rank_of,
            num_stages=schedule.spec.num_stages,
            forward=[time.forward for time in times],
            backward=[time.backward for time in times],
            p2p=self._transfer(boundary),
        )
        loads = [self._load(rank, times) for rank in range(self.plan.layout.pp)]
        seconds = step_seconds(
            timeline.makespan,
            loads,
            self.hardware,
            sharding_ranks=self.sharding_ranks(experts=False),
            world=parallel.world_size,
        )
        total = sum((load.traffic for load in loads), Traffic())
        return self._prediction(seconds, total.times(parallel.world_size // self.plan.layout.pp))

    def _prediction(self, seconds: float, traffic: Traffic) -> Prediction:
        parallel = self.plan.parallel
        tokens = parallel.global_batch_size * parallel.seq_length
        forward = sum(self.flops.forward(stage) for stage in self.plan.layout.stages)
        needed = 3 * forward * parallel.global_batch_size / parallel.micro_batch_size
        rate = self.hardware.flops(self.plan.settings.precision) / self.hardware.compute_efficiency
        return Prediction(
            step_time=seconds,
            traffic=traffic,
            tokens_per_s_per_gpu=tokens / seconds / parallel.world_size,
            model_flops_utilization=needed / (seconds * rate * parallel.world_size),
        )

    def _of(self, rank: int) -> dict[int, StageMemory]:
        return {stage.stage: self.stages[stage.stage] for stage in self.plan.layout.stages_of(rank)}

    def _actions(self, rank: int) -> list[Action]:
        return [] if self.plan.schedule is None else self.plan.schedule.actions[rank]

    def _stage(
        self, stage: StageLayout, units: list[UnitSize], sent: int, received: int
    ) -> StageMemory:
        return StageMemory(
            held=self.activations.held(stage),
            working=self.activations.working(stage),
            gathered=sum(unit.parameters for unit in units) * self.precision.compute,
            units=tuple(self._share(unit) for unit in units),
            boundary=sent,
            received=received,
        )

    def _share(self, unit: UnitSize) -> UnitShare:
        return UnitShare(unit.parameters, self.sharding_ranks(experts=unit.is_experts))

    def _peak(self, rank: int) -> Peak:
        settings = self.plan.settings
        residency = Residency(
            settings.resident_chunks,
            settings.gradient_reduction,
            self.precision.compute,
            GRADIENT_BYTES,
        )
        return walk(self._actions(rank), self._of(rank), residency)

    def _routed(self, stage: StageLayout) -> int:
        """Bytes one forward of a stage sends to other expert ranks."""
        moe, ranks = self.plan.model.moe, self.plan.parallel.expert_model_parallel_size
        if moe is None or ranks == 1:
            return 0
        layers = sum(self.plan.model.is_moe_layer(layer) for layer in stage.layers)
        tokens = self.activations.tokens * moe.moe_router_topk
        return layers * ring(tokens * self.plan.model.hidden_size * self.precision.compute, ranks)

    def stage_time(self, stage: StageLayout) -> StageTime:
        """Seconds of a stage for one microbatch."""
        granularity = self.plan.settings.recompute_granularity
        split = self.plan.parallel.tensor_model_parallel_size
        split *= self.plan.parallel.context_parallel_size
        return stage_time(
            forward_flops=self.flops.forward(stage) / split,
            recomputed_flops=self.flops.recomputed(stage, granularity) / split,
            weight_bytes=self.stages[stage.stage].gathered,
            routed_bytes=self._routed(stage),
            hardware=self.hardware,
            precision=self.plan.settings.precision,
            expert_ranks=self.plan.parallel.expert_model_parallel_size,
        )

    def _transfer(self, size: int) -> float:
        """Seconds a tensor takes to the next stage; stages lie DP ranks apart."""
        link = self.hardware.link(self.plan.parallel.world_size)
        return size / link + self.hardware.latency_s if size else 0.0

    def _load(self, rank: int, times: list[StageTime]) -> RankLoad:
        mine = self._of(rank)
        microbatches = self.plan.parallel.num_microbatches
        busy = sum(times[stage].forward + times[stage].backward for stage in mine) * microbatches
        units = [unit for stage in mine.values() for unit in stage.units]
        traffic = rank_traffic(
            self._actions(rank),
            mine,
            compute_bytes=self.precision.compute,
            gradient_bytes=GRADIENT_BYTES,
            shared_bytes=self._shared(rank),
            all_to_all={number: self._routed(self.plan.layout.stages[number]) for number in mine},
        )
        first = self.stages[rank]
        return RankLoad(
            busy=busy,
            traffic=traffic,
            first_gather=sum(
                ring(unit.parameters * self.precision.compute, unit.ranks) for unit in first.units
            ),
            owned=sum(unit.shard for unit in units),
        )

    def _shared(self, rank: int) -> int:
        """Bytes a rank sends so that its shard of each shared parameter gets every copy's part."""
        size = self.plan.model.padded_vocab_size * self.plan.model.hidden_size * GRADIENT_BYTES
        shard = -(-size // self.sharding_ranks(experts=False))
        return sum(
            2 * ring(shard, len(group.pp_ranks))
            for group in self.plan.groups
            if rank in group.pp_ranks
        )
