"""torchtitan's stdout log, color codes included: ``step:  1  loss:  8.0401  grad_norm: ...``."""

from __future__ import annotations

import re
from typing import ClassVar

from mfsdp_cli.compare.collector import Collector
from mfsdp_cli.compare.lines import MAX_RECORD, Line
from mfsdp_cli.compare.series import GAP
from mfsdp_cli.compare.values import number

_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_RECORD = re.compile(r"\b(validate )?step:\s*(\d{1,15})\b(.*)")
_VALUE = re.compile(r"\b(loss|grad_norm):\s*(\S+)")


class TorchtitanLog:
    """Reads torchtitan's log."""

    name: ClassVar[str] = "torchtitan-log"
    looked_for: ClassVar[str] = "a torchtitan log (step: 1  loss: 8.04  ...)"

    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    @property
    def format(self) -> str:
        return self.name

    @property
    def may_be_empty(self) -> bool:
        return False

    @staticmethod
    def claims(text: str) -> bool:
        return _record(text) is not None

    def read(self, line: Line) -> None:
        if not (match := _record(line.text)):
            return
        fields = match[3] if line.ended else match[3].rpartition(" ")[0]
        values = {name: number(text) for name, text in _VALUE.findall(fields)}
        if not line.ended and "loss" not in values:
            self._collector.run.notes.append("the last line is cut off and was left out")
        elif match[1]:
            self._collector.row(int(match[2]), {f"validation {n}": v for n, v in values.items()})
        else:
            self._collector.row(int(match[2]), values, gap=GAP)

    def end(self) -> None:
        """Nothing is left over."""


def _record(text: str) -> re.Match[str] | None:
    """Validation or training flag, step and fields, if the line is a record."""
    if "step:" not in text or len(text) > MAX_RECORD:
        return None
    plain = _COLOR.sub("", text)
    if "loss:" not in plain and "grad_norm:" not in plain:
        return None
    return _RECORD.search(plain)
