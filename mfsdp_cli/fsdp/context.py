"""One context for all chunks of a rank: when units are gathered, freed and reduced.

The context is opened once around the wrapping of all chunks and finalized when that scope ends.
From then on it is driven by module hooks (``module.py``), by :func:`microbatch` scopes, and, where
a schedule runs it, by :meth:`Context.hold` and :meth:`Context.release` (residency).
"""

from __future__ import annotations

import contextlib
import contextvars
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

import torch

from mfsdp_cli.fsdp.chunk import Chunk, find_chunks
from mfsdp_cli.fsdp.order import Orientation, Use, UseOrder
from mfsdp_cli.fsdp.parameter_group import ParameterGroup
from mfsdp_cli.fsdp.reductions import Reductions
from mfsdp_cli.fsdp.residency import kept_uses
from mfsdp_cli.fsdp.unit import Phase, Unit


class GradientReduction(StrEnum):
    """When gradients are reduced into their shards."""

    EVERY_MICROBATCH = "microbatch"
    LAST_MICROBATCH = "last"


@dataclass(frozen=True)
class Event:
    """Something that was communicated for a unit.

    Args:
        operation: ``gather`` of its weights, ``reduce`` of its gradients (a reduce-scatter), or
            ``replicate``: the sum of the reduced shard over replicas (hybrid sharding).
        bytes: of the whole tensor that the collective works on, on this rank.
    """

    operation: str
    unit: str
    bytes: int


class Context:
    """State shared by all chunks of a rank.

    Args:
        device: where the chunks live.
        gradient_reduction: reduce every microbatch, or hold unsharded gradients to the last.
        resident_bytes: keep units gathered between uses while all that is gathered stays within
            this; 0: free after every use. Takes effect once the order of uses is known.
    """

    def __init__(
        self,
        device: torch.device,
        gradient_reduction: GradientReduction = GradientReduction.EVERY_MICROBATCH,
        resident_bytes: int = 0,
    ) -> None:
        self.device = device
        self.gradient_reduction = gradient_reduction
        self.resident_bytes = resident_bytes
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
        self._reductions = Reductions(self._record)
        self._prefetched: weakref.ref[Unit] | None = None
        self._kept: frozenset[int] = frozenset()
        self._prefetch_first = True

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
        """Find the chunks: wrapped modules that no other wrapped module contains."""
        units = self.units
        if not units:
            raise ValueError("Expected at least one module wrapped by fully_shard, got none")
        self._chunks = find_chunks(units)
        self._chunk_of = {unit.index: chunk for chunk in self._chunks for unit in chunk.units}
        self.finalized = True

    def plan_order(self, uses: Iterable[Use], *, prefetch_first: bool = True) -> None:
        """Follow a planned order of uses instead of tracing the first step.

        Args:
            prefetch_first: gather what the next step begins with as soon as the weights have
                changed; a schedule that gathers by itself says no.
        """
        self.order = UseOrder(list(uses))
        self._prefetch_first = prefetch_first
        self._choose_kept()

    def _choose_kept(self) -> None:
        sizes = {unit.index: unit.gathered_bytes for unit in self.units}
        uses = self.order.expected if self.resident_bytes else []
        self._kept = kept_uses(uses, sizes, self.resident_bytes)

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
        self._release_stale(unit)
        self.ensure_gathered(unit)
        if following is not None:
            self._prefetch(following)

    def _prefetch(self, use: Use) -> None:
        unit = self._units[use.unit]()
        if unit is not None and not unit.gathered:
            self.start_gather(unit)
            self._prefetched = weakref.ref(unit)  # a deleted model goes at once

    def _release_stale(self, used: Unit) -> None:
        """Free what was prefetched for this use if another unit is used instead."""
        stale = None if self._prefetched is None else self._prefetched()
        self._prefetched = None
        if stale is not None and stale is not used and stale.phase is Phase.RESTING:
            self.reshard(stale)

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
        if self.in_backward:
            self.ensure_gathered(unit)  # recomputation does not enter the order
        elif torch.is_grad_enabled() or self._within_training(unit):
            unit.phase = Phase.FORWARD
            self._use(unit, Orientation.FORWARD)
        else:
            self.ensure_gathered(unit)  # nor does evaluation

    def _within_training(self, unit: Unit) -> bool:
        """Whether a unit that runs without gradient is to be recomputed: its chunk has one."""
        return self._chunk_of[unit.index].units[0].phase is Phase.FORWARD

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
                self._reductions.start(unit, is_last=self.is_last_microbatch)

    def finish_reductions(self) -> None:
        """Wait for every reduction under way; ``main_grad`` is complete afterwards."""
        self._reductions.finish()

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
        if self.order.position_of(unit.index) not in self._kept:
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
        left = [unit.name for unit in self.units if unit.awaits_reduction()]
        if left:
            raise RuntimeError(
                f"Expected every gradient reduced by the end of the step, but {left[:3]} were "
                "not: was the last microbatch run with is_last=True?"
            )
        known = self.order.expected
        self.order.end_step()
        if self.order.expected != known:
            self._choose_kept()
        self._prefetched = None
        self.release(self.units)

    def refresh_weights(self) -> None:
        """After the optimizer: what is gathered next are the new weights."""
        self._prefetched = None
        self.release(self.units)
        for group in self.groups:
            group.refresh_model_weight()
        first = self.order.first if self._prefetch_first else None
        if first is not None:
            self._prefetch(first)


_current: contextvars.ContextVar[Context | None] = contextvars.ContextVar("context", default=None)


@contextlib.contextmanager
def fully_shard_context(
    device: torch.device | str,
    *,
    gradient_reduction: GradientReduction | str = GradientReduction.EVERY_MICROBATCH,
    resident_bytes: int = 0,
) -> Iterator[Context]:
    """The scope in which all chunks of a rank are wrapped; finalized when it ends.

    Args:
        device: where the chunks live.
        gradient_reduction: ``microbatch`` reduces gradients with every microbatch; ``last`` adds
            them up unsharded and reduces once a step.
        resident_bytes: budget of gathered weights: units whose next use is near stay gathered
            while all of them together stay within it. 0: each is freed after its use.

    Raises:
        RuntimeError: scopes are nested.
        ValueError: nothing was wrapped, or the budget is negative.
    """
    if resident_bytes < 0:
        raise ValueError(f"Expected a budget of 0 bytes or more, got {resident_bytes}")
    if _current.get() is not None:
        raise RuntimeError("Expected one fully_shard_context around all chunks, got a nested one")
    context = Context(torch.device(device), GradientReduction(gradient_reduction), resident_bytes)
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
