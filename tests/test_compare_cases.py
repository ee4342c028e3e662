"""Reports of people who compare runs, each with its right answer, on the files in data/runs."""

from __future__ import annotations

from typing import Any

import pytest

from mfsdp_cli.compare.compare_paths import compare_paths
from mfsdp_cli.compare.document import document
from mfsdp_cli.compare.judge import Policy
from mfsdp_cli.compare.readers import read_run
from mfsdp_cli.compare.run import Axis
from mfsdp_cli.errors import MfsdpError
from tests.helpers.runs import DATA


def judged(a: str, b: str, axis: Axis = Axis.STEP) -> dict[str, Any]:
    return document(compare_paths([str(DATA / a), str(DATA / b)], Policy(axis=axis)))


def test_c01_a_nan_loss_leaves_no_loss_field() -> None:
    found = judged("c01_healthy.log", "c01_nan_omitted.log")
    a, b = found["runs"]
    assert (a["first_step"], a["last_step"], b["first_step"], b["last_step"]) == (1, 6, 1, 6)
    assert (a["missing"] + a["nan"], b["missing"] + b["nan"]) == (0, 3)
    train = found["train"]
    assert (train["common"], train["max_abs"], train["first_mismatch_step"]) == (3, 0.0, 4)
    assert (train["only_a"], train["only_b"]) == (0, 0)
    assert found["ok"] is found["verdict"]["pass"] is False
    assert found["verdict"]["reasons"] == ["B: 3 of 6 training losses are missing (step 4-6)"]


def test_c02_skipped_and_nan_counters() -> None:
    found = judged("c02_fp16_skips.log", "c02_fp16_skips.log")
    run = found["runs"][0]
    assert (run["skipped"], run["nan"], run["train_points"], run["missing"]) == (3, 1, 3, 0)
    assert found["train"]["common"] == 3
    assert found["ok"] is False
    assert "A: the logger counted 1 NaN iterations" in found["verdict"]["reasons"]


def test_c06_every_point_of_an_event_file() -> None:
    train = read_run(str(DATA / "c06_tb_12000")).train
    assert train.points == 12_000
    assert max(train.finite(), key=lambda point: point[1]) == (7777, 99.0)


def test_c07_tags_are_not_mixed_up() -> None:
    run = read_run(str(DATA / "c07_tb_tags"))
    assert (run.train_name, run.eval_name) == ("lm loss", "lm loss validation")
    assert list(run.train.steps) == list(range(1, 11))
    assert list(run.eval.steps) == [5, 10]
    assert list(run.eval.values) == pytest.approx([4.7, 4.2])


def test_c08_several_event_files() -> None:
    run = read_run(str(DATA / "c08_tb_multi"))
    assert list(run.train.steps) == list(range(1, 101))
    assert (run.repeated_steps, run.train.repeated) == (10, tuple(range(41, 51)))
    assert dict(run.train.finite())[45] == pytest.approx(5.555)


def test_c09_wandb_history() -> None:
    found = judged("c09_wandb_history.jsonl", "c09_wandb_history.jsonl")
    run = found["runs"][0]
    assert (run["train_points"], run["nan"], run["inf"], run["missing"]) == (4, 1, 1, 0)
    assert run["eval_points"] == 1
    assert found["train"]["common"] == 2
    assert found["ok"] is False


def test_c11_steps_that_do_not_meet() -> None:
    found = judged("c11_a.jsonl", "c11_b.jsonl")
    assert found["ok"] is False
    assert found["train"]["common"] == 0
    assert found["verdict"]["reasons"] == [
        "no common step of the training losses: A has 10 from 10 to 100 and B has 10 from 5 to 95"
    ]


def test_c11_different_lengths() -> None:
    found = judged("c11_a.jsonl", "c11_c.jsonl")
    train = found["train"]
    assert (train["common"], train["only_a"], train["only_b"]) == (5, 5, 1)
    assert (train["max_abs"], train["first_mismatch_step"]) == (0.0, None)
    assert found["ok"] is True
    assert "A ends at step 100, B at step 120" in found["warnings"]


def test_c12_the_same_end_and_another_middle() -> None:
    found = judged("c12_a.jsonl", "c12_b.jsonl")
    train = found["train"]
    assert found["ok"] is False
    assert (train["max_abs"], train["max_abs_step"]) == (0.5, 5)
    assert train["mean_abs"] == pytest.approx(0.05)
    assert train["first_mismatch_step"] == 5


def test_c13_other_loggers() -> None:
    titan = read_run(str(DATA / "c13_titan.log"))
    assert dict(titan.train.finite()) == {1: 8.0401, 2: 7.7477, 3: 7.0176}
    swift = read_run(str(DATA / "c13_swift.jsonl"))
    assert list(swift.train.steps) == [601, 602, 603]


@pytest.mark.parametrize("name", ["c13_hf.log", "c13_nemo_tqdm.log"])
def test_c13_loggers_without_a_reader_are_refused(name: str) -> None:
    with pytest.raises(MfsdpError, match=r"MF601.*looked for"):
        read_run(str(DATA / name))


def test_c15_validation_lines() -> None:
    found = judged("c15_val.log", "c15_val_b.log")
    assert found["eval"]["points"] == [
        {"step": 500, "a": 3.05, "b": 3.05},
        {"step": 1000, "a": 2.87, "b": 2.9},
    ]
    assert found["eval"]["max_abs"] == pytest.approx(0.03)
    assert (found["judged"], found["ok"]) == ("eval", False)


def test_c16_batch_sizes_by_step() -> None:
    found = judged("c16_gbs256.log", "c16_gbs512.log")
    train = found["train"]
    assert train["common"] == 4
    assert train["max_abs"] == pytest.approx(0.4)
    assert train["mean_abs"] == pytest.approx(0.25)
    assert any("256" in text and "512" in text for text in found["warnings"])
    assert found["ok"] is False


def test_c16_batch_sizes_by_samples() -> None:
    (comparison,) = compare_paths(
        [str(DATA / "c16_gbs256.log"), str(DATA / "c16_gbs512.log")], Policy(axis=Axis.SAMPLES)
    )
    judged_series = comparison.train
    assert list(judged_series.b.steps) == [512, 1024, 1536, 2048]
    assert judged_series.alignment.common == 4
    assert judged_series.alignment.max_abs == 0.0
    assert comparison.verdict.passed
    assert any("256" in text for text in document([comparison])["warnings"])


def test_c19_evaluations_at_different_steps() -> None:
    evaluations = judged("c25_a.jsonl", "c25_b.jsonl")["eval"]
    assert [point["step"] for point in evaluations["points"]] == [500, 1000]
    assert evaluations["max_abs"] == pytest.approx(0.03)
    assert (evaluations["max_abs_step"], evaluations["mean_abs"]) == (1000, pytest.approx(0.015))
    assert (evaluations["only_a"], evaluations["only_b"]) == (8, 2)


def test_c19_a_constant_ratio_is_shown() -> None:
    found = judged("c25_a.jsonl", "c26_b.jsonl")
    assert found["ok"] is False
    assert any("A / B is 4 at every common point" in text for text in found["verdict"]["reasons"])
