"""Bubbles and live forwards, exactly; times with given costs."""

from fractions import Fraction

import pytest

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.schedule.orders import compute_orders
from mfsdp_cli.schedule.simulate import peak_in_flight, simulate
from tests.helpers.schedules import rows, schedule, spec

# (pp, microbatches, vpp, group): bubble over the step, and over the ideal, live forwards by rank
BUBBLES = [
    ((4, 8, 1, 4), Fraction(3, 11), 0.375, [4, 3, 2, 1]),
    ((4, 8, 2, 4), Fraction(3, 19), 0.1875, [11, 9, 7, 5]),
    ((4, 4, 2, 4), Fraction(3, 11), 0.375, [8, 8, 7, 5]),
    ((8, 64, 5, 8), Fraction(7, 327), 0.021875, [47, 45, 43, 41, 39, 37, 35, 33]),
    ((2, 5, 2, 3), Fraction(1, 11), 0.1, [6, 4]),
    ((8, 1, 1, 8), Fraction(7, 8), 7.0, [1] * 8),
    ((4, 3, 1, 4), Fraction(1, 2), 1.0, [3, 3, 2, 1]),
    ((2, 4, 2, 2), Fraction(1, 9), 0.125, [5, 3]),
    ((1, 6, 1, 1), Fraction(0), 0.0, [1]),
]


@pytest.mark.parametrize(("sizes", "fraction", "ratio", "live"), BUBBLES)
def test_bubble_and_live_forwards(sizes, fraction, ratio, live):
    pp, microbatches, vpp, group = sizes
    built = schedule(pp, vpp, microbatches, group_size=group)
    assert built.bubble_fraction == float(fraction)
    assert built.bubble_ratio == ratio
    assert built.in_flight_chunks == live


@pytest.mark.parametrize("backward", [1, 2, 3])
@pytest.mark.parametrize(("sizes", "fraction", "ratio", "live"), BUBBLES)
def test_the_bubble_does_not_depend_on_the_backwards_length(sizes, fraction, ratio, live, backward):
    pp, microbatches, vpp, group = sizes
    given = spec(pp, vpp, microbatches, group_size=group)
    timeline = simulate(
        compute_orders(given),
        rank_of=given.rank_of,
        num_stages=given.num_stages,
        backward=[backward] * given.num_stages,
    )
    assert timeline.bubble_fraction == float(fraction)
    assert timeline.bubble_ratio == ratio


def test_uneven_costs_and_transfer_times():
    """PP2, two microbatches: rank 1's forward waits for 3 + 1, rank 0's backward for the way back.

    ::

        rank 0  F0 0-3   F1 3-6                 B0 11-14 B1 17-20
        rank 1          F0 4-6   B0 6-10 F1 10-12 B1 12-16
    """
    given = spec(2, 1, 2)
    timeline = simulate(
        compute_orders(given),
        rank_of=given.rank_of,
        num_stages=2,
        forward=[3, 2],
        backward=[3, 4],
        p2p=1,
    )
    assert timeline.starts == [[0, 3, 11, 17], [4, 6, 10, 12]]
    assert timeline.ends == [[3, 6, 14, 20], [6, 10, 12, 16]]
    assert timeline.makespan == 20
    assert timeline.busy == 24
    assert timeline.bubble_fraction == 16 / 40


def test_stages_of_one_rank_have_no_transfer_time():
    given = spec(1, 3, 2, group_size=1)
    timeline = simulate(compute_orders(given), rank_of=given.rank_of, num_stages=3, p2p=100)
    assert timeline.makespan == 2 * 3 * (1 + 2)


def test_split_backward_passes_the_gradient_on_after_its_first_half():
    orders = rows("0F0 0I0 0W0\n1F0 1I0 1W0")
    timeline = simulate(orders, rank_of=lambda stage: stage, num_stages=2)
    assert timeline.ends == [[1, 4.0, 5.0], [2, 3.0, 4.0]]
    assert peak_in_flight(orders) == [1, 1]


def test_live_forwards_of_a_split_backward_end_with_the_weight_gradient():
    assert peak_in_flight(rows("0F0 0I0 0F1 0W0 0I1 0W1")) == [2]


def test_ranks_that_wait_for_ever():
    orders = rows("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0")
    with pytest.raises(MfsdpError, match="rank 0 waits in 0B0"):
        simulate(orders, rank_of=lambda stage: stage, num_stages=2)


def test_nothing_to_run_has_no_bubble():
    timeline = simulate([[], []], rank_of=lambda stage: stage, num_stages=0)
    assert (timeline.makespan, timeline.bubble_fraction, timeline.bubble_ratio) == (0, 0, 0)
