from __future__ import annotations

from mfsdp_cli.compare.run import Axis, Progress, Run
from mfsdp_cli.compare.series import SeriesBuilder


def test_progress_places_the_steps_that_say_it_and_those_between() -> None:
    progress = Progress()
    for step, total in ((10, 640), (20, 1280)):
        progress.add(step, total)
    assert progress.growths() == {64}
    assert (progress.at(10), progress.at(15)) == (640, None)
    progress.growth = 64
    assert (progress.at(15), progress.at(25)) == (960, 1600)


def test_progress_of_a_resumed_run_forgets_what_was_done_again() -> None:
    progress = Progress()
    for step, total in ((1, 8), (2, 16), (3, 24), (2, 20), (3, 32)):
        progress.add(step, total)
    assert [progress.at(step) for step in (1, 2, 3)] == [8, 20, 32]
    assert progress.growths() == {12}


def test_progress_that_does_not_grow_is_of_no_use() -> None:
    progress = Progress()
    for step in (1, 2, 3):
        progress.add(step, 1024)
    assert (progress.at(2), progress.growths()) == (None, set())


def test_progress_from_the_batch_size_alone() -> None:
    assert Progress(growth=8).at(5) == 40
    assert Progress().at(5) is None


def test_a_series_on_another_axis() -> None:
    builder = SeriesBuilder()
    for step in (1, 2, 3):
        builder.add(step, 5.0 - step)
    run = Run("a", "jsonl", train=builder.finish())
    run.samples.add(1, 256)
    run.samples.add(3, 700)
    placed, lost = run.on_axis(Axis.SAMPLES, run.train)
    assert (list(placed.finite()), lost) == ([(256, 4.0), (700, 2.0)], 1)
    assert run.on_axis(Axis.STEP, run.train) == (run.train, 0)
    placed, lost = run.on_axis(Axis.TOKENS, run.train)
    assert (len(placed), lost) == (0, 3)


def test_counts_of_the_document() -> None:
    builder = SeriesBuilder()
    builder.add(1, float("nan"))
    builder.add(2, float("inf"))
    builder.add_gap(3)
    builder.add(4, 5.0)
    builder.add(4, 4.0)
    run = Run("a", "jsonl", train=builder.finish(), skipped=2, nan_iterations=1, damaged=1)
    assert run.to_json() == {
        "path": "a",
        "format": "jsonl",
        "train_points": 3,
        "eval_points": 0,
        "nan": 2,
        "inf": 1,
        "missing": 2,
        "skipped": 2,
        "repeated_steps": 1,
        "first_step": 1,
        "last_step": 4,
    }
