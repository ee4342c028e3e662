"""The schedule as a whole: golden files, digest, refusals, speed."""

import hashlib
import os
import time
from pathlib import Path

import pytest

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.schedule.actions import Action, Kind
from mfsdp_cli.schedule.build import build_evaluation, build_schedule, canonical_text
from mfsdp_cli.schedule.proof.execution import stuck
from mfsdp_cli.schedule.proof.waiting import message_parties
from tests.helpers.schedules import schedule, spec, with_lists

GOLDEN = Path(__file__).parent / "golden" / "schedules"
CASES = {
    "1f1b-pp1-m2": spec(1, 1, 2),
    "1f1b-pp2-m4-tied": spec(2, 1, 4, tied_pp_ranks=((0, 1),)),
    "1f1b-pp4-m2-last": spec(4, 1, 2, gradient_reduction="last"),
    "interleaved-pp1-vpp2-m2": spec(1, 2, 2, group_size=1),
    "interleaved-pp2-vpp2-m4-moe": spec(2, 2, 4, resident_chunks=2, router_bias=True),
    "interleaved-pp2-vpp2-m5-group3": spec(2, 2, 5, group_size=3, resident_chunks=0),
    "interleaved-pp4-vpp4-m16-resident2": spec(4, 4, 16, resident_chunks=2),
}


@pytest.mark.parametrize("name", CASES)
def test_golden(name):
    path = GOLDEN / f"{name}.csv"
    text = canonical_text(build_schedule(CASES[name]).actions)
    if os.environ.get("MFSDP_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


def test_no_golden_file_is_left_over():
    assert {path.stem for path in GOLDEN.glob("*.csv")} == set(CASES)


def test_digest_is_of_the_canonical_text():
    built = schedule(2, 2, 4)
    text = canonical_text(built.actions)
    assert built.digest == hashlib.sha256(text.encode()).hexdigest()
    assert text.count("\n") == 2
    assert built.actions_per_rank == [line.count(",") + 1 for line in text.splitlines()]


def test_equal_specs_give_equal_schedules():
    assert schedule(4, 2, 8) == schedule(4, 2, 8)
    assert schedule(4, 2, 8).digest != schedule(4, 2, 8, resident_chunks=2).digest


def test_last_backward_of_each_stage():
    assert schedule(2, 2, 5, group_size=3).last_backward == [4, 4, 4, 4]


def test_refuses_what_megatron_refuses():
    with pytest.raises(MfsdpError, match=r"MF304.*3 microbatches are too few"):
        build_schedule(spec(6, 2, 3))


@pytest.mark.parametrize(("pp", "vpp", "m"), [(6, 2, 3), (4, 2, 5), (3, 2, 1)])
def test_builds_what_can_run_when_not_strict(pp, vpp, m):
    built = build_schedule(spec(pp, vpp, m), strict=False)
    assert len(built.timeline.ends[0]) == 2 * vpp * m


def test_says_so_where_ranks_would_wait_for_ever():
    with pytest.raises(MfsdpError, match=r"MF304.*never ends") as error:
        build_schedule(spec(4, 3, 5), strict=False)
    assert "5 microbatches in groups of 4" in error.value.finding.message


def test_runs_with_fewer_microbatches_than_ranks():
    assert schedule(8, 1, 1).bubble_fraction == 0.875
    assert schedule(4, 1, 3).bubble_fraction == 0.5


@pytest.mark.parametrize(
    ("pp", "vpp", "m", "more"),
    [
        (1, 1, 3, {}),
        (2, 1, 4, {}),
        (2, 2, 4, {"resident_chunks": 2}),
        (2, 2, 8, {"group_size": 3, "resident_chunks": 0}),
        (3, 3, 6, {}),
        (4, 2, 9, {"group_size": 5}),
    ],
)
def test_an_evaluation_runs_every_forward_and_never_waits_for_ever(pp, vpp, m, more):
    made = spec(pp, vpp, m, **more)
    lists = build_evaluation(made)
    forwards = [action for row in lists for action in row if action.kind is Kind.FORWARD]
    assert sorted((a.stage, a.microbatch) for a in forwards) == [
        (stage, microbatch) for stage in range(pp * vpp) for microbatch in range(m)
    ]
    for row in lists:
        gathered = set()
        for action in row:
            if action.kind is Kind.UNSHARD:
                gathered.add(action.stage)
                assert len(gathered) <= max(1, made.resident_chunks)
            elif action.kind is Kind.RESHARD:
                gathered.remove(action.stage)
            elif action.kind is Kind.FORWARD:
                assert action.stage in gathered
        assert not gathered
    graph = with_lists(build_schedule(made), lists).graph()
    assert not stuck(graph, message_parties(graph))


def test_receives_at_their_uses_would_wait_for_ever():
    made = spec(2, 2, 4)
    lists = [_received_at_use(row) for row in build_evaluation(made)]
    graph = with_lists(build_schedule(made), lists).graph()
    assert stuck(graph, message_parties(graph))


def _received_at_use(row: list[Action]) -> list[Action]:
    receives = [action for action in row if action.kind is Kind.RECV_F]
    late = []
    for action in row:
        receive = Action(Kind.RECV_F, action.stage, action.microbatch)
        if action.kind is Kind.FORWARD and receive in receives:
            late.append(receive)
        if action.kind is not Kind.RECV_F:
            late.append(action)
    return late


def test_pp16_vpp2_m64_is_fast():
    """Typically 35 ms; the limit leaves room for a busy machine."""
    best = min(timed(lambda: schedule(16, 2, 64)) for _ in range(3))
    assert best < 0.2


def timed(run):
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
