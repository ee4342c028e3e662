"""Which pipeline to use where none was asked for: PP and VPP tried, layouts split by cost.

Every combination is estimated in closed form; the most promising are then built and costed
exactly, and those numbers decide. A candidate that does not fit the memory limit loses to any
that fits; among those that do not fit the smallest wins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mfsdp_cli.cost.hardware import Hardware
from mfsdp_cli.errors import Finding, MfsdpError, Severity
from mfsdp_cli.layout.printer import format_layout
from mfsdp_cli.planning.assemble import Assembly, assemble, sharding_of
from mfsdp_cli.planning.costs import Costs
from mfsdp_cli.planning.estimate import estimate
from mfsdp_cli.planning.pipeline import CHUNKS, PipelineRequest, choose_layout
from mfsdp_cli.planning.request import PlanningFaults
from mfsdp_cli.planning.settings import resolve_settings
from mfsdp_cli.planning.sizes import resolve_parallel
from mfsdp_cli.planning.units import stage_units

#: Virtual stages a rank that are tried where none were asked for.
TRIED_CHUNKS = (1, 2, 3, 4, 5, 6, 8)
GIB = 1 << 30


@dataclass(frozen=True)
class Candidate:
    """One pipeline that was tried.

    Args:
        fault: why it cannot be; empty where it can.
        seconds, peak: predicted step time and largest rank's peak bytes.
        exact: whether they come from the built schedule or from the estimate.
    """

    pp: int
    vpp: int
    layout: str = ""
    fault: str = ""
    seconds: float = 0.0
    peak: int = 0
    exact: bool = False
    reason: str = ""
    parts: Assembly | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """What to add to the given sizes to get this candidate."""
        return {"pipeline_model_parallel_size": self.pp, CHUNKS: self.vpp}

    def to_json(self) -> dict[str, Any]:
        known = not self.fault
        return {
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.vpp,
            "layout": self.layout,
            "step_time_s": self.seconds if known else None,
            "peak_bytes": self.peak if known else None,
            "exact": self.exact,
            "reason": self.reason,
        }


@dataclass(frozen=True)
class Found:
    """The best candidate and those to show, ranked, the best first."""

    best: Candidate
    shown: list[Candidate]


def search(
    request: PipelineRequest,
    settings: Mapping[str, Any],
    hardware: Hardware,
    limit: int | None,
    top: int,
) -> Found:
    """Try every pipeline and rank them.

    Raises:
        PlanningFaults: no pipeline is possible; why the first one is not.
    """
    tried = [_estimated(request, settings, hardware, pp, vpp) for pp, vpp in _sizes(request)]
    possible = [candidate for candidate in tried if not candidate.fault]
    if not possible:
        raise PlanningFaults([_nothing(request, tried)])
    possible.sort(key=lambda candidate: _order(candidate, limit))
    deeper = max(3, top)
    exact = [_exact(candidate, hardware) for candidate in possible[:deeper]]
    exact.sort(key=lambda candidate: _order(candidate, limit))
    ranked = [*exact, *possible[deeper:], *(item for item in tried if item.fault)]
    named = [_with_reason(candidate, exact[0], limit) for candidate in ranked]
    return Found(named[0], named[: max(1, top)])


def _sizes(request: PipelineRequest) -> Iterator[tuple[int, int]]:
    """PP that divide the ranks and can each have a layer; VPP declared or tried."""
    sizes, layers = request.sizes, request.spec.num_layers
    ranks = int(sizes["world_size"])
    ranks //= int(sizes.get("tensor_model_parallel_size") or 1)
    ranks //= int(sizes.get("context_parallel_size") or 1)
    declared = request.declared_chunks
    for pp in range(1, min(ranks, layers) + 1):
        if ranks % pp:
            continue
        for vpp in (declared,) if declared else TRIED_CHUNKS:
            if vpp == 1 or (pp > 1 and pp * vpp <= layers):
                yield pp, vpp


def _estimated(
    request: PipelineRequest,
    given: Mapping[str, Any],
    hardware: Hardware,
    pp: int,
    vpp: int,
) -> Candidate:
    here = replace(request, sizes={**request.sizes, CHUNKS: vpp})
    layout, faults = choose_layout(here, pp)
    parallel, contradictions = resolve_parallel(request.sizes, request.spec, pp=pp, vpp=vpp)
    settings, wrong = resolve_settings(given, vpp=vpp)
    faults = [*faults, *contradictions, *wrong]
    if layout is None or parallel is None or faults:
        return Candidate(pp, vpp, fault=faults[0].message)
    units = [
        stage_units(request.spec, layout, stage, sharding_of(parallel)) for stage in layout.stages
    ]
    parts = Assembly(request.spec, parallel, layout, settings, None, (), units, [])
    if vpp > 1 and parallel.num_microbatches < pp:
        fault = f"{parallel.num_microbatches} microbatches are too few to interleave {pp} ranks"
        return Candidate(pp, vpp, fault=fault)
    guess = estimate(Costs(parts, hardware))
    return Candidate(
        pp, vpp, format_layout(layout), seconds=guess.seconds, peak=guess.peak, parts=parts
    )


def _exact(candidate: Candidate, hardware: Hardware) -> Candidate:
    """The same candidate with its schedule built and walked."""
    assert candidate.parts is not None
    parts = candidate.parts
    try:
        built = assemble(parts.model, parts.parallel, parts.layout, parts.settings)
    except MfsdpError as error:
        return replace(candidate, fault=error.finding.message)
    costs = Costs(built, hardware)
    prediction = costs.prediction()
    errors = [finding for finding in built.findings if finding.severity is Severity.ERROR]
    if prediction is None or errors:
        reason = errors[0].message if errors else "its schedule never ends"
        return replace(candidate, fault=reason)
    peak = max(costs.memory(rank).peak for rank in range(candidate.pp))
    return replace(candidate, seconds=prediction.step_time, peak=peak, exact=True)


def _order(candidate: Candidate, limit: int | None) -> tuple[bool, bool, float, int, int]:
    """What fits first, then what is fast; of equals the simpler pipeline."""
    over = limit is not None and candidate.peak > limit
    cost = float(candidate.peak) if over else candidate.seconds
    return bool(candidate.fault), over, cost, candidate.pp, candidate.vpp


def _with_reason(candidate: Candidate, best: Candidate, limit: int | None) -> Candidate:
    return replace(candidate, reason=_reason(candidate, best, limit))


def _reason(candidate: Candidate, best: Candidate, limit: int | None) -> str:
    if candidate.fault:
        return candidate.fault
    over = limit is not None and candidate.peak > limit
    need = f"needs {candidate.peak / GIB:.2f} GiB a rank"
    bound = f", the limit is {limit / GIB:.2f}" if limit is not None else ""
    if candidate is best:
        return f"chosen; {need}{bound}" if over else "chosen"
    if over:
        return f"{need}{bound}"
    return f"{candidate.seconds / best.seconds - 1:.1%} slower"


def _nothing(request: PipelineRequest, tried: list[Candidate]) -> Finding:
    ranks = request.sizes["world_size"]
    why = tried[0].fault if tried else "no pipeline size divides the ranks"
    return Finding(
        "MF219",
        Severity.ERROR,
        f"no pipeline of {request.spec.name} fits {ranks} ranks: {why}",
        where=f"--world-size {ranks}",
        hint="give --pipeline-model-parallel-size, or another number of ranks",
    )
