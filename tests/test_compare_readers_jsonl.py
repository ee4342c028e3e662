from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mfsdp_cli.compare.readers import read_run
from mfsdp_cli.compare.run import Run
from tests.helpers.runs import losses, run_folder, write_rows


def read(tmp_path: Path, *rows: dict[str, Any] | str, metric: str | None = None) -> Run:
    """A run from rows, or from lines as they are."""
    path = tmp_path / "a.jsonl"
    if rows and isinstance(rows[0], str):
        path.write_text("".join(map(str, rows)))
    else:
        write_rows(path, rows)  # type: ignore[arg-type]
    return read_run(str(path), metric)


@pytest.mark.parametrize(
    "step",
    [
        {"step": 7},
        {"iteration": 7},
        {"global_step": 7.0},
        {"iter": "7"},
        {"trainer/global_step": 7},
        {"global_step/max_steps": "7/100"},
        {"_step": 7},
        {"_step": 99, "train/global_step": 7},
        {"_step": 99, "step": 7},
    ],
)
def test_the_many_names_of_a_step(tmp_path: Path, step: dict[str, Any]) -> None:
    assert list(read(tmp_path, {**step, "loss": 5.0}).train.finite()) == [(7, 5.0)]


@pytest.mark.parametrize(
    "loss",
    [
        {"loss": 5.0},
        {"train/loss": 5.0},
        {"lm loss": "5.0"},
        {"train": {"loss": 5.0}},
        {"loss": 9.0, "lm loss": 5.0},
        {"loss": 5.0, "mtp_1 loss": 9.0, "load_balancing_loss": 1.0, "test_loss": 2.0},
    ],
)
def test_the_many_names_of_a_training_loss(tmp_path: Path, loss: dict[str, Any]) -> None:
    assert list(read(tmp_path, {"step": 1, **loss}).train.finite()) == [(1, 5.0)]


@pytest.mark.parametrize(
    "row",
    [
        {"val_loss": 3.0},
        {"eval/loss": 3.0},
        {"lm loss validation": 3.0, "lm loss validation ppl": 20.0},
        {"split": "val", "loss": 3.0},
        {"phase": "eval", "loss": 3.0},
        {"kind": "eval", "loss": 3.0},
    ],
)
def test_the_many_ways_to_say_evaluation(tmp_path: Path, row: dict[str, Any]) -> None:
    run = read(tmp_path, {"step": 1, "loss": 5.0}, {"step": 10, **row})
    assert list(run.train.finite()) == [(1, 5.0)]
    assert list(run.eval.finite()) == [(10, 3.0)]


def test_a_test_set_is_neither(tmp_path: Path) -> None:
    run = read(tmp_path, {"step": 1, "loss": 5.0}, {"step": 2, "split": "test", "loss": 3.0})
    assert (run.train.points, run.eval.points) == (1, 0)


def test_literals_and_texts_that_are_not_finite(tmp_path: Path) -> None:
    run = read(
        tmp_path,
        '{"step": 1, "loss": NaN}\n',
        '{"step": 2, "loss": Infinity}\n',
        '{"step": 3, "loss": "-inf"}\n',
        '{"step": 4, "loss": "nan"}\n',
        '{"step": 5, "loss": 5.0}\n',
    )
    assert (run.train.nan(), run.train.infinite(), run.train.points) == ([1, 4], [2, 3], 5)


@pytest.mark.parametrize("loss", ["null", '"x"', "true", "[1.0]", "1e400000"])
def test_what_is_no_number_is_missing_or_infinite(tmp_path: Path, loss: str) -> None:
    run = read(tmp_path, f'{{"step": 1, "loss": {loss}}}\n', '{"step": 2, "loss": 5.0}\n')
    assert run.train.missing() + run.train.infinite() == [1]
    assert list(run.train.finite()) == [(2, 5.0)]


def test_a_record_without_its_loss_is_missing(tmp_path: Path) -> None:
    run = read(
        tmp_path,
        {"step": 1, "grad_norm": 1.0},
        {"step": 2, "loss": 5.0, "grad_norm": 1.0},
        {"step": 3, "grad_norm": 1.0},
    )
    assert (run.train.missing(), run.missing) == ([1, 3], 2)


def test_a_record_with_a_nan_norm_is_missing_whatever_the_cadence(tmp_path: Path) -> None:
    rows = [{"step": s, "grad_norm": 1.0, **({} if s % 10 else {"loss": 5.0})} for s in range(41)]
    assert read(tmp_path, *rows).train.missing() == []
    rows[33]["grad_norm"] = "NaN"
    assert read(tmp_path, *rows).train.missing() == [33]


def test_null_where_a_row_is_about_another_loss_is_no_missing_value(tmp_path: Path) -> None:
    run = read(
        tmp_path,
        {"step": 1, "loss": 5.0, "val_loss": None},
        {"step": 2, "loss": 4.0, "val_loss": 4.5},
        {"step": 3, "loss": None, "val_loss": 4.4},
    )
    assert (run.train.points, run.eval.points, run.missing) == (2, 2, 0)


def test_an_exported_table_with_null_in_every_other_column(tmp_path: Path) -> None:
    run = read(
        tmp_path,
        {"_step": 1, "lm loss": 5.0, "grad-norm": 1.0, "lm loss validation": None},
        {"_step": 2, "lm loss": None, "grad-norm": None, "lm loss validation": 4.5},
        {"_step": 3, "lm loss": None, "grad-norm": 1.0, "lm loss validation": None},
        {"_step": 4, "lm loss": 4.0, "grad-norm": 1.0, "lm loss validation": None},
    )
    assert (run.format, run.train.points, run.eval.points) == ("wandb-history", 2, 1)
    assert run.train.missing() == []  # step 3 is not due: losses come every third step


