"""Executes a rank's action list, action by action, exactly as the plan wrote it.

Where an action of the plan meets the engine:

=============== =====================================================================
action          what happens
=============== =====================================================================
UNSHARD         the stage's units are gathered and held (or, without residency, the
                first of them is prefetched and unit hooks do the rest)
RESHARD         they are let go (without residency units free themselves)
F, B            the chunk runs; unit hooks gather what is absent; B issues reductions
REDUCE_GRAD     nothing of the stage is left to be reduced (B has issued it)
RECV_*, SEND_*  posted; waited for at first use
=============== =====================================================================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mfsdp_cli.fsdp import Context, microbatch
from mfsdp_cli.fsdp.chunk import Chunk as Sharded
from mfsdp_cli.runtime.data import Batch
from mfsdp_cli.runtime.pipe import Arrival, Pipe
from mfsdp_cli.runtime.stage_runner import StageRunner
from mfsdp_cli.runtime.trace import Trace
from mfsdp_cli.schedule.actions import Action, Kind

Batches = Callable[[int], Batch]
RankOf = Callable[[int], int]


@dataclass(frozen=True)
class Stages:
    """The stages of a rank and where their neighbours live.

    Args:
        runners, sharded: by stage: what runs it, and its units.
        rank_of: global rank of any stage of this data-parallel rank's pipeline.
        sequences_after: by stage: how many hidden states go on to the next one, (1 + k) behind k
            MTP layers.
    """

    runners: dict[int, StageRunner]
    sharded: dict[int, Sharded]
    rank_of: RankOf
    sequences_after: Sequence[int]


class Executor:
    """Runs the actions of one rank.

    Args:
        actions: of a training step.
        evaluation: of an evaluation of one batch: forwards with their gathers and messages.
        forward_pipe, backward_pipe: activations and their gradients.
        resident: whether stages are held between UNSHARD and RESHARD.
        end_of_step: what each end-of-step action does.
        before_backward: called before each backward (auxiliary loss scales).
    """

    def __init__(
        self,
        actions: Sequence[Action],
        evaluation: Sequence[Action],
        stages: Stages,
        context: Context,
        forward_pipe: Pipe,
        backward_pipe: Pipe,
        *,
        resident: bool,
        end_of_step: dict[Kind, Callable[[], None]],
        before_backward: Callable[[], None],
        trace: Trace,
    ) -> None:
        self._actions = tuple(actions)
        self._evaluation = tuple(evaluation)
        self._stages = stages
        self._context = context
        self._forward_pipe = forward_pipe
        self._backward_pipe = backward_pipe
        self._resident = resident
        self._before_backward = before_backward
        self._trace = trace
        self._batches: Batches | None = None
        self._activations: dict[tuple[int, int], torch.Tensor | Arrival] = {}
        self._gradients: dict[tuple[int, int], torch.Tensor | Arrival] = {}
        self._backwards_left: Counter[int] = Counter()
        self._do: dict[Kind, Callable[[Action], None]] = {
            Kind.UNSHARD: self._unshard,
            Kind.RESHARD: self._reshard,
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.REDUCE_GRAD: self._check_reduced,
            Kind.SEND_F: self._send_forward,
            Kind.RECV_F: self._receive_forward,
            Kind.SEND_B: self._send_backward,
            Kind.RECV_B: self._receive_backward,
        }
        for kind, run in end_of_step.items():
            self._do[kind] = _ignoring_action(run)
        given = {*self._actions, *self._evaluation}
        unknown = sorted({str(a.kind) for a in given} - {str(kind) for kind in self._do})
        if unknown:
            raise ValueError(f"Expected actions that the executor knows, got {unknown}")

    # -- a training step -------------------------------------------------------------------

    def run(self, batches: Batches) -> None:
        """Run one step. ``batches(m)`` is microbatch ``m`` of this data-parallel rank."""
        self._batches = batches
        self._backwards_left = Counter(
            a.stage for a in self._actions if a.kind is Kind.BACKWARD and a.stage is not None
        )
        for action in self._actions:
            self._trace.begin(action)
            self._do[action.kind](action)
            self._trace.end()
        self._forward_pipe.flush()
        self._backward_pipe.flush()

    def _unshard(self, action: Action) -> None:
        units = self._sharded(action).units
        if self._resident:
            self._context.hold(units)
        else:
            with_parameters = [unit for unit in units if unit.groups]
            for unit in with_parameters[:1]:
                self._context.start_gather(unit)

    def _reshard(self, action: Action) -> None:
        if not self._resident:
            return  # units freed themselves after use; what is here was prefetched for what comes
        self._context.release(self._sharded(action).units)

    def _forward(self, action: Action) -> None:
        runner, stage, index = self._runner(action)
        received = _take(self._activations, (stage, index), runner.stage.embedding)
        output = runner.forward(index, received, self._batch(runner, index))
        if output is None:
            return
        key = (stage + 1, index)
        self._activations[key] = output  # local: the next stage takes it; else SEND_F does

    def _backward(self, action: Action) -> None:
        runner, stage, index = self._runner(action)
        self._backwards_left[stage] -= 1
        gradient = _take(self._gradients, (stage, index), runner.stage.loss)
        self._before_backward()
        with microbatch(self._context, is_last=self._backwards_left[stage] == 0):
            upstream = runner.backward(index, gradient)
        if upstream is not None:
            self._gradients[(stage - 1, index)] = upstream

    def _check_reduced(self, action: Action) -> None:
        left = [unit.name for unit in self._sharded(action).units if unit.has_unsharded_gradient()]
        if left:
            raise RuntimeError(f"Expected {action} to find nothing left to reduce, found {left}")

    # -- neighbours ------------------------------------------------------------------------

    def _send_forward(self, action: Action) -> None:
        stage, index = _place(action)
        tensor = self._activations.pop((stage + 1, index))
        assert isinstance(tensor, torch.Tensor)
        sequences = self._stages.sequences_after[stage]
        self._forward_pipe.send(tensor, self._stages.rank_of(stage + 1), sequences)

    def _receive_forward(self, action: Action) -> None:
        stage, index = _place(action)
        source = self._stages.rank_of(stage - 1)
        self._activations[(stage, index)] = self._forward_pipe.receive(
            source, self._stages.sequences_after[stage - 1]
        )

    def _send_backward(self, action: Action) -> None:
        stage, index = _place(action)
        tensor = self._gradients.pop((stage - 1, index))
        assert isinstance(tensor, torch.Tensor)
        sequences = self._stages.sequences_after[stage - 1]
        self._backward_pipe.send(tensor, self._stages.rank_of(stage - 1), sequences)

    def _receive_backward(self, action: Action) -> None:
        stage, index = _place(action)
        source = self._stages.rank_of(stage + 1)
        self._gradients[(stage, index)] = self._backward_pipe.receive(
            source, self._stages.sequences_after[stage]
        )

    # -- evaluation ------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, batches: Batches) -> None:
        """Run one batch forward only. It enters neither the trace nor the order of uses."""
        self._batches = batches
        for action in self._evaluation:
            self._do[action.kind](action)
        self._forward_pipe.flush()

    # -- look-ups --------------------------------------------------------------------------

    def _batch(self, runner: StageRunner, index: int) -> Batch | None:
        """Tokens are needed where the pipeline begins, in MTP layers and where the loss is."""
        assert self._batches is not None
        stage = runner.stage
        needed = stage.embedding or stage.mtp or stage.loss
        return self._batches(index) if needed else None

    def _runner(self, action: Action) -> tuple[StageRunner, int, int]:
        stage, index = _place(action)
        return self._stages.runners[stage], stage, index

    def _sharded(self, action: Action) -> Sharded:
        assert action.stage is not None
        return self._stages.sharded[action.stage]


def _place(action: Action) -> tuple[int, int]:
    assert action.stage is not None
    assert action.microbatch is not None
    return action.stage, action.microbatch


def _take(
    tensors: dict[tuple[int, int], torch.Tensor | Arrival], key: tuple[int, int], at_end: bool
) -> torch.Tensor | None:
    """What arrived for a stage and microbatch; None at the end of the pipeline."""
    if at_end:
        return None
    value = tensors.pop(key)
    return value.take() if isinstance(value, Arrival) else value


def _ignoring_action(run: Callable[[], None]) -> Callable[[Action], None]:
    return lambda _action: run()
