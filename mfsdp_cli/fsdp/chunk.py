"""One chunk: its units as a tree, and the orders in which they are used and reduced.

A chunk's root holds everything else; a layer may hold a unit of its own, its experts. With two
layers of which the second is a mixture of experts::

    root
    ├── layer 0               forward      root, 0, 1, experts
    └── layer 1               backward     root, 1, experts, 0
        └── experts           reduction    experts, 1, 0, root

A module's hook opens it before what it contains, in both directions. What it contains has its
gradients first. The root is reduced last: a shared weight in it is used to the end.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from mfsdp_cli.fsdp.unit import Unit


class Chunk:
    """The units of one chunk, known by weak references: their modules own them.

    Args:
        root: the unit that contains all others.
        inside: units directly inside a unit, by its index, as they were wrapped.
    """

    def __init__(self, root: Unit, inside: Mapping[int, Sequence[Unit]]) -> None:
        self._forward = _weak(_outer_first(root, inside, reverse=False))
        self._backward = _weak(_outer_first(root, inside, reverse=True))
        self._reduction = _weak(_inner_first(root, inside))
        self._waiting: deque[Unit] = deque()
        self._ready: set[int] = set()

    @property
    def units(self) -> list[Unit]:
        """In order of use in a forward pass: a module before what it contains."""
        return _alive(self._forward)

    @property
    def backward_order(self) -> list[Unit]:
        """In order of use in a backward pass."""
        return _alive(self._backward)

    @property
    def reduction_order(self) -> list[Unit]:
        """The same on every rank, whatever order gradients come in."""
        return _alive(self._reduction)

    def begin_backward(self) -> None:
        """Expect the gradients of one microbatch."""
        self._waiting = deque(unit for unit in self.reduction_order if unit.trained_parameters)
        self._ready.clear()

    def mark_ready(self, unit: Unit) -> None:
        """Note that a unit's gradients are complete."""
        self._ready.add(unit.index)

    def take_ready(self) -> Iterator[Unit]:
        """Units whose gradients are complete and whose predecessors have been taken."""
        while self._waiting and self._waiting[0].index in self._ready:
            yield self._waiting.popleft()

    def unfinished(self) -> list[Unit]:
        """Units that still miss gradients."""
        return [unit for unit in self._waiting if unit.index not in self._ready]


def find_chunks(units: Sequence[Unit]) -> list[Chunk]:
    """One chunk for each wrapped module that no other wrapped module contains."""
    inside: dict[int, list[Unit]] = {}
    roots = []
    for position, unit in enumerate(units):
        # Wrapped from the inside out: the first later one that contains it is the nearest.
        parents = [
            other for other in units[position + 1 :] if _contains(_module(other), _module(unit))
        ]
        if parents:
            inside.setdefault(parents[0].index, []).append(unit)
        else:
            roots.append(unit)
    return [Chunk(root, inside) for root in roots]


def _module(unit: Unit) -> nn.Module:
    module = unit.module()
    assert module is not None
    return module


def _contains(module: nn.Module, other: nn.Module) -> bool:
    return any(part is other for part in module.modules())


def _outer_first(
    unit: Unit, inside: Mapping[int, Sequence[Unit]], *, reverse: bool
) -> Iterator[Unit]:
    yield unit
    below = inside.get(unit.index, ())
    for child in reversed(below) if reverse else below:
        yield from _outer_first(child, inside, reverse=reverse)


def _inner_first(unit: Unit, inside: Mapping[int, Sequence[Unit]]) -> Iterator[Unit]:
    for child in reversed(inside.get(unit.index, ())):
        yield from _inner_first(child, inside)
    yield unit


def _weak(units: Iterator[Unit]) -> tuple[weakref.ref[Unit], ...]:
    return tuple(weakref.ref(unit) for unit in units)


def _alive(references: Sequence[weakref.ref[Unit]]) -> list[Unit]:
    return [unit for reference in references if (unit := reference()) is not None]
