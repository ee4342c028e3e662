"""Megatron-Core's own parser and checks as the oracle, on sound strings and on broken ones."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from mfsdp_cli.layout.grammar import examine_layout, format_layout
from mfsdp_cli.layout.layout import Layout
from mfsdp_cli.layout.printer import stage_signs

FIELD = json.loads((Path(__file__).parent / "data" / "layouts.json").read_text())
LETTERS = {
    LayerType.embedding: "E",
    LayerType.decoder: "t",
    LayerType.mtp: "m",
    LayerType.loss: "L",
}
#: Refused here, accepted by Megatron-Core: why, for each code.
STRICTER = {
    "MF102": "a count after a group's count, which Megatron-Core gives to the group's last sign",
    "MF109": "empty stages after the loss, which would wait for an output that nobody sends",
    "MF111": "MTP layers on pipeline rank 0, which its own message excludes",
    "MF116": "virtual stages on one pipeline rank, which no schedule runs",
}


def _of_megatron(text: str, layers: int, mtp: int, pp: int) -> list[str] | None:
    """The stages in order, or None where Megatron-Core refuses."""
    try:
        read = PipelineParallelLayerLayout(text, pp)
        read.validate_layer_layout(layers, mtp)
    except (AssertionError, IndexError):
        return None
    chunks = range(read.virtual_pipeline_model_parallel_size)
    return [
        "".join(LETTERS[part] for part in read.layout[rank][chunk])
        for chunk in chunks
        for rank in range(pp)
    ]


def _compare(text: str, layers: int, mtp: int, pp: int) -> str:
    """``sound``, ``refused`` by both, or the code by which only we refuse."""
    theirs = _of_megatron(text, layers, mtp, pp)
    ours, faults = examine_layout(text, num_layers=layers, mtp_num_layers=mtp, pp=pp, vpp=None)
    if ours is None:
        return "refused" if theirs is None else faults[0].code
    assert theirs == [stage_signs(stage) for stage in ours.stages], text
    _prints_back(ours, layers, mtp)
    return "sound"


def _prints_back(layout: Layout, layers: int, mtp: int) -> None:
    """Megatron-Core reads what we print as what we meant."""
    printed = format_layout(layout)
    again = _of_megatron(printed, layers, mtp, layout.pp)
    assert again == [stage_signs(stage) for stage in layout.stages], printed


@pytest.mark.parametrize("case", FIELD, ids=lambda case: str(case["id"]))
def test_published_layouts(case: dict) -> None:
    verdict = _compare(case["layout"], case["num_layers"], case["mtp_num_layers"], case["pp"])
    assert verdict == ("sound" if case["valid"] else "refused")


def test_random_sound_layouts() -> None:
    draw = random.Random(29)
    seen = Counter(_compare(*_sound(draw)) for _ in range(1500))
    assert seen == {"sound": 1500}


def test_random_broken_layouts() -> None:
    """One to three signs of a sound string are left out, doubled, replaced or put in."""
    draw = random.Random(31)
    seen: Counter[str] = Counter()
    for _ in range(6000):
        text, layers, mtp, pp = _sound(draw)
        for _ in range(draw.randrange(1, 4)):
            text = _broken(draw, text)
        verdict = _compare(text or "E", layers, mtp, pp)
        assert verdict in {"sound", "refused", *STRICTER}, (verdict, text, layers, mtp, pp)
        seen[verdict] += 1
    assert seen["refused"] > 3000
    assert seen["sound"] > 100


@pytest.mark.parametrize(
    ("code", "text", "layers", "mtp", "pp"),
    [
        ("MF102", "E(t|)*2*2L", 2, 0, 2),
        ("MF109", "Et|tL|", 2, 0, 3),
        ("MF111", "Et|t|m|L", 2, 1, 2),
        ("MF116", "Et|tL", 2, 0, 1),
    ],
)
def test_where_we_are_stricter(code: str, text: str, layers: int, mtp: int, pp: int) -> None:
    assert _compare(text, layers, mtp, pp) == code


def _sound(draw: random.Random) -> tuple[str, int, int, int]:
    """A random layout as someone may write it, with its layers, MTP layers and pipeline size."""
    pp = draw.randrange(1, 7)
    vpp = draw.randrange(1, 5) if pp > 1 else 1
    stages = ["t" * draw.choice([0, 1, 1, 2, 2, 2, 3, 11]) for _ in range(pp * vpp)]
    mtp = draw.choice([0, 0, 1, 2])
    if mtp:
        place = draw.randrange(len(stages) - pp + (pp > 1), len(stages))
        stages[place] += "m" * mtp
        stages[place + 1 :] = [""] * (len(stages) - place - 1)
    layers = "".join(stages).count("t")
    signs = f"E{'|'.join(stages)}L"
    return _written(draw, signs), layers, mtp, pp


def _written(draw: random.Random, signs: str) -> str:
    """Runs with counts or without, repeats as groups, commas anywhere."""
    text, at = "", 0
    while at < len(signs):
        period = draw.randrange(1, 5)
        unit = signs[at : at + period]
        times = 1
        while signs[at + times * period : at + (times + 1) * period] == unit:
            times += 1
        if times == 1 or draw.random() < 0.4:
            unit, times = signs[at], 1
        text += unit if times == 1 else f"{unit if len(unit) == 1 else f'({unit})'}*{times}"
        text += "," * (draw.random() < 0.1)
        at += len(unit) * times
    return text


def _broken(draw: random.Random, text: str) -> str:
    at = draw.randrange(len(text) + 1)
    sign = draw.choice("EtmL|()*,0123x ")
    match draw.randrange(4):
        case 0:
            return text[:at] + text[at + 1 :]
        case 1:
            return text[:at] + text[at : at + 1] * 2 + text[at + 1 :]
        case 2:
            return text[:at] + sign + text[at + 1 :]
        case _:
            return text[:at] + sign + text[at:]