def test_a_row_that_lacks_the_step_key_of_its_loss_is_left_out(tmp_path: Path) -> None:
    run = read(
        tmp_path,
        {"_step": 10, "train/global_step": 1, "train/loss": 5.0},
        {"_step": 11, "train/loss": 99.0},
        {"_step": 12, "train/global_step": 2, "train/loss": 4.0},
    )
    assert list(run.train.finite()) == [(1, 5.0), (2, 4.0)]
    assert run.notes == ["1 rows have a loss but no step: left out"]


def test_a_summary_row_is_no_point(tmp_path: Path) -> None:
    run = read(
        tmp_path,
        {"step": 10, "loss": 5.0},
        {"step": 10, "train_runtime": 12.1, "train_loss": 0.98},
    )
    assert list(run.train.finite()) == [(10, 5.0)]
    assert run.repeated_steps == 0


def test_broken_rows_count_as_missing_and_a_cut_last_one_does_not(tmp_path: Path) -> None:
    run = read(
        tmp_path,
        '{"step": 1, "loss": 5.0}\n',
        '{"step": 2, "lo\n',
        "a stray message\n",
        '{"step": 3, "loss": 4.0}\n',
        '{"step": 4, "loss": 3.',
    )
    assert list(run.train.finite()) == [(1, 5.0), (3, 4.0)]
    assert (run.damaged, run.missing) == (1, 1)
    assert run.notes == [
        "the last line is cut off and was left out",
        "1 rows are broken JSON and count as missing",
    ]


def test_samples_tokens_and_batch_size(tmp_path: Path) -> None:
    run = read(
        tmp_path,
        {"step": 10, "loss": 5.0, "consumed_samples": 640, "tokens": 6400},
        {"step": 20, "loss": 4.0, "consumed_samples": 1280, "tokens": 12800},
    )
    assert run.batch_sizes == (64,)
    assert [run.samples.at(step) for step in (10, 15, 20)] == [640, 960, 1280]
    assert run.tokens.at(20) == 12800


def test_tokens_of_one_step_are_no_count_from_the_start(tmp_path: Path) -> None:
    rows = [{"step": s, "loss": 5.0, "tokens": 1024} for s in (1, 2, 3)]
    assert read(tmp_path, *rows).tokens.at(2) is None


def test_a_metric_by_name(tmp_path: Path) -> None:
    rows = [{"step": s, "loss": 5.0, "grad_norm": s / 2, "val_loss": 4.0} for s in (1, 2)]
    run = read(tmp_path, *rows, metric="grad-norm")
    assert (run.train_name, list(run.train.finite())) == ("grad_norm", [(1, 0.5), (2, 1.0)])
    assert run.eval.points == 0
    assert read(tmp_path, *rows, metric="validation").eval_name == "val_loss"
    assert read(tmp_path, *rows, metric="loss").eval_name is None


def test_our_own_rows(tmp_path: Path) -> None:
    train = {1: 5.0, 2: "nan", 3: "+inf", 4: None, 5: 4.0}
    run = read_run(str(run_folder(tmp_path / "run", train, {5: 4.5}, status="nan")))
    assert (run.train.nan(), run.train.infinite(), run.train.missing()) == ([2], [3], [4])
    assert list(run.eval.finite()) == [(5, 4.5)]
    assert (run.train_name, run.eval_name) == ("loss", "validation loss")
    assert run.status == "nan"


def test_our_metrics_without_an_end_are_of_a_run_that_goes_on(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", {1: 5.0}, status=None)
    assert read_run(str(folder / "metrics.jsonl")).status == "running"
    assert read_run(str(folder)).status == "running"


def test_a_resumed_run_has_the_status_of_its_last_part(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", {1: 5.0}, status="interrupted")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 2, "loss": 4.0}\n')
    assert read_run(str(folder / "metrics.jsonl")).status == "running"
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "end", "status": "completed"}\n')
    assert read_run(str(folder)).status == "completed"


def test_utf_16_as_some_shells_redirect(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"step": 1, "loss": 5.0}\n{"step": 2, "loss": 4.0}\n', encoding="utf-16")
    assert list(read_run(str(path)).train.finite()) == [(1, 5.0), (2, 4.0)]


def test_a_row_of_a_megabyte(tmp_path: Path) -> None:
    rows = [{"step": 1, "loss": 5.0, "weights": [0.5] * 200_000}, {"step": 2, "loss": 4.0}]
    assert list(read(tmp_path, *rows).train.finite()) == [(1, 5.0), (2, 4.0)]


def test_deep_and_huge_values_are_survived(tmp_path: Path) -> None:
    deep = '{"step": 1, "loss": ' + "[" * 100_000 + "]" * 100_000 + "}\n"
    huge = '{"step": ' + "9" * 10_000 + ', "loss": 5.0}\n'
    run = read(tmp_path, '{"step": 2, "loss": 4.0}\n', deep, huge)
    assert list(run.train.finite()) == [(2, 4.0)]
    assert run.damaged == 2


def test_a_repeated_step_of_a_file_of_losses(tmp_path: Path) -> None:
    path = losses(tmp_path / "a.jsonl", {1: 5.0, 2: 4.0})
    path.write_text(path.read_text() * 2)
    assert read_run(str(path)).repeated_steps == 2
