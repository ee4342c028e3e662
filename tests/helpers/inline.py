"""Run the command line inside the test process: quick, and everything it says is kept."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from mfsdp_cli.cli import main


@dataclass(frozen=True)
class Said:
    """What a command said, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON document on stdout, read strictly."""
        found: dict[str, Any] = json.loads(self.out, parse_constant=_refuse)
        return found

    def codes(self, severity: str | None = None) -> list[str]:
        """Codes of the document's findings, of one severity or all."""
        return [
            finding["code"]
            for finding in self.document["findings"]
            if severity in (None, finding["severity"])
        ]


def inline(*arguments: str | Path) -> Said:
    """``mfsdp ARGUMENTS`` as one call."""
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    with (
        mock.patch.object(sys, "argv", ["mfsdp", *map(str, arguments)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as leave:
            code = leave.code
    return Said(int(code or 0), out.getvalue(), err.getvalue())  # type: ignore[call-overload]


def _refuse(name: str) -> float:
    raise AssertionError(f"{name} is not strict JSON")
