"""Which tokens count and what they weigh: by microbatch or by token, however a batch is cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mfsdp_cli.runtime.corpus import Corpus, load_corpus
from mfsdp_cli.runtime.data import Data
from mfsdp_cli.runtime.loss import MicrobatchLoss, weighed_mean, weighed_sum
from tests.helpers.alone import alone
from tests.helpers.plans import plan_of
from tests.helpers.ranks import run_ranks
from tests.helpers.training import SETTINGS, engine_of, largest_difference, reconnect, train

BY_TOKEN = replace(SETTINGS, calculate_per_token_loss=True, eod_mask_loss=True)
BY_MICROBATCH = replace(SETTINGS, eod_mask_loss=True)
CPU = torch.device("cpu")
STEPS = 3


def _microbatch(total: float, tokens: int) -> MicrobatchLoss:
    losses = torch.full((1, 12), total / max(tokens, 1))
    mask = (torch.arange(12) < tokens).float().view(1, 12)
    return MicrobatchLoss.of(losses, mask)


def _loss(*microbatches: MicrobatchLoss, per_token: bool) -> float:
    return float(weighed_mean(weighed_sum(microbatches, per_token=per_token, device=CPU)))


def test_the_worked_case_is_9_2_by_token_and_6_by_microbatch() -> None:
    one, other = _microbatch(2.0, 1), _microbatch(90.0, 9)
    assert _loss(one, other, per_token=True) == pytest.approx(9.2, rel=1e-6)
    assert _loss(one, other, per_token=False) == pytest.approx(6.0, rel=1e-6)
    # On two ranks: their sums are added before the division.
    parts = [weighed_sum([loss], per_token=True, device=CPU) for loss in (one, other)]
    assert float(weighed_mean(parts[0] + parts[1])) == pytest.approx(9.2, rel=1e-6)


def test_no_valid_token_is_a_loss_of_zero() -> None:
    for per_token in (False, True):
        assert _loss(_microbatch(5.0, 0), per_token=per_token) == 0.0
        assert _loss(per_token=per_token) == 0.0
    assert _loss(_microbatch(5.0, 0), _microbatch(90.0, 9), per_token=True) == pytest.approx(10.0)


# -- engines ---------------------------------------------------------------------------------

#: Engine, data-parallel size, micro batch, further sizes: the same global batch of 8, cut.
CUTS: list[tuple[str, str, dict[str, Any]]] = [
    ("mfsdp", "gpt2-tiny", {"dp": 4, "mbs": 1}),
    ("mfsdp", "gpt2-tiny", {"dp": 4, "mbs": 2}),
    ("mfsdp", "gpt2-tiny", {"pp": 2, "dp": 2, "mbs": 1}),
    ("mfsdp", "gpt2-tiny", {"pp": 2, "dp": 2, "mbs": 4}),
    ("mfsdp", "gpt2-tiny", {"pp": 2, "vpp": 2, "dp": 2, "mbs": 2, "gradient_reduction": "last"}),
    ("mfsdp", "gpt2-tiny", {"pp": 4, "dp": 1, "mbs": 2}),
    ("distopt", "gpt2-tiny", {"dp": 4, "mbs": 2}),
    ("distopt", "gpt2-tiny", {"pp": 2, "vpp": 2, "dp": 2, "mbs": 1}),
    ("mfsdp", "deepseek-v3-proxy-tiny", {"pp": 2, "dp": 2, "mbs": 1}),
    ("distopt", "deepseek-v3-proxy-tiny", {"pp": 2, "dp": 2, "mbs": 1}),
]


def _train_cuts(rank: int, world: int, folder: str, settings: Any) -> list[dict[str, Any]]:
    found = []
    for name, model, sizes in CUTS:
        if not settings.calculate_per_token_loss and sizes["mbs"] != 1:
            continue  # the mean over microbatches depends on what they are
        reference = torch.load(Path(folder, f"{model}.pt"), weights_only=False)
        plan = plan_of(model, **sizes)
        mine = train(engine_of(name, plan, reconnect(plan, engine=name), settings), STEPS)
        found.append(
            {
                "case": f"{name}, {model}, {sizes}",
                "steps": mine.steps,
                "expected": reference.steps,
                "evaluations": (mine.before, mine.after),
                "expected_evaluations": (reference.before, reference.after),
                "gradients": largest_difference(mine.gradients, reference.gradients),
                "weights": largest_difference(mine.weights, reference.weights),
            }
        )
    return found


@pytest.mark.parametrize("settings", [BY_TOKEN, BY_MICROBATCH], ids=["token", "microbatch"])
def test_every_engine_and_cut_equals_one_rank(settings: Any, tmp_path: Path) -> None:
    for model in ("gpt2-tiny", "deepseek-v3-proxy-tiny"):
        reference = train(engine_of("single", plan_of(model), alone(), settings), STEPS)
        torch.save(reference, tmp_path / f"{model}.pt")
    for found in run_ranks(4, _train_cuts, str(tmp_path), settings):
        for case in found:
            assert case["steps"][0] == pytest.approx(case["expected"][0], rel=1e-6), case
            for step, expected in zip(case["steps"], case["expected"], strict=True):
                assert step == pytest.approx(expected, rel=1e-5), case
            assert case["evaluations"] == pytest.approx(case["expected_evaluations"], rel=1e-5), (
                case
            )
            assert case["gradients"][0] < 1e-5, case
            assert case["weights"][0] < 1e-5, case


def test_one_rank_gives_one_result_however_it_accumulates() -> None:
    found = [
        train(engine_of("single", plan_of("gpt2-tiny", mbs=mbs), alone(), BY_TOKEN), 1)
        for mbs in (1, 2, 4, 8)
    ]
    for other in found[1:]:
        assert other.steps[0] == pytest.approx(found[0].steps[0], rel=1e-6)
        assert largest_difference(other.gradients, found[0].gradients)[0] < 1e-5
        assert (other.before, other.after) == pytest.approx(
            (found[0].before, found[0].after), rel=1e-6
        )


def test_the_two_weightings_differ_where_masks_are_uneven() -> None:
    plan = plan_of("gpt2-tiny")
    token, microbatch = (
        train(engine_of("single", plan, alone(), settings), 1)
        for settings in (BY_TOKEN, BY_MICROBATCH)
    )
    assert abs(token.steps[0][0] / microbatch.steps[0][0] - 1) > 1e-5
    assert largest_difference(token.gradients, microbatch.gradients)[0] > 1e-3
    assert token.before == pytest.approx(microbatch.before, rel=1e-6)  # evaluation is by token


@pytest.mark.parametrize("engine", ["single", "mfsdp", "distopt"])
@pytest.mark.parametrize("settings", [BY_TOKEN, BY_MICROBATCH], ids=["token", "microbatch"])
def test_a_step_without_valid_tokens_is_zero_not_nan(engine: str, settings: Any) -> None:
    plan = plan_of("gpt2-tiny", gbs=2)
    made = engine_of(engine, plan, alone(), settings)
    everything = Corpus(load_corpus([]).tokens, "here", torch.arange(2**25).numpy())
    made._data.corpus = everything  # type: ignore[attr-defined]
    assert made._data.training(1, 0).loss_mask.sum() == 0  # type: ignore[attr-defined]
    before = made.named_weights()
    result = made.train_step(1)
    assert (result.loss, result.grad_norm) == (0.0, 0.0)
    for name, weight in made.named_weights().items():
        assert weight.isfinite().all(), name
        assert torch.allclose(weight, before[name], rtol=1e-4), name  # decay alone
    made._data.corpus = load_corpus([])  # type: ignore[attr-defined]
    assert made.train_step(2).loss > 1.0


# -- masks -----------------------------------------------------------------------------------


def _data(corpus: Corpus, **changes: Any) -> Data:
    values: dict[str, Any] = {
        "vocab_size": 256,
        "seq_length": 4,
        "micro_batch_size": 2,
        "global_batch_size": 2,
        "seed": 5,
        "eod_mask_loss": True,
    }
    return Data(corpus, **{**values, **changes})


def test_positions_at_the_end_of_a_document_do_not_count(tmp_path: Path) -> None:
    """Files as documents: what a file's last byte is followed by is another file's first."""
    for number in range(40):
        (tmp_path / f"{number:02}").write_bytes(b"a" * (number % 5) + b"\n")
    corpus = load_corpus([str(tmp_path)])
    data = _data(corpus)
    masked = 0
    for kind in ("training", "evaluation"):
        for step in range(1, 5):
            batch = getattr(data, kind)(step, 0)
            assert torch.equal(batch.loss_mask == 0, batch.tokens == ord("\n"))
            masked += int((batch.loss_mask == 0).sum())
    assert masked > 8
    whole = _data(corpus, eod_mask_loss=False).training(1, 0).loss_mask
    assert torch.equal(whole, torch.ones(2, 4))
