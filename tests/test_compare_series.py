from __future__ import annotations

import math

from mfsdp_cli.compare.series import GAP, UNSURE_GAP, Series, SeriesBuilder


def build(*points: tuple[int, float]) -> Series:
    builder = SeriesBuilder()
    for step, value in points:
        builder.add(step, value)
    return builder.finish()


def test_points_in_order_stay_as_they_are() -> None:
    series = build((1, 5.0), (2, 4.0), (10, 3.0))
    assert list(series.steps) == [1, 2, 10]
    assert list(series.values) == [5.0, 4.0, 3.0]
    assert (series.points, series.repeated, series.stale_after) == (3, (), None)


def test_the_last_value_of_a_repeated_step_counts() -> None:
    series = build((1, 5.0), (2, 4.0), (3, 3.0), (2, 4.5), (3, 3.5), (4, 2.5))
    assert list(series.finite()) == [(1, 5.0), (2, 4.5), (3, 3.5), (4, 2.5)]
    assert series.repeated == (2, 3)
    assert series.stale_after is None


def test_three_times_the_same_step_is_one_repeated_step() -> None:
    assert build((1, 1.0), (1, 2.0), (1, 3.0)).repeated == (1,)


def test_a_record_that_went_back_and_ended_early_is_known() -> None:
    assert build((1, 5.0), (2, 4.0), (3, 3.0), (2, 4.5)).stale_after == 2


def test_nan_infinite_and_missing_are_kept_apart() -> None:
    builder = SeriesBuilder()
    for step, value in ((1, 5.0), (2, math.nan), (3, math.inf), (4, -math.inf)):
        builder.add(step, value)
    builder.add_gap(5)
    series = builder.finish()
    assert (series.nan(), series.infinite(), series.missing()) == ([2], [3, 4], [5])
    assert (len(series), series.points) == (5, 4)
    assert list(series.finite()) == [(1, 5.0)]


def test_a_gap_after_a_value_replaces_it() -> None:
    builder = SeriesBuilder()
    builder.add(1, 5.0)
    builder.add_gap(1)
    series = builder.finish()
    assert (series.missing(), series.points, series.repeated) == ([1], 0, (1,))


def test_an_unsure_gap_never_replaces_a_value() -> None:
    builder = SeriesBuilder()
    builder.add_gap(1, UNSURE_GAP)
    builder.add(1, 5.0)
    builder.add_gap(1, UNSURE_GAP)
    series = builder.finish()
    assert (series.missing(), series.points, series.repeated) == ([], 1, ())


def test_unsure_gaps_between_rarer_values_are_another_cadence() -> None:
    builder = SeriesBuilder()
    for step in range(1, 41):
        if step % 10 == 0 and step != 30:
            builder.add(step, 5.0)
        else:
            builder.add_gap(step, UNSURE_GAP)
    # Step 30 was due: the values come every tenth step. (The distance of values is 10 and 20.)
    assert builder.finish().missing() == [30]


def test_sure_gaps_are_never_another_cadence() -> None:
    builder = SeriesBuilder()
    for step in range(1, 7):
        if step % 2:
            builder.add(step, 5.0)
        else:
            builder.add_gap(step, GAP)
    assert builder.finish().missing() == [2, 4, 6]


def test_interval_is_the_commonest_distance() -> None:
    assert build((10, 1.0), (20, 1.0), (30, 1.0), (35, 1.0)).interval() == 10
    assert build((10, 1.0)).interval() is None


def test_an_empty_series() -> None:
    series = Series()
    assert (len(series), series.points, series.interval()) == (0, 0, None)
