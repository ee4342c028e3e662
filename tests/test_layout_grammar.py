from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.layout.grammar import (
    MAX_SIGNS,
    count_stages,
    examine_layout,
    expand,
    format_layout,
    parse_layout,
)
from mfsdp_cli.layout.layout import Layout

FIELD = json.loads((Path(__file__).parent / "data" / "layouts.json").read_text())


def _parse(text: str, layers: int, *, mtp: int = 0, pp: int, vpp: int | None = None) -> Layout:
    return parse_layout(text, num_layers=layers, mtp_num_layers=mtp, pp=pp, vpp=vpp)


def _fault(text: str, layers: int, *, mtp: int = 0, pp: int, vpp: int | None = None) -> str:
    with pytest.raises(MfsdpError) as caught:
        _parse(text, layers, mtp=mtp, pp=pp, vpp=vpp)
    finding = caught.value.finding
    assert caught.value.exit_code == 2
    return f"{finding.code} {finding.message} | {finding.where}"


@pytest.mark.parametrize("case", FIELD, ids=lambda case: str(case["id"]))
def test_layouts_of_published_recipes(case: dict) -> None:
    sizes = {"mtp": case["mtp_num_layers"], "pp": case["pp"], "vpp": case["vpp"]}
    if not case["valid"]:
        fault = _fault(case["layout"], case["num_layers"], **sizes)
        assert fault.startswith("MF107 the layout holds 31 decoder layers (t), the model has 27")
        return
    layout = _parse(case["layout"], case["num_layers"], **sizes)
    assert layout.decoder_layers_per_pp_rank() == case["decoder_layers_per_pp_rank"]
    assert [layer for stage in layout.stages for layer in stage.layers] == list(
        range(case["num_layers"])
    )
    again = _parse(format_layout(layout), case["num_layers"], **sizes)
    assert again == layout
    assert len(format_layout(layout)) <= len(case["layout"].replace(",", ""))


def test_counts_groups_and_commas() -> None:
    assert expand("E|(t*4|)*2,t,*1,2|*2L") == "E|tttt|tttt|tttttttttttt||L"
    assert expand("(E)*1(t*0|)*2L") == "E||L"
    assert count_stages("Et*3|(tt|)*29,m|L") == 32


def test_reading_is_that_of_megatron_core() -> None:
    """Random strings of the grammar, against Megatron-Core's own parser."""
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import (
        PipelineParallelLayerLayout,
    )

    letters = {
        LayerType.embedding: "E",
        LayerType.decoder: "t",
        LayerType.mtp: "m",
        LayerType.loss: "L",
    }
    draw = random.Random(7)
    texts = [case["layout"] for case in FIELD] + [_random_text(draw) for _ in range(300)]
    for text in texts:
        stages = PipelineParallelLayerLayout.parse_str_to_list(text)
        assert expand(text) == "|".join("".join(letters[part] for part in s) for s in stages), text


def _random_text(draw: random.Random) -> str:
    def item() -> str:
        sign = draw.choice("ttttm|EL")
        return sign + (f"*{draw.randrange(14)}" if draw.random() < 0.3 else "")

    parts = []
    for _ in range(draw.randrange(1, 8)):
        if draw.random() < 0.4:
            inner = "".join(item() for _ in range(draw.randrange(1, 5)))
            parts.append(f"({inner})*{draw.randrange(5)}")
        else:
            parts.append(item())
    text = "".join(parts)
    for _ in range(draw.randrange(3)):
        place = draw.randrange(len(text) + 1)
        text = f"{text[:place]},{text[place:]}"
    return text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Ett|txtL", "MF101 'x' is no layout sign (position 6)"),
        ("E t|tL", "MF101 ' ' is no layout sign (position 2)"),
        ("et|tL", "MF101 'e' is no layout sign (position 1)"),
        ("Et*3|t*xL", "MF102 '*' must be followed by a count (position 7)"),
        ("Et*", "MF102 '*' must be followed by a count (position 3)"),
        ("*3t", "MF102 '*' must follow a layer, '|' or a group (position 1)"),
        ("Et*3*2L", "MF102 a count follows a count, which Megatron misreads (position 5)"),
        ("E(tt|)*2*3L", "MF102 a count follows a count, which Megatron misreads (position 9)"),
        ("E(tt|L", "MF102 the group that opens here is not closed (position 2)"),
        ("E(tt|)L", "MF102 a group needs a count, as in (tt|)*3, but has none (position 2)"),
        ("E()*3L", "MF102 the group that opens here is empty (position 2)"),
        ("E((t|)*2)*2L", "MF102 Megatron's grammar knows no group in a group"),
        ("Et)L", "MF102 ')' closes no group (position 3)"),
        ("Et3L", "MF101 '3' is no layout sign (position 3)"),
        ("Et*³L", "MF102 '*' must be followed by a count (position 3)"),
        ("", "MF101 a layout must be a text such as 'Et*4|t*4L', got ''"),
    ],
)
def test_syntax_errors_name_sign_and_position(text: str, message: str) -> None:
    assert _fault(text, 2, pp=2).startswith(message)


@pytest.mark.parametrize(
    "text",
    ["Et*999999999L", "E(t*999|)*999999L", "E" + "(t*90000)*1" * 4 + "L", f"Et*{'9' * 5000}L"],
)
def test_explosions_are_refused_at_once(text: str) -> None:
    assert _fault(text, 2, pp=1).startswith("MF103")


def test_large_layouts_are_read() -> None:
    assert len(expand(f"E(t|)*{MAX_SIGNS // 2 - 2}L")) == MAX_SIGNS - 2


