from __future__ import annotations

import pytest

from mfsdp_cli.compare.names import Choice, Role, alias, choose, normal, role, same_name


@pytest.mark.parametrize(
    "name",
    [
        *("loss", "lm loss", "train/loss", "train_loss", "training loss", "reduced_train_loss"),
        *("loss/train", "ce_loss", "loss_metrics/global_avg_loss"),
    ],
)
def test_training_losses(name: str) -> None:
    assert role(name) is Role.TRAIN


@pytest.mark.parametrize(
    "name",
    [
        *("val_loss", "eval_loss", "lm loss validation", "validation/loss", "eval/lm loss"),
        *("valid_loss", "validation_metrics/loss", "loss/val"),
    ],
)
def test_evaluation_losses(name: str) -> None:
    assert role(name) is Role.EVAL


@pytest.mark.parametrize(
    "name",
    [
        *("mtp_1 loss", "load_balancing_loss", "z_loss", "aux_loss", "loss-scale", "loss scale"),
        *("lm loss vs samples", "lm loss validation vs samples", "lm loss validation ppl"),
        *("lm loss test", "test_loss", "eval_runtime", "grad_norm", "learning_rate", "step"),
        *("mtp_1 loss validation", "loss_metrics/global_max_loss", "seq_load_balancing_loss"),
    ],
)
def test_neither(name: str) -> None:
    assert role(name) is Role.OTHER


def test_separators_and_case_make_no_other_name() -> None:
    assert normal("train/Grad-Norm") == normal("train grad_norm") == "train grad norm"


def test_choose_prefers_the_language_model_loss() -> None:
    names = ["loss", "lm loss", "val_loss", "mtp_1 loss"]
    assert choose(names, Role.TRAIN) == Choice("lm loss")
    assert choose(names, Role.EVAL) == Choice("val_loss")


def test_choose_takes_the_only_unknown_loss() -> None:
    assert choose(["nll_loss", "aux_loss"], Role.TRAIN) == Choice("nll_loss")


def test_choose_names_rivals_rather_than_guess() -> None:
    assert choose(["nll_loss", "ce_loss"], Role.TRAIN) == Choice(rivals=("nll_loss", "ce_loss"))
    assert choose([], Role.TRAIN) == Choice()


def test_a_metric_is_found_whatever_its_separators() -> None:
    names = {"grad-norm": None, "lm loss": None}
    assert same_name("grad_norm", names) == "grad-norm"
    assert same_name("lm loss", names) == "lm loss"
    assert same_name("nope", names) is None


def test_aliases() -> None:
    assert alias("loss") is Role.TRAIN
    assert alias("validation") is Role.EVAL
    assert alias("eval_loss") is Role.EVAL
    assert alias("grad_norm") is None
