"""Every invariant: sound schedules pass, and one change breaks exactly one check."""

from dataclasses import replace

import pytest

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.layout.layout import Layout, StageLayout
from mfsdp_cli.layout.shared import SharedGroup, SharedMember
from mfsdp_cli.schedule.actions import RECEIVES, SENDS, Action, Kind, parse_action
from mfsdp_cli.schedule.proof import Boundary, prove
from tests.helpers.schedules import by_code, failed, schedule, with_lists

BUILT = schedule(
    2,
    2,
    4,
    resident_chunks=2,
    gradient_reduction="last",
    tied_pp_ranks=((0, 1),),
    router_bias=True,
)
EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
GROUP = SharedGroup(
    "word_embeddings",
    "tied",
    (0, 1),
    (SharedMember(0, 0, EMBEDDING), SharedMember(1, 1, HEAD)),
)
LAYOUT = Layout(
    2,
    2,
    (
        StageLayout(0, 0, 0, (0, 1), embedding=True),
        StageLayout(1, 1, 0, (2, 3)),
        StageLayout(2, 0, 1, (4, 5)),
        StageLayout(3, 1, 1, (6, 7), loss=True),
    ),
)
WHOLE = {"layout": LAYOUT, "num_layers": 8, "shared_groups": [GROUP], "tied": True}

SOUND = [
    (1, 1, 3, {}),
    (1, 3, 3, {"resident_chunks": 0}),
    (2, 1, 1, {}),
    (2, 2, 5, {"group_size": 3}),
    (3, 2, 6, {"gradient_reduction": "last", "router_bias": True}),
    (4, 1, 2, {"tied_pp_ranks": ((0, 3),)}),
    (4, 2, 8, {"resident_chunks": 2, "tied_pp_ranks": ((0, 2), (0, 2, 3))}),
    (4, 3, 13, {"group_size": 9, "resident_chunks": 0}),
    (8, 4, 32, {"resident_chunks": 3}),
    (16, 2, 64, {}),
]


@pytest.mark.parametrize(("pp", "vpp", "m", "more"), SOUND)
@pytest.mark.parametrize("p2p", ["rendezvous", "buffered"])
def test_sound_schedules_pass(pp, vpp, m, more, p2p):
    checks = prove(schedule(pp, vpp, m, **more), p2p=p2p)
    assert failed(checks) == set()
    skipped = {check.code for check in checks if check.status == "skip"}
    no_rendezvous = {"MF314"} if p2p == "buffered" or pp == 1 else set()
    assert skipped == {"MF324"} | no_rendezvous


def test_everything_is_judged_where_everything_is_given():
    checks = prove(BUILT, **WHOLE)
    assert {check.status for check in checks} == {"pass"}
    assert [check.code for check in checks] == [
        *("MF311", "MF312", "MF313", "MF314", "MF315", "MF316", "MF317", "MF318"),
        *("MF321", "MF322", "MF323", "MF324"),
    ]
    assert all(check.to_json().keys() == {"code", "name", "status"} for check in checks)


# -- changes to the lists ------------------------------------------------------------------


def place(actions, text):
    return actions.index(parse_action(text))


def drop(rank, text):
    def change(lists):
        del lists[rank][place(lists[rank], text)]

    return change


def repeat(rank, text):
    def change(lists):
        at = place(lists[rank], text)
        lists[rank].insert(at, lists[rank][at])

    return change


def swap(rank, one, other):
    def change(lists):
        a, b = place(lists[rank], one), place(lists[rank], other)
        lists[rank][a], lists[rank][b] = lists[rank][b], lists[rank][a]

    return change


def move(rank, text, before):
    """Move an action in front of another one; to the end if ``before`` is None."""

    def change(lists):
        action = lists[rank].pop(place(lists[rank], text))
        end = len(lists[rank])
        lists[rank].insert(end if before is None else place(lists[rank], before), action)

    return change


def rename(rank, text, other):
    def change(lists):
        lists[rank][place(lists[rank], text)] = parse_action(other)

    return change


def insert(rank, text, before):
    def change(lists):
        lists[rank].insert(place(lists[rank], before), parse_action(text))

    return change


def on_all_ranks(make, *arguments):
    def change(lists):
        for rank in range(len(lists)):
            make(rank, *arguments)(lists)

    return change


def judge(change, built=BUILT):
    lists = [list(actions) for actions in built.actions]
    change(lists)
    return prove(with_lists(built, lists), **WHOLE)


