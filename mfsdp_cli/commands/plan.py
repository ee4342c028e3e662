"""``mfsdp plan``."""

from __future__ import annotations


def plan() -> None:
    """Not built yet."""
    raise NotImplementedError
