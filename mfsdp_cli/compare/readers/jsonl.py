"""JSON lines: our own ``metrics.jsonl``, other trainers', and exported W&B histories.

A row is an object with a step under one of many names and numbers under others. Our rows say
with ``kind`` whether they are training, evaluation or the end; others say it with ``split``,
``phase`` and the like, or in the names of the values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from mfsdp_cli.compare.collector import Collector
from mfsdp_cli.compare.lines import Line
from mfsdp_cli.compare.names import (
    EVAL_WORDS,
    GRAD_NORMS,
    STEPS,
    TEST_WORDS,
    TRAIN_WORDS,
    Role,
    normal,
    role,
)
from mfsdp_cli.compare.series import GAP, UNSURE_GAP
from mfsdp_cli.compare.values import number, step_number

_SPLIT_KEYS = ("kind", "split", "phase", "mode", "type")
#: Deeper objects are configuration, not values.
_MAX_DEPTH = 3


class Jsonl:
    """Reads JSON lines."""

    name: ClassVar[str] = "jsonl"
    looked_for: ClassVar[str] = 'JSON lines with a step and a loss ({"step": 1, "loss": 5.5})'

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._wandb = False
        self._own = False
        self._step_names: dict[str, str] = {}  # per value: the step key its rows go by
        self._without_step = 0
        self._broken = 0

    @property
    def format(self) -> str:
        return "wandb-history" if self._wandb else self.name

    @property
    def may_be_empty(self) -> bool:
        """Our own rows make a run even before the first loss."""
        return self._own

    @staticmethod
    def claims(text: str) -> bool:
        row = _parse(text)
        if row is None:
            return False
        values = dict(_flat(row))
        if row.get("kind") == "end" and isinstance(row.get("status"), str):
            return True
        return _step_key(values) is not None and any(map(_is_metric, values))

    def read(self, line: Line) -> None:
        text = line.text.strip()
        if not text.startswith("{"):
            return  # a stray message of the program that wrote the rows
        row = None if line.too_long else _parse(text)
        if row is None:
            self._note_broken(line)
        elif "train_runtime" not in row:  # a summary of the whole run is no point of it
            self._row(row)

    def _note_broken(self, line: Line) -> None:
        if line.ended:
            self._broken += 1
        else:
            self._collector.run.notes.append("the last line is cut off and was left out")

    def _row(self, row: dict[str, Any]) -> None:
        split = _split(row)
        if row.get("kind") == "end":
            self._own = True
            self._collector.run.status = str(row.get("status"))
            return
        if split == "test":
            return
        self._wandb |= "_step" in row
        self._own |= "kind" in row and split is not None
        values = dict(_flat(row))
        if split is None:
            values = _without_empty(values, table="_step" in row)
        step_key = self._step_key(values)
        step = None if step_key is None else step_number(values[step_key])
        if step is None:
            self._without_step += any(map(_is_metric, values))
            return
        if split == "train":
            self._collector.run.status = None  # a run that was resumed after its end line
        numbers = self._numbers(step, values, split, row.get("nonfinite"))
        self._collector.row(step, numbers, gap=self._gap(row, numbers, split))

    def _step_key(self, values: Mapping[str, Any]) -> str | None:
        """The key that holds the step: for each loss, the one its first row went by.

        A row that suddenly lacks that key must not be put at another counter's step.
        """
        key = _step_key(values)
        for name in values:
            if role(name) is not Role.OTHER and key is not None:
                locked = self._step_names.setdefault(name, key)
                return locked if locked in values else None
        return key

    def _numbers(
        self, step: int, values: Mapping[str, Any], split: str | None, nonfinite: object
    ) -> dict[str, float | None]:
        prefix = "validation " if split == "eval" else ""
        numbers: dict[str, float | None] = {}
        for name, value in values.items():
            if normal(name) in STEPS or self._collector.place(step, name, value):
                continue
            if value is None and name == "loss":
                value = nonfinite  # our rows: "loss": null, "nonfinite": "nan"
            found = number(value)
            if found is not None or role(name) is not Role.OTHER:
                numbers[prefix + name] = found
        return numbers

    def _gap(
        self, row: Mapping[str, Any], numbers: Mapping[str, float | None], split: str | None
    ) -> int | None:
        """Whether a row without a training loss lacks one: see ``Collector.row``.

        A W&B history has rows for any subset of its values, so nothing lacks there; but a null in
        a row that has the gradient norm does.
        """
        if split == "train":
            return GAP
        norms = [value for name, value in numbers.items() if normal(name) in GRAD_NORMS]
        empty = any(value is None and role(name) is Role.TRAIN for name, value in _flat(row))
        if split == "eval" or not norms or ("_step" in row and not empty):
            return None
        return UNSURE_GAP if norms[0] is not None and math.isfinite(norms[0]) else GAP

    def end(self) -> None:
        run = self._collector.run
        run.damaged += self._broken
        if self._broken:
            run.notes.append(f"{self._broken} rows are broken JSON and count as missing")
        if self._without_step:
            run.notes.append(f"{self._without_step} rows have a loss but no step: left out")
        if self._own and run.status is None:
            run.status = "running"


def _parse(text: str) -> dict[str, Any] | None:
    """The object of a line, NaN and Infinity literals included; None if it is none."""
    text = text.strip()
    if not text.startswith("{"):
        return None
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _flat(row: Mapping[str, Any], prefix: str = "", depth: int = 1) -> Iterator[tuple[str, Any]]:
    """Values by name; nested objects are joined with a slash: ``{"train": {"loss": 1}}``."""
    for key, value in row.items():
        if not isinstance(value, dict):
            yield prefix + key, value
        elif depth < _MAX_DEPTH:
            yield from _flat(value, f"{prefix}{key}/", depth + 1)


def _step_key(values: Mapping[str, Any]) -> str | None:
    """The key that holds the step: the trainer's own counter before the logger's ``_step``."""
    found = {normal(name): name for name in values if name != "_step"}
    known = next((found[name] for name in STEPS if name in found), None)
    return known or ("_step" if "_step" in values else None)


def _without_empty(values: Mapping[str, Any], *, table: bool) -> dict[str, Any]:
    """Leave out losses that are null only because the row is about another value.

    Tables exported as rows (``table``) have every column in every row; many trainers write
    ``"val_loss": null`` where they did not evaluate. A null loss in a row without any other loss
    stays: it is missing.
    """
    losses = [name for name in values if role(name) is not Role.OTHER]
    other = any(values[name] is not None for name in losses)
    drop = {name for name in losses if values[name] is None and (other or table)}
    return {name: value for name, value in values.items() if name not in drop}


def _split(row: Mapping[str, Any]) -> str | None:
    """``train``, ``eval`` or ``test`` where the row says it."""
    for key in _SPLIT_KEYS:
        words = set(normal(str(row.get(key, ""))).split())
        for split, known in (("train", TRAIN_WORDS), ("eval", EVAL_WORDS), ("test", TEST_WORDS)):
            if words & known:
                return split
    return None


def _is_metric(name: str) -> bool:
    return role(name) is not Role.OTHER or normal(name) in GRAD_NORMS
