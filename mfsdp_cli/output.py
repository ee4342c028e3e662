"""The only module that prints.

Data goes to stdout; progress, logs, warnings, errors and hints go to stderr. Color is
decoration: the text says everything without it, and ``NO_COLOR`` is respected (by rich).
rich is imported when a table is first drawn, so that ``--json`` and ``--help`` stay fast.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any

from mfsdp_cli.errors import Finding

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


class Output:
    """Everything a command says, on the right stream."""

    def __init__(self, *, stdout: IO[str] | None = None, stderr: IO[str] | None = None) -> None:
        self._stdout = stdout
        self._stderr = stderr
        self.progress_allowed = True

    @property
    def stdout(self) -> IO[str]:
        return self._stdout or sys.stdout

    @property
    def stderr(self) -> IO[str]:
        return self._stderr or sys.stderr

    def console(self, *, err: bool = False) -> Console:
        """A rich console on stdout, or on stderr with ``err``."""
        from rich.console import Console

        return Console(file=self.stderr if err else self.stdout, highlight=False, soft_wrap=False)

    def json(self, document: Any) -> None:
        """Print exactly one strict JSON document (NaN and Infinity raise ``ValueError``)."""
        self.stdout.write(json.dumps(document, allow_nan=False, indent=1) + "\n")

    def data(self, text: str) -> None:
        """Print a line of data on stdout."""
        self.stdout.write(text + "\n")

    def draw(self, *renderables: RenderableType, err: bool = False) -> None:
        """Draw tables, bars and the like with rich."""
        console = self.console(err=err)
        for renderable in renderables:
            console.print(renderable)

    def log(self, text: str) -> None:
        """A line for the person watching, on stderr; if nobody can, work goes on without."""
        with suppress(OSError):
            self.stderr.write(text + "\n")
            self.stderr.flush()

    def finding(self, finding: Finding) -> None:
        """One finding in the house form: ``severity[CODE]: message``, place, then hint."""
        lines = [f"{finding.severity}[{finding.code}]: {finding.message}"]
        if finding.where:
            lines.append(f"  where: {finding.where}")
        if finding.hint:
            lines += ["", f"hint: {finding.hint}"]
        self.log("\n".join(lines))

    def findings(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            self.finding(finding)

    def interactive(self) -> bool:
        """Whether progress bars may be drawn: a terminal on stderr and no ``--no-progress``."""
        return self.progress_allowed and self.stderr.isatty()


output = Output()
