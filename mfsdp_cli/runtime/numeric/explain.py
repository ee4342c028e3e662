"""What a divergence usually means. Knows no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from mfsdp_cli.runtime.numeric.divergence import Divergence, Evidence, Forward, Phase

#: A factor is taken for a cause's where it is this near.
_NEAR = 2e-3
#: bf16 keeps 8 bits: half a unit in the last place.
_BF16 = 2.0**-8
_EXPERT, _ROUTER, _MTP = ".experts.", ".router.", "mtp."


@dataclass(frozen=True)
class Setup:
    """What a run was made of, as far as its faults depend on it.

    Args:
        microbatches: of a data-parallel rank.
        shared: copies of each shared parameter, by global name.
        betas: Adam's.
    """

    microbatches: int
    dp: int
    ep: int = 1
    shared: Mapping[str, int] = field(default_factory=dict)
    betas: tuple[float, float] = (0.9, 0.95)


def explain(first: Divergence, setup: Setup) -> str:
    """One sentence on the usual cause of a first divergence."""
    explanations: dict[Phase, Callable[[Divergence, Setup], str]] = {
        Phase.WEIGHTS: _weights,
        Phase.FORWARD: _forward,
        Phase.GRADIENT: _gradient,
        Phase.NORM: _norm,
        Phase.CLIP: _clip,
        Phase.UPDATE: _update,
        Phase.COPIES: _copies,
        Phase.ROUTER_BIAS: _router_bias,
        Phase.EVALUATION: _evaluation,
    }
    return explanations[first.phase](first, setup)


def _weights(first: Divergence, setup: Setup) -> str:
    if first.difference == float("inf"):
        return f"only one side has {first.name}: a layer is built twice or never"
    return (
        f"{first.name} starts from other values: initial weights must depend on the seed and the "
        "global name alone, and here they depend on the layout"
    )


# -- forward -----------------------------------------------------------------------------------


def _forward(first: Divergence, setup: Setup) -> str:
    evidence = first.evidence
    if evidence.forward is None:
        return (
            "every layer agrees and the loss differs: labels, final norm or head, or the mean over "
            "microbatches and ranks" + _times(first.ratio)
        )
    if evidence.forward is Forward.TAKEN:
        return _taken(first.name, evidence, setup)
    if evidence.forward is Forward.MISSING:
        return "the layer did not run: it was never built, or its microbatch was left out"
    if evidence.forward is Forward.TWICE:
        return "the layer ran twice for one microbatch: it is built twice, or the microbatch is"
    if evidence.forward is Forward.STRANGE:
        return "the reference has no such layer or microbatch"
    return f"the layer {evidence.forward}: " + _other_weights(first.step)


def _taken(name: str, evidence: Evidence, setup: Setup) -> str:
    is_first = "embedding" in name
    source = "the tokens" if is_first else "what the stage before gave for it"
    if evidence.taken_from is not None:
        theirs = _place(evidence.taken_from, setup)
        return (
            f"it took {source.split(' for it')[0]} for {theirs} instead of its own: a microbatch "
            "runs twice, or two are mixed up on the way"
        )
    if is_first:
        return "it took other tokens: another sample, or positions and samples mixed up"
    return (
        "what it took is not what the layer before gave: activations and gradients mixed up on one "
        "communicator, or an output freed before it was sent"
    )


def _other_weights(step: int) -> str:
    if step == 1:
        return "it computes with other weights, or is another layer"
    return (
        "weights agreed after the step before, so it computes with stale ones: they were not "
        "refreshed, or stayed gathered over the update"
    )


def _place(index: int, setup: Setup) -> str:
    """A microbatch of the global batch as a person would look for it."""
    microbatch, rank = divmod(index, setup.dp)
    return f"microbatch {microbatch}" + (f" of data-parallel rank {rank}" * (setup.dp > 1))


# -- gradients ---------------------------------------------------------------------------------


def _gradient(first: Divergence, setup: Setup) -> str:
    name, evidence = first.name, first.evidence
    if first.difference == float("inf") and first.ratio is None:
        return f"only one side has a gradient of {name}: a layer is built twice or never"
    if evidence.members_add_up:
        return (
            f"the copies of {name} are not summed: each stage has its own share of the gradient, "
            "and the shares add up to the reference's"
        )
    if first.ratio is not None and abs(first.ratio - 1) > _NEAR:
        return f"ratio {first.ratio:.3f} on " + _scaled(first, setup)
    if counted := _counted(evidence.counts, setup):
        return counted
    if evidence.is_bf16:
        return "every element is a number that bf16 holds: gradients are added up in bf16"
    if _ROUTER in name:
        return (
            f"the gradient of {name} is no sum of what microbatches add: the balancing loss is "
            f"scaled otherwise (it takes 1/{setup.microbatches}), or counts other tokens"
        )
    if first.difference < _BF16:
        return (
            f"a difference of {first.difference:.0e} is what rounding to bf16 makes (up to "
            f"{_BF16:.0e}): gradients are added up or sent in bf16"
        )
    if name in setup.shared:
        return (
            f"the copies of {name} are summed wrongly: by place in shards that start at different "
            "offsets, or before the mean over data-parallel ranks was complete"
        )
    return (
        f"the gradient of {name} is neither a multiple of the reference's nor a sum of what "
        "microbatches add: elements of ranks are mixed, or data-parallel ranks left out"
    )


def _scaled(first: Divergence, setup: Setup) -> str:
    """Causes of a constant factor, all that fit."""
    assert first.ratio is not None
    where = "every gradient" if first.evidence.everywhere else first.name
    if first.name in setup.shared and not first.evidence.everywhere:
        where = "the tied embedding" if "embedding" in first.name else first.name
    causes = [cause for factor, cause in _factors(first, setup) if _near(first.ratio, factor)]
    return f"{where}: " + (" or ".join(causes) or "a divisor or scale is off")


def _factors(first: Divergence, setup: Setup) -> Iterator[tuple[float, str]]:
    """Factors that faults make, with the faults."""
    name, everywhere = first.name, first.evidence.everywhere
    m, dp, ep = setup.microbatches, setup.dp, setup.ep
    if name in setup.shared and not everywhere:
        yield 2.0, "counted on both stages"
        if setup.shared[name] > 2:
            yield float(setup.shared[name]), "counted on every stage that holds a copy"
    if name.startswith(_MTP) and not everywhere:
        yield float(m), "the multi-token-prediction loss is not scaled by 1/microbatches"
    if _EXPERT in name and not everywhere and ep > 1:
        yield float(dp), "expert gradients are not divided by the data-parallel size"
        yield float(ep), "expert gradients are not divided by the expert-parallel size"
        yield 1 / ep, "expert gradients are divided by the expert-parallel size twice"
    if everywhere and dp == 1:
        yield 2.0, "doubled where the data-parallel group has one rank"
    if name in setup.shared and not everywhere:
        return
    if m > 1:
        yield float(m), "the mean over microbatches is a sum"
        yield 1 / m, "the mean over microbatches is taken twice"
    if dp > 1:
        yield float(dp), "the mean over data-parallel ranks is a sum"
        yield 1 / dp, "the mean over data-parallel ranks is taken twice"
    if not everywhere:
        yield 2.0, "reduced or added up twice"


def _counted(counts: tuple[float, ...], setup: Setup) -> str:
    """What the counts of microbatches say; empty where nothing."""
    if not counts or all(abs(count - 1) < 0.01 for count in counts):
        return ""
    places = list(enumerate(counts))
    missing = [index for index, count in places if abs(count) < 0.01]
    twice = [index for index, count in places if abs(count - 2) < 0.01]
    last = set(range(len(counts) - setup.dp, len(counts)))
    if len(missing) == len(counts) - setup.dp and not last & set(missing):
        return (
            "only the last microbatch counts: gradients are overwritten instead of added up"
            f" (it counts {counts[-1]:.3g} times)"
        )
    counting = {index % setup.dp for index, count in places if abs(count) >= 0.01}
    if setup.dp > 1 and len(counting) == 1:
        return (
            "only the microbatches of one data-parallel rank count: a shard was used before the "
            "mean over data-parallel ranks"
        )
    once = sum(abs(count - 1) < 0.01 for count in counts)
    whole = once + len(missing) + len(twice) == len(counts)
    said = []
    if missing and whole:
        said.append(f"{_places(missing, setup)} does not count")
    if twice and whole:
        said.append(f"{_places(twice, setup)} counts twice")
    if said:
        return "of the microbatches, " + ", ".join(said)
    weights = ", ".join(f"{count:.3g}" for count in counts[:8])
    return (
        f"microbatches count {weights}{', …' * (len(counts) > 8)} times instead of once each: "
        "weighted by microbatch instead of by token, or added up again with what came before"
    )


def _places(indices: list[int], setup: Setup) -> str:
    shown = [_place(index, setup) for index in indices[:3]]
    more = f" and {len(indices) - 3} more" * (len(indices) > 3)
    return ", ".join(shown) + more


# -- norm, clipping, update ----------------------------------------------------------------------


def _norm(first: Divergence, setup: Setup) -> str:
    said = "the gradients agree and the norm does not"
    if first.ratio is None:
        return f"{said}: it is no number"
    causes = [
        cause
        for factor, cause in _norm_factors(first.evidence.squares, setup)
        if abs(first.ratio**2 - factor) < 0.01 * abs(factor - 1)
    ]
    if causes:
        return f"{said} (ratio {first.ratio:.4f}): " + " or ".join(causes[:3])
    if abs(first.ratio - 1) < _BF16:
        return (
            f"{said} (ratio {first.ratio:.7f}): it is added up in bf16, or over rounded gradients"
        )
    return f"{said} (ratio {first.ratio:.4f}): elements are counted twice or left out"


def _norm_factors(squares: Mapping[str, float], setup: Setup) -> Iterator[tuple[float, str]]:
    """Factors on the squared norm that faults make, with the faults."""
    whole = sum(squares.values())
    if not whole:
        return
    for name, members in setup.shared.items():
        for copies in range(1, members):
            factor = 1 + copies * squares.get(name, 0.0) / whole
            yield factor, f"{name} is counted {copies + 1} times, once a copy"
    experts = sum(square for name, square in squares.items() if _EXPERT in name)
    if experts:
        for size, what in ((setup.ep, "expert-parallel"), (setup.dp, "data-parallel")):
            yield 1 + (size - 1) * experts / whole, f"experts are counted once a {what} rank"
        yield 1 - experts / whole, "experts are left out"
    yield float(setup.dp), "every data-parallel rank's replica is counted"
    yield 1 / setup.dp, "only one data-parallel rank's share is counted"
    for name, square in squares.items():
        if square > 1e-4 * whole and name not in setup.shared:
            yield 1 - square / whole, f"{name} is left out"
            yield 1 + square / whole, f"{name} is counted twice"


def _clip(first: Divergence, setup: Setup) -> str:
    said = "gradients and norm agree, but the optimizer got other gradients"
    expected = first.evidence.expected_clip
    if first.ratio is None:
        return f"{said}: they were not all scaled by one factor"
    if expected is not None and _near(first.ratio * expected, 1.0):
        return f"{said}: nothing was clipped (the factor is {expected:.4f})"
    return f"{said}: the clip factor is {first.ratio:.4f} times the reference's"


def _update(first: Divergence, setup: Setup) -> str:
    said = "the optimizer got equal gradients and made another update"
    if first.ratio is None:
        return f"{said}: a setting of it differs (decay, eps, betas), or its state is another's"
    one, two = setup.betas
    late = (1 + two) ** 0.5 / (1 + one)
    if first.step == 1 and abs(first.ratio - late) < 0.02 * late:
        return (
            f"{said}, {1 / first.ratio:.2f} times too small: Adam's state was made by a step with "
            "a zero gradient before the first"
        )
    if abs(first.ratio) < 1e-6:
        return f"{said}: none; the optimizer does not hold {first.name}"
    return f"{said} (ratio {first.ratio:.4f}): the learning rate differs, or the step number"


def _copies(first: Divergence, setup: Setup) -> str:
    if first.name.endswith("expert_bias"):
        return (
            f"ranks have different values of {first.name}: counts of tokens are not summed over "
            "the data-parallel ranks"
        )
    if first.step == 0:
        return (
            f"the copies of {first.name} start from different values: initial weights must depend "
            "on the seed and the global name alone"
        )
    return (
        f"the copies of {first.name} drifted apart: they are not summed in one order on all ranks, "
        "or one is updated by itself"
    )


def _router_bias(first: Divergence, setup: Setup) -> str:
    return (
        f"{first.name} moved another way: tokens of evaluation or recomputation were counted, or "
        "counts of data-parallel ranks not summed"
    )


def _evaluation(first: Divergence, setup: Setup) -> str:
    said = "equal weights evaluate to another loss" + _times(first.ratio)
    if first.step:
        return f"{said}: evaluation computes with stale weights or takes other samples"
    return f"{said}: the mean over microbatches and ranks, or the samples, differ"


def _near(ratio: float, factor: float) -> bool:
    return abs(ratio - factor) < _NEAR * abs(factor)


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f" (ratio {ratio:.4f})"
