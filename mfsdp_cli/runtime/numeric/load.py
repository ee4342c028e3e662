"""Read back what the ranks of a numeric run saved."""

from __future__ import annotations

from typing import Any

import torch

from mfsdp_cli.runtime.numeric.captured import Step
from mfsdp_cli.runtime.numeric.differences import Tensors
from mfsdp_cli.runtime.numeric.job import Capture


def load_steps(capture: Capture, ranks: int) -> list[Step]:
    """The steps an engine captured; tensors of all ranks together."""
    return [_load_step(capture, ranks, step) for step in range(1, capture.steps + 1)]


def _load_step(capture: Capture, ranks: int, step: int) -> Step:
    files = [capture.file(rank, step) for rank in range(ranks)]
    parts: list[dict[str, Any]] = [torch.load(file, weights_only=True) for file in files]
    weights, differing = _join([part["weights"] for part in parts])
    biases, differing_biases = _join([part["router_biases"] for part in parts])
    before, differing_before = _join([part.get("weights_before", {}) for part in parts])
    gradients, differing_gradients = _join([part["gradients"] for part in parts])
    clipped, _ = _join([part["clipped"] for part in parts])
    return Step(
        loss=parts[0]["loss"],
        grad_norm=parts[0]["grad_norm"],
        gradients=gradients,
        weights=weights,
        differing_copies=tuple(sorted({*differing, *differing_biases})),
        weights_before=before,
        differing_before=tuple(sorted(differing_before)),
        clipped=clipped,
        router_biases=biases,
        observed={tuple(key): value for part in parts for key, value in part["observed"]},
        member_gradients={
            name: [part["gradients"][name] for part in parts if name in part["gradients"]]
            for name in differing_gradients
        },
        contributions=parts[0]["contributions"],
        evaluation_before=parts[0].get("evaluation_before"),
        evaluation_after=parts[0].get("evaluation_after"),
    )


def _join(parts: list[Tensors]) -> tuple[Tensors, set[str]]:
    """Tensors of all ranks by name, and the names of those that are not bit-equal everywhere."""
    joined: Tensors = {}
    differing = set()
    for part in parts:
        for name, tensor in part.items():
            if name in joined and not torch.equal(joined[name], tensor):
                differing.add(name)
            joined.setdefault(name, tensor)
    return joined, differing
