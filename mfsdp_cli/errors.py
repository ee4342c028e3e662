"""The one error type of the package and the finding it carries.

Codes are grouped by what they speak of:

====== =====================================================
MF1xx  layouts, splits and layout strings
MF2xx  sizes and training settings (the rules table)
MF3xx  schedules and the schedule graph
MF4xx  model inputs: presets, config.json, Megatron arguments
MF5xx  training runs
MF6xx  comparisons
MF9xx  usage of the command line, and internal faults
====== =====================================================
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Severity(StrEnum):
    """How bad a finding is. An error makes a command end with exit code 1 or 2."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class ExitCode:
    """Exit codes of every command (part of the contract)."""

    OK = 0
    PROBLEM = 1
    USAGE = 2
    INTERNAL = 3
    INTERRUPTED = 130


@dataclass(frozen=True)
class Finding:
    """One thing a check found.

    Args:
        code: rule code such as ``MF104``.
        severity: how bad it is.
        message: the rule and the numbers in conflict, one sentence, no trailing period.
        hint: what mends it; empty if nothing can be said.
        where: the place (a flag, a file and line, a stage); empty if there is none.
    """

    code: str
    severity: Severity
    message: str
    hint: str = ""
    where: str = ""

    def to_json(self) -> dict[str, Any]:
        """The finding as the contract's JSON object."""
        return {key: str(value) for key, value in asdict(self).items()}


class MfsdpError(Exception):
    """A user's mistake or a limitation, as a finding of severity error.

    Raised where work cannot go on; what can go on collects :class:`Finding` instead.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        hint: str = "",
        where: str = "",
        exit_code: int = ExitCode.USAGE,
    ) -> None:
        super().__init__(f"[{code}] {message}")
        self.finding = Finding(code, Severity.ERROR, message, hint, where)
        self.exit_code = exit_code

    @classmethod
    def of(cls, finding: Finding) -> MfsdpError:
        """The error that a collected finding becomes where work cannot go on."""
        return cls(finding.code, finding.message, hint=finding.hint, where=finding.where)
