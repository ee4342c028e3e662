"""Predicted time of a step: compute along the schedule, and what communication cannot hide.

``step = makespan + exposed gathers and reductions + shared parameters + optimizer``, where the
makespan comes from simulating the schedule with each stage's own forward and backward time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mfsdp_cli.cost.communication import Traffic
from mfsdp_cli.cost.hardware import Hardware

#: Bytes the optimizer moves an element: weight, gradient, two averages read; three of them and
#: the compute weight written, fp32 each.
OPTIMIZER_BYTES = 32


@dataclass(frozen=True)
class StageTime:
    """Seconds of one stage for one microbatch."""

    forward: float
    backward: float


def stage_time(
    *,
    forward_flops: float,
    recomputed_flops: float,
    weight_bytes: int,
    routed_bytes: int,
    hardware: Hardware,
    precision: str,
    expert_ranks: int,
) -> StageTime:
    """Time of a stage, by arithmetic or by reading its weights, whichever is longer.

    Args:
        weight_bytes: compute weights that are read.
        routed_bytes: bytes dispatched to other expert ranks by one forward.
    """
    rate = hardware.flops(precision)
    reading = weight_bytes / hardware.memory_bandwidth
    routing = 2 * routed_bytes / hardware.link(expert_ranks) if routed_bytes else 0.0
    forward = max(forward_flops / rate, reading)
    backward = max((2 * forward_flops + recomputed_flops) / rate, 2 * reading)
    return StageTime(forward + routing, backward + routing)


@dataclass(frozen=True)
class RankLoad:
    """What one rank does in a step beside waiting.

    Args:
        busy: seconds of compute.
        traffic: bytes it sends.
        first_gather: bytes gathered before anything can start.
        owned: elements the optimizer updates on it.
    """

    busy: float
    traffic: Traffic
    first_gather: int
    owned: int


def exposed(load: RankLoad, hardware: Hardware, sharding_ranks: int) -> float:
    """Seconds of gathers and reductions that compute does not hide on a rank."""
    link = hardware.link(sharding_ranks)
    moved = (load.traffic.all_gather + load.traffic.reduce_scatter) / link
    return load.first_gather / link + max(0.0, moved - load.busy)


def step_seconds(
    makespan: float,
    loads: Sequence[RankLoad],
    hardware: Hardware,
    *,
    sharding_ranks: int,
    world: int,
) -> float:
    """Seconds of a whole step."""
    hidden_not = max(exposed(load, hardware, sharding_ranks) for load in loads)
    shared = max(load.traffic.shared_parameters for load in loads) / hardware.link(world)
    updated = max(load.owned for load in loads) * OPTIMIZER_BYTES / hardware.memory_bandwidth
    return makespan + hidden_not + shared + updated
