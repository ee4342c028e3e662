"""Megatron-LM's (and Megatron-Bridge's) stdout log.

A training line looks like::

     iteration 5/ 100 | consumed samples: 320 | ... | lm loss: 5.0E+00 | ... | grad norm: 1.0 |
     number of skipped iterations: 0 | number of nan iterations: 0 |

and an evaluation line like ``validation loss at iteration 5 on validation set | lm loss value:
...``; older versions leave out ``on validation set``. Time stamps and launchers' prefixes may
stand before either. A loss is a mean over the logging interval. Once it is NaN the training line
has no loss field at all.
"""

from __future__ import annotations

import math
import re
from typing import ClassVar

from mfsdp_cli.compare.collector import Collector
from mfsdp_cli.compare.lines import MAX_RECORD, Line
from mfsdp_cli.compare.series import GAP
from mfsdp_cli.compare.values import number, step_number

_TRAIN = re.compile(r"\biteration\s+(\d+)\s*/\s*\d+\s*\|(.*)")
_EVAL = re.compile(
    r"\bvalidation loss at (?:iteration\s+(\d+)|the end of training)\s*([^|]*)\|(.*)"
)
_ARGUMENT = re.compile(r"^(?:\[?[\w:.]+\]?:)?\s*([a-z]\w*) \.{2,} (\S.*)")

_LOSS = "lm loss"

#: Arguments of Megatron's dump that should agree between two runs.
_SETTINGS = frozenset(
    {"seed", "seq_length", "global_batch_size", "params_dtype", "num_layers", "hidden_size"}
    | {"lr", "min_lr", "weight_decay", "clip_grad", "padded_vocab_size"}
)


class MegatronLog:
    """Reads Megatron's log, old and new wording."""

    name: ClassVar[str] = "megatron-log"
    looked_for: ClassVar[str] = "a Megatron stdout log (iteration 1/ 100 | ... | lm loss: ... |)"

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._fields: tuple[str, ...] = ()
        self._last_step: int | None = None
        self._last_evaluation: int | None = None
        self._nan_norms = 0
        self._at_end: dict[str, float | None] = {}

    @property
    def format(self) -> str:
        return self.name

    @property
    def may_be_empty(self) -> bool:
        return False

    @staticmethod
    def claims(text: str) -> bool:
        return bool(_training_match(text) or _evaluation_match(text))

    def read(self, line: Line) -> None:
        text = line.text
        if match := _evaluation_match(text):
            self._evaluation(match, line)
        elif match := _training_match(text):
            self._training(match, line)
        elif " .." in text and len(text) < MAX_RECORD:
            self._argument(text)

    def _argument(self, text: str) -> None:
        """A line of the arguments that Megatron prints before it starts."""
        match = _ARGUMENT.match(text)
        if match and match[1] in _SETTINGS:
            self._collector.run.settings[match[1]] = match[2].strip()

    def _training(self, match: re.Match[str], line: Line) -> None:
        step, fields = step_number(match[1]), _fields(match[2])
        if step is None or self._is_cut(line, fields):
            self._note_cut()
            return
        self._fields, self._last_step = tuple(fields), step
        run = self._collector.run
        run.skipped += _count(fields.pop("number of skipped iterations", ""))
        run.nan_iterations += _count(fields.pop("number of nan iterations", ""))
        values = {
            name: number(text)
            for name, text in fields.items()
            if not self._collector.place(step, name, text)
        }
        norm = values.get("grad norm")
        self._nan_norms += norm is not None and math.isnan(norm) and _LOSS not in values
        self._collector.row(step, values, gap=GAP)

    def _is_cut(self, line: Line, fields: dict[str, str]) -> bool:
        """Whether a last line stops early: inside a field, or with fewer fields than before."""
        if line.ended:
            return False
        if not line.text.rstrip().endswith("|"):
            return True
        names = tuple(fields)
        return len(names) < len(self._fields) and self._fields[: len(names)] == names

    def _note_cut(self) -> None:
        self._collector.run.notes.append("the last line is cut off and was left out")

    def _evaluation(self, match: re.Match[str], line: Line) -> None:
        if not line.ended and not line.text.rstrip().endswith("|"):
            self._note_cut()
            return
        suffix = " test" if re.search(r"\btest\b", match[2]) else " validation"
        values = {
            _evaluation_name(name, suffix): number(text) for name, text in _fields(match[3]).items()
        }
        step = step_number(match[1])
        if match[1] is None:
            self._at_end |= values
        elif step is not None:
            self._last_evaluation = step
            self._collector.row(step, values)

    def end(self) -> None:
        """Place what was evaluated "at the end of training" at the last iteration seen."""
        if self._last_step is not None and self._last_step != self._last_evaluation:
            self._collector.row(self._last_step, self._at_end)
        if self._nan_norms:
            self._collector.run.notes.append(
                f"{self._nan_norms} lines without {_LOSS} have a NaN gradient norm: "
                "Megatron leaves the loss out once it is NaN"
            )
        self._collector.batch_size(self._collector.run.settings)


def _training_match(text: str) -> re.Match[str] | None:
    if "iteration" not in text or len(text) > MAX_RECORD:
        return None
    return _TRAIN.search(text)


def _evaluation_match(text: str) -> re.Match[str] | None:
    if "validation loss at" not in text or len(text) > MAX_RECORD:
        return None
    return _EVAL.search(text)


def _fields(text: str) -> dict[str, str]:
    """``name: value`` between bars; the value is what follows the last colon."""
    fields: dict[str, str] = {}
    for piece in text.split("|"):
        name, colon, value = piece.rpartition(":")
        if colon:
            fields[name.strip()] = value.strip()
    return fields


def _count(text: str) -> int:
    """A counter; 0 where there is none."""
    return step_number(text) or 0


def _evaluation_name(name: str, suffix: str) -> str:
    """The names that TensorBoard users of Megatron know: ``lm loss validation [ppl]``."""
    if name.endswith(" PPL"):
        return name.removesuffix(" PPL") + suffix + " ppl"
    return name.removesuffix(" value") + suffix
