"""``mfsdp train``."""

from __future__ import annotations


def train() -> None:
    """Not built yet."""
    raise NotImplementedError
