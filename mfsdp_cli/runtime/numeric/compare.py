"""Compare the captured numbers of two engines, step by step, and name what diverged first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mfsdp_cli.runtime.numeric.captured import Step
from mfsdp_cli.runtime.numeric.differences import (
    Tensors,
    constant_ratio,
    finite,
    ratio_of,
    relative,
    worst_difference,
)
from mfsdp_cli.runtime.numeric.divergence import Divergence, Evidence, Phase
from mfsdp_cli.runtime.numeric.evidence import gradient_evidence, squares
from mfsdp_cli.runtime.numeric.layers import LayerDifference, compare_layers
from mfsdp_cli.runtime.numeric.tolerances import NoiseFloor, Tolerances, join_floors

LOSS = "loss"
BEFORE, AFTER = "before the first step", "after the last step"


@dataclass
class Comparison:
    """All differences of a run against the reference.

    ``max_forward_rel`` (what layers took and gave) and ``max_grad_rel`` are the first step's,
    where both start from equal weights; the other maxima and ``max_later_grad_rel`` are over all
    steps that were judged. ``noise_floor`` is the largest relative difference of loss, norm or
    weights that rounding alone made in the reference within these steps. ``unjudged`` says why
    later steps were left out.
    """

    steps: int = 0
    judged_steps: int = 0
    max_loss_rel: float = 0.0
    max_forward_rel: float = 0.0
    max_grad_rel: float = 0.0
    max_later_grad_rel: float = 0.0
    max_norm_rel: float = 0.0
    max_weight_rel: float = 0.0
    max_evaluation_rel: float = 0.0
    grad_norm: float = 0.0
    reference_grad_norm: float = 0.0
    copies_bit_equal: bool = True
    noise_floor: float = 0.0
    unjudged: str = ""
    first_divergence: Divergence | None = None

    def to_json(self) -> dict[str, Any]:
        first = self.first_divergence
        return {
            "steps": self.steps,
            "judged_steps": self.judged_steps,
            "max_loss_rel": finite(self.max_loss_rel),
            "max_forward_rel": finite(self.max_forward_rel),
            "max_grad_rel": finite(self.max_grad_rel),
            "max_later_grad_rel": finite(self.max_later_grad_rel),
            "max_norm_rel": finite(self.max_norm_rel),
            "max_weight_rel": finite(self.max_weight_rel),
            "max_evaluation_rel": finite(self.max_evaluation_rel),
            "grad_norm": finite(self.grad_norm),
            "reference_grad_norm": finite(self.reference_grad_norm),
            "noise_floor": finite(self.noise_floor),
            "copies_bit_equal": self.copies_bit_equal,
            "first_divergence": None if first is None else first.to_json(),
        }


def compare(
    mine: Sequence[Step],
    reference: Sequence[Step],
    tolerances: Tolerances,
    floor: NoiseFloor | None = None,
    stages: Mapping[str, int] | None = None,
) -> Comparison:
    """Compare step by step, as far as rounding lets anybody judge.

    Args:
        stages: the stage of each layer, by the layer's global name.
    """
    steps = min(len(mine), len(reference))
    floor = floor or NoiseFloor()
    judged = floor.judged_steps(steps)
    result = Comparison(
        steps=steps,
        judged_steps=judged,
        grad_norm=mine[0].grad_norm,
        reference_grad_norm=reference[0].grad_norm,
        noise_floor=floor.largest(judged),
        unjudged="" if judged == steps else "trainings of the reference differ as much",
    )
    judge = _Judge(result, stages or {})
    judge.start(mine[0], reference[0])
    for number in range(1, judged + 1):
        allowed = _allowed(tolerances, floor, number)
        judge.step(number, mine[number - 1], reference[number - 1], allowed)
        judge.evaluation(number, mine[number - 1], reference[number - 1], allowed)
        if result.judged_steps < number:
            break
    return result


def measure_floor(reference: Sequence[Step], *others: Sequence[Step]) -> NoiseFloor:
    """The noise floor from several trainings of the reference."""
    return join_floors([_floor_of(other, reference) for other in others])


def _floor_of(one: Sequence[Step], other: Sequence[Step]) -> NoiseFloor:
    scalars, gradients = [0.0], [0.0]
    for a, b in zip(one, other, strict=True):
        evaluations = [(a.evaluation_before, b.evaluation_before)]
        evaluations += [(a.evaluation_after, b.evaluation_after)]
        scalars.append(
            max(
                scalars[-1],
                relative(a.loss, b.loss),
                relative(a.grad_norm, b.grad_norm),
                worst_difference(a.weights, b.weights)[0],
                *(relative(x, y) for x, y in evaluations if x is not None and y is not None),
            )
        )
        small = _rounded_gradient(b)
        worst, _ = worst_difference(a.gradients, b.gradients, small)
        forward = compare_layers(a.observed, b.observed, float("inf"), ties=False).largest
        gradients.append(max(gradients[-1], worst, forward))
    return NoiseFloor(tuple(scalars[1:]), tuple(gradients[1:]))


def _allowed(tolerances: Tolerances, floor: NoiseFloor, number: int) -> Tolerances:
    """What a step may differ by: ``first`` for loss and norm, ``gradient``, ``later`` for weights.

    The first step starts from equal weights: nothing is added to its tolerances.
    """
    if number == 1:
        return tolerances
    later = floor.later(number, tolerances.later)
    gradient = floor.later_gradient(number, tolerances.later_gradient)
    return Tolerances(first=later, gradient=gradient, later=later)


def _rounded_gradient(reference: Step) -> float:
    """Norms of gradients below this are rounding: the true gradient is zero."""
    return 1e-6 * reference.grad_norm


@dataclass
class _Judge:
    """Notes the differences of one step after the other; only the first divergence is kept."""

    result: Comparison
    stages: Mapping[str, int]
    last: tuple[Step, Step] | None = field(default=None)

    def start(self, ours: Step, theirs: Step) -> None:
        """Before the first step: equal weights, equal copies."""
        if ours.weights_before and theirs.weights_before:
            difference, name = worst_difference(ours.weights_before, theirs.weights_before)
            ratio = _ratio_of_tensors(name, ours.weights_before, theirs.weights_before)
            self._note(0, Phase.WEIGHTS, name, difference, 0.0, ratio)
        self._copies(0, ours.differing_before)

    def step(self, number: int, ours: Step, theirs: Step, allowed: Tolerances) -> None:
        if self._ends_in_a_tie(number, ours, theirs, allowed):
            return
        # After the layers: they say more of a forward pass that is wrong.
        before = (ours.evaluation_before, theirs.evaluation_before)
        self._compare_evaluations(0, BEFORE, *before, allowed.first)
        self._loss(number, ours, theirs, allowed)
        self._gradients(number, ours, theirs, allowed.gradient)
        self._norm(number, ours, theirs, allowed.first)
        self._clip(number, ours, theirs, allowed.gradient)
        self._update(number, ours, theirs, allowed.later)
        self._copies(number, ours.differing_copies)
        self._router_biases(number, ours, theirs)
        self.last = (ours, theirs)

    def evaluation(self, number: int, ours: Step, theirs: Step, allowed: Tolerances) -> None:
        self._compare_evaluations(
            number, AFTER, ours.evaluation_after, theirs.evaluation_after, allowed.later
        )

    # -- one kind of number each -----------------------------------------------------------

    def _ends_in_a_tie(self, number: int, ours: Step, theirs: Step, allowed: Tolerances) -> bool:
        """Compare what layers took and gave; whether a router's tie ends what can be judged."""
        if not ours.observed:
            return False
        forward = compare_layers(ours.observed, theirs.observed, allowed.gradient, ties=number > 1)
        if number == 1:
            self.result.max_forward_rel = forward.largest
        if forward.tie is not None and self.result.first_divergence is None:
            self.result.judged_steps = number - 1
            self.result.unjudged = f"rounding decided where {forward.tie} sent a token"
            return True
        if forward.first is not None:
            self._note_layer(number, forward.first, allowed.gradient)
        return False

    def _note_layer(self, number: int, found: LayerDifference, tolerance: float) -> None:
        evidence = Evidence(
            forward=found.what, taken_from=found.taken_from, microbatch=found.microbatch
        )
        stage = self.stages.get(found.layer)
        name = f"stage {stage} ({found.layer}, microbatch {found.microbatch})"
        self._note(number, Phase.FORWARD, name, found.difference, tolerance, None, evidence)

    def _loss(self, number: int, ours: Step, theirs: Step, allowed: Tolerances) -> None:
        difference = relative(ours.loss, theirs.loss)
        self.result.max_loss_rel = max(self.result.max_loss_rel, difference)
        ratio = ratio_of(ours.loss, theirs.loss)
        self._note(number, Phase.FORWARD, LOSS, difference, allowed.first, ratio)

    def _gradients(self, number: int, ours: Step, theirs: Step, tolerance: float) -> None:
        small = _rounded_gradient(theirs)
        worst, name = worst_difference(ours.gradients, theirs.gradients, small)
        if number == 1:
            self.result.max_grad_rel = worst
        else:
            self.result.max_later_grad_rel = max(self.result.max_later_grad_rel, worst)
        if worst > tolerance and self.result.first_divergence is None:
            ratio = _ratio_of_tensors(name, ours.gradients, theirs.gradients)
            evidence = gradient_evidence(name, ratio, ours, theirs)
            self._note(number, Phase.GRADIENT, name, worst, tolerance, ratio, evidence)

    def _norm(self, number: int, ours: Step, theirs: Step, tolerance: float) -> None:
        difference = relative(ours.grad_norm, theirs.grad_norm)
        self.result.max_norm_rel = max(self.result.max_norm_rel, difference)
        ratio = ratio_of(ours.grad_norm, theirs.grad_norm)
        evidence = Evidence(squares=squares(theirs) if difference > tolerance else {})
        self._note(number, Phase.NORM, "grad_norm", difference, tolerance, ratio, evidence)

    def _clip(self, number: int, ours: Step, theirs: Step, tolerance: float) -> None:
        if not ours.clipped or not theirs.clipped:
            return
        small = _rounded_gradient(theirs)
        worst, name = worst_difference(ours.clipped, theirs.clipped, small)
        ratio = _ratio_of_tensors(name, ours.clipped, theirs.clipped)
        factor = constant_ratio(theirs.clipped.get(name), theirs.gradients.get(name))
        evidence = Evidence(expected_clip=factor)
        self._note(number, Phase.CLIP, name, worst, tolerance, ratio, evidence)

    def _update(self, number: int, ours: Step, theirs: Step, tolerance: float) -> None:
        worst, name = worst_difference(ours.weights, theirs.weights)
        self.result.max_weight_rel = max(self.result.max_weight_rel, worst)
        if worst > tolerance:
            ratio = self._ratio_of_updates(name, ours, theirs)
            self._note(number, Phase.UPDATE, name, worst, tolerance, ratio)

    def _ratio_of_updates(self, name: str, ours: Step, theirs: Step) -> float | None:
        """The factor between what the step added: to this parameter, else to most of them all.

        Not to every element: decay adds its own, and gradients that are truly zero (of key
        biases, say) make updates of rounding.
        """
        last = self.last or (None, None)
        mine, wanted = _updates(ours, last[0]), _updates(theirs, last[1])
        own = constant_ratio(mine.get(name), wanted.get(name), spread=0.02, share=0.6)
        if own is not None:
            return own
        found = [
            constant_ratio(mine.get(other), update, spread=0.02, share=0.6)
            for other, update in wanted.items()
        ]
        ratios = torch.tensor([ratio for ratio in found if ratio is not None])
        if not len(ratios) or 2 * len(ratios) < len(wanted):
            return None
        return constant_ratio(ratios, torch.ones_like(ratios), spread=0.02, share=0.6)

    def _copies(self, number: int, differing: tuple[str, ...]) -> None:
        if differing:
            self.result.copies_bit_equal = False
            self._note(number, Phase.COPIES, differing[0], float("inf"), 0.0, None)

    def _router_biases(self, number: int, ours: Step, theirs: Step) -> None:
        """Biases move by a fixed rate in the direction of a sign: equal counts, equal biases."""
        difference, name = worst_difference(ours.router_biases, theirs.router_biases)
        self._note(number, Phase.ROUTER_BIAS, name, difference, 1e-5, None)

    def _compare_evaluations(
        self, number: int, when: str, ours: float | None, theirs: float | None, tolerance: float
    ) -> None:
        if ours is None or theirs is None:
            return
        difference = relative(ours, theirs)
        self.result.max_evaluation_rel = max(self.result.max_evaluation_rel, difference)
        ratio = ratio_of(ours, theirs)
        self._note(number, Phase.EVALUATION, when, difference, tolerance, ratio)

    def _note(
        self,
        step: int,
        phase: Phase,
        name: str,
        difference: float,
        tolerance: float,
        ratio: float | None,
        evidence: Evidence | None = None,
    ) -> None:
        if self.result.first_divergence is None and difference > tolerance:
            self.result.first_divergence = Divergence(
                step, phase, name, difference, tolerance, ratio, evidence or Evidence()
            )


def _updates(step: Step, last: Step | None) -> Tensors:
    """What a step added to each parameter."""
    before = step.weights_before if last is None else last.weights
    return {
        name: weight - before[name]
        for name, weight in step.weights.items()
        if name in before and before[name].shape == weight.shape
    }


def _ratio_of_tensors(name: str, ours: Tensors, theirs: Tensors) -> float | None:
    return constant_ratio(ours.get(name), theirs.get(name))
