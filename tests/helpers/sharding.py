"""Plain modules under the engine, for tests of ``mfsdp_cli.fsdp``."""

from __future__ import annotations

from typing import Any

from torch import nn

from mfsdp_cli.fsdp import ShardMesh, fully_shard, fully_shard_context, unit_of
from mfsdp_cli.fsdp.parameter_group import ParameterGroup


def shard_whole(module: nn.Module, mesh: ShardMesh, **options: Any) -> ParameterGroup:
    """Make a module one unit in a context of its own; returns the unit's first group."""
    with fully_shard_context("cpu"):
        fully_shard(module, mesh, **options)
    return group_of(module)


def group_of(module: nn.Module) -> ParameterGroup:
    """The first parameter group of the unit that a module is."""
    unit = unit_of(module)
    assert unit is not None
    return unit.groups[0]
