"""Whole tensors from shards: weights and gradients by name, for checkpoints and proofs."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mfsdp_cli.fsdp.collectives import all_gather
from mfsdp_cli.fsdp.parameter_group import ParameterGroup
from mfsdp_cli.fsdp.unit import Unit


def full_weights(unit: Unit) -> Iterator[tuple[str, torch.Tensor]]:
    """Main weights of a unit, whole, as (name in the unit's module, tensor). A collective."""
    for group in unit.groups:
        yield from _whole(group, group.main_weight)


def full_gradients(unit: Unit) -> Iterator[tuple[str, torch.Tensor]]:
    """Main gradients of a unit, whole, after reduction. A collective."""
    for group in unit.groups:
        if group.main_grad is not None:
            yield from _whole(group, group.main_grad)


def _whole(group: ParameterGroup, shard: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    whole = shard
    if group.mesh.size > 1:
        whole = shard.new_empty(group.layout.padded_numel)
        all_gather(whole, shard, group.mesh.gather).wait()
    for name, view in zip(group.names, group.layout.views(whole), strict=True):
        yield name, view.clone()
