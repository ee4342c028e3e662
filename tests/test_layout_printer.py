from __future__ import annotations

import random
from functools import cache
from itertools import product

import pytest

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.layout.checks import build_layout
from mfsdp_cli.layout.grammar import expand, format_layout
from mfsdp_cli.layout.printer import compress


def test_no_short_string_of_the_grammar_is_shorter() -> None:
    """Against all strings of up to six signs."""
    for size in range(1, 7):
        for signs in product("t|(*)2", repeat=size):
            text = "".join(signs)
            try:
                expanded = expand(text)
            except MfsdpError:
                continue
            assert len(compress(expanded)) <= size, text


def test_no_random_string_of_the_grammar_is_shorter() -> None:
    draw = random.Random(11)
    for _ in range(2000):
        parts = []
        for _ in range(draw.randrange(1, 5)):
            inner = "".join(_item(draw) for _ in range(draw.randrange(1, 5)))
            count = f"*{draw.randrange(1, 12)}"
            parts.append(f"({inner}){count}" if draw.random() < 0.6 else inner)
        text = "".join(parts)
        assert len(compress(expand(text))) <= len(text), text


def test_nothing_shorter_exists() -> None:
    """Against every way to write each text of up to nine signs, and random longer ones."""
    for size in range(1, 10):
        for signs in product("t|m", repeat=size):
            text = "".join(signs)
            assert len(compress(text)) == _shortest(text), text
    draw = random.Random(5)
    for _ in range(300):
        unit = "".join(draw.choices("t|", k=draw.randrange(1, 9)))
        text = "".join(draw.choice([unit, unit, "t", "|"]) for _ in range(draw.randrange(2, 9)))
        assert len(compress(text)) == _shortest(text), text


@cache
def _shortest(text: str, *, grouped: bool = True) -> int:
    """Signs of the shortest writing: every first piece is tried, nothing is left out."""
    best = len(text)
    for period in range(1, len(text) // 2 + 1) if grouped else [1]:
        unit, times = text[:period], 1
        inner = 1 if period == 1 else 2 + _shortest(unit, grouped=False)
        while len(text) >= period * (times + 1) and text[period * times :].startswith(unit):
            times += 1
            rest = _shortest(text[period * times :], grouped=grouped)
            best = min(best, inner + 1 + len(str(times)) + rest)
    return min(best, 1 + _shortest(text[1:], grouped=grouped)) if text else 0


def _item(draw: random.Random) -> str:
    sign = draw.choice("ttt|m")
    return sign + (f"*{draw.randrange(1, 15)}" if draw.random() < 0.4 else "")


@pytest.mark.parametrize(
    ("stages", "text"),
    [
        (["Ett"], "Ett"),
        (["Et", "tL"], "Et|tL"),
        (["Etttttttt", "tttttttt", "ttttttt", "tttttttL"], "Et*8|t*8(|t*7)*2L"),
        (["Ettt", *["tt"] * 29, "m", "L"], "Et(tt|)*30m|L"),
        (["Et", "", "", "", "tL"], "Et|*4tL"),
    ],
)
def test_examples(stages: list[str], text: str) -> None:
    assert format_layout(build_layout(stages, len(stages))) == text


def test_what_is_printed_reads_back() -> None:
    draw = random.Random(3)
    for _ in range(200):
        stages = [
            "t" * draw.choice([0, 0, 1, 2, 2, 2, 5, 13]) for _ in range(draw.randrange(1, 40))
        ]
        signs = "E" + "|".join(stages) + "mL"
        assert expand(compress(signs)) == signs
        assert len(compress(signs)) <= len(signs)


def test_a_thousand_stages_take_no_minutes() -> None:
    signs = "E" + "|".join(["t"] * 1024) + "L"
    assert compress(signs) == "Et(|t)*1023L"
    assert compress(f"E{'t' * 10_000}L") == "Et*10000L"
