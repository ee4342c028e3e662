"""Static validation: every rule and every invariant, on a plan or on what was to become one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mfsdp_cli.cost.activations import sequences_after
from mfsdp_cli.errors import Finding, Severity
from mfsdp_cli.layout.layout import Layout, StageLayout
from mfsdp_cli.plan import Plan
from mfsdp_cli.planning.build import Decided, Limits, assembled, decide, finished, read_inputs
from mfsdp_cli.planning.request import PlanningFaults, PlanRequest
from mfsdp_cli.rules.judge import MICROBATCHES, RULES, judge
from mfsdp_cli.rules.table import Subject, Target
from mfsdp_cli.schedule.proof import FAIL, PASS, SKIP, Boundary, Check, prove

SCHEMA = "mfsdp.validate/1"
#: Values that are none of their choices: wrong usage, not a finding about a configuration.
_USAGE = frozenset({"MF201", "MF205", "MF302"})


@dataclass
class Report:
    """What validation found.

    Args:
        plan: the plan that was judged; None where it is impossible.
        findings: all of them, in the order they were found.
        checks: what was judged, passed or not.
        numeric: the contract's object of numeric validation; None where it was not asked for.
    """

    plan: Plan | None = None
    findings: list[Finding] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    numeric: dict[str, Any] | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing of severity error was found."""
        return all(finding.severity is not Severity.ERROR for finding in self.findings)

    def add_checks(self, checks: Sequence[Check]) -> None:
        """Take over checks and their counterexamples."""
        self.checks += checks
        self.findings += [finding for check in checks for finding in check.findings]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "ok": self.ok,
            "findings": [finding.to_json() for finding in self.findings],
            "checks": [check.to_json() for check in self.checks],
            "numeric": self.numeric,
        }


def validate_request(
    request: PlanRequest, *, target: Target = Target.MFSDP, limits: Limits | None = None
) -> Report:
    """Judge a configuration that is given as a model and flags.

    Raises:
        MfsdpError: a model that cannot be read, a value that is none of its choices.
    """
    try:
        decided = decide(read_inputs(request))
    except PlanningFaults as faults:
        return _impossible(faults.findings)
    if decided.faults:
        return _impossible(decided.faults, _rules_without_layout(decided, target), target)
    try:
        plan = finished(decided, assembled(decided, target), limits)
    except PlanningFaults as faults:
        return _impossible(faults.findings, _rules_without_layout(decided, target), target)
    return validate_plan(plan, target=target)


def validate_plan(
    plan: Plan, contradictions: Sequence[Finding] = (), *, target: Target = Target.MFSDP
) -> Report:
    """Judge a plan: its rules, its own contradictions, the invariants of its schedule."""
    report = Report(plan, [*contradictions, *plan.findings])
    report.checks = rule_checks(report.findings, target)
    report.checks.append(_consistency(contradictions))
    if plan.built is not None:
        report.add_checks(
            prove(
                plan.built,
                layout=plan.layout,
                num_layers=plan.model.num_layers,
                mtp_num_layers=plan.model.mtp_num_layers,
                shared_groups=plan.shared_groups,
                tied=not plan.model.untie_embeddings_and_output_weights,
                boundaries=boundaries(plan),
            )
        )
    return report


def rule_checks(findings: Sequence[Finding], target: Target) -> list[Check]:
    """A check for each rule of the table: failed where it found an error, skipped where it does
    not bind the target.
    """
    first: dict[str, Finding] = {}
    for finding in findings:
        if finding.severity is Severity.ERROR:
            first.setdefault(finding.code, finding)
    checks = []
    for rule in RULES:
        if not rule.binds.binds(target):
            reason = f"binds {rule.binds} alone"
            checks.append(Check(rule.code, rule.name, SKIP, reason=reason))
        else:
            status = FAIL if rule.code in first else PASS
            checks.append(Check(rule.code, rule.name, status, first.get(rule.code)))
    code, name = MICROBATCHES
    checks.append(Check(code, name, FAIL if code in first else PASS, first.get(code)))
    return checks


def boundaries(plan: Plan) -> dict[int, Boundary]:
    """The tensor from each stage to the next, as its sender and its receiver shape it.

    Behind MTP layers the hidden states of every depth travel together: (1 + k) sequences long.
    """
    sizes, width = plan.parallel, plan.model.hidden_size
    precision = plan.settings.precision
    length = sizes.seq_length // sizes.context_parallel_size

    def shape(sequences: int) -> tuple[tuple[int, ...], str]:
        return (length * sequences, sizes.micro_batch_size, width), precision

    sent = sequences_after(plan.layout)
    return {
        stage.stage - 1: Boundary(
            sent=shape(sent[stage.stage - 1]), received=shape(_sequences_before(plan.layout, stage))
        )
        for stage in plan.layout.stages[1:]
    }


def _sequences_before(layout: Layout, stage: StageLayout) -> int:
    """What a stage expects: the hidden states of the decoder and of every MTP layer before it."""
    return 1 + sum(len(earlier.mtp) for earlier in layout.stages if earlier.stage < stage.stage)


def _consistency(contradictions: Sequence[Finding]) -> Check:
    name = "the plan file agrees with itself"
    if not contradictions:
        return Check("MF209", name, PASS)
    return Check("MF209", name, FAIL, contradictions[0], tuple(contradictions[1:]))


def _rules_without_layout(decided: Decided, target: Target) -> list[Finding] | None:
    """What the rules say although the plan is impossible; None without sizes to judge."""
    if decided.parallel is None:
        return None
    spec = decided.inputs.spec
    subject = Subject(spec, decided.parallel, decided.settings, decided.layout)
    return [*decided.inputs.loaded.findings, *judge(subject, target)]


def _impossible(
    faults: Sequence[Finding],
    judged: Sequence[Finding] | None = None,
    target: Target = Target.MFSDP,
) -> Report:
    """A report on faults that leave no plan; wrong usage is raised instead.

    Args:
        judged: what the rules found beside them; None where they could not be judged.
    """
    for fault in faults:
        if fault.code in _USAGE:
            raise PlanningFaults([fault, *(other for other in faults if other is not fault)])
    report = Report(None, [*faults, *(judged or ())])
    named = {fault.code: fault for fault in reversed(faults)}
    report.checks = [Check(code, "layout and sizes", FAIL, named[code]) for code in sorted(named)]
    if judged is not None:
        report.checks += rule_checks(judged, target)
    return report
