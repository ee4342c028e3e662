"""``mfsdp compare-runs``."""

from __future__ import annotations


def compare_runs() -> None:
    """Not built yet."""
    raise NotImplementedError
