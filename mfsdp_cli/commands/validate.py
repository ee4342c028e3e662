"""``mfsdp validate``."""

from __future__ import annotations


def validate() -> None:
    """Not built yet."""
    raise NotImplementedError
