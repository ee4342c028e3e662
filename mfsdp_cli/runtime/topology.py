"""The ranks of a run: who holds what, and the communicators between them.

Rank order is Megatron's default, ``rank = pp_rank * dp + dp_rank`` (tensor and context
parallelism are 1). Each kind of traffic has a communicator of its own, so that none waits for
another and every member sees one order of operations on each.

Within the data-parallel ranks of one pipeline rank, neighbours form a shard group (hybrid sharding:
the same place in every group holds the same shard), and neighbours form an expert group, whose
ranks hold different experts (the same place in every group holds the same ones). DP 4::

    dp_rank                     0      1      2      3
    2 replicas: shard           0      1      0      1     replicated over (0, 2), (1, 3)
    EP 2: experts of            0      1      0      1     sharded over (0, 2), (1, 3)
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.runtime import megatron_on_cpu

if TYPE_CHECKING:
    from mfsdp_cli.plan import Plan

TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Topology:
    """This process among all.

    Args:
        device: where its tensors live.
        world: all ranks.
        ep: expert-parallel size; data-parallel neighbours hold different experts.
        dp_group: all ranks that hold the same stages. None where there is but one.
        dp_gather, dp_reduce: those of them over which parameters are sharded, twice: all-gathers
            and reduce-scatters do not share a communicator. None where there is but one.
        dp_replicate: the ranks that hold the same shard (hybrid sharding); None without.
        expert_gather, expert_reduce: the ranks that hold the same experts, twice; None where
            there is but one, or no expert parallelism.
        pp_forward, pp_backward: the pipeline ranks of this data-parallel rank, once for
            activations and once for their gradients. None where there is but one.
        shared: for each set of pipeline ranks that share a parameter, a communicator over their
            data-parallel ranks (those of one replica): shards of the copies need not align.
    """

    rank: int
    world_size: int
    pp: int
    dp: int
    vpp: int
    pp_rank: int
    dp_rank: int
    device: torch.device
    world: dist.ProcessGroup
    ep: int = 1
    dp_group: dist.ProcessGroup | None = None
    dp_gather: dist.ProcessGroup | None = None
    dp_reduce: dist.ProcessGroup | None = None
    dp_replicate: dist.ProcessGroup | None = None
    expert_gather: dist.ProcessGroup | None = None
    expert_reduce: dist.ProcessGroup | None = None
    pp_forward: dist.ProcessGroup | None = None
    pp_backward: dist.ProcessGroup | None = None
    shared: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)

    @property
    def ep_rank(self) -> int:
        """Which of the expert-parallel parts this rank holds."""
        return self.dp_rank % self.ep

    def rank_of(self, pp_rank: int) -> int:
        """The global rank of another pipeline rank with this data-parallel rank."""
        return pp_rank * self.dp + self.dp_rank

    def shared_group(self, pp_ranks: Sequence[int]) -> dist.ProcessGroup:
        """The communicator over these pipeline ranks; raises ``KeyError`` for a stranger."""
        return self.shared[tuple(pp_ranks)]

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            dist.barrier()

    def close(self) -> None:
        """Take down Megatron's and torch's process groups."""
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()


def connect(
    *,
    pp: int,
    dp: int,
    vpp: int = 1,
    ep: int = 1,
    replicas: int = 1,
    backend: str = "gloo",
    shared_pp_ranks: Iterable[Sequence[int]] = (),
    local_device: int = 0,
    timeout: timedelta = TIMEOUT,
) -> Topology:
    """Join the run this process was started for, and lay out its communicators.

    Reads ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``. Collective: every rank
    calls it with the same arguments.

    Args:
        ep: expert-parallel size; divides ``dp``.
        replicas: how many copies of the shards there are (hybrid sharding); divides ``dp``.
        backend: ``gloo`` (CPU) or ``nccl`` (one GPU, ``cuda:local_device``).
        shared_pp_ranks: the sets of pipeline ranks that share a parameter.
        timeout: how long a rank waits for the others before it gives up.
    """
    device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", local_device)
    megatron_on_cpu.prepare(device.type)
    if device.type == "cuda":
        torch.accelerator.set_device_index(device)
    if not dist.is_initialized():
        dist.init_process_group(
            backend, timeout=timeout, device_id=None if device.type == "cpu" else device
        )
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size != pp * dp:
        raise MfsdpError(
            "MF501",
            f"the plan needs {pp * dp} ranks (PP {pp} x DP {dp}) and {world_size} were started",
            hint=f"start {pp * dp} ranks",
        )
    _check_divides(dp, "EP", ep)
    _check_divides(dp, "optimizer instances", replicas)
    holders = [tuple(members) for members in shared_pp_ranks]
    _initialize_megatron(pp, vpp, ep, timeout, holders)
    grid = _Grid(pp, dp)
    pp_rank, dp_rank = divmod(rank, dp)
    shards, experts = grid.neighbours(dp // replicas), grid.strided(ep) if ep > 1 else []
    shared = {
        members: _own_group(grid.holders(members, dp // replicas), timeout) for members in holders
    }
    return Topology(
        rank=rank,
        world_size=world_size,
        pp=pp,
        dp=dp,
        vpp=vpp,
        pp_rank=pp_rank,
        dp_rank=dp_rank,
        device=device,
        world=_world(),
        ep=ep,
        dp_group=_own_group(grid.neighbours(dp), timeout),
        dp_gather=_own_group(shards, timeout),
        dp_reduce=_own_group(shards, timeout),
        dp_replicate=_own_group(grid.strided(dp // replicas), timeout) if replicas > 1 else None,
        expert_gather=_own_group(experts, timeout),
        expert_reduce=_own_group(experts, timeout),
        pp_forward=_own_group(grid.pipelines(), timeout),
        pp_backward=_own_group(grid.pipelines(), timeout),
        shared={members: group for members, group in shared.items() if group is not None},
    )


def connect_plan(
    plan: Plan, *, engine: str = "mfsdp", backend: str = "gloo", local_device: int = 0
) -> Topology:
    """:func:`connect` with the sizes of a plan; engine ``single`` is one rank whatever they are.

    Hybrid sharding is engine mfsdp's; the others keep one data-parallel axis.
    """
    if engine == "single":
        return connect(pp=1, dp=1, backend=backend, local_device=local_device)
    parallel = plan.parallel
    replicas = plan.settings.num_distributed_optimizer_instances if engine == "mfsdp" else 1
    return connect(
        pp=parallel.pipeline_model_parallel_size,
        vpp=parallel.virtual_pipeline_model_parallel_size,
        dp=parallel.data_parallel_size,
        ep=parallel.expert_model_parallel_size,
        replicas=replicas,
        backend=backend,
        local_device=local_device,
        shared_pp_ranks=[group.pp_ranks for group in plan.shared_groups],
    )


def connect_alone(backend: str = "gloo", local_device: int = 0) -> Topology:
    """A run of one rank inside this process, whatever the environment says."""
    if not dist.is_initialized():
        megatron_on_cpu.prepare("cpu" if backend == "gloo" else "cuda")
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return connect(pp=1, dp=1, backend=backend, local_device=local_device)


@dataclass(frozen=True)
class _Grid:
    """Sets of ranks in the order ``rank = pp_rank * dp + dp_rank``."""

    pp: int
    dp: int

    def neighbours(self, size: int) -> list[list[int]]:
        """Every ``size`` data-parallel ranks next to one another."""
        return [list(range(first, first + size)) for first in range(0, self.pp * self.dp, size)]

    def strided(self, stride: int) -> list[list[int]]:
        """Data-parallel ranks ``stride`` apart: the same place in every set of neighbours."""
        return [
            list(range(stage * self.dp + place, (stage + 1) * self.dp, stride))
            for stage in range(self.pp)
            for place in range(stride)
        ]

    def pipelines(self) -> list[list[int]]:
        """The pipeline ranks of each data-parallel rank."""
        return [list(range(place, self.pp * self.dp, self.dp)) for place in range(self.dp)]

    def holders(self, pp_ranks: Sequence[int], size: int) -> list[list[int]]:
        """The ranks of some pipeline ranks, each ``size`` data-parallel neighbours a set."""
        return [
            [stage * self.dp + first + place for stage in pp_ranks for place in range(size)]
            for first in range(0, self.dp, size)
        ]


def _check_divides(dp: int, what: str, size: int) -> None:
    if size < 1 or dp % size:
        raise MfsdpError("MF501", f"{what} {size} does not divide DP {dp}")


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is initialized"
    return world


def _own_group(rank_sets: list[list[int]], timeout: timedelta) -> dist.ProcessGroup | None:
    """Create one group for each set (every rank takes part); return the one this rank is in.

    None for sets of one: a group of one has nobody to talk to.
    """
    own = None
    for ranks in rank_sets:
        if len(ranks) == 1:
            continue
        group = dist.new_group(ranks, timeout=timeout)
        if dist.get_rank() in ranks:
            own = group
    return own


def _initialize_megatron(
    pp: int, vpp: int, ep: int, timeout: timedelta, shared_pp_ranks: Sequence[Sequence[int]]
) -> None:
    from megatron.core import parallel_state

    # Megatron's own guess is the first and the last rank. With MTP on a rank between them that
    # leaves its copy out, and in an untied model it takes in a head that is no copy.
    holders = sorted({pp_rank for members in shared_pp_ranks for pp_rank in members})

    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        expert_model_parallel_size=ep,
        distributed_timeout_minutes=max(1, int(timeout.total_seconds() // 60)),
        create_gloo_process_groups=False,
        get_embedding_ranks=(
            (lambda pipeline, *_: [pipeline[pp_rank] for pp_rank in holders]) if holders else None
        ),
    )


def share_device(rank: int) -> None:
    """Let NCCL accept several ranks on one GPU; call before :func:`connect`.

    NCCL refuses two ranks on one device of one host. With a host identity each they talk through
    sockets on the loopback interface instead: right results, at a few GB/s.
    """
    os.environ["NCCL_HOSTID"] = f"mfsdp-rank-{rank}"
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_IB_DISABLE", "1")


def use_device(backend: str, ranks_per_device: int) -> int:
    """The number of this rank's GPU on its host; sets NCCL up where several ranks share one."""
    if backend == "nccl" and ranks_per_device > 1:
        share_device(int(os.environ["RANK"]))
    return local_rank() // ranks_per_device


def local_rank() -> int:
    """This process's number on its host, by its environment; 0 where it says nothing."""
    return int(os.environ.get("LOCAL_RANK", "0"))
