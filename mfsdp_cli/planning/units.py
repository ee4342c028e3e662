"""Units: what a rank gathers together, with their sizes, chunk by chunk.

Order of use inside a chunk: forward the root (final norm, head, whatever is not wrapped below
it: its own hooks run first), then the embedding, the decoder layers, the MTP layers; backward
the root first again, then the others in reverse. Under expert parallelism the routed experts of a
layer are a unit of their own, sharded over other ranks; it opens inside its layer, after it, in
both directions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mfsdp_cli.layout.layout import Layout, StageLayout
from mfsdp_cli.model.parameters import Sharding, layer_roles, mtp_roles, trainable
from mfsdp_cli.model.spec import ModelSpec
from mfsdp_cli.model.tensors import (
    Role,
    embedding_tensors,
    final_norm_tensors,
    head_tensors,
    holds_final_norm,
)

EXPERTS = ".mlp.experts"


@dataclass(frozen=True)
class UnitSize:
    """A unit of a stage.

    Args:
        name: ``root``, ``embedding``, ``decoder.layers.3``, ``mtp.layers.0``, or a layer's with
            ``.mlp.experts`` behind it.
        parameters: trainable elements on one rank before data parallelism shards them.
        routed: how many of them are routed experts.
    """

    name: str
    parameters: int
    routed: int = 0

    @property
    def is_experts(self) -> bool:
        """Whether it is sharded over the expert-data-parallel ranks alone."""
        return self.name.endswith(EXPERTS)


def stage_units(
    spec: ModelSpec, layout: Layout, stage: StageLayout, sharding: Sharding
) -> list[UnitSize]:
    """The units of a stage in forward order; units without parameters are left out."""
    units = [*_ends(spec, layout, stage, sharding)]
    for layer in stage.layers:
        roles = layer_roles(spec, spec.is_moe_layer(layer), sharding)
        units += _layer(f"decoder.layers.{layer}", trainable(roles), roles, sharding)
    for depth in stage.mtp:
        roles = mtp_roles(spec, sharding)
        units += _layer(f"mtp.layers.{depth}", trainable(roles), roles, sharding)
    return [unit for unit in units if unit.parameters]


def backward_order(units: list[UnitSize]) -> list[UnitSize]:
    """The units of a stage as its backward pass opens them."""
    root = [unit for unit in units if unit.name == "root"]
    others = [unit for unit in reversed(units) if unit.name != "root"]
    # Reversing puts a layer's experts before the layer; the layer's own hook still comes first.
    return root + sorted(others, key=_Position(others))


class _Position:
    """Sort key: where a unit's layer stands, the layer itself before its experts."""

    def __init__(self, units: list[UnitSize]) -> None:
        self._place: dict[str, int] = {}
        for index, unit in enumerate(units):
            self._place.setdefault(unit.name.removesuffix(EXPERTS), index)

    def __call__(self, unit: UnitSize) -> tuple[int, bool]:
        return self._place[unit.name.removesuffix(EXPERTS)], unit.is_experts


def _ends(
    spec: ModelSpec, layout: Layout, stage: StageLayout, sharding: Sharding
) -> Iterator[UnitSize]:
    tensors = [*embedding_tensors(spec, stage), *head_tensors(spec, stage)]
    if holds_final_norm(spec, layout, stage):
        tensors += final_norm_tensors(spec)
    for name in ("root", "embedding"):
        yield UnitSize(name, sum(sharding.share(t) for t in tensors if t.unit == name))


def _layer(
    name: str, parameters: int, roles: dict[Role, int], sharding: Sharding
) -> list[UnitSize]:
    routed = roles.get(Role.ROUTED_EXPERT, 0)
    if sharding.expert_parallel == 1 or not routed:
        return [UnitSize(name, parameters, routed)]
    experts = UnitSize(name + EXPERTS, routed, routed)
    return [UnitSize(name, parameters - routed), experts]
