"""Point-to-point between neighbouring stages: activations forward, their gradients backward.

Each direction has a communicator of its own, so an activation and a gradient between the same two
ranks can never be taken for one another. Nothing here blocks the host until the data is needed:
receives are posted where the schedule says and waited for at first use; what is sent stays alive
until it has gone.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass
class Arrival:
    """A tensor on its way here; :meth:`take` waits for it."""

    tensor: torch.Tensor
    work: dist.Work | None

    def take(self) -> torch.Tensor:
        if self.work is not None:
            self.work.wait()
            self.work = None
        return self.tensor


class Pipe:
    """One direction of traffic.

    Args:
        group: this direction's communicator over the pipeline ranks; None where there is one rank.
        shape, dtype, device: of one hidden state that crosses a stage boundary, (sequence, micro
            batch, hidden). Behind k MTP layers (1 + k) of them travel as one tensor, joined along
            the sequence.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._group = group
        self._shape = shape
        self._dtype = dtype
        self._device = device
        self._leaving: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def _shape_of(self, sequences: int) -> tuple[int, ...]:
        length, *rest = self._shape
        return (sequences * length, *rest)

    def receive(self, source: int, sequences: int = 1) -> Arrival:
        """Post a receive of so many hidden states from a global rank."""
        tensor = torch.empty(self._shape_of(sequences), dtype=self._dtype, device=self._device)
        return Arrival(tensor, dist.irecv(tensor, src=source, group=self._group))

    def send(self, tensor: torch.Tensor, destination: int, sequences: int = 1) -> None:
        """Send so many hidden states to a global rank without waiting for it."""
        expected = self._shape_of(sequences)
        if tuple(tensor.shape) != expected:
            raise RuntimeError(
                f"Expected a boundary tensor of shape {expected}, got {tuple(tensor.shape)}"
            )
        tensor = tensor.contiguous()
        work = dist.isend(tensor, dst=destination, group=self._group)
        assert work is not None
        self._leaving.append((work, tensor))
        while self._leaving and self._leaving[0][0].is_completed():
            self._leaving.popleft()

    def flush(self) -> None:
        """Wait until everything that was sent has gone."""
        while self._leaving:
            self._leaving.popleft()[0].wait()