def test_61_layers_on_16_ranks() -> None:
    layout = _parse("Et|(tt|)*30L", 61, pp=16)
    assert layout.vpp == 2
    assert [stage.layers for stage in layout.stages_of(15)] == [(29, 30), ()]
    assert [stage.loss for stage in layout.stages_of(15)] == [False, True]


@pytest.mark.parametrize("text", ["Et|(tt|)*29L|", "Et|(tt|)*29|L", "Et|(tt|)*28t|t|L"])
def test_layers_that_are_missing_are_counted(text: str) -> None:
    assert count_stages(text) == 32
    fault = _fault(text, 61, pp=16)
    assert fault.startswith("MF107 the layout holds 59 decoder layers (t), the model has 61 |")


def test_an_empty_stage_in_the_middle_is_legal() -> None:
    layout = _parse("Ettt|(tt|)*14|(tt|)*15L", 61, pp=16)
    empty, last = layout.stages_of(15)
    assert (empty.layers, empty.loss, last.layers, last.loss) == ((), False, (), True)
    assert layout.decoder_layers_per_pp_rank() == [5, *[4] * 14, 0]


def test_the_loss_must_be_on_the_last_stage() -> None:
    """Megatron-Core accepts this string and would wait for ever; stricter here."""
    fault = _fault("Ettt|(tt|)*29L|", 61, pp=16)
    assert fault.startswith("MF109 the loss (L) must come last on the last stage, stage 31")
    assert "is on stage 30 (pp rank 14, virtual stage 1)" in fault
    assert "the last stage is empty" in fault


def test_the_embedding_must_come_first() -> None:
    assert "is on stage 1" in _fault("|Et|tL", 2, pp=3)
    assert _fault("tE|tL", 2, pp=2).startswith("MF108 the embedding (E) must come first")
    assert _fault("tt|tL", 3, pp=2).startswith("MF108 the embedding (E) must stand once, found 0")


def test_stages_must_divide_over_the_ranks() -> None:
    text = "Ett|(tt|)*46L"
    layout = _parse(text, 94, pp=8)
    assert layout.vpp == 6
    assert [stage.layers for stage in layout.stages_of(0)] == [
        (0, 1), (16, 17), (32, 33), (48, 49), (64, 65), (80, 81)
    ]  # fmt: skip
    assert _parse(text, 94, pp=16).vpp == 3
    assert _fault(text, 94, pp=10).startswith(
        "MF105 the layout has 48 stages, which do not divide over 10 pipeline ranks"
    )
    fault = _fault(text, 94, pp=8, vpp=4)
    assert fault.startswith("MF106 4 virtual stages a rank are declared")
    assert "make 6" in fault
    for pp in (0, -8):
        assert _fault(text, 94, pp=pp).startswith(f"MF116 pipeline sizes start at 1, got {pp}")


def test_one_rank_does_not_interleave() -> None:
    assert _fault("Et|tL", 2, pp=1).startswith("MF116 one pipeline rank cannot interleave")


@pytest.mark.parametrize(("pp", "vpp"), [(8, 4), (16, 2)])
def test_mtp_without_decoder_layers_beside_it(pp: int, vpp: int) -> None:
    layout = _parse("E(|tt)*30,|mL", 60, mtp=1, pp=pp)
    assert layout.vpp == vpp
    assert (layout.stages[-1].layers, layout.stages[-1].mtp) == ((), (0,))


def test_mtp_faults() -> None:
    assert _fault("Et|tmL", 2, mtp=3, pp=2).startswith(
        "MF110 the layout holds 1 MTP layers (m), the model has 3"
    )
    split = _fault("E|(t|)*11m|m|m|L", 11, mtp=3, pp=8)
    assert split.startswith("MF111 all MTP layers (m) must be on one stage, not on stage 12 (pp ra")
    assert "MTP" in _fault("Et|m|tL", 2, mtp=1, pp=3)
    assert _fault("Et|m|tL", 2, mtp=1, pp=3).startswith(
        "MF111 decoder layers (t) must come before MTP layers (m)"
    )
    early = _fault("Et|t|m|t|t|L", 4, mtp=1, pp=2)
    assert early.startswith("MF111 MTP layers (m) must be in the last virtual stage of their rank")
    assert _fault("Et|t|m|L", 2, mtp=1, pp=2).startswith(
        "MF111 MTP layers (m) must not be on pipeline rank 0"
    )


def test_four_losses() -> None:
    fault = _fault("E|(t|)*10m|m|m|LL|LL", 10, mtp=3, pp=8)
    assert fault.startswith("MF109 the loss (L) must stand once, found 4")


def test_all_faults_are_found_at_once() -> None:
    layout, faults = examine_layout("tt|mE|tL|", num_layers=7, mtp_num_layers=0, pp=3, vpp=None)
    assert layout is None
    assert [fault.code for fault in faults] == [
        "MF105",
        "MF107",
        "MF108",
        "MF109",
        "MF110",
        "MF111",
    ]


def test_stages_are_numbered_in_loops() -> None:
    layout = _parse("Et|t|t|tL", 4, pp=2)
    assert [(s.stage, s.pp_rank, s.vp_stage) for s in layout.stages] == [
        (0, 0, 0),
        (1, 1, 0),
        (2, 0, 1),
        (3, 1, 1),
    ]


@pytest.mark.parametrize("value", [None, 7, ["E", "L"], b"EL"])
def test_a_layout_that_is_no_text(value: object) -> None:
    with pytest.raises(MfsdpError, match="MF101"):
        expand(value)  # type: ignore[arg-type]
