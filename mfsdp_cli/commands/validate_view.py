"""What ``mfsdp validate`` shows a person."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mfsdp_cli.errors import Severity
from mfsdp_cli.planning.validation import Report
from mfsdp_cli.rules.judge import RULES
from mfsdp_cli.schedule.proof import FAIL, PASS, SKIP, Check

if TYPE_CHECKING:
    from rich.console import RenderableType

_STYLE = {PASS: "green", FAIL: "bold red", SKIP: "dim"}


def validate_view(report: Report) -> list[RenderableType]:
    """A table of checks, the numeric comparison, and the verdict in one line."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("check", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("what is checked", overflow="fold")
    for code, status, text in _rows(report.checks):
        table.add_row(code, Text(status, style=_STYLE[status]), text)
    views: list[RenderableType] = [table]
    if report.numeric is not None:
        views += [Text(""), _numeric(report.numeric)]
    return [*views, Text(""), Text(_verdict(report))]


def _rows(checks: Sequence[Check]) -> list[tuple[str, str, str]]:
    """A row a check; the rules that hold, and those that bind somebody else, share a row each."""
    rules = {rule.code for rule in RULES}
    rows = []
    for status, text in ((PASS, "rules hold"), (SKIP, "rules bind another target")):
        shared = [check for check in checks if check.code in rules and check.status == status]
        if shared:
            rows.append(("MF2xx", status, f"{len(shared)} {text}"))
    for check in checks:
        if check.code not in rules or check.status == FAIL:
            text = f"{check.name} ({check.reason})" if check.reason else check.name
            rows.append((check.code, check.status, text))
    return rows


def _numeric(document: dict[str, object]) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("against one rank", no_wrap=True)
    table.add_column("", overflow="fold")
    for name, value in document.items():
        shown = f"{value:.3e}" if isinstance(value, float) else str(value)
        table.add_row(name.replace("_", " "), shown)
    return table


def _verdict(report: Report) -> str:
    statuses = Counter(check.status for check in report.checks)
    severities = Counter(finding.severity for finding in report.findings)
    counted = ", ".join(
        f"{severities[severity]} {severity}{'s' * (severities[severity] != 1)}"
        for severity in Severity
        if severities[severity]
    )
    verdict = "valid" if report.ok else "not valid"
    checks = f"{statuses[PASS]} checks passed, {statuses[FAIL]} failed, {statuses[SKIP]} skipped"
    return f"{verdict}: {checks}" + (f"; {counted}" if counted else "")
