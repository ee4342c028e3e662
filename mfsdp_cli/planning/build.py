"""From a request to a plan: the one way in for ``plan``, ``validate`` and tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mfsdp_cli.cost.hardware import DEFAULT_NAME, Hardware, load_hardware
from mfsdp_cli.errors import Finding, MfsdpError, Severity
from mfsdp_cli.layout.layout import Layout
from mfsdp_cli.model.load import LoadedModel, load_model
from mfsdp_cli.model.spec import ModelSpec
from mfsdp_cli.parallel import Parallel, Settings
from mfsdp_cli.plan import Plan
from mfsdp_cli.planning.assemble import Assembly, assemble
from mfsdp_cli.planning.costs import Costs
from mfsdp_cli.planning.document import make_plan
from mfsdp_cli.planning.limits import memory_findings
from mfsdp_cli.planning.megatron_args import inexpressible
from mfsdp_cli.planning.pipeline import (
    PipelineRequest,
    check_pipeline,
    choose_layout,
    pipeline_size,
)
from mfsdp_cli.planning.request import PlanningFaults, PlanRequest, join_sizes
from mfsdp_cli.planning.search import search
from mfsdp_cli.planning.settings import resolve_settings
from mfsdp_cli.planning.signature import signature
from mfsdp_cli.planning.sizes import check_counts, resolve_parallel
from mfsdp_cli.rules.table import Target

Limits = Callable[[ModelSpec], list[str]]
"""What a trainer cannot build of a model, in words."""


@dataclass(frozen=True)
class Inputs:
    """A request joined with what the model's file says."""

    request: PlanRequest
    loaded: LoadedModel
    sizes: Mapping[str, Any]
    settings: Mapping[str, Any]
    hardware: Hardware

    @property
    def spec(self) -> ModelSpec:
        return self.loaded.spec

    @property
    def pipeline(self) -> PipelineRequest:
        return PipelineRequest(self.spec, self.sizes, self.request.split)


def build_plan(
    request: PlanRequest, *, target: Target = Target.MFSDP, limits: Limits | None = None
) -> Plan:
    """Plan a model.

    Args:
        target: who is to run the plan; the rules weigh by it.
        limits: what the trainer here cannot build becomes a note.

    Raises:
        PlanningFaults: everything that makes the plan impossible.
        MfsdpError: a model or hardware that cannot be read.
    """
    inputs = read_inputs(request)
    decided = decide(inputs)
    parts = assembled(decided, target)
    return finished(decided, parts, limits)


def read_inputs(request: PlanRequest) -> Inputs:
    """Read model and hardware; wrong kinds of values are faults."""
    asked = request.sizes
    tensor = asked.get("tensor_model_parallel_size")
    loaded = load_model(
        request.model,
        num_layers=request.num_layers,
        mtp_num_layers=request.mtp_num_layers,
        make_vocab_size_divisible_by=request.make_vocab_size_divisible_by,
        tensor_parallel=tensor if isinstance(tensor, int) and tensor > 0 else None,
    )
    sizes = join_sizes(asked, loaded.parallel)
    if faults := [*check_counts(sizes), *check_pipeline(sizes)]:
        raise PlanningFaults(faults)
    name = DEFAULT_NAME if request.hardware is None else request.hardware
    hardware = load_hardware(name, gpus_per_node=request.gpus_per_node)
    settings = {**loaded.settings, **request.settings}
    return Inputs(request, loaded, sizes, settings, hardware)


@dataclass(frozen=True)
class Decided:
    """Sizes, layout and settings of a request, or what stands against them.

    Args:
        candidates: what a search compared; empty where sizes were given.
        faults: contradictions; with any of them the plan is impossible.
    """

    inputs: Inputs
    layout: Layout | None
    parallel: Parallel | None
    settings: Settings
    candidates: list[dict[str, Any]]
    faults: list[Finding]


def decide(inputs: Inputs) -> Decided:
    """Work out sizes, layout and settings; the pipeline is searched where none is said."""
    candidates: list[dict[str, Any]] = []
    try:
        pp = pipeline_size(inputs.pipeline)
    except MfsdpError as error:  # a layout string that does not parse
        raise PlanningFaults([error.finding]) from error
    if pp is None:
        limit, top = memory_limit(inputs), inputs.request.top
        found = search(inputs.pipeline, inputs.settings, inputs.hardware, limit, top)
        candidates = [candidate.to_json() for candidate in found.shown]
        inputs = replace(inputs, sizes={**inputs.sizes, **found.best.sizes})
        pp = found.best.pp
    layout, faults = choose_layout(inputs.pipeline, pp)
    chunks = layout.vpp if layout is not None else inputs.pipeline.declared_chunks or 1
    parallel, contradictions = resolve_parallel(inputs.sizes, inputs.spec, pp=pp, vpp=chunks)
    settings, wrong = resolve_settings(inputs.settings, vpp=chunks)
    faults = [*faults, *contradictions, *wrong]
    return Decided(inputs, layout, parallel, settings, candidates, faults)


def assembled(decided: Decided, target: Target) -> Assembly:
    """The assembly of what was decided. Raises PlanningFaults where something stands against it."""
    layout, parallel = decided.layout, decided.parallel
    if layout is None or parallel is None or decided.faults:
        raise PlanningFaults(decided.faults)
    try:
        return assemble(decided.inputs.spec, parallel, layout, decided.settings, target=target)
    except MfsdpError as error:
        raise PlanningFaults([error.finding]) from error


def finished(decided: Decided, parts: Assembly, limits: Limits | None) -> Plan:
    """The plan with its costs, its findings and its document."""
    inputs, request = decided.inputs, decided.inputs.request
    costs = Costs(parts, inputs.hardware)
    findings = [*inputs.loaded.findings, *parts.findings]
    findings += memory_findings(costs, memory_limit(inputs))
    findings += [
        Finding("MF233", Severity.NOTE, f"Megatron has no flag for {what}", where=inputs.spec.name)
        for what in inexpressible(inputs.spec)
    ]
    if limits is not None:
        findings += _notes(inputs.spec, limits)
    parts = replace(parts, findings=findings)
    return make_plan(
        parts,
        costs,
        signature=signature(request, parts.parallel, parts.layout, parts.settings),
        hardware_assumed=request.hardware is None,
        candidates=decided.candidates,
    )


def memory_limit(inputs: Inputs) -> int | None:
    """Bytes a rank may use; None: memory is reported, never judged."""
    if inputs.request.memory_limit is not None:
        return inputs.request.memory_limit
    return None if inputs.request.hardware is None else inputs.hardware.memory_bytes


def _notes(spec: ModelSpec, limits: Limits) -> list[Finding]:
    return [
        Finding("MF217", Severity.NOTE, f"mfsdp train cannot build {reason}", where=spec.name)
        for reason in limits(spec)
    ]
