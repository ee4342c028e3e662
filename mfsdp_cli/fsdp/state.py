"""Whole tensors from shards: weights and gradients by name, for checkpoints and proofs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mfsdp_cli.fsdp.collectives import all_gather
from mfsdp_cli.fsdp.flat_buffer import Range
from mfsdp_cli.fsdp.optimizer import ShardedOptimizer
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


@dataclass(frozen=True)
class Shard:
    """This rank's elements of one parameter, with their Adam state.

    Args:
        shape: of the whole parameter.
        range: the elements, counted in the flattened parameter.
        tensors: ``weight`` and, where it is trained, ``exp_avg``, ``exp_avg_sq`` (views of
            ``range.numel`` elements) and ``step`` (one element).
    """

    shape: torch.Size
    range: Range
    tensors: dict[str, torch.Tensor]


def sharded_state_dict(optimizer: ShardedOptimizer) -> dict[str, Shard]:
    """What this rank owns of weights and optimizer state; nothing is communicated or copied.

    Names are those of ``nn.ModuleList(chunks)``. Parameters of which the rank owns no element
    are left out. To load, copy into the tensors on every rank and call
    ``context.refresh_weights()``.
    """
    names = _names(optimizer)
    return {
        names[id(parameter)]: _shard(optimizer, group, index)
        for group in optimizer.context.groups
        for index, parameter in enumerate(group.parameters)
        if group.layout.owned(index).numel
    }


def _shard(optimizer: ShardedOptimizer, group: ParameterGroup, index: int) -> Shard:
    in_shard = group.layout.owned_in_shard(index)
    tensors = {"weight": in_shard.within(group.main_weight)}
    if group.requires_grad:
        kind = group.optimizer_classes[index]
        in_slice = in_shard.shift(-group.class_range(kind).start)
        for name, value in optimizer.state_of(group, kind).items():
            tensors[name] = in_slice.within(value) if value.ndim else value
    return Shard(group.layout.shapes[index], group.layout.owned(index), tensors)


def full_state_dict(optimizer: ShardedOptimizer) -> dict[str, dict[str, torch.Tensor]]:
    """Weights and Adam moments of this rank's chunks, whole: name -> kind -> tensor.

    Names and kinds are those of :func:`sharded_state_dict`, ``step`` left out. Every rank that
    shares a chunk calls it: each group is gathered in turn.
    """
    names = _names(optimizer)
    state: dict[str, dict[str, torch.Tensor]] = {}
    for group in optimizer.context.groups:
        for kind, flat in _flat_state(optimizer, group).items():
            for parameter, (_, value) in zip(group.parameters, _whole(group, flat), strict=True):
                state.setdefault(names[id(parameter)], {})[kind] = value
    return state


def _flat_state(optimizer: ShardedOptimizer, group: ParameterGroup) -> dict[str, torch.Tensor]:
    """This rank's shard of the weights and of each moment; a rank without elements has zeros."""
    flat = {"weight": group.main_weight}
    if not group.requires_grad:
        return flat
    for name in ("exp_avg", "exp_avg_sq"):
        flat[name] = torch.zeros_like(group.main_weight)
    for optimizer_class in set(group.optimizer_classes):
        state = optimizer.state_of(group, optimizer_class)
        if state:
            owned = group.class_range(optimizer_class)
            for name in ("exp_avg", "exp_avg_sq"):
                owned.within(flat[name]).copy_(state[name])
    return flat


def _names(optimizer: ShardedOptimizer) -> dict[int, str]:
    """The name of each parameter in ``nn.ModuleList(chunks)``, by identity."""
    names: dict[int, str] = {}
    for index, chunk in enumerate(optimizer.context.chunks):
        root = chunk.units[0].module()
        assert root is not None
        names |= {id(p): f"{index}.{name}" for name, p in root.named_parameters()}
    return names
