"""How a worker that fails tells the launcher, and which of several failures came first.

When one rank fails the others lose their connections and fail too, often before anybody looks.
The launcher shows the error that is not about a connection; of those, the earliest. Knows no
torch.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mfsdp_cli.errors import ExitCode, Finding, MfsdpError, Severity
from mfsdp_cli.runtime.job import REPORTS

_TAIL = 30
_CONNECTION = (
    "connection closed by peer",
    "connection reset",
    "connection refused",
    "broken pipe",
    "timed out waiting",
    "socket closed",
    "failed to recv",
    "failed to send",
    "remote process exited",
    "application timeout caused pair closure",
    "store->get",
    "nccl communicator was aborted",
)


@dataclass(frozen=True)
class Report:
    """One rank's failure.

    Args:
        code, message, hint, where: the finding, where the error was one of ours; else code is "".
        consequence: whether the error is about a peer that is gone, so not the first cause.
    """

    rank: int
    kind: str
    message: str
    traceback: str
    time_ns: int
    code: str = ""
    exit_code: int = ExitCode.PROBLEM
    hint: str = ""
    where: str = ""
    consequence: bool = False


def write_report(rank: int, error: BaseException) -> None:
    """Leave a report for the launcher; without one, print nothing either."""
    folder = os.environ.get(REPORTS)
    if folder is None:
        return
    report = report_of(rank, error)
    new = Path(folder, f".rank-{rank}")
    new.write_text(json.dumps(asdict(report)))
    os.replace(new, Path(folder, f"rank-{rank}.json"))


def report_of(rank: int, error: BaseException) -> Report:
    """The report of an error that a rank met."""
    lines = traceback.format_exception(error)
    text = str(error).strip() or type(error).__name__
    values: dict[str, Any] = {}
    if isinstance(error, MfsdpError):
        finding = error.finding
        text = finding.message
        values = {"code": finding.code, "hint": finding.hint, "where": finding.where}
        values["exit_code"] = error.exit_code
    return Report(
        rank=rank,
        kind=type(error).__name__,
        message=text,
        traceback="\n".join("".join(lines).splitlines()[-_TAIL:]),
        time_ns=time.time_ns(),
        consequence=_is_about_a_peer(error),
        **values,
    )


def read_reports(folder: Path) -> list[Report]:
    """All reports in a folder, first causes before consequences, each in order of time."""
    reports = [Report(**json.loads(path.read_text())) for path in folder.glob("rank-*.json")]
    return sorted(reports, key=lambda report: (report.consequence, report.time_ns))


def _is_about_a_peer(error: BaseException) -> bool:
    if type(error).__name__ in {"DistNetworkError", "DistStoreError"}:
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _CONNECTION)


def finding_of(report: Report, others: int) -> Finding:
    """The failure of a rank as a finding: its own error first."""
    if report.code:
        where = ", ".join(part for part in (f"rank {report.rank}", report.where) if part)
        return Finding(report.code, Severity.ERROR, report.message, report.hint, where)
    what = f"{report.kind}: {report.message}" if report.kind else report.message
    more = f" ({others} other rank(s) ended with it)" if others else ""
    hint = "" if not report.traceback else "run with MFSDP_DEBUG=1 to see where it happened"
    return Finding("MF512", Severity.ERROR, f"rank {report.rank}: {what}{more}", hint)
