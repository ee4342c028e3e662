"""Gathers: how many, never too many at a time, and as few as an exhaustive search finds."""

import random

import pytest

from mfsdp_cli.schedule.actions import COMPUTE, Action, Kind
from mfsdp_cli.schedule.orders import compute_orders
from mfsdp_cli.schedule.residency import Interval, add_unshard_reshard, residency
from tests.helpers.schedules import schedule, spec


def fewest_gathers(uses, slots, *, spare_previous):
    """Least gathers over all ways to evict; optionally a gather never takes the last use's slot."""
    best = {frozenset(): 0}
    for index, stage in enumerate(uses):
        after = {}
        for resident, count in best.items():
            for left in evictions(
                resident, stage, slots, uses[index - 1] if spare_previous else -1
            ):
                cost = count + (stage not in resident)
                state = left | {stage}
                after[state] = min(cost, after.get(state, cost))
        best = after
    return min(best.values())


def evictions(resident, stage, slots, spared):
    if stage in resident or len(resident) < slots:
        return [resident]
    return [resident - {victim} for victim in resident if victim != spared]


def stages_of(order):
    return [action.stage for action in order]


def test_worked_example():
    assert residency([0, 1, 0, 2, 0], 2) == [
        Interval(0, 0, 4),
        Interval(1, 1, 1),
        Interval(2, 3, 3),
    ]


@pytest.mark.parametrize("sizes", [(4, 4, 16), (8, 4, 32)])
def test_two_resident_chunks_take_20_gathers(sizes):
    assert schedule(*sizes, resident_chunks=2).gathers_per_step == [20] * sizes[0]


@pytest.mark.parametrize("sizes", [(4, 4, 16), (2, 3, 6)])
def test_no_resident_chunk_gathers_for_every_use(sizes):
    pp, vpp, microbatches = sizes
    built = schedule(*sizes, resident_chunks=0)
    assert built.gathers_per_step == [2 * microbatches * vpp] * pp


@pytest.mark.parametrize("resident", [1, 2, 7])
def test_one_chunk_a_rank_is_gathered_once(resident):
    assert schedule(4, 1, 16, resident_chunks=resident).gathers_per_step == [1] * 4


@pytest.mark.parametrize("resident", [4, 5, 99])
def test_room_for_all_chunks_gathers_each_once(resident):
    assert schedule(4, 4, 16, resident_chunks=resident).gathers_per_step == [4] * 4


@pytest.mark.parametrize("sizes", [(2, 2, 4), (2, 4, 8), (4, 3, 8), (4, 4, 16)])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_fewest_gathers_that_can_be_issued_early(sizes, slots):
    for order in compute_orders(spec(*sizes)):
        uses = stages_of(order)
        found = len(residency(uses, slots))
        assert found == fewest_gathers(uses, slots, spare_previous=slots > 1)
        assert found <= fewest_gathers(uses, slots, spare_previous=False) + 2


def test_fewest_gathers_on_arbitrary_orders():
    source = random.Random(7)
    for _ in range(60):
        uses = [source.randrange(5) for _ in range(source.randrange(1, 25))]
        for slots in (2, 3):
            best = fewest_gathers(uses, slots, spare_previous=True)
            assert len(residency(uses, slots)) == best


@pytest.mark.parametrize("resident", [0, 1, 2, 3])
def test_gathered_chunks_stay_within_the_budget(resident):
    for actions in schedule(4, 4, 16, resident_chunks=resident).actions:
        gathered, peak = set(), 0
        for action in actions:
            if action.kind is Kind.UNSHARD:
                assert action.stage not in gathered
                gathered.add(action.stage)
            elif action.kind is Kind.RESHARD:
                gathered.remove(action.stage)
            elif action.kind in COMPUTE:
                assert action.stage in gathered
            peak = max(peak, len(gathered))
        assert not gathered
        assert peak == max(1, resident)


@pytest.mark.parametrize("resident", [2, 3])
def test_each_gather_but_the_first_is_issued_one_compute_action_early(resident):
    for order in compute_orders(spec(4, 4, 16)):
        [actions] = add_unshard_reshard([order], resident)
        for index, action in enumerate(actions):
            if action.kind is not Kind.UNSHARD or index == 0:
                continue
            following = [a for a in actions[index:] if a.kind in COMPUTE][:2]
            assert following[0].stage != action.stage
            assert following[1].stage == action.stage


def test_one_slot_gathers_when_the_stage_changes():
    order = [Action(Kind.FORWARD, stage, 0) for stage in (0, 0, 4, 0)]
    [actions] = add_unshard_reshard([order], 1)
    assert " ".join(map(str, actions)) == (
        "0UNSHARD 0F0 0F0 0RESHARD 4UNSHARD 4F0 4RESHARD 0UNSHARD 0F0 0RESHARD"
    )


def test_a_stage_is_freed_right_after_its_last_use():
    [actions] = add_unshard_reshard(compute_orders(spec(1, 2, 1, group_size=1)), 2)
    assert " ".join(map(str, actions)) == ("0UNSHARD 1UNSHARD 0F0 1F0 1B0 1RESHARD 0B0 0RESHARD")