BREAKS = {
    "a forward is missing": (drop(1, "1F2"), "MF311", ["rank 1", "stage 1", "1F2"]),
    "a backward is missing": (drop(0, "2B3"), "MF311", ["rank 0", "stage 2", "2B3"]),
    "a forward runs twice": (repeat(0, "0F1"), "MF311", ["0F1", "twice"]),
    "a microbatch too many": (rename(0, "0F3", "0F4"), "MF311", ["0F4", "4 microbatches"]),
    "a stage of another rank": (
        rename(1, "1REDUCE_GRAD", "2REDUCE_GRAD"),
        "MF311",
        ["stage 2 is on rank 0"],
    ),
    "compute before its receive": (
        swap(1, "1F0", "1RECV_F0"),
        "MF312",
        ["1F0 (rank 1, stage 1, microbatch 0) waits for 1RECV_F0", "runs later"],
    ),
    "a backward before its forward": (
        swap(1, "3F1", "3B1"),
        "MF312",
        ["3B1 (rank 1, stage 3, microbatch 1) waits for 3F1"],
    ),
    "a send before its compute": (swap(0, "0F2", "0SEND_F2"), "MF312", ["0SEND_F2", "0F2"]),
    "a receive is missing": (drop(1, "1RECV_F1"), "MF313", ["0SEND_F1", "has no receive"]),
    "a send is missing": (drop(1, "3SEND_B2"), "MF313", ["2RECV_B2", "has no send"]),
    "a receive stands twice": (repeat(0, "2RECV_B2"), "MF313", ["2RECV_B2", "twice"]),
    "messages overtake": (
        move(1, "1RECV_F1", "1RECV_F0"),
        "MF313",
        ["rank 0 sends 0SEND_F0 where rank 1 receives 1RECV_F1"],
    ),
    "both ranks send first": (
        move(1, "1RECV_F2", "3F1"),
        "MF314",
        [
            "deadlock: rank 0 waits in 0SEND_F2 for 1RECV_F2 of rank 1",
            "rank 1 waits in 3SEND_B0 for 2RECV_B0 of rank 0",
        ],
    ),
    "a gather is missing": (drop(0, "2UNSHARD"), "MF316", ["2F0", "not gathered"]),
    "a stage is freed too early": (move(1, "3RESHARD", "3B2"), "MF316", ["3B2", "not gathered"]),
    "a stage is never freed": (drop(1, "1RESHARD"), "MF316", ["stage 1", "survives OPTIMIZER"]),
    "a stage is gathered twice": (repeat(0, "0UNSHARD"), "MF316", ["gathered already"]),
    "a reduction is missing": (drop(0, "0REDUCE_GRAD"), "MF317", ["0B0", "not reduced"]),
    "a reduction too early": (move(1, "1REDUCE_GRAD", "1B3"), "MF317", ["1B3", "not reduced"]),
    "a reduction twice": (repeat(1, "3REDUCE_GRAD"), "MF317", ["3REDUCE_GRAD", "no backward"]),
    "copies are summed after the norm": (
        on_all_ranks(swap, "TIED_ALLREDUCE", "GRAD_NORM"),
        "MF321",
        ["TIED_ALLREDUCE (rank 0)", "after GRAD_NORM"],
    ),
    "clipping after the update": (
        swap(1, "CLIP", "OPTIMIZER"),
        "MF322",
        ["CLIP (rank 1) comes after OPTIMIZER"],
    ),
    "no refresh": (drop(0, "REFRESH_WEIGHTS"), "MF322", ["rank 0", "0 REFRESH_WEIGHTS"]),
    "no router bias update": (drop(1, "ROUTER_BIAS"), "MF322", ["rank 1", "0 ROUTER_BIAS"]),
    "router bias before a reduction": (
        move(0, "ROUTER_BIAS", "0REDUCE_GRAD"),
        "MF322",
        ["0REDUCE_GRAD", "comes after ROUTER_BIAS"],
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_one_change_breaks_one_check(name):
    change, code, words = BREAKS[name]
    checks = judge(change)
    assert failed(checks) == {code}
    finding = by_code(checks, code).finding
    assert finding.code == code
    assert all(word in finding.message for word in words), finding.message


def test_the_counterexample_shows_the_place():
    finding = by_code(judge(BREAKS["messages overtake"][0]), "MF313").finding
    assert "rank 1, action" in finding.where
    assert ">1RECV_F1<" in finding.where
    assert ">0SEND_F0<" in finding.where


def test_the_shortest_ring_of_waits_is_shown():
    """All four ranks are stuck, two of them in a ring."""
    built = schedule(4, 1, 8)
    checks = judge_alone(built, move(3, "3RECV_F1", "3F1"))
    finding = by_code(checks, "MF314").finding
    assert failed(checks) == {"MF314"}
    assert finding.message.count("waits in") == 2
    assert "rank 2 waits in 2SEND_F1" in finding.message
    assert "rank 3 waits in 3SEND_B0" in finding.message


def judge_alone(built, change):
    lists = [list(actions) for actions in built.actions]
    change(lists)
    return prove(with_lists(built, lists))


def test_a_deadlock_of_rendezvous_passes_when_buffered():
    change = BREAKS["both ranks send first"][0]
    lists = [list(actions) for actions in BUILT.actions]
    change(lists)
    assert failed(prove(with_lists(BUILT, lists), p2p="buffered")) == set()


def test_all_faults_are_reported():
    def change(lists):
        drop(0, "0B1")(lists)
        drop(0, "2F3")(lists)
        repeat(1, "1F0")(lists)

    findings = by_code(judge(change), "MF311").findings
    assert sorted(
        word for f in findings for word in ("0B1", "2F3", "1F0") if word in f.message
    ) == [
        "0B1",
        "1F0",
        "2F3",
    ]


def test_no_message_at_all_is_found():
    messages = SENDS | RECEIVES
    lists = [[a for a in actions if a.kind not in messages] for actions in BUILT.actions]
    assert failed(prove(with_lists(BUILT, lists))) == {"MF313"}


def test_collectives_that_a_rank_leaves_out():
    checks = judge(drop(1, "GRAD_NORM"))
    finding = by_code(checks, "MF315").finding
    assert "rank 1 enters GRAD_NORM 0 times, rank 0 1 times" in finding.message


def test_collectives_that_cross():
    """Rank 0 sums copies first, rank 1 takes the norm first: each waits for the other."""
    checks = judge(swap(1, "TIED_ALLREDUCE", "GRAD_NORM"))
    finding = by_code(checks, "MF315").finding
    assert "rank 0 waits in TIED_ALLREDUCE for TIED_ALLREDUCE of rank 1" in finding.message
    assert "rank 1 waits in GRAD_NORM for GRAD_NORM of rank 0" in finding.message


def test_wrong_last_microbatch():
    checks = prove(replace(BUILT, last_backward=[3, 3, 2, 3]), **WHOLE)
    assert failed(checks) == {"MF318"}
    assert "stage 2 on rank 0 takes microbatch 2" in by_code(checks, "MF318").finding.message


def test_reduction_that_the_setting_does_not_ask_for():
    each = schedule(2, 1, 2)
    checks = judge_alone(each, drop(0, "0REDUCE_GRAD"))
    assert failed(checks) == {"MF317"}
    assert "2 backwards at once" in by_code(checks, "MF317").finding.message
    last = schedule(2, 1, 2, gradient_reduction="last")
    checks = judge_alone(last, insert(0, "0REDUCE_GRAD", "0B1"))
    assert failed(checks) == {"MF317"}
    assert "second time" in by_code(checks, "MF317").finding.message


def test_more_gathered_than_the_budget():
    spec = replace(BUILT.spec, resident_chunks=1)
    checks = prove(replace(BUILT, spec=spec), **WHOLE)
    assert failed(checks) == {"MF323"}
    message = by_code(checks, "MF323").finding.message
    assert "2 gathered chunks, stages [0, 2]; the residency budget is 1" in message


def test_boundary_tensors_must_agree():
    right = (((4096, 1, 64), "bf16"),) * 2
    assert failed(prove(BUILT, boundaries={0: Boundary(*right)})) == set()
    shape = Boundary(((8192, 1, 64), "bf16"), ((4096, 1, 64), "bf16"))
    dtype = Boundary(((4096, 1, 64), "bf16"), ((4096, 1, 64), "fp32"))
    for boundary in (shape, dtype):
        checks = prove(BUILT, boundaries={1: boundary})
        assert failed(checks) == {"MF313"}
        assert "stage 1 sends bf16" in by_code(checks, "MF313").finding.message


def test_unknown_p2p():
    with pytest.raises(MfsdpError, match="MF305"):
        prove(BUILT, p2p="eager")


# -- layouts -------------------------------------------------------------------------------


def changed_layout(stage, **fields):
    stages = list(LAYOUT.stages)
    stages[stage] = replace(stages[stage], **fields)
    return replace(LAYOUT, stages=tuple(stages))


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (changed_layout(1, layers=(2,)), ["decoder.layers.3 is on no stage"]),
        (changed_layout(1, layers=(1, 2, 3)), ["decoder.layers.1", "stage 0", "stage 1"]),
        (changed_layout(1, layers=(3, 2)), ["decoder.layers.2 on stage 1 comes after"]),
        (changed_layout(3, layers=(6, 7, 8)), ["decoder.layers.8", "model has 8"]),
        (changed_layout(3, mtp=(0,)), ["mtp.layers.0", "model has 0"]),
        (changed_layout(2, embedding=True), ["embedding is on stages [0, 2]"]),
        (changed_layout(3, loss=False), ["loss is on stages []"]),
        (changed_layout(2, pp_rank=1), ["stage 2 stands at place 2"]),
        (replace(LAYOUT, pp=4, vpp=1), ["4 x 1", "2 x 2"]),
    ],
)
def test_layers_exactly_once(layout, words):
    checks = prove(BUILT, layout=layout, num_layers=8)
    assert failed(checks) == {"MF324"}
    messages = " / ".join(finding.message for finding in by_code(checks, "MF324").findings)
    assert all(word in messages for word in words), messages


