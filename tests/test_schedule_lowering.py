"""Lowering passes, against worked lists and against torch's own simulator."""

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from mfsdp_cli.schedule.actions import COMPUTE, END_OF_STEP, RECEIVES, SENDS, Kind
from mfsdp_cli.schedule.lowering import add_end_of_step, add_reduce_grad, last_backwards
from tests.helpers.schedules import rows, schedule

SIZES = [
    (1, 1, 3, {}),
    (1, 3, 3, {"resident_chunks": 2}),
    (2, 1, 2, {"tied_pp_ranks": ((0, 1),), "router_bias": True}),
    (2, 2, 4, {"gradient_reduction": "last"}),
    (2, 2, 5, {"group_size": 3}),
    (3, 2, 6, {"resident_chunks": 0}),
    (4, 1, 2, {}),
    (4, 2, 8, {"resident_chunks": 2}),
    (4, 3, 13, {"group_size": 9}),
    (8, 4, 32, {"resident_chunks": 2}),
]
IDS = [f"pp{pp}-vpp{vpp}-m{m}" for pp, vpp, m, _ in SIZES]
every_size = pytest.mark.parametrize(("pp", "vpp", "m", "more"), SIZES, ids=IDS)


def text(lists):
    return "\n".join(" ".join(map(str, actions)) for actions in lists)


def test_two_ranks_two_microbatches():
    built = schedule(2, 1, 2, tied_pp_ranks=((0, 1),), router_bias=True)
    end = "ROUTER_BIAS TIED_ALLREDUCE GRAD_NORM CLIP OPTIMIZER REFRESH_WEIGHTS"
    assert text(built.actions) == (
        "0UNSHARD 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0REDUCE_GRAD 0RECV_B1 0B1 0REDUCE_GRAD "
        f"0RESHARD {end}\n"
        "1UNSHARD 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1REDUCE_GRAD 1F1 1B1 1SEND_B1 1REDUCE_GRAD "
        f"1RESHARD {end}"
    )


def test_stages_of_one_rank_send_nothing():
    built = schedule(1, 3, 2, group_size=1, resident_chunks=3)
    kinds = {action.kind for action in built.actions[0]}
    assert not kinds & (SENDS | RECEIVES)


@every_size
def test_compute_order_is_kept(pp, vpp, m, more):
    built = schedule(pp, vpp, m, **more)
    kept = [[a for a in actions if a.kind in COMPUTE] for actions in built.actions]
    assert kept == built.timeline.orders


@every_size
def test_each_boundary_is_crossed_once_a_microbatch_and_direction(pp, vpp, m, more):
    kinds = [a.kind for actions in schedule(pp, vpp, m, **more).actions for a in actions]
    crossings = m * (pp * vpp - 1 if pp > 1 else 0)
    for kind in SENDS | RECEIVES:
        assert kinds.count(kind) == crossings


@every_size
def test_one_sequence_has_every_receive_right_behind_its_send(pp, vpp, m, more):
    """Takes from all lists at once: compute freely, a send only together with its receive."""
    lists = [list(actions) for actions in schedule(pp, vpp, m, **more).actions]
    waiting = [actions[::-1] for actions in lists]
    moved = True
    while moved:
        moved = False
        for rank, stack in enumerate(waiting):
            while stack and stack[-1].kind not in SENDS | RECEIVES:
                stack.pop()
                moved = True
            if stack and stack[-1].kind in SENDS:
                send = stack[-1]
                forward = send.kind is Kind.SEND_F
                stage = send.stage + (1 if forward else -1)
                other = waiting[stage % pp]
                wanted = Kind.RECV_F if forward else Kind.RECV_B
                if other and (other[-1].kind, other[-1].stage, other[-1].microbatch) == (
                    wanted,
                    stage,
                    send.microbatch,
                ):
                    assert stage % pp != rank
                    stack.pop()
                    other.pop()
                    moved = True
    assert not any(waiting)


@every_size
def test_torch_accepts_and_runs_the_lists(pp, vpp, m, more):
    parse = torch_schedules._Action.from_str
    lists = {
        rank: [parse(str(a)) for a in actions if a.kind not in END_OF_STEP]
        for rank, actions in enumerate(schedule(pp, vpp, m, **more).actions)
    }
    assert torch_schedules._validate_schedule(lists, pp, pp * vpp, m) == {
        stage: stage % pp for stage in range(pp * vpp)
    }
    silent = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
    simulated = {
        rank: [a for a in actions if a.computation_type.value not in silent]
        for rank, actions in lists.items()
    }
    done = torch_schedules._simulate_comms_compute(simulated, lambda s: s % pp, pp * vpp)
    assert {rank: [a for a in acts if a] for rank, acts in done.items()} == simulated


def test_reduction_after_every_backward_or_the_last():
    lists = rows("0F0 0F1 0B0 0B1 4F0 4I0 4W0")
    assert text(add_reduce_grad(lists, "microbatch")) == (
        "0F0 0F1 0B0 0REDUCE_GRAD 0B1 0REDUCE_GRAD 4F0 4I0 4W0 4REDUCE_GRAD"
    )
    assert text(add_reduce_grad(lists, "last")) == (
        "0F0 0F1 0B0 0B1 0REDUCE_GRAD 4F0 4I0 4W0 4REDUCE_GRAD"
    )
    assert last_backwards(lists) == {0: 1, 4: 0}
    assert lists == rows("0F0 0F1 0B0 0B1 4F0 4I0 4W0"), "passes leave their input alone"


def test_only_ranks_with_a_copy_sum_copies():
    lists = add_end_of_step([[], [], []], tied_pp_ranks=((0, 2),), router_bias=False)
    update = "GRAD_NORM CLIP OPTIMIZER REFRESH_WEIGHTS"
    assert text(lists) == f"TIED_ALLREDUCE {update}\n{update}\nTIED_ALLREDUCE {update}"


@every_size
def test_nothing_gathered_at_the_optimizer(pp, vpp, m, more):
    for actions in schedule(pp, vpp, m, **more).actions:
        kinds = [action.kind for action in actions]
        last_freed = max(i for i, kind in enumerate(kinds) if kind is Kind.RESHARD)
        assert kinds.count(Kind.UNSHARD) == kinds.count(Kind.RESHARD)
        assert last_freed < kinds.index(Kind.OPTIMIZER)
        assert kinds[-4:] == [
            Kind.GRAD_NORM,
            Kind.CLIP,
            Kind.OPTIMIZER,
            Kind.REFRESH_WEIGHTS,
        ]
