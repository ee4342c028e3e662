"""Numbers and steps as loggers write them. Pure functions; nothing here raises."""

from __future__ import annotations

import math
import re

#: Larger steps are not steps: every integer up to here is exact as a float, too.
MAX_STEP = 2**53

_NONFINITE = re.compile(r"([+-]?)(nan|inf|infinity)(?:\.0*)?", re.IGNORECASE)
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_STEP = re.compile(r"\s*(\d+)(?:\.0*)?\s*(?:/\s*\d+\s*)?")


def number(value: object) -> float | None:
    """``value`` as a float, NaN and infinities included; None where it is no number.

    Takes JSON numbers and text: ``"2.5"``, ``"NaN"``, ``"-Infinity"``, ``"nan.0"`` (tqdm's).
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return _to_float(value)
    return _number_in_text(value.strip()) if isinstance(value, str) else None


def _to_float(value: float) -> float | None:
    try:
        return float(value)
    except OverflowError:  # an integer beyond the range of floats
        return None


def _number_in_text(text: str) -> float | None:
    if match := _NONFINITE.fullmatch(text):
        return float(match[1] + match[2])
    return float(text) if _NUMBER.fullmatch(text) else None


def step_number(value: object) -> int | None:
    """``value`` as a step: 601 for ``601``, ``601.0``, ``"601"`` and ``"601/2161"``; else None."""
    if isinstance(value, str):
        match = _STEP.fullmatch(value)
        return _in_range(int(match[1])) if match and len(match[1]) <= 16 else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, float) and not (math.isfinite(value) and value.is_integer()):
        return None
    return _in_range(int(value))


def _in_range(step: int) -> int | None:
    return step if 0 <= step <= MAX_STEP else None


def ranges(steps: list[int], limit: int = 4) -> str:
    """Steps in words: ``4-6, 9``; at most ``limit`` pieces, then how many steps are left out.

    Only a run of consecutive steps is drawn together.
    """
    pieces: list[tuple[int, int]] = []
    for step in steps:
        if pieces and step == pieces[-1][1] + 1:
            pieces[-1] = (pieces[-1][0], step)
        else:
            pieces.append((step, step))
    shown = [f"{low}" if low == high else f"{low}-{high}" for low, high in pieces[:limit]]
    left = sum(high - low + 1 for low, high in pieces[limit:])
    return ", ".join(shown) + (f" and {left} more" if left else "")


def short(value: float) -> str:
    """A number for people: at most four significant digits, no trailing zeros."""
    return f"{value:.4g}"
