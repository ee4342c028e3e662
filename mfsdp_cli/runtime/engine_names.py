"""The engines' names. Knows no torch."""

from __future__ import annotations

ENGINES = ("mfsdp", "distopt", "single")
