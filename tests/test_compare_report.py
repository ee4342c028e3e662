from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from mfsdp_cli.compare.compare_paths import compare_paths
from mfsdp_cli.compare.judge import Policy
from mfsdp_cli.compare.report import report, verdict_lines
from tests.helpers.runs import DATA, losses, run_folder


def shown(*paths: Path, width: int = 100, **policy: object) -> str:
    comparisons = compare_paths([str(p) for p in paths], Policy(**policy))  # type: ignore[arg-type]
    console = Console(file=io.StringIO(), width=width, highlight=False)
    for part in (*report(comparisons, width), *verdict_lines(comparisons)):
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def lines_of(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_evaluations_side_by_side(tmp_path: Path) -> None:
    a = run_folder(tmp_path / "a", {50: 5.0, 100: 4.0}, {50: 4.5, 100: 3.5})
    b = run_folder(tmp_path / "b", {50: 5.0, 100: 4.0}, {50: 4.5, 100: 3.6})
    text = lines_of(shown(a, b, width=200))
    assert f"A {a} run-folder 2 2 50-100" in text
    assert "step A B B - A of tolerance" in text
    assert "50 4.50000 4.50000 0 0% ok" in text
    assert "100 3.50000 3.60000 +0.1 500% beyond" in text
    assert (
        "training loss, B - A: 2 common, largest 0 at step 50, mean 0, signed 0; "
        "last A 4.00000, B 4.00000" in text
    )
    assert text[-1].startswith("different: beyond tolerance (0.02 or 0.5%")


def test_the_training_losses_where_there_are_no_evaluations() -> None:
    text = lines_of(shown(DATA / "c01_healthy.log", DATA / "c01_nan_omitted.log"))
    assert "training losses:" in text
    assert "4 4.50000 missing - - missing" in text
    assert text[-1] == "different: B: 3 of 6 training losses are missing (step 4-6)"


def test_every_kind_of_point_has_a_word(tmp_path: Path) -> None:
    values = {1: 5.0, 2: "nan", 3: "inf", 4: 5.0, 5: 5.0, 6: 1e9}
    a = losses(tmp_path / "a.jsonl", values)
    b = losses(tmp_path / "b.jsonl", {1: 5.0, 2: 5.0, 3: 5.0, 4: None, 6: 1e9, 7: 1e-9})
    text = lines_of(shown(a, b))
    assert "2 nan 5.00000 - - nan" in text
    assert "3 inf 5.00000 - - infinite" in text
    assert "4 5.00000 missing - - missing" in text
    assert "5 5.00000 - - - only A" in text
    assert "6 1e+09 1e+09 0 0% ok" in text
    assert "7 - 1e-09 - - only B" in text


def test_a_long_table_keeps_the_ends_and_the_faults(tmp_path: Path) -> None:
    values = dict.fromkeys(range(1, 1001), 5.0)
    a = losses(tmp_path / "a.jsonl", values)
    b = losses(tmp_path / "b.jsonl", {**values, 333: 5.1, 777: 9.0})
    text = lines_of(shown(a, b))
    rows = [line.split()[0] for line in text if line.endswith((" ok", " beyond"))]
    assert len(rows) < 24
    assert {"1", "333", "777", "1000"} <= set(rows)
    assert f"{1000 - len(rows)} rows are left out" in text


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_line_is_wider_than_the_terminal(tmp_path: Path, width: int) -> None:
    train = {step: 5.0 / step for step in range(1, 300)}
    a = run_folder(tmp_path / ("deep" * 20) / "a", train, {100: 4.5, 200: 4.4})
    b = run_folder(tmp_path / "b", train, {100: 4.5, 200: 4.0})
    text = shown(a, b, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "beyond" in text
    assert text.count("different") == 1


def test_more_than_two_runs_have_one_table(tmp_path: Path) -> None:
    paths = [losses(tmp_path / f"{i}.jsonl", {1: 5.0, 2: 4.0 + i}) for i in range(3)]
    text = lines_of(shown(*paths))
    assert "B - A 2 1 2 0.5 0.5 different" in text
    assert "C - A 2 2 2 1 1 different" in text


def test_markup_in_names_is_text(tmp_path: Path) -> None:
    a = losses(tmp_path / "[bold]a[bold].jsonl", {1: 5.0})
    assert "[bold]a[bold].jsonl" in shown(a, a, width=200)


def test_no_points_at_all(tmp_path: Path) -> None:
    a, b = (run_folder(tmp_path / name, {}, status="failed") for name in "ab")
    text = shown(a, b)
    assert "no training losses in either run" in text
    assert "nothing to compare" in text
