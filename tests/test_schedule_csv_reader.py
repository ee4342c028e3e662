"""Schedules from CSV: torch's own, sound and faulty ones, and everything that is no schedule."""

import random

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.schedule.csv_reader import check_csv, read_csv, read_csv_text
from mfsdp_cli.schedule.export import render
from tests.helpers.schedules import by_code, failed, schedule


def judge(text, **more):
    return failed(check_csv(text, **more))


def finding(text, code, **more):
    checks = check_csv(text, **more)
    assert failed(checks) == {code}
    return by_code(checks, code).finding


def refused(text, code):
    with pytest.raises(MfsdpError) as error:
        check_csv(text)
    assert error.value.finding.code == code
    return error.value.finding


# -- cases from the field ------------------------------------------------------------------


def test_orders_that_wait_for_each_other():
    found = finding("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", "MF312")
    assert found.message == (
        "deadlock: rank 0 waits in 0B0 for 1B0 of rank 1; rank 1 waits in 1F1 for 0F1 of rank 0"
    )
    assert ">0B0<" in found.where
    assert ">1F1<" in found.where


def test_missing_backward():
    found = finding("0F0,0F1,0B0,0B1\n1F0,1B0,1F1\n", "MF311")
    assert "rank 1, stage 1: the backward of microbatch 1 (1B1) is missing" in found.message
    assert ">1F1<" in found.where


def test_blanks_and_blank_cells():
    assert judge(" 0F0 ,, 0B0\t,\r\n1F0,1B0,,\r\n\r\n") == set()


def test_split_backward():
    assert judge("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1") == set()
    assert judge("0F0,0F1,0B0,0I1,0W1\n1F0,1B0,1F1,1B1") == set()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0,0I0", ["weight-gradient backward of microbatch 0 (0W0) is missing"]),
        ("0F0,0I0,0W0,0B0", ["has a full backward (0B0) and a split one"]),
        ("0F0,0B0,0B0", ["0B0", "twice: action 2 of rank 0 and action 3"]),
        ("0F0,0B0\n0F0,0B0", ["stage 0 is on rank 0"]),
        ("0F0,0B0,0F2,0B2", ["forward of microbatch 1 (0F1) is missing"]),
        ("0F0,0B0\n2F0,2B0", ["stage 1 never runs"]),
        ("0F0,0B0\n\n1F0,1B0", ["rank 1 runs no forward"]),
        ("999999999F0,999999999B0", ["stage 0 never runs"]),
        ("0F999999999,0B999999999", ["microbatch 0 (0F0) is missing, and of 999999998 more"]),
    ],
)
def test_what_is_not_complete(text, words):
    checks = check_csv(text)
    assert "MF311" in failed(checks)
    messages = " / ".join(found.message for found in by_code(checks, "MF311").findings)
    assert all(word in messages for word in words), messages


def test_weight_gradient_before_the_input_gradient():
    assert judge("0F0,0W0,0I0") == {"MF312"}


# -- communication -------------------------------------------------------------------------

SOUND = (
    "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
    "1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n"
)
BOTH_SEND_FIRST = SOUND.replace("1RECV_F1,1B0,1SEND_B0", "1B0,1SEND_B0,1RECV_F1")


def test_rendezvous_and_buffered():
    assert judge(SOUND) == judge(SOUND, p2p="buffered") == set()
    found = finding(BOTH_SEND_FIRST, "MF314")
    assert "rank 0 waits in 0SEND_F1 for 1RECV_F1 of rank 1" in found.message
    assert "rank 1 waits in 1SEND_B0 for 0RECV_B0 of rank 0" in found.message
    assert judge(BOTH_SEND_FIRST, p2p="buffered") == set()


def test_p2p_does_not_matter_without_communication():
    text = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1"
    assert judge(text) == judge(text, p2p="buffered") == set()
    assert by_code(check_csv(text), "MF314").status == "skip"


