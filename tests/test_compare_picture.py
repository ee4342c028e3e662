from __future__ import annotations

import math
import struct
from pathlib import Path

import pytest

from mfsdp_cli.compare.compare_paths import compare_paths
from mfsdp_cli.compare.judge import Policy
from mfsdp_cli.compare.picture import _short_names, _thinned, draw
from mfsdp_cli.errors import MfsdpError
from tests.helpers.runs import DATA, losses, run_folder


def drawn(tmp_path: Path, *paths: Path) -> tuple[int, int]:
    """Width and height of the picture in pixels."""
    target = tmp_path / "picture.png"
    draw(compare_paths([str(path) for path in paths], Policy()), target)
    content = target.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(content) > 10_000
    return struct.unpack(">II", content[16:24])


def test_two_runs_with_evaluations(tmp_path: Path) -> None:
    train = {step: 5.0 / step for step in range(1, 50)}
    a = run_folder(tmp_path / "a", train, {10: 1.0, 20: 0.5})
    b = run_folder(tmp_path / "b", train, {10: 1.0, 20: 0.9})
    assert drawn(tmp_path, a, b) == (1440, 990)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("c25_a.jsonl", "c25_b.jsonl"),  # evaluations alone
        ("c11_a.jsonl", "c11_b.jsonl"),  # no common step
        ("c09_wandb_history.jsonl", "c09_wandb_history.jsonl"),  # one point, NaN, Inf
        ("c06_tb_12000", "c08_tb_multi"),  # long, of different lengths
    ],
)
def test_every_kind_of_pair_can_be_drawn(tmp_path: Path, a: str, b: str) -> None:
    drawn(tmp_path, DATA / a, DATA / b)


def test_runs_without_any_point(tmp_path: Path) -> None:
    folders = [run_folder(tmp_path / name, {}, status="failed") for name in "ab"]
    drawn(tmp_path, *folders)


def test_many_runs_and_strange_names(tmp_path: Path) -> None:
    paths = [losses(tmp_path / f"$\\x_{i}$^{{.jsonl", {1: 5.0, 2: 4.0 + i}) for i in range(8)]
    drawn(tmp_path, *paths)


def test_a_spike_in_a_long_curve_is_not_thinned_away() -> None:
    points = [(step, 10.0) for step in range(100_000)]
    points[77_777] = (77_777, 99.0)
    points[5] = (5, math.nan)
    thin = _thinned(points)
    assert len(thin) < 5000
    assert (77_777, 99.0) in thin
    assert any(math.isnan(value) for _, value in thin)
    assert [step for step, _ in thin] == sorted(step for step, _ in thin)


def test_names_are_as_short_as_they_can_be(tmp_path: Path) -> None:
    folders = [run_folder(tmp_path / place, {1: 5.0}) for place in ("x/run", "y/run")]
    comparisons = compare_paths([str(folder) for folder in folders], Policy())
    assert _short_names(comparisons) == ["x/run", "y/run"]
    comparisons = compare_paths([str(folders[0]), str(folders[0])], Policy())
    assert _short_names(comparisons) == [str(folders[0])] * 2


def test_a_place_where_nothing_can_be_written(tmp_path: Path) -> None:
    comparisons = compare_paths([str(DATA / "c11_a.jsonl"), str(DATA / "c11_c.jsonl")], Policy())
    for target in (tmp_path / "none" / "a.png", tmp_path):
        with pytest.raises(MfsdpError, match="MF609"):
            draw(comparisons, target)
