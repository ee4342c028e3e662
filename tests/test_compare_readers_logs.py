"""The text logs of Megatron and torchtitan."""

from __future__ import annotations

from pathlib import Path

import pytest

from mfsdp_cli.compare.readers import read_run
from mfsdp_cli.compare.run import Run
from tests.helpers.runs import DATA, megatron_line


def read(tmp_path: Path, text: str, metric: str | None = None) -> Run:
    path = tmp_path / "a.log"
    path.write_text(text)
    return read_run(str(path), metric)


@pytest.mark.parametrize(
    "prefix", ["", "[2026-05-18 16:04:41.338] ", "[default7]:", "12: ", "node1: [rank0]: "]
)
def test_time_stamps_and_launcher_prefixes(tmp_path: Path, prefix: str) -> None:
    run = read(tmp_path, "".join(prefix + megatron_line(s, 5.0 - s) for s in (1, 2)))
    assert list(run.train.finite()) == [(1, 4.0), (2, 3.0)]
    assert run.batch_sizes == (64,)
    assert (run.samples.at(1), run.samples.at(2)) == (64, 128)


def test_counters_add_up(tmp_path: Path) -> None:
    text = megatron_line(10, 5.0, number_of_skipped_iterations=2, number_of_nan_iterations=1)
    text += megatron_line(20, 4.0, number_of_skipped_iterations=1, number_of_nan_iterations=0)
    run = read(tmp_path, text)
    assert (run.skipped, run.nan_iterations, run.nan) == (3, 1, 1)
    text = megatron_line(10, 5.0, number_of_skipped_iterations="nan", number_of_nan_iterations="x")
    assert read(tmp_path, text).skipped == 0


def test_a_line_without_the_loss_is_missing_and_not_zero(tmp_path: Path) -> None:
    run = read(tmp_path, megatron_line(1) + megatron_line(2, 5.0) + megatron_line(3))
    assert (run.train.missing(), run.train.nan(), run.train.points) == ([1, 3], [], 1)
    assert run.notes == []


def test_a_resumed_line_without_the_loss_hides_the_earlier_value(tmp_path: Path) -> None:
    text = "".join(megatron_line(step, 5.0) for step in (1, 2, 3)) + megatron_line(3)
    run = read(tmp_path, text)
    assert (run.train.missing(), run.train.points) == ([3], 2)


def test_a_run_whose_every_loss_is_missing(tmp_path: Path) -> None:
    run = read(tmp_path, megatron_line(1) + megatron_line(2))
    assert (run.train.missing(), run.train.points, run.last_step) == ([1, 2], 0, 2)


def test_a_nan_norm_beside_a_missing_loss_is_said(tmp_path: Path) -> None:
    run = read(tmp_path, megatron_line(1, 5.0) + megatron_line(2, grad_norm="nan"))
    assert run.notes == [
        "1 lines without lm loss have a NaN gradient norm: "
        "Megatron leaves the loss out once it is NaN"
    ]


def test_losses_that_are_zero_or_negative_are_values(tmp_path: Path) -> None:
    run = read(tmp_path, megatron_line(1, 0.0) + megatron_line(2, -1.5))
    assert list(run.train.finite()) == [(1, 0.0), (2, -1.5)]


def test_evaluations_in_old_and_new_words(tmp_path: Path) -> None:
    text = (
        megatron_line(10, 5.0)
        + " validation loss at iteration 10 | lm loss value: 4.5E+00 | lm loss PPL: 9.0E+01 | \n"
        + "[2026-05-18 16:04:41] validation loss at iteration 20 on validation set | "
        + "lm loss value: 4.0E+00 | lm loss PPL: 5.0E+01 | mtp_1 loss value: 7.0E+00 | \n"
        + " validation loss at iteration 20 on test set | lm loss value: 1.0E+00 | \n"
        + megatron_line(30, 4.0)
        + " validation loss at the end of training for val data | lm loss value: 3.5E+00 | \n"
        + " validation loss at the end of training for test data | lm loss value: 2.0E+00 | \n"
    )
    run = read(tmp_path, text)
    assert list(run.eval.finite()) == [(10, 4.5), (20, 4.0), (30, 3.5)]
    assert run.eval_name == "lm loss validation"
    assert list(read(tmp_path, text, "mtp_1 loss validation").eval.finite()) == []
    assert list(read(tmp_path, text, "mtp_1 loss validation").train.finite()) == [(20, 7.0)]


def test_a_nan_evaluation(tmp_path: Path) -> None:
    text = megatron_line(10, 5.0) + " validation loss at iteration 10 | lm loss value: nan | \n"
    assert read(tmp_path, text).eval.nan() == [10]


def test_a_cut_last_line_is_left_out_wherever_it_ends(tmp_path: Path) -> None:
    first, second = megatron_line(1, 5.0), megatron_line(2, 4.75)
    whole = second.rstrip()
    for end in range(len("iteration        2/    1000 |") + 1, len(whole) - 1):
        run = read(tmp_path, first + second[:end])
        assert list(run.train.finite()) == [(1, 5.0)], second[:end]
        assert run.missing == 0
        assert run.notes in ([], ["the last line is cut off and was left out"])
    assert list(read(tmp_path, first + whole).train.finite()) == [(1, 5.0), (2, 4.75)]


def test_the_arguments_that_megatron_prints_are_settings(tmp_path: Path) -> None:
    text = (
        "  seed ............................................ 1234\n"
        "  seq_length ...................................... 4096\n"
        "  data_path ....................................... None\n"
        "  global_batch_size ............................... 64\n"
    )
    run = read(tmp_path, text + megatron_line(1, 5.0) + megatron_line(2, 5.0))
    assert run.settings == {"seed": "1234", "seq_length": "4096", "global_batch_size": "64"}
    assert run.tokens.at(2) == 2 * 64 * 4096


def test_a_metric_of_the_log(tmp_path: Path) -> None:
    run = read(tmp_path, megatron_line(1, 5.0, mtp_1_loss="7.5E+00"), "mtp_1 loss")
    assert list(run.train.finite()) == [(1, 7.5)]


def test_torchtitan_evaluations_and_prefixes(tmp_path: Path) -> None:
    text = (
        "[titan] step:  1  loss:  8.0000  grad_norm:  0.8  memory: 1GiB\n"
        "[titan] validate step:  1  loss:  7.5000  memory: 1GiB\n"
        "[titan] step:  2  loss:  nan  grad_norm:  nan  memory: 1GiB\n"
        "[titan] step: 3  loss: 6.5"
    )
    run = read(tmp_path, text)
    assert (list(run.train.finite()), run.train.nan()) == ([(1, 8.0)], [2])
    assert list(run.eval.finite()) == [(1, 7.5)]
    assert run.notes == ["the last line is cut off and was left out"]


def test_torchtitan_colors(tmp_path: Path) -> None:
    run = read_run(str(DATA / "c13_titan.log"))
    assert list(run.train.finite()) == [(1, 8.0401), (2, 7.7477), (3, 7.0176)]
