"""What every engine can do. The training loop and numeric validation know nothing else of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.runtime.engine_names import ENGINES

if TYPE_CHECKING:
    from mfsdp_cli.plan import Plan
    from mfsdp_cli.runtime.data import Data
    from mfsdp_cli.runtime.observe import Records
    from mfsdp_cli.runtime.pieces import Pieces
    from mfsdp_cli.runtime.settings import TrainSettings
    from mfsdp_cli.runtime.topology import Topology


@dataclass(frozen=True)
class StepResult:
    """What a step reports, the same on every rank.

    Args:
        loss: mean over the global batch, without auxiliary terms.
        grad_norm: norm of the whole gradient before clipping, every element once.
    """

    loss: float
    grad_norm: float


class Engine(Protocol):
    """A model with its optimizer. All methods are collective: every rank calls them together."""

    def train_step(self, step: int) -> StepResult:
        """Run one optimizer step (counted from 1)."""

    def evaluate(self) -> float:
        """Mean loss over the evaluation batches; changes nothing that training depends on."""

    def named_weights(self) -> dict[str, torch.Tensor]:
        """This pipeline rank's parameters by global name: whole, fp32, on the CPU."""

    def named_gradients(self) -> dict[str, torch.Tensor]:
        """The last step's gradients likewise, reduced but not clipped.

        Needs ``settings.keep_gradients``.
        """

    def clipped_gradients(self) -> dict[str, torch.Tensor]:
        """The last step's gradients likewise, as the optimizer got them.

        Empty where the engine does not keep them.
        """

    def router_biases(self) -> dict[str, torch.Tensor]:
        """This pipeline rank's router biases by global name; empty in a dense model."""

    def observed(self) -> Records:
        """What layers took and gave in the last step; empty unless the settings ask for it."""

    def state(self, *, saving: bool) -> dict[str, Pieces]:
        """What training goes on from, by global name: this rank's part, in place.

        Args:
            saving: leave out copies, which their owner saves.
        """

    def loaded(self, step: int) -> None:
        """What :meth:`state` gave has been overwritten with the state after a step."""

    def persistent_bytes(self) -> int:
        """Bytes of weights, gradients and optimizer state that this rank keeps between steps."""

    def trace(self) -> list[dict[str, Any]]:
        """What was executed, one record an action; empty unless the settings ask for it."""

    def close(self) -> None:
        """Let go of what outlives the object (hooks, streams)."""


def make_engine(
    name: str, plan: Plan, topology: Topology, settings: TrainSettings, data: Data
) -> Engine:
    """The engine of that name for this rank."""
    if name == "single":
        from mfsdp_cli.baselines.single import SingleEngine

        return SingleEngine(plan, topology, settings, data)
    if name == "distopt":
        from mfsdp_cli.baselines.distopt import DistOptEngine

        return DistOptEngine(plan, topology, settings, data)
    if name == "mfsdp":
        from mfsdp_cli.runtime.engine_mfsdp import MfsdpEngine

        return MfsdpEngine(plan, topology, settings, data)
    raise MfsdpError(
        "MF902", f"unknown engine {name!r}", where="--engine", hint=f"one of {', '.join(ENGINES)}"
    )
