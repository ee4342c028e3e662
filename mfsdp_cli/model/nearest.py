"""The nearest known words to a misspelt one."""

from __future__ import annotations

from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """``did you mean a, b?``, or an empty text where nothing is near."""
    from difflib import get_close_matches

    matches = get_close_matches(word, list(known), n=3, cutoff=cutoff)
    return f"did you mean {', '.join(matches)}?" if matches else ""
