"""Compare the forward passes of two engines, layer by layer and microbatch by microbatch."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch

from mfsdp_cli.layout.layout import Layout
from mfsdp_cli.runtime.numeric.differences import tensor_difference
from mfsdp_cli.runtime.numeric.divergence import Forward
from mfsdp_cli.runtime.observe import CHOSEN, EMBEDDING, GIVEN, TAKEN, Key, Records

#: A token's experts are a choice: at a tie rounding decides it. So many choices of a microbatch
#: may be ties; a wrong weight or input moves more.
TIED_CHOICES = 2
_KINDS = ("embedding", "decoder", "mtp")
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class LayerDifference:
    """Where the forward passes first differ.

    Args:
        layer: global name of the layer, ``embedding`` for the embedding.
        microbatch: of the global batch.
        taken_from: the microbatch whose input it is in the reference, where it is one's.
    """

    layer: str
    microbatch: int
    what: Forward
    difference: float
    taken_from: int | None = None


@dataclass(frozen=True)
class ForwardComparison:
    """The forward passes of a step.

    Args:
        largest: the largest relative difference of what layers took and gave.
        first: the first beyond the tolerance.
        tie: the first layer whose router sent tokens elsewhere although it was given the same:
            what follows from it cannot be judged.
    """

    largest: float
    first: LayerDifference | None
    tie: str | None = None


def compare_layers(
    ours: Records, theirs: Records, tolerance: float, *, ties: bool
) -> ForwardComparison:
    """Compare in the order of the model: what comes first is a cause, the rest a consequence.

    Args:
        ties: whether a router may choose differently for a token or two: rounding decides a tie.
    """
    largest = 0.0
    for key in _in_order(ours.keys() | theirs.keys()):
        found = _compare(key, ours, theirs)
        chooses = found.what is Forward.CHOSEN
        if chooses and ties and 0 < found.difference * ours[key].numel() <= TIED_CHOICES:
            return ForwardComparison(largest, None, found.layer)
        if found.difference > (0.0 if chooses else tolerance):
            if found.what is Forward.TAKEN:
                found = replace(found, taken_from=_source(key, ours, theirs))
            return ForwardComparison(max(largest, found.difference), found)
        largest = max(largest, found.difference)
    return ForwardComparison(largest, None)


def stage_of_layers(layout: Layout) -> dict[str, int]:
    """The stage that runs each layer, by the layer's global name."""
    stages = {}
    for stage in layout.stages:
        if stage.embedding:
            stages[EMBEDDING] = stage.stage
        stages |= {f"decoder.layers.{layer}": stage.stage for layer in stage.layers}
        stages |= {f"mtp.layers.{layer}": stage.stage for layer in stage.mtp}
    return stages


def _in_order(keys: set[Key]) -> list[Key]:
    """Layer by layer, within a layer as it runs, then by microbatch."""
    return sorted(keys, key=_position)


def _position(key: Key) -> tuple[int, int, int, int, int]:
    index, name, side, time = key
    layer = _NUMBER.search(name)
    is_router = name.endswith(".router")
    moment = (TAKEN, CHOSEN, GIVEN).index(side) + (is_router and side == TAKEN) / 2
    number = int(layer[0]) if layer else 0
    return (_KINDS.index(name.split(".")[0]), number, int(2 * moment), index, time)


def _compare(key: Key, ours: Records, theirs: Records) -> LayerDifference:
    index, name, side, time = key
    layer = _layer_of(name)
    if key not in ours:
        return LayerDifference(layer, index, Forward.MISSING, float("inf"))
    if key not in theirs:
        what = Forward.TWICE if time else Forward.STRANGE
        return LayerDifference(layer, index, what, float("inf"))
    if side == CHOSEN:
        difference = _share_of_others(ours[key], theirs[key])
        return LayerDifference(layer, index, Forward.CHOSEN, difference)
    difference = tensor_difference(ours[key], theirs[key])
    if side == GIVEN or name.endswith(".router"):
        return LayerDifference(layer, index, Forward.GIVEN, difference)
    return LayerDifference(layer, index, Forward.TAKEN, difference)


def _layer_of(name: str) -> str:
    """``decoder.layers.3`` for anything in it."""
    return ".".join(name.split(".")[:3])


def _share_of_others(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Which part of the choices differs."""
    if ours.shape != theirs.shape:
        return float("inf")
    return float((ours != theirs).double().mean())


def _source(key: Key, ours: Records, theirs: Records) -> int | None:
    """The microbatch of the reference whose input a layer took, where it is another one's."""
    index, name, side, time = key
    for other in sorted(key[0] for key in theirs if key[1:] == (name, side, time)):
        if other != index and tensor_difference(ours[key], theirs[other, name, side, time]) < 1e-3:
            return other
    return None
