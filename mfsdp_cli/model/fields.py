"""Typed reading of a configuration's keys, with errors that name key, value and file."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.model.validity import MAX_SIZE

MISSING: Any = object()


class Fields:
    """The keys of one configuration object.

    Args:
        values: the object.
        where: the file, for messages.
        fallback: consulted where a key is absent (the object around a nested one).
    """

    def __init__(
        self, values: Mapping[str, Any], where: str, fallback: Mapping[str, Any] | None = None
    ) -> None:
        self.values = values
        self.where = where
        self.fallback = fallback or {}
        self.assumptions: list[str] = []

    def has(self, name: str) -> bool:
        """Whether a key is there with something in it (null is nothing)."""
        return self.raw(name) is not None

    def absent(self, name: str) -> bool:
        """Whether a key is not there at all (null is there)."""
        return name not in self.values and name not in self.fallback

    def raw(self, name: str) -> Any:
        """The value as it stands, None where absent."""
        return self.values.get(name, self.fallback.get(name))

    def assume(self, text: str) -> None:
        """Remember something that the file does not say."""
        self.assumptions.append(text)

    def integer(self, *names: str, default: Any = MISSING, minimum: int = 1) -> int:
        """A whole number under the first of ``names`` that is there.

        With a default an absent key is noted as assumed. Raises MF404 where it is missing, MF405
        where it is no whole number of at least ``minimum``.
        """
        name = self._present(names, default)
        return int(default) if name is None else self._integer(name, minimum)

    def number(self, *names: str, default: Any = MISSING) -> float:
        """A finite number; like :meth:`integer` otherwise."""
        name = self._present(names, default)
        if name is None:
            return float(default)
        value = self.raw(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(name, "a number")
        if not abs(value) <= sys.float_info.max:
            raise self.wrong(name, "a finite number")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """True or false; an absent key or null is the default, not noted."""
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def text(self, *names: str, default: str) -> str:
        """A text; an absent key or null is the default, not noted."""
        for name in names:
            value = self.raw(name)
            if value is None:
                continue
            if not isinstance(value, str):
                raise self.wrong(name, "a text")
            return value
        return default

    def integers(self, name: str) -> list[int]:
        """A list of whole numbers from 0 on; an absent key or null is the empty list."""
        values = self.raw(name)
        if values is None:
            return []
        if not isinstance(values, list):
            raise self.wrong(name, "a list of whole numbers")
        for value in values:
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise self.wrong(name, "a list of whole numbers")
        return list(values)

    def wrong(self, name: str, expected: str) -> MfsdpError:
        """The error for a value of the wrong kind."""
        shown = repr(self.raw(name))
        return MfsdpError(
            "MF405",
            f"{name} must be {expected}, got {shown if len(shown) < 80 else shown[:80] + '...'}",
            where=f"{self.where}, key {name}",
        )

    def _present(self, names: tuple[str, ...], default: Any) -> str | None:
        for name in names:
            if self.has(name):
                return name
        if default is MISSING:
            raise MfsdpError(
                "MF404",
                f"the configuration has no {' or '.join(names)}",
                where=self.where,
            )
        self.assume(f"{names[0]} is absent: {default} assumed")
        return None

    def _integer(self, name: str, minimum: int) -> int:
        value = self.raw(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.wrong(name, "a whole number")
        if not minimum <= value <= MAX_SIZE:
            raise self.wrong(name, f"a whole number between {minimum} and {MAX_SIZE}")
        return value