# -- shared parameters ---------------------------------------------------------------------


def sharing(groups, **more):
    return by_code(prove(BUILT, **{**WHOLE, "shared_groups": groups, **more}), "MF321")


def test_a_group_that_the_schedule_does_not_sum():
    check = by_code(prove(schedule(2, 2, 4), **WHOLE), "MF321")
    assert "plan shares a parameter over pipeline ranks [0, 1]" in check.finding.message


def test_a_sum_without_a_group():
    messages = [finding.message for finding in sharing([]).findings]
    assert "the schedule shares a parameter over pipeline ranks [0, 1], the plan not" in messages
    assert any("copies on (rank, virtual stage) [(0, 0), (1, 1)]" in m for m in messages)


def test_a_copy_on_an_mtp_stage_outside_the_group():
    layout = changed_layout(2, mtp=(0,))
    check = sharing([GROUP], layout=layout, mtp_num_layers=1)
    assert "[(0, 0), (0, 1), (1, 1)]" in check.finding.message


def test_untied_models_without_mtp_share_nothing():
    built = schedule(2, 2, 4)
    checks = prove(built, layout=LAYOUT, num_layers=8, shared_groups=[], tied=False)
    assert failed(checks) == set()


def test_a_copy_in_two_groups():
    twice = replace(GROUP, name="again")
    messages = [finding.message for finding in sharing([GROUP, twice]).findings]
    assert any("in group word_embeddings and again in again" in message for message in messages)