def test_a_receive_waits_for_its_send_even_when_buffered():
    text = "0F0,0RECV_B0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0"
    assert judge(text, p2p="buffered") == judge(text) == {"MF312"}


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("0SEND_F1,", "", ["1RECV_F1", "has no send"]),
        ("1RECV_F1,", "", ["0SEND_F1", "has no receive"]),
        (
            "1RECV_F0,1F0,1RECV_F1",
            "1RECV_F1,1RECV_F0,1F0",
            ["rank 0 sends 0SEND_F0 where rank 1 receives 1RECV_F1"],
        ),
        ("0RECV_B0,", "0RECV_B0,0RECV_B0,", ["0RECV_B0", "twice"]),
        ("0B0,", "0B0,0SEND_B0,", ["0SEND_B0", "has no receive"]),
    ],
)
def test_messages_that_do_not_pair(old, new, words):
    message = finding(SOUND.replace(old, new, 1), "MF313").message
    assert all(word in message for word in words), message


def test_compute_that_misses_its_input():
    text = SOUND.replace("0SEND_F1,", "").replace("1RECV_F1,", "")
    message = finding(text, "MF313").message
    assert "1F1 (rank 1, stage 1, microbatch 1) needs what stage 0 on rank 0 makes" in message


def test_gathers_and_reductions_are_judged_where_they_stand():
    sound = "0UNSHARD,0F0,0B0,0REDUCE_GRAD,0RESHARD,GRAD_NORM,CLIP,OPTIMIZER,REFRESH_WEIGHTS"
    assert judge(sound) == set()
    assert judge(sound.replace(",0RESHARD", "")) == {"MF316"}
    assert judge(sound.replace("0F0", "0F0,0RESHARD,0UNSHARD,0RESHARD")) == {"MF316"}
    assert judge(sound.replace("0B0,0REDUCE_GRAD", "0REDUCE_GRAD,0B0")) == {"MF317"}
    assert judge(sound.replace("CLIP,OPTIMIZER", "OPTIMIZER,CLIP")) == {"MF322"}


# -- what is no schedule -------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", "\n", " , ,\n,\n", "\ufeff", "GRAD_NORM", "0SEND_F0\n1RECV_F0"]
)
def test_nothing_that_computes(text):
    assert "no forward and no backward" in refused(text, "MF308").message


@pytest.mark.parametrize(
    ("text", "row", "column"),
    [
        ("0F0,0B0\n1F0,,1X0", 2, 3),
        ("F0,B0", 1, 1),
        ("0F0,0B", 1, 2),
        ("0F0;0B0", 1, 1),
        ("rank,0F0,0B0", 1, 1),
        ("1FOO", 1, 1),
        ("0F0\t0B0", 1, 1),
        ("0F0,0UNSHARD0", 1, 2),
        ("0F" + "9" * 5000, 1, 1),
        ("(0F0;0X0)OVERLAP_F_B", 1, 1),
        ("\x00\x01\x7fELF", 1, 1),
        ('"0F0,0B0', 1, 1),
    ],
)
def test_cells_that_do_not_parse(text, row, column):
    found = refused(text, "MF307")
    assert f"row {row}, column {column}" in found.message
    assert f"rank {row - 1}, cell {column}" in found.where
    assert len(found.message) < 200


def test_the_grid_marks_the_cell():
    found = refused("0F0,0B0\n1F0,1X0", "MF307")
    assert found.where.splitlines()[1:] == [
        "    rank 0     0F0   0B0",
        "    rank 1     1F0  >1X0<",
    ]


def test_a_field_longer_than_csv_takes():
    assert "does not parse as CSV" in refused("0F0," + "9" * 200_000, "MF307").message


def test_byte_order_mark_quotes_and_line_ends():
    for text in ("\ufeff0F0,0B0", '"0F0","0B0"\n', "0F0,0B0\r1F0,1B0\r", "0F0,0B0\r\n1F0,1B0"):
        assert judge(text) == set()


def test_overlapped_pairs():
    read = read_csv("0F0,(0F1; 0B0 )OVERLAP_F_B,0B1")
    assert [str(action) for action in read.lists[0]] == ["0F0", "0F1", "0B0", "0B1"]


