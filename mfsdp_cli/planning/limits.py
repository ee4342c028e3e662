"""Whether every rank stays within a memory limit, where one was given."""

from __future__ import annotations

from mfsdp_cli.errors import Finding, Severity
from mfsdp_cli.planning.costs import Costs

GIB = 1 << 30


def memory_findings(costs: Costs, limit: int | None) -> list[Finding]:
    """MF218 naming the heaviest rank, its largest component and what would bring it down."""
    if limit is None:
        return []
    peaks = [costs.memory(rank) for rank in range(costs.plan.layout.pp)]
    over = [rank for rank, memory in enumerate(peaks) if memory.peak > limit]
    if not over:
        return []
    rank = max(over, key=lambda number: peaks[number].peak)
    name, size = max(peaks[rank].components.items(), key=lambda item: item[1])
    return [
        Finding(
            "MF218",
            Severity.ERROR,
            f"pipeline rank {rank} needs {_gib(peaks[rank].peak)} of the {_gib(limit)} a rank may "
            f"use; {len(over)} of {len(peaks)} pipeline ranks are over; the largest part is "
            f"{name.replace('_', ' ')} with {_gib(size)}",
            hint=_HINTS.get(name, _MORE_RANKS),
            where=f"pp_rank {rank}",
        )
    ]


_MORE_RANKS = "more ranks (--world-size): state is sharded over data parallelism"
_HINTS = {
    "activations": "--recompute-granularity full, a smaller --mbs or --seq, or fewer virtual "
    "stages",
    "working_set": "a smaller --mbs or --seq",
    "gathered_parameters": "--resident-chunks 1, or 0 to gather unit by unit",
    "unsharded_gradients": "--gradient-reduction microbatch",
}


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
