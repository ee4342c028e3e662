"""What a numeric run captured of one engine, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from mfsdp_cli.runtime.numeric.differences import Tensors
from mfsdp_cli.runtime.observe import Records


@dataclass(frozen=True)
class Step:
    """What an engine did in one step.

    Args:
        gradients: whole tensors by global name, after reduction, before clipping.
        weights: whole tensors by global name, after the update.
        differing_copies: names of parameters and router biases that are not bit-equal on all
            ranks that hold them.
        weights_before: weights before the step (the first step's only).
        differing_before: as ``differing_copies``, before the step (the first step's only).
        clipped: gradients as the optimizer got them; empty where the engine does not keep them.
        router_biases: after the step.
        observed: what layers took and gave; empty where the engine does not record it.
        member_gradients: of parameters that several pipeline ranks hold, each one's, where they
            differ.
        contributions: the reference's first step only: what each microbatch added to each
            gradient, as sketches (microbatches, buckets).
        evaluation_before, evaluation_after: evaluation losses, where one was run.
    """

    loss: float
    grad_norm: float
    gradients: Tensors
    weights: Tensors
    differing_copies: tuple[str, ...] = ()
    weights_before: Tensors = field(default_factory=dict)
    differing_before: tuple[str, ...] = ()
    clipped: Tensors = field(default_factory=dict)
    router_biases: Tensors = field(default_factory=dict)
    observed: Records = field(default_factory=dict)
    member_gradients: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    contributions: Tensors = field(default_factory=dict)
    evaluation_before: float | None = None
    evaluation_after: float | None = None
