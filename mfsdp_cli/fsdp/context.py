"""One context for all chunks of a rank: when units are gathered, freed and reduced.

The context is opened once around the wrapping of all chunks and finalized when that scope ends.
From then on it is driven by module hooks (``module.py``), by :func:`microbatch` scopes, and, where
a schedule runs it, by :meth:`Context.hold` and :meth:`Context.release` (residency).
"""

from __future__ import annotations

import contextlib
import contextvars
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import nn

from mfsdp_cli.fsdp.order import Orientation, Use, UseOrder
from mfsdp_cli.fsdp.parameter_group import ParameterGroup, Reduction
from mfsdp_cli.fsdp.unit import Phase, Unit

#: Reduce-scatters under way at once: one runs while the next is being filled.
REDUCTIONS_IN_FLIGHT = 2


class GradientReduction(StrEnum):
    """When gradients are reduced into their shards."""

    EVERY_MICROBATCH = "microbatch"
    LAST_MICROBATCH = "last"


@dataclass(frozen=True)
class Event:
    """Something that was communicated: ``gather`` or ``reduce`` of a unit."""

    operation: str
    unit: str
    bytes: int


class Chunk:
    """The units of one chunk: its root, and everything wrapped below it.

    Units are owned by their modules; a chunk knows them by weak references only.
    """

    def __init__(self, root: Unit, units: Sequence[Unit]) -> None:
        # Reduced in this order on every rank, whatever order their gradients come in: last
        # wrapped first, the root at the end because a shared weight in it is used to the end.
        ordered = [unit for unit in reversed(units) if unit is not root] + [root]
        self._reduction_order = [weakref.ref(unit) for unit in ordered]
        self._waiting: deque[Unit] = deque()
        self._ready: set[int] = set()

    @property
    def reduction_order(self) -> list[Unit]:
        return [unit for ref in self._reduction_order if (unit := ref()) is not None]

    @property
    def units(self) -> list[Unit]:
        """In order of use in a forward pass: the root, then as they were wrapped."""
        return list(reversed(self.reduction_order))

    def begin_backward(self) -> None:
        self._waiting = deque(unit for unit in self.reduction_order if unit.trained_parameters)
        self._ready.clear()

    def mark_ready(self, unit: Unit) -> None:
        self._ready.add(unit.index)

    def take_ready(self) -> Iterator[Unit]:
        """Units whose gradients are complete and whose predecessors have been taken."""
        while self._waiting and self._waiting[0].index in self._ready:
            yield self._waiting.popleft()

    def unfinished(self) -> list[Unit]:
        """Units that still miss gradients."""
        return [unit for unit in self._waiting if unit.index not in self._ready]