def test_what_is_inferred():
    read = read_csv("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0")
    assert read.stage_ranks == {0: 0, 3: 0, 1: 1, 2: 1}
    assert (read.num_stages, read.num_microbatches, read.has_messages) == (4, 1, False)


def test_unknown_p2p():
    with pytest.raises(MfsdpError, match="MF305"):
        check_csv("0F0,0B0", p2p="none")


def test_files(tmp_path):
    path = tmp_path / "schedule.csv"
    path.write_bytes(b"\xef\xbb\xbf0F0,0B0\r\n")
    assert judge(read_csv_text(path)) == set()
    path.write_bytes(b"\x89PNG\r\n\x1a\n\xff\xfe")
    for place, word in ((path, "UTF-8"), (tmp_path, "directory"), (tmp_path / "x", "No such")):
        with pytest.raises(MfsdpError, match=word) as error:
            read_csv_text(place)
        assert error.value.finding.code == "MF308"


# -- torch's own schedules -----------------------------------------------------------------


def torch_rows(cls, ranks, local, microbatches):
    instance = cls.__new__(cls)
    instance.pp_group_size, instance.n_local_stages = ranks, local
    instance.num_stages = instance._num_stages = ranks * local
    instance._stages = range(local)
    instance._n_microbatches = microbatches
    instance.number_of_rounds = max(1, microbatches // ranks)
    instance.microbatches_per_round = microbatches // instance.number_of_rounds
    rows = {rank: instance._calculate_single_rank_operations(rank) for rank in range(ranks)}
    if cls is torch_schedules.ScheduleInterleavedZeroBubble:
        instance.pipeline_order = rows
        rows = instance._add_bubbles_to_actions(ranks * local)
    return rows


def dump(rows):
    return "\n".join(",".join("" if a is None else str(a) for a in row) for row in rows.values())


def lowered(rows, stages):
    rank_of = {a.stage_index: r for r, acts in rows.items() for a in flat(acts)}
    count = 1 + max(a.microbatch_index for acts in rows.values() for a in flat(acts))
    rows = {rank: torch_schedules._add_unshard_reshard(acts) for rank, acts in rows.items()}
    rows = {rank: torch_schedules._add_reduce_grad(acts, count) for rank, acts in rows.items()}
    return torch_schedules._add_send_recv(rows, lambda stage: rank_of[stage], stages)


def flat(acts):
    return [sub for act in acts if act is not None for sub in (act.sub_actions or (act,))]


TORCH = [
    (torch_schedules.ScheduleInterleaved1F1B, 2, 2, 4),
    (torch_schedules.ScheduleInterleaved1F1B, 4, 2, 10),
    (torch_schedules.ScheduleLoopedBFS, 4, 2, 4),
    (torch_schedules.ScheduleInterleavedZeroBubble, 2, 2, 4),
    (torch_schedules.ScheduleInterleavedZeroBubble, 4, 3, 8),
    (torch_schedules.ScheduleZBVZeroBubble, 2, 2, 4),
    (torch_schedules.ScheduleZBVZeroBubble, 4, 2, 8),
    (torch_schedules.ScheduleDualPipeV, 2, 2, 4),
    (torch_schedules.ScheduleDualPipeV, 4, 2, 10),
]
every_torch_schedule = pytest.mark.parametrize(("cls", "ranks", "local", "microbatches"), TORCH)


@every_torch_schedule
def test_torchs_compute_orders_are_sound(cls, ranks, local, microbatches):
    text = dump(torch_rows(cls, ranks, local, microbatches))
    assert judge(text) == set()
    read = read_csv(text)
    assert (read.num_stages, read.num_microbatches) == (ranks * local, microbatches)


@every_torch_schedule
@pytest.mark.parametrize("p2p", ["rendezvous", "buffered"])
def test_torchs_lowered_orders_are_sound(cls, ranks, local, microbatches, p2p):
    rows = lowered(torch_rows(cls, ranks, local, microbatches), ranks * local)
    checks = check_csv(dump(rows), p2p=p2p)
    assert failed(checks) == set()
    assert by_code(checks, "MF313").status == by_code(checks, "MF316").status == "pass"


def test_the_loop_of_another_rank_is_caught_in_torchs_zero_bubble():
    rows = torch_rows(torch_schedules.ScheduleZBVZeroBubble, 4, 2, 8)
    rows[1], rows[2] = rows[1][:-1], [*rows[2], rows[1][-1]]
    assert "MF311" in judge(dump(rows))


# -- our own -------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(2, 1, 4), (4, 2, 8), (1, 3, 3), (4, 4, 16)])
def test_what_we_export_is_sound(sizes):
    text = render(schedule(*sizes, group_size=sizes[0]), ".csv")
    assert judge(text) == judge(text, p2p="buffered") == set()


def test_faults_put_into_a_sound_file_are_caught():
    """Every drop, repetition and renaming of one cell, at random places."""
    source = random.Random(11)
    text = render(schedule(4, 2, 8, gradient_reduction="last"), ".csv")
    cells = [line.split(",") for line in text.splitlines()]
    for _ in range(150):
        rows = [list(row) for row in cells]
        row = source.choice(rows)
        at = source.randrange(len(row))
        kind = source.choice(["drop", "repeat", "rename"])
        if kind == "drop":
            del row[at]
        elif kind == "repeat":
            row.insert(at, row[at])
        else:
            other = source.choice([cell for r in cells for cell in r if cell != row[at]])
            row[at] = other
        assert judge("\n".join(map(",".join, rows))), (kind, at)


def test_arbitrary_text_gives_checks_or_a_named_error():
    """Cells glued together from pieces of the grammar, and from none of it."""
    source = random.Random(5)
    pieces = ["0", "1", "9", "F", "B", "W", "SEND_F", ",", "\r", '"', ";", "\u00e9", "\x00", "-"]
    pieces += ["0F0,", "0B0,", "1F0,", "1B0,", "0I0,", "0SEND_F0,", "1RECV_F0,", "CLIP,", "\n"] * 6
    outcomes = {
        outcome("".join(source.choices(pieces, k=source.randrange(12)))) for _ in range(500)
    }
    assert {"MF307", "MF308", "checked"} == outcomes


def outcome(text):
    try:
        check_csv(text)
    except MfsdpError as error:
        return error.finding.code
    return "checked"


def test_sound_and_faulty_orders_of_random_ranks():
    """Shuffled orders: whatever is said, the checks end, and agree with a plain simulation."""
    source = random.Random(3)
    sound = 0
    for _ in range(200):
        rows = shuffled(source, source.randrange(1, 4), source.randrange(1, 3))
        ends = runs_through(rows)
        assert ("MF312" not in judge("\n".join(map(",".join, rows)))) == ends
        sound += ends
    assert 10 < sound < 190


def shuffled(source, ranks, microbatches):
    """One stage a rank, forwards and backwards each in a random order, mixed."""
    rows = []
    for rank in range(ranks):
        row = [f"{rank}{kind}{mb}" for kind in "FB" for mb in range(microbatches)]
        if source.random() < 0.6:
            row.sort(key=lambda cell: (cell[1] == "B") + source.random() * 1.2)
        else:
            source.shuffle(row)
        rows.append(row)
    return rows


def runs_through(rows):
    """A plain simulation: run whatever has its inputs, until all is done or nothing moves."""
    left, done = [list(row) for row in rows], set()
    moved = True
    while moved:
        moved = False
        for row in left:
            if row and inputs(row[0], len(rows)) <= done:
                done.add(row.pop(0))
                moved = True
    return not any(left)


def inputs(cell, stages):
    stage, kind, microbatch = int(cell[0]), cell[1], cell[2:]
    if kind == "F":
        return {f"{stage - 1}F{microbatch}"} if stage else set()
    after = {f"{stage + 1}B{microbatch}"} if stage + 1 < stages else set()
    return after | {f"{stage}F{microbatch}"}
