"""Memory of a rank by component, at the peak of its schedule.

The rank's action list is walked once: a forward adds what its stage holds for a microbatch, the
backward takes it away, ``UNSHARD`` and ``RESHARD`` move gathered parameters, gradients pile up
until they are reduced. Components are reported as they are at the action with the largest sum, so
that they add up to the peak.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mfsdp_cli.cost.state import UnitShare, two_largest
from mfsdp_cli.schedule.actions import Action, Kind

_ENDS_FORWARD = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
#: A tensor a direction that is being received while the one before is computed on, and sent.
BOUNDARY_BUFFERS = 2


@dataclass(frozen=True)
class StageMemory:
    """What one stage adds while it runs, in bytes.

    Args:
        held: activations of a microbatch in flight.
        working: what a backward needs on top.
        gathered: compute weights of the whole stage.
        units: its units, for what moves unit by unit.
        boundary: tensor passed on; its gradient comes back.
        received: tensor that comes in; its gradient is sent back.
    """

    held: int
    working: int
    gathered: int
    units: Sequence[UnitShare]
    boundary: int
    received: int = 0


@dataclass(frozen=True)
class Residency:
    """How gathering and reducing are run: see :class:`~mfsdp_cli.parallel.Settings`."""

    resident_chunks: int
    gradient_reduction: str
    compute_bytes: int
    gradient_bytes: int


@dataclass(frozen=True)
class Transient:
    """What comes and goes, at one moment."""

    activations: int = 0
    working_set: int = 0
    gathered_parameters: int = 0
    unsharded_gradients: int = 0

    @property
    def total(self) -> int:
        return (
            self.activations + self.working_set + self.gathered_parameters
            + self.unsharded_gradients
        )  # fmt: skip


@dataclass(frozen=True)
class Peak:
    """The moment of the largest sum, and the largest amount ever gathered."""

    at: Transient
    gathered: int


def walk(actions: Sequence[Action], stages: dict[int, StageMemory], residency: Residency) -> Peak:
    """Walk one rank's actions; ``stages`` are those of the rank, by stage."""
    return _Walk(stages, residency).run(actions)


class _Walk:
    def __init__(self, stages: dict[int, StageMemory], residency: Residency) -> None:
        self.stages, self.residency = stages, residency
        self.live = self.whole_chunks = self.pending = 0
        self.waiting: set[int] = set()
        self.peak = Transient()
        self.gathered = 0

    def run(self, actions: Sequence[Action]) -> Peak:
        for action in actions:
            if action.stage is not None:
                self._act(action.kind, action.stage, self.stages[action.stage])
        return Peak(self.peak, self.gathered)

    def _act(self, kind: Kind, number: int, stage: StageMemory) -> None:
        if kind is Kind.UNSHARD:
            self.whole_chunks += stage.gathered
        elif kind is Kind.RESHARD:
            self.whole_chunks -= stage.gathered
        elif kind is Kind.FORWARD:
            self.live += stage.held
            self._look(stage)
        elif kind in _ENDS_FORWARD:
            self._look(stage, backward=number)
            self.live -= stage.held
        elif kind is Kind.REDUCE_GRAD:
            self.pending -= self._whole_gradient(number)

    def _look(self, stage: StageMemory, backward: int | None = None) -> None:
        """Compare this moment with the peak so far."""
        working = gradients = 0
        if backward is not None:
            working = stage.working
            gradients = self._gradients(backward, stage)
        now = Transient(self.live, working, self._gathered(stage), gradients)
        self.gathered = max(self.gathered, now.gathered_parameters)
        if now.total > self.peak.total:
            self.peak = now

    def _gathered(self, stage: StageMemory) -> int:
        """Whole chunks where chunks stay, else the unit in use and the one that comes next."""
        if self.residency.resident_chunks:
            return self.whole_chunks
        return two_largest(stage.units) * self.residency.compute_bytes

    def _gradients(self, number: int, stage: StageMemory) -> int:
        """Reduced by unit as they come, or kept whole from a chunk's first backward to its last."""
        if self.residency.gradient_reduction == "microbatch":
            return two_largest(stage.units) * self.residency.gradient_bytes
        if number not in self.waiting:
            self.waiting.add(number)
            self.pending += self._size(stage)
        return self.pending

    def _whole_gradient(self, number: int) -> int:
        if number not in self.waiting:
            return 0
        self.waiting.discard(number)
        return self._size(self.stages[number])

    def _size(self, stage: StageMemory) -> int:
        return sum(unit.parameters for unit in stage.units) * self.residency.gradient_bytes


def pipeline_buffers(stages: dict[int, StageMemory], pp: int) -> int:
    """Bytes of tensors on their way between ranks; none with one pipeline rank."""
    if pp == 1:
        return 0
    largest = max((max(stage.boundary, stage.received) for stage in stages.values()), default=0)
    return 2 * BOUNDARY_BUFFERS * largest
