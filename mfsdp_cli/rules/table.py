"""What a rule is, and how a list of rules is applied to a run.

A rule says which implementation it binds. M-FSDP v2 inside Megatron refuses settings that the
engine here never looks at, and the other way round, so the same violation weighs differently by
who is to run the plan:

=============== ======================= =========================================
rule binds      target is bound         target is not bound
=============== ======================= =========================================
both            ``severity``            (there is no such target)
one of the two  ``severity``            ``elsewhere``: a warning, a note, silence
=============== ======================= =========================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from mfsdp_cli.errors import Finding, Severity
from mfsdp_cli.layout.layout import Layout
from mfsdp_cli.model.spec import ModelSpec
from mfsdp_cli.parallel import Parallel, Settings


class Target(StrEnum):
    """Who is to run the plan."""

    MFSDP = "mfsdp"
    MEGATRON = "megatron"


class Binds(StrEnum):
    """Whose rule it is: Megatron's own M-FSDP v2, the engine here, or both."""

    MEGATRON = "megatron"
    MFSDP = "mfsdp"
    BOTH = "both"

    def binds(self, target: Target) -> bool:
        """Whether the rule holds for a target."""
        return self is Binds.BOTH or str(self) == str(target)


@dataclass(frozen=True)
class Subject:
    """What is judged. ``layout`` is None where the sizes gave none."""

    model: ModelSpec
    parallel: Parallel
    settings: Settings
    layout: Layout | None = None


@dataclass(frozen=True)
class Rule:
    """One rule of the table.

    Args:
        code: ``MF2xx``.
        name: what the rule is about, in a few words.
        binds: whose rule it is.
        violated: the rule and the numbers in conflict, in words, or None where it holds.
        where: the flag that broke it.
        hint: what mends it.
        severity: for a target that the rule binds.
        elsewhere: for a target that it does not bind; None: nothing is said.
        source: where the fact comes from.
    """

    code: str
    name: str
    binds: Binds
    violated: Callable[[Subject], str | None]
    where: str
    hint: str
    source: str
    severity: Severity = Severity.ERROR
    elsewhere: Severity | None = Severity.WARNING

    def judge(self, subject: Subject, target: Target) -> Finding | None:
        """The finding for a target, or None where the rule holds or is not the target's."""
        message = self.violated(subject)
        severity = self.severity if self.binds.binds(target) else self.elsewhere
        if message is None or severity is None:
            return None
        return Finding(self.code, severity, message, self.hint, self.where)


def apply_rules(rules: Iterable[Rule], subject: Subject, target: Target) -> list[Finding]:
    """The findings of all rules that do not hold, in the order of the table."""
    found = (rule.judge(subject, target) for rule in rules)
    return [finding for finding in found if finding is not None]
