"""The training loop: the same for every engine."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from mfsdp_cli.runtime.engine import Engine, StepResult

if TYPE_CHECKING:
    from mfsdp_cli.parallel import Parallel
    from mfsdp_cli.runtime.progress import Progress
    from mfsdp_cli.runtime.record import RunRecord
    from mfsdp_cli.runtime.settings import TrainSettings

COMPLETED = "completed"
NAN = "nan"


class Loop:
    """Steps and evaluations, recorded by rank 0.

    Args:
        record: where to write; None on ranks that do not.
        done: steps that a checkpoint has behind it.
        save: saves after a step, every ``save_interval`` steps (0: never).
    """

    def __init__(
        self,
        engine: Engine,
        settings: TrainSettings,
        parallel: Parallel,
        device: torch.device,
        record: RunRecord | None,
        progress: Progress,
        *,
        done: int = 0,
        save: Callable[[int], None] | None = None,
        save_interval: int = 0,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._step_tokens = parallel.global_batch_size * parallel.seq_length
        self._device = device
        self._record = record
        self._progress = progress
        self._done = done
        self._save = save
        self._save_interval = save_interval

    def run(self) -> str:
        """Train to the end, or until a loss is not finite; returns the run's status."""
        settings = self._settings
        for step in range(self._done + 1, settings.steps + 1):
            began = time.perf_counter()
            result = self._engine.train_step(step)
            self._took(step, result, time.perf_counter() - began)
            if not math.isfinite(result.loss):
                return self._end(NAN, step)
            if self._save and self._save_interval and step % self._save_interval == 0:
                self._save(step)
            if settings.eval_interval and step % settings.eval_interval == 0:
                loss = self._engine.evaluate()
                self._progress.evaluation(step, loss)
                if self._record is not None:
                    self._record.evaluation(step, loss)
                if not math.isfinite(loss):
                    return self._end(NAN, step)
        return self._end(COMPLETED, settings.steps)

    def _took(self, step: int, result: StepResult, seconds: float) -> None:
        peak = self._peak_bytes()
        self._progress.step(step, result.loss, result.grad_norm, seconds, self._step_tokens)
        if self._record is not None:
            self._record.train(
                step,
                loss=result.loss,
                grad_norm=result.grad_norm,
                lr=self._settings.learning_rate(step),
                tokens=step * self._step_tokens,
                step_time_s=seconds,
                peak_bytes=peak,
                step_tokens=self._step_tokens,
            )

    def _peak_bytes(self) -> int:
        """The largest peak of the ranks: resident memory on the CPU, allocated on a GPU."""
        value = torch.tensor([peak_bytes(self._device)], device=self._device)
        if dist.get_world_size() > 1:
            dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return int(value.item())

    def _end(self, status: str, step: int) -> str:
        self._progress.close()
        if self._record is not None:
            self._record.end(status, step=step)
        return status


def peak_bytes(device: torch.device) -> int:
    """This process's peak memory so far."""
    if device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
