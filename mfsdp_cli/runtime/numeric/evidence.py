"""What a wrong gradient is made of: the reference knows what each microbatch adds to it."""

from __future__ import annotations

import torch

from mfsdp_cli.runtime.numeric.captured import Step
from mfsdp_cli.runtime.numeric.differences import constant_ratio, tensor_difference
from mfsdp_cli.runtime.numeric.divergence import Evidence
from mfsdp_cli.runtime.observe import BUCKETS, sketch

#: How well a sum must fit to be taken for one.
_FIT = 1e-3


def squares(step: Step) -> dict[str, float]:
    """The squared norm of every gradient."""
    return {name: float(g.double().square().sum()) for name, g in step.gradients.items()}


def gradient_evidence(name: str, ratio: float | None, ours: Step, theirs: Step) -> Evidence:
    """What tells the causes of a wrong gradient apart."""
    gradient = ours.gradients.get(name)
    return Evidence(
        everywhere=ratio is not None and _same_ratio_everywhere(ratio, ours, theirs),
        counts=() if gradient is None else microbatch_counts(name, gradient, theirs),
        is_bf16=gradient is not None and torch.equal(gradient, gradient.bfloat16().float()),
        members_add_up=_members_add_up(name, ours, theirs),
    )


def microbatch_counts(name: str, gradient: torch.Tensor, reference: Step) -> tuple[float, ...]:
    """How often each microbatch counts in a gradient, by least squares on sketches.

    Empty where the gradient is no sum of the microbatches' or there are too many to tell.
    """
    contributions = reference.contributions.get(name)
    if contributions is None:
        return ()
    count = contributions.shape[0]
    if count > min(BUCKETS // 2, gradient.numel()):
        return ()
    wanted = sketch(gradient)
    # gelsd: contributions of two microbatches may be the same.
    solution = torch.linalg.lstsq(contributions.T, wanted[:, None], driver="gelsd").solution
    if tensor_difference(contributions.T @ solution, wanted[:, None]) > _FIT:
        return ()
    return tuple(solution[:, 0].tolist())


def _same_ratio_everywhere(ratio: float, ours: Step, theirs: Step) -> bool:
    small = 1e-6 * theirs.grad_norm
    ratios = [
        constant_ratio(ours.gradients.get(name), gradient)
        for name, gradient in theirs.gradients.items()
        if float(gradient.norm()) > small
    ]
    return all(r is not None and abs(r - ratio) <= 1e-3 * abs(ratio) for r in ratios)


def _members_add_up(name: str, ours: Step, theirs: Step) -> bool:
    members = ours.member_gradients.get(name)
    if not members or name not in theirs.gradients:
        return False
    whole = torch.stack([member.double() for member in members]).sum(0)
    return tensor_difference(whole, theirs.gradients[name].double()) < _FIT
