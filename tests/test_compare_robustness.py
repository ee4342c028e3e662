"""Files cut anywhere, damaged anywhere: an error of ours or a reading that invents nothing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from mfsdp_cli.compare.judge import Policy, compare
from mfsdp_cli.compare.readers import read_run
from mfsdp_cli.compare.run import Run
from mfsdp_cli.errors import MfsdpError
from tests.helpers.runs import DATA

TEXTS = sorted(path.name for path in DATA.iterdir() if path.is_file())
EVENTS = ["c07_tb_tags", "c08_tb_multi"]


def source(name: str) -> Path:
    path = DATA / name
    return path if path.is_file() else sorted(path.iterdir())[-1]


def read(path: Path) -> Run | None:
    """The run, or None where it was refused."""
    try:
        return read_run(str(path))
    except MfsdpError:
        return None


def values(run: Run) -> dict[tuple[str, int], float]:
    return {
        (name, step): value
        for name, series in (("train", run.train), ("eval", run.eval))
        for step, value in series.finite()
    }


@pytest.mark.parametrize("name", [*TEXTS, *EVENTS])
def test_a_file_cut_anywhere_shows_only_values_of_the_whole(tmp_path: Path, name: str) -> None:
    content = source(name).read_bytes()
    (tmp_path / "whole").write_bytes(content)
    whole = read(tmp_path / "whole")
    expected = values(whole) if whole else {}
    rng, path = random.Random(name), tmp_path / "cut"
    for end in sorted(rng.sample(range(len(content)), min(60, len(content)))):
        path.write_bytes(content[:end])
        run = read(path)
        if run is not None:
            assert values(run).items() <= expected.items(), content[max(0, end - 200) : end]


@pytest.mark.parametrize("name", [*TEXTS, *EVENTS])
def test_a_file_with_a_byte_changed_is_read_or_refused(tmp_path: Path, name: str) -> None:
    content = bytearray(source(name).read_bytes())
    rng, path = random.Random(name), tmp_path / "changed"
    for _ in range(40):
        damaged = bytearray(content)
        for _ in range(rng.choice((1, 1, 20))):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged)
        run = read(path)
        if run is not None:
            run.to_json()
            compare(run, run, Policy())


@pytest.mark.parametrize("name", EVENTS)
def test_damage_in_an_event_file_is_never_a_pass(tmp_path: Path, name: str) -> None:
    content = source(name).read_bytes()
    whole = read(source(name))
    assert whole is not None
    rng, path = random.Random(name), tmp_path / "changed"
    for _ in range(40):
        damaged = bytearray(content)
        damaged[rng.randrange(100, len(damaged) - 100)] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        run = read(path)
        if run is not None:
            assert not compare(whole, run, Policy()).verdict.passed


@pytest.mark.parametrize("loss", ["NaN", "Infinity", "null", '"diverged"', "[]"])
def test_a_last_step_that_went_wrong_is_never_a_pass(tmp_path: Path, loss: str) -> None:
    rows = [f'{{"step": {step}, "loss": 5.0}}\n' for step in range(1, 10)]
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_text("".join([*rows, '{"step": 10, "loss": 5.0}\n']))
    bad.write_text("".join([*rows, f'{{"step": 10, "loss": {loss}}}\n']))
    for a, b in ((good, bad), (bad, good), (bad, bad)):
        runs = read_run(str(a)), read_run(str(b))
        assert not compare(*runs, Policy()).verdict.passed
    assert compare(read_run(str(good)), read_run(str(good)), Policy()).verdict.passed


def test_binary_between_the_lines_of_a_log(tmp_path: Path) -> None:
    lines = source("c01_healthy.log").read_bytes().splitlines(keepends=True)
    path = tmp_path / "mixed"
    rng = random.Random(1)
    path.write_bytes(b"".join(line + rng.randbytes(3000) + b"\n" for line in lines))
    whole, mixed = read(source("c01_healthy.log")), read(path)
    assert whole is not None
    assert mixed is not None
    assert values(mixed) == values(whole)
