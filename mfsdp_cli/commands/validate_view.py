"""What ``mfsdp validate`` shows a person."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from mfsdp_cli.errors import Severity
from mfsdp_cli.planning.validation import Report
from mfsdp_cli.schedule.proof import FAIL, PASS, SKIP

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
    table.add_column("what holds", overflow="fold")
    for check in report.checks:
        text = f"{check.name} ({check.reason})" if check.reason else check.name
        table.add_row(check.code, Text(check.status, style=_STYLE[check.status]), text)
    views: list[RenderableType] = [table]
    if report.numeric is not None:
        views.append(_numeric(report.numeric))
    return [*views, Text(""), Text(_verdict(report))]


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