def test_a_group_whose_ranks_are_not_its_copies():
    group = replace(GROUP, members=GROUP.members[:1])
    assert "its copies are on [0]" in sharing([group]).finding.message


# -- any change at all ---------------------------------------------------------------------


def test_every_dropped_and_every_repeated_action_is_caught():
    for rank, actions in enumerate(BUILT.actions):
        for at in range(len(actions)):
            for lists in (without(rank, at), doubled(rank, at)):
                checks = prove(with_lists(BUILT, lists), **WHOLE)
                assert failed(checks), (rank, str(actions[at]))


def test_every_action_of_another_microbatch_or_stage_is_caught():
    for rank, actions in enumerate(BUILT.actions):
        for at, action in enumerate(actions):
            for other in neighbours(action):
                lists = [list(acts) for acts in BUILT.actions]
                lists[rank][at] = other
                assert failed(prove(with_lists(BUILT, lists), **WHOLE)), (rank, str(other))


def without(rank, at):
    return [
        [a for place, a in enumerate(actions) if (row, place) != (rank, at)]
        for row, actions in enumerate(BUILT.actions)
    ]


def doubled(rank, at):
    lists = [list(actions) for actions in BUILT.actions]
    lists[rank].insert(at, lists[rank][at])
    return lists


def neighbours(action):
    found = []
    if action.microbatch is not None:
        found.append(Action(action.kind, action.stage, (action.microbatch + 1) % 4))
    if action.stage is not None:
        found.append(Action(action.kind, (action.stage + 2) % 4, action.microbatch))
        found.append(Action(action.kind, (action.stage + 1) % 4, action.microbatch))
    if action.kind in (Kind.FORWARD, Kind.SEND_F, Kind.RECV_F):
        other = {Kind.FORWARD: Kind.BACKWARD, Kind.SEND_F: Kind.SEND_B, Kind.RECV_F: Kind.RECV_B}
        found.append(Action(other[action.kind], action.stage, action.microbatch))
    return found
