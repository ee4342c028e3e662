"""What a divergence usually means. Knows no torch."""

from __future__ import annotations

_UPDATE = (
    "equal gradients and another update: an optimizer setting, a stale copy of the weights, or "
    "clipping differs"
)


def explain(phase: str, name: str, ratio: float | None, *, microbatches: int, dp: int) -> str:
    """One sentence on the usual cause of a first divergence.

    Args:
        phase: ``forward``, ``gradient``, ``norm``, ``update`` or ``copies``.
        ratio: ours / reference where it is constant.
    """
    if phase == "copies":
        return f"the copies of {name} drifted apart: they are not summed in one order on all ranks"
    if phase == "forward":
        return (
            "the loss differs although both start from the same weights: a layer is missing, run "
            "twice, or fed by the wrong stage"
        )
    if phase == "norm":
        return "equal gradients and another norm: elements are counted twice or left out" + _times(
            ratio
        )
    if phase == "gradient" and ratio is not None:
        return _constant(name, ratio, microbatches, dp)
    if phase == "gradient":
        return f"the gradient of {name} is not a multiple of the reference's: contributions mixed"
    return _UPDATE


def _constant(name: str, ratio: float, microbatches: int, dp: int) -> str:
    for factor, meaning in (
        (2.0, f"{name} is counted on two stages, or reduced twice"),
        (float(microbatches), "the mean over microbatches is a sum"),
        (1.0 / microbatches, "only one microbatch counts, or the mean is taken twice"),
        (float(dp), "the mean over data-parallel ranks is a sum"),
        (1.0 / dp, "the mean over data-parallel ranks is taken twice"),
    ):
        if factor != 1.0 and abs(ratio - factor) < 1e-3 * factor:
            return f"ratio {ratio:.3f}: {meaning}"
    return f"ratio {ratio:.3f}: a divisor or scale of {name} is off"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f" (ratio {ratio:.4f})"
