"""``mfsdp validate`` as scripts call it: plans, models with flags, CSV schedules, broken files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.plan import Plan
from tests.helpers.inline import Said, inline

LAYERS_61 = ["deepseek-v3", "--pp", "16"]


def judged(*arguments: str | Path, code: int) -> Said:
    said = inline("validate", *arguments, "--json")
    assert said.code == code, said.out + said.err
    assert said.document["ok"] == (code == 0)
    return said


def messages(said: Said, code: str) -> str:
    return "\n".join(item["message"] for item in said.document["findings"] if item["code"] == code)


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    file = tmp_path / "plan.json"
    assert inline("plan", "gpt2-tiny", "--pp", "2", "--vpp", "2", "--out", file).code == 0
    return file


# Layouts.


def test_a_sound_plan_passes_every_check(plan_file: Path) -> None:
    said = judged(plan_file, code=0)
    statuses = {item["code"]: item["status"] for item in said.document["checks"]}
    invariants = ["MF311", "MF312", "MF313", "MF314", "MF321", "MF322", "MF324"]
    assert [statuses[code] for code in invariants] == ["pass"] * len(invariants)
    assert "fail" not in statuses.values()


@pytest.mark.parametrize(
    ("layout", "code", "texts"),
    [
        ("Et|(tt|)*29L|", "MF107", ["59", "61"]),
        ("Et|(tt|)*29|L", "MF107", ["59", "61"]),
        ("Et|(tt|)*28t|t|L", "MF107", ["59", "61"]),
        ("Ettt|(tt|)*29L|", "MF109", ["last stage", "empty"]),
    ],
)
def test_layout_strings_that_count_wrong(layout: str, code: str, texts: list[str]) -> None:
    said = judged(*LAYERS_61, "--mtp-num-layers", "0", "--layout", layout, code=1)
    assert all(text in messages(said, code) for text in texts)


@pytest.mark.parametrize(
    ("layout", "last"),
    [("Et|(tt|)*30L", [[29, 30], []]), ("Ettt|(tt|)*14|(tt|)*15L", [[], []])],
)
def test_layout_strings_of_61_layers_that_are_valid(layout: str, last: list[list[int]]) -> None:
    flags = [*LAYERS_61, "--mtp-num-layers", "0", "--layout", layout]
    judged(*flags, code=0)
    document = inline("plan", *flags, "--json").document
    stages = [stage for stage in document["layout"]["stages"] if stage["pp_rank"] == 15]
    assert [stage["layers"] for stage in stages] == last
    assert stages[-1]["loss"]


def test_stages_against_pp() -> None:
    model = ["llama3-70b", "--num-layers", "94", "--layout", "Ett|(tt|)*46L"]
    document = inline("plan", *model, "--pp", "8", "--json").document
    stages = [stage["layers"] for stage in document["layout"]["stages"] if not stage["pp_rank"]]
    assert stages == [[0, 1], [16, 17], [32, 33], [48, 49], [64, 65], [80, 81]]
    judged(*model, "--pp", "16", code=0)
    assert "48 stages" in messages(judged(*model, "--pp", "10", code=1), "MF105")
    declared = messages(judged(*model, "--pp", "8", "--vpp", "4", code=1), "MF106")
    assert "4 virtual stages" in declared
    assert "make 6" in declared


@pytest.mark.parametrize(
    ("flags", "layout", "code", "text"),
    [
        ("--num-layers 60 --pp 8", "E(|tt)*30,|mL", None, ""),
        ("--num-layers 60 --pp 16", "E(|tt)*30,|mL", None, ""),
        (
            "--num-layers 60 --pp 8 --mtp-num-layers 3",
            "E(|tt)*30,|mL",
            "MF110",
            "1 MTP layers (m), the model has 3",
        ),
        (
            "--num-layers 11 --pp 8 --mtp-num-layers 3",
            "E|(t|)*11m|m|m|L",
            "MF111",
            "all MTP layers (m) must be on one stage",
        ),
        (
            "--num-layers 10 --pp 8 --mtp-num-layers 3",
            "E|t|(t|)*9m|m|m|LL|LL",
            "MF109",
            "found 4",
        ),
        ("--num-layers 2 --pp 3", "Et|m|tL", "MF111", "before MTP layers"),
        ("--num-layers 4 --pp 2", "Et|tm|t|tL", "MF111", "last virtual stage"),
    ],
)
def test_mtp_placement(flags: str, layout: str, code: str | None, text: str) -> None:
    said = judged("deepseek-v3", *flags.split(), "--layout", layout, code=0 if code is None else 1)
    if code is not None:
        assert text in messages(said, code)


def test_all_findings_are_reported_not_the_first() -> None:
    said = judged(
        "llama-tiny",
        *["--pp", "3", "--layout", "Et|m|tLL|t", "--gbs", "7", "--tp", "2", "--fp16"],
        *["--calculate-per-token-loss"],
        code=1,
    )
    assert {"MF105", "MF107", "MF109", "MF110", "MF111", "MF210", "MF223"} <= set(
        said.codes("error")
    )
    failed = {item["code"] for item in said.document["checks"] if item["status"] == "fail"}
    assert failed == set(said.codes("error"))


def test_contradictory_sizes_are_findings_here() -> None:
    said = judged("llama-tiny", "--pp", "2", "--world-size", "8", "--gbs", "30", code=1)
    assert said.codes("error") == ["MF203"]


@pytest.mark.parametrize(
    "flags", [["--schedule", "1F1BX"], ["--pp", "-1"], ["--precision", "int4"]]
)
def test_values_that_are_no_choice_are_wrong_usage(flags: list[str]) -> None:
    said = inline("validate", "llama-tiny", *flags, "--json")
    assert (said.code, said.out) == (2, "")
    assert "error[MF" in said.err


def test_microbatches_too_few_for_virtual_stages() -> None:
    said = judged(
        "llama-tiny", "--num-layers", "12", "--pp", "6", "--vpp", "2", "--gbs", "3", code=1
    )
    text = messages(said, "MF304")
    for part in ("3 microbatches", "6 pipeline ranks", "at least 6", "global batch 3"):
        assert part in text


@pytest.mark.parametrize(("pp", "batch", "bubble"), [(8, 1, "87.5%"), (4, 3, "50.0%")])
def test_few_microbatches_under_plain_1f1b_are_valid(pp: int, batch: int, bubble: str) -> None:
    said = judged("llama-tiny", "--pp", str(pp), "--gbs", str(batch), code=0)
    assert bubble in messages(said, "MF304")
    assert said.codes("warning") == ["MF304"]


def test_a_rank_without_parameters_is_a_warning() -> None:
    flags = ["--num-layers", "2", "--pp", "3", "--layout", "Et||tL", "--gbs", "6"]
    said = judged("llama-tiny", *flags, code=0)
    assert "pipeline rank 1" in messages(said, "MF120")


# Schedules in CSV.


@pytest.mark.parametrize(
    ("text", "p2p", "code", "texts"),
    [
        ("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", "rendezvous", "MF312", ["rank 0", "rank 1"]),
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1\n", "rendezvous", "MF311", ["rank 1", "microbatch 1"]),
        ("0F0, 0F1 ,0B0,0B1\n1F0,1B0,1F1,1B1\n", "rendezvous", None, []),
        ("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", "rendezvous", None, []),
        ("0F0,0I0,0W0\n", "rendezvous", None, []),
    ],
)
def test_schedules_in_csv(
    text: str, p2p: str, code: str | None, texts: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "schedule.csv"
    file.write_text(text)
    said = judged("--schedule-csv", file, "--p2p", p2p, code=0 if code is None else 1)
    if code is not None:
        found = "\n".join(
            f"{item['message']} {item['where']}"
            for item in said.document["findings"]
            if item["code"] == code
        )
        assert all(part in found for part in texts)


@pytest.mark.parametrize("text", ["0F0,0X0\n", "1FOO\n", "", "\x00\x01"])
def test_a_csv_that_does_not_parse_is_unreadable_input(text: str, tmp_path: Path) -> None:
    file = tmp_path / "schedule.csv"
    file.write_text(text)
    said = inline("validate", "--schedule-csv", file, "--json")
    assert (said.code, said.out) == (2, "")


def test_p2p_decides_whether_a_send_waits(tmp_path: Path) -> None:
    """Both ranks send first: fine where sends are buffered, a deadlock where they wait."""
    file = tmp_path / "schedule.csv"
    file.write_text(
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
    )
    judged("--schedule-csv", file, "--p2p", "buffered", code=0)
    said = judged("--schedule-csv", file, code=1)
    assert said.codes("error") == ["MF314"]


@pytest.mark.parametrize(
    "arguments", [["llama-tiny"], ["--pp", "2"]], ids=["subject", "plan flags"]
)
def test_a_csv_is_checked_by_itself(arguments: list[str], tmp_path: Path) -> None:
    file = tmp_path / "schedule.csv"
    file.write_text("0F0,0B0\n")
    assert inline("validate", "--schedule-csv", file, *arguments).code == 2


def test_a_csv_that_is_not_there() -> None:
    assert inline("validate", "--schedule-csv", "absent.csv").code == 2


# Plan files that were edited or damaged.


def edited(file: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))
    return file


CONTRADICTIONS: list[tuple[str, Callable[[dict[str, Any]], object], str]] = [
    ("digest", lambda d: d.update(plan_digest="0" * 64), "plan_digest"),
    ("settings", lambda d: d["settings"].update(precision="bf16"), "plan_digest"),
    ("model", lambda d: d["model"]["spec"].update(ffn_hidden_size=512), "plan_digest"),
    ("batch", lambda d: d["parallel"].update(num_microbatches=7), "num_microbatches is 7"),
    ("dp", lambda d: d["parallel"].update(data_parallel_size=2), "data_parallel_size is 2"),
    ("layer twice", lambda d: d["layout"]["stages"][1].update(layers=[1, 2, 3]), "stages[1]"),
    ("stage gone", lambda d: d["layout"]["stages"].pop(), "4 stages"),
    ("schedule", lambda d: d["schedule"].update(digest="f" * 64), "schedule.digest"),
    ("layers shown", lambda d: d["model"].update(num_layers=9), "model.num_layers is 9, its"),
    ("count", lambda d: d["ranks"][1].update(parameters=1), "ranks[1].parameters is 1, its"),
    ("bubble", lambda d: d["schedule"].update(bubble_fraction=0.5), "bubble_fraction is 0.5"),
    ("number of another type", lambda d: d["layout"]["stages"][0].update(loss=0), "loss is 0"),
    (
        "order",
        lambda d: d["context"][0]["forward_order"][0].update(microbatch=7),
        "context[0].forward_order[0].microbatch is 7",
    ),
    ("use gone", lambda d: d["context"][0]["backward_order"].pop(), "context[0].backward_order"),
    ("group", lambda d: d["shared_groups"][0].update(pp_ranks=[0]), "shared_groups[0].pp_ranks"),
    ("flags", lambda d: d["megatron_args"].pop(), "megatron_args"),
    ("section gone", lambda d: d.pop("ranks"), "ranks is null"),
]


@pytest.mark.parametrize(
    ("change", "text"), [item[1:] for item in CONTRADICTIONS], ids=[i[0] for i in CONTRADICTIONS]
)
def test_a_plan_edited_by_hand(
    change: Callable[[dict[str, Any]], object], text: str, plan_file: Path
) -> None:
    edited(plan_file, change)
    said = judged(plan_file, code=1)
    assert text in messages(said, "MF209")
    with pytest.raises(MfsdpError, match="MF209"):
        Plan.load(plan_file)


BROKEN: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    ("no model", lambda d: d.pop("model")),
    ("no spec", lambda d: d["model"].pop("spec")),
    ("spec unknown key", lambda d: d["model"]["spec"].update(colour="red")),
    ("spec wrong type", lambda d: d["model"]["spec"].update(num_layers="eight")),
    ("spec negative", lambda d: d["model"]["spec"].update(hidden_size=-64)),
    ("spec huge", lambda d: d["model"]["spec"].update(num_layers=10**30)),
    ("parallel missing", lambda d: d["parallel"].pop("world_size")),
    ("parallel text", lambda d: d["parallel"].update(world_size="4")),
    ("parallel bool", lambda d: d["parallel"].update(micro_batch_size=True)),
    ("parallel zero", lambda d: d["parallel"].update(pipeline_model_parallel_size=0)),
    ("settings missing", lambda d: d["settings"].pop("precision")),
    ("settings wrong", lambda d: d["settings"].update(resident_chunks="two")),
    ("settings unknown", lambda d: d["settings"].update(schedule="gpipe")),
    ("layout text", lambda d: d["layout"].update(string=3)),
    ("layout wrong", lambda d: d["layout"].update(string="Et|tL")),
    ("layout list", lambda d: d.update(layout=[])),
    ("findings", lambda d: d.update(findings=[{"code": "MF210"}])),
    ("severity", lambda d: d.update(findings=[{"code": "M", "severity": "x", "message": "y"}])),
    ("digest number", lambda d: d.update(plan_digest=7)),
    ("schema", lambda d: d.update(schema="mfsdp.plan/2")),
]


@pytest.mark.parametrize("change", [item[1] for item in BROKEN], ids=[item[0] for item in BROKEN])
def test_a_plan_that_lacks_what_it_needs(
    change: Callable[[dict[str, Any]], object], plan_file: Path
) -> None:
    edited(plan_file, change)
    said = inline("validate", plan_file, "--json")
    assert (said.code, said.out) == (2, "")
    assert "error[MF208]" in said.err
    assert "Traceback" not in said.err
    with pytest.raises(MfsdpError, match="MF208"):
        Plan.load(plan_file)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\xff\xfe",
        b"[]",
        b"3",
        b'"text"',
        b'{"schema": "mfsdp.plan/1"',
        b"{}",
        b"[" * 5000,
    ],
    ids=["empty", "binary", "list", "number", "text", "truncated", "object", "deep"],
)
def test_a_file_that_is_no_plan(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_bytes(content)
    said = inline("validate", file, "--json")
    assert (said.code, said.out) == (2, "")
    assert "error[MF" in said.err
    assert "internal fault" not in said.err
    with pytest.raises(MfsdpError, match="MF208"):
        Plan.load(file)


def test_a_truncated_plan_is_called_a_plan(plan_file: Path) -> None:
    text = plan_file.read_text()
    plan_file.write_text(text[: len(text) // 2])
    said = inline("validate", plan_file)
    assert said.code == 2
    assert "not a plan file: it is not JSON" in said.err


def test_a_plan_that_is_not_there() -> None:
    with pytest.raises(MfsdpError, match="MF208"):
        Plan.load("absent.json")


def test_a_memory_limit_stays_with_the_plan(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    assert inline("plan", "llama-tiny", "--memory-limit", "1", "--out", file).code == 1
    assert judged(file, code=1).codes("error") == ["MF218"]


def test_a_plan_made_for_megatron_is_judged_for_whom_it_is_asked(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    made = inline("plan", "llama-tiny", "--pp", "2", "--target", "megatron", "--out", file)
    assert made.code == 1
    assert judged(file, code=0).codes() == ["MF213"]
    assert judged(file, "--target", "megatron", code=1).codes("error") == ["MF213"]


def test_flags_do_not_go_with_a_plan(plan_file: Path) -> None:
    said = inline("validate", plan_file, "--pp", "4")
    assert said.code == 2
    assert "--pipeline-model-parallel-size would make it another one" in said.err


def test_numeric_is_left_out_where_the_plan_has_errors() -> None:
    said = inline("validate", "llama-tiny", "--fp16", "--numeric", "--json")
    assert said.code == 1
    assert said.document["numeric"] is None
    assert "left out" in said.err


def test_the_view_shows_checks_and_a_verdict(plan_file: Path) -> None:
    said = inline("validate", plan_file)
    assert "MF314  pass" in said.out
    assert "rules hold" in said.out
    assert "valid: " in said.out
    bad = inline("validate", "llama-tiny", "--fp16")
    assert "MF223  fail" in bad.out
    assert "not valid: " in bad.out


def test_nothing_to_validate() -> None:
    said = inline("validate")
    assert said.code == 2
    assert "nothing to validate" in said.err


def test_a_path_that_cannot_exist_is_none() -> None:
    said = inline("validate", "a" * 5000, "--json")
    assert (said.code, said.out) == (2, "")
    assert "File name too long" in said.err
