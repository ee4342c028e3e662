"""How losses of tokens become the loss of a step: which tokens count, and what they weigh.

A microbatch has the sum of its valid tokens' losses and their number. Two ways to put together
the microbatches of a global batch, with (2, 1 token) and (90, 9 tokens) as an example:

================ ======================================= ===========================
weighting        loss                                    example
================ ======================================= ===========================
by microbatch    mean of each one's mean                 (2/1 + 90/9) / 2 = 6.0
by token         all sums over the number of all tokens  (2 + 90) / (1 + 9) = 9.2
================ ======================================= ===========================

By token, the result does not depend on how the batch is cut into microbatches or spread over
ranks. Without masks every microbatch has the same number of tokens and both are the same.
Evaluation is by token always, so that runs cut differently can be compared.

Where a microbatch, or the whole batch, has no valid token, its loss and gradient are 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MicrobatchLoss:
    """The loss of one microbatch.

    Args:
        total: sum of the losses of its valid tokens; no dimensions, fp32.
        tokens: number of valid tokens; no dimensions, fp32.
    """

    total: torch.Tensor
    tokens: torch.Tensor

    @classmethod
    def of(cls, losses: torch.Tensor, mask: torch.Tensor) -> MicrobatchLoss:
        """From the losses of all tokens and a mask, 1 where one counts (both of one shape)."""
        return cls((losses.float() * mask).sum(), mask.sum())

    @property
    def mean(self) -> torch.Tensor:
        """The mean over the valid tokens; 0 where there is none."""
        return self.total / self.tokens.clamp(min=1)

    def objective(self, per_token: bool) -> torch.Tensor:
        """What the gradient is of, up to a factor that all microbatches of a step share."""
        return self.total if per_token else self.mean

    def weighed(self, per_token: bool) -> torch.Tensor:
        """Loss and weight (two elements, float64, detached), to be summed over microbatches."""
        weight = self.tokens if per_token else torch.ones_like(self.tokens)
        return torch.stack([self.objective(per_token).detach(), weight]).double()


def weighed_sum(
    losses: Iterable[MicrobatchLoss], *, per_token: bool, device: torch.device
) -> torch.Tensor:
    """The sum of losses and the sum of their weights: two elements, float64; zeros for none."""
    parts = [loss.weighed(per_token) for loss in losses]
    if not parts:
        return torch.zeros(2, dtype=torch.float64, device=device)
    return torch.stack(parts).sum(dim=0)


def weighed_mean(weighed: torch.Tensor) -> torch.Tensor:
    """The loss that a :func:`weighed_sum` (of all ranks) comes to; 0 where no token counts."""
    return weighed[0] / weighed[1].clamp(min=1)