class Context:
    """State shared by all chunks of a rank.

    Args:
        device: where the chunks live.
        gradient_reduction: reduce every microbatch, or hold unsharded gradients to the last.
    """

    def __init__(
        self,
        device: torch.device,
        gradient_reduction: GradientReduction = GradientReduction.EVERY_MICROBATCH,
    ) -> None:
        self.device = device
        self.gradient_reduction = gradient_reduction
        self.order = UseOrder()
        self.is_last_microbatch = False
        self.finalized = False
        self.on_event: Callable[[Event], None] | None = None
        self.gathered_bytes = 0
        self.peak_gathered_bytes = 0
        self._units: list[weakref.ref[Unit]] = []
        self._chunks: list[Chunk] = []
        self._chunk_of: dict[int, Chunk] = {}
        self._in_microbatch = False
        self._backward_chunks: list[Chunk] = []
        self._reductions: deque[Reduction] = deque()

    # -- construction ----------------------------------------------------------------------

    def add(self, unit: Unit) -> None:
        if self.finalized:
            raise RuntimeError(
                f"Expected {unit.name} to be wrapped inside the fully_shard_context scope, "
                "but the context is finalized"
            )
        self._units.append(weakref.ref(unit))

    @property
    def units(self) -> list[Unit]:
        """Every unit that is still alive, in the order of wrapping."""
        return [unit for ref in self._units if (unit := ref()) is not None]

    @property
    def chunks(self) -> list[Chunk]:
        return self._chunks

    @property
    def groups(self) -> list[ParameterGroup]:
        return [group for unit in self.units for group in unit.groups]

    def next_index(self) -> int:
        return len(self._units)

    def finalize(self) -> None:
        """Find the roots: wrapped modules that no other wrapped module contains."""
        units = self.units
        if not units:
            raise ValueError("Expected at least one module wrapped by fully_shard, got none")
        inside: dict[int, list[Unit]] = {}
        for unit in units:
            module = unit.module()
            assert module is not None
            inside[unit.index] = [
                other for other in units if other is not unit and _contains(module, other)
            ]
        nested = {other.index for below in inside.values() for other in below}
        for unit in units:
            if unit.index not in nested:
                self._add_chunk(Chunk(unit, [*inside[unit.index], unit]))
        self.finalized = True

    def _add_chunk(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        for unit in chunk.units:
            self._chunk_of[unit.index] = chunk

    def plan_order(self, uses: Iterable[Use]) -> None:
        """Follow a planned order of uses instead of tracing the first step."""
        self.order = UseOrder(list(uses))

    # -- gathering -------------------------------------------------------------------------

    def start_gather(self, unit: Unit) -> None:
        """Issue the gather of a unit unless its weights are there or on their way."""
        if unit.gathered or not unit.groups:
            return
        unit.start_gather()
        self.gathered_bytes += unit.gathered_bytes
        self.peak_gathered_bytes = max(self.peak_gathered_bytes, self.gathered_bytes)
        self._record("gather", unit.name, unit.gathered_bytes)

    def ensure_gathered(self, unit: Unit) -> None:
        self.start_gather(unit)
        unit.finish_gather()

    def reshard(self, unit: Unit) -> None:
        """Free a unit's weights unless they are held for a later use."""
        if unit.gathered and not unit.held:
            unit.reshard()
            self.gathered_bytes -= unit.gathered_bytes

    def hold(self, units: Iterable[Unit]) -> None:
        """Gather units and keep them past their uses until :meth:`release`."""
        for unit in units:
            unit.held = True
            self.start_gather(unit)

    def release(self, units: Iterable[Unit]) -> None:
        """End the residency of units and free them."""
        for unit in units:
            unit.held = False
            self.reshard(unit)

    def _use(self, unit: Unit, orientation: Orientation) -> None:
        if not unit.groups:
            return  # nothing to gather: the root of a chunk whose layers hold everything
        following = self.order.advance(Use(unit.index, orientation))
        self.ensure_gathered(unit)
        if following is not None:
            successor = self._units[following.unit]()
            if successor is not None:
                self.start_gather(successor)

    def _record(self, operation: str, unit: str, size: int) -> None:
        if self.on_event is not None:
            self.on_event(Event(operation, unit, size))

    # -- hooks -----------------------------------------------------------------------------

    @property
    def in_backward(self) -> bool:
        return bool(self._backward_chunks)

    def before_forward(self, unit: Unit) -> None:
        if not self.finalized:
            raise RuntimeError(
                f"Expected the fully_shard_context scope to have ended before {unit.name} runs"
            )
        if torch.is_grad_enabled() and not self.in_backward:
            unit.phase = Phase.FORWARD
            self._use(unit, Orientation.FORWARD)
        else:
            # Evaluation, or recomputation inside the backward pass: neither enters the order.
            self.ensure_gathered(unit)

    def after_forward(self, unit: Unit) -> None:
        if self.in_backward:
            return  # recomputation: the backward pass is about to use these weights
        self._rest(unit)

    def before_backward(self, unit: Unit) -> None:
        if unit.phase is Phase.BACKWARD:
            return
        if not self._in_microbatch:
            raise RuntimeError(
                f"Expected backward of {unit.name} inside `with microbatch(context, is_last):`"
            )
        chunk = self._chunk_of[unit.index]
        if chunk not in self._backward_chunks:
            chunk.begin_backward()
            self._backward_chunks.append(chunk)
        unit.phase = Phase.BACKWARD
        unit.pending_gradients = unit.trained_parameters
        self._use(unit, Orientation.BACKWARD)

    def gradient_arrived(self, unit: Unit) -> None:
        unit.pending_gradients -= 1
        if unit.pending_gradients == 0:
            self._finish_unit(unit)
            self._reduce_ready(self._chunk_of[unit.index])

    # -- reduction -------------------------------------------------------------------------

    def _finish_unit(self, unit: Unit) -> None:
        unit.collect_gradients()
        self._chunk_of[unit.index].mark_ready(unit)
        if not unit.has_frozen_parameters:
            self._rest(unit)
        # Else: no gradient says when a frozen weight was used last. The microbatch's end frees it.

    def _reduce_ready(self, chunk: Chunk) -> None:
        reduce_now = (
            self.gradient_reduction is GradientReduction.EVERY_MICROBATCH or self.is_last_microbatch
        )
        for unit in chunk.take_ready():
            if reduce_now:
                self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        for group in unit.groups:
            if not group.requires_grad:
                continue
            while len(self._reductions) >= REDUCTIONS_IN_FLIGHT:
                self._reductions.popleft().finish()
            reduction = group.start_reduce()
            self._record("reduce", unit.name, reduction.bytes)
            self._reductions.append(reduction)

    def finish_reductions(self) -> None:
        """Wait for every reduction under way; ``main_grad`` is complete afterwards."""
        while self._reductions:
            self._reductions.popleft().finish()

    # -- scopes of time --------------------------------------------------------------------

    def begin_microbatch(self, is_last: bool) -> None:
        if self._in_microbatch:
            raise RuntimeError("Expected microbatch scopes not to be nested")
        if not self.finalized:
            raise RuntimeError("Expected the fully_shard_context scope to have ended")
        self._in_microbatch = True
        self.is_last_microbatch = is_last

    def end_microbatch(self) -> None:
        """Finish what the backward pass left: units without all gradients count zeros."""
        for chunk in self._backward_chunks:
            for unit in chunk.unfinished():
                self._finish_unit(unit)
            self._reduce_ready(chunk)
        self._end_backward()
        self.is_last_microbatch = False

    def _end_backward(self) -> None:
        """Free what is still in its backward pass: units with frozen parameters."""
        for chunk in self._backward_chunks:
            for unit in chunk.units:
                if unit.phase is Phase.BACKWARD:
                    self._rest(unit)
        self._backward_chunks.clear()
        self._in_microbatch = False

    def _rest(self, unit: Unit) -> None:
        unit.phase = Phase.RESTING
        self.reshard(unit)

    def abort_microbatch(self) -> None:
        """Leave the scope after an exception, without further communication.

        The step is lost: what was reduced of it is forgotten by :meth:`zero_grad`.
        """
        self._end_backward()

    def zero_grad(self) -> None:
        """Start a step: gradients are zero, also those that an aborted step left."""
        self.finish_reductions()
        self.order.restart()
        for group in self.groups:
            group.forget_gradients()

    def end_step(self) -> None:
        """Close the recorded order and free what is still gathered (a stale prefetch, say).

        Weights are about to change: nothing gathered may survive.
        """
        self.finish_reductions()
        left = [unit.name for unit in self.units if unit.has_unsharded_gradient()]
        if left:
            raise RuntimeError(
                f"Expected every gradient reduced by the end of the step, but {left[:3]} were "
                "not: was the last microbatch run with is_last=True?"
            )
        self.order.end_step()
        self.release(self.units)

    def refresh_weights(self) -> None:
        """After the optimizer: what is gathered next are the new weights."""
        for group in self.groups:
            group.refresh_model_weight()


def _contains(module: nn.Module, unit: Unit) -> bool:
    other = unit.module()
    return any(part is other for part in module.modules())


_current: contextvars.ContextVar[Context | None] = contextvars.ContextVar("context", default=None)


@contextlib.contextmanager
def fully_shard_context(
    device: torch.device | str,
    *,
    gradient_reduction: GradientReduction | str = GradientReduction.EVERY_MICROBATCH,
) -> Iterator[Context]:
    """The scope in which all chunks of a rank are wrapped; finalized when it ends.

    Raises:
        RuntimeError: scopes are nested.
        ValueError: nothing was wrapped.
    """
    if _current.get() is not None:
        raise RuntimeError("Expected one fully_shard_context around all chunks, got a nested one")
    context = Context(torch.device(device), GradientReduction(gradient_reduction))
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)
    context.finalize()


def current_context() -> Context:
    """The context of the surrounding scope. Raises ``RuntimeError`` outside of one."""
    context = _current.get()
    if context is None:
        raise RuntimeError("Expected fully_shard inside `with fully_shard_context(device):`")
    return context


@contextlib.contextmanager
def microbatch(context: Context, is_last: bool) -> Iterator[None]:
    """The scope of one microbatch's backward pass (its forward may be inside as well).

    Args:
        is_last: whether this is the chunk's last microbatch of the step.
    """
    context.begin_microbatch(is_last)
    try:
        yield
    except BaseException:
        context.abort_microbatch()
        raise
    context.end_microbatch()
