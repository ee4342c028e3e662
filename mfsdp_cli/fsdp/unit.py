"""A unit: the parameters that are gathered together, and where they are in their life.

=========== ================= ============================= =========================
phase       entered by        while in it                   left by
=========== ================= ============================= =========================
RESTING     start, end        weights sharded, or held      a use
FORWARD     pre-forward       weights gathered              post-forward
BACKWARD    pre-backward      weights gathered; forward     all gradients collected
                              here is recomputation         (no parameter frozen), or
                                                            the microbatch's end
=========== ================= ============================= =========================
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from enum import StrEnum

import torch
from torch import nn

from mfsdp_cli.fsdp.parameter_group import ParameterGroup


class Phase(StrEnum):
    """Where a unit is in its life; the module's docstring has the transitions."""

    RESTING = "resting"
    FORWARD = "forward"
    BACKWARD = "backward"


class Unit:
    """Groups of one wrapped module.

    The module owns the unit; the unit knows the module by a weak reference only, so that
    deleting the model frees its storage at once.
    """

    def __init__(self, index: int, name: str, module: nn.Module, groups: Sequence[ParameterGroup]):
        self.index = index
        self.name = name
        self.module = weakref.ref(module)
        self.groups = tuple(groups)
        self.phase = Phase.RESTING
        self.gathered = False
        self.held = False
        self.pending_gradients = 0

    @property
    def trained_parameters(self) -> int:
        return sum(len(group.parameters) for group in self.groups if group.requires_grad)

    @property
    def has_frozen_parameters(self) -> bool:
        return any(not group.requires_grad for group in self.groups)

    @property
    def gathered_bytes(self) -> int:
        return sum(group.gathered_bytes for group in self.groups)

    def start_gather(self) -> None:
        for group in self.groups:
            group.start_gather()
        self.gathered = True

    def finish_gather(self) -> None:
        for group in self.groups:
            group.finish_gather()

    def reshard(self) -> None:
        for group in self.groups:
            group.reshard()
        self.gathered = False

    def collect_gradients(self) -> None:
        for group in self.groups:
            if group.requires_grad:
                group.collect_gradients()

    def awaits_reduction(self) -> bool:
        """Whether the step's last reduction of a gradient is still to come."""
        return any(group.unsharded_grad is not None or group.awaits_last for group in self.groups)

    def has_unsharded_gradient(self) -> bool:
        return any(group.unsharded_grad is not None for group in self.groups)

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {self.phase}, gathered={self.gathered})"


def tensors_in(value: object) -> list[torch.Tensor]:
    """All tensors in nested tuples, lists and dicts, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    return []
