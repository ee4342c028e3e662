from __future__ import annotations

import json
from pathlib import Path

from mfsdp_cli.compare.compare_paths import compare_paths
from mfsdp_cli.compare.document import document, verdict_of
from mfsdp_cli.compare.judge import Policy
from tests.helpers.runs import losses, run_folder

PAIR = {
    *("common", "only_a", "only_b", "max_abs", "max_abs_step", "mean_abs", "mean_signed"),
    *("max_rel", "first_mismatch_step"),
}


def test_the_keys_that_scripts_rely_on(tmp_path: Path) -> None:
    a = run_folder(tmp_path / "a", {1: 5.0, 2: "nan"}, {2: 4.5})
    b = run_folder(tmp_path / "b", {1: 5.0, 2: "+inf"}, {2: 4.25})
    found = document(compare_paths([str(a), str(b)], Policy()))
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert set(found) == {
        *("schema", "ok", "x", "tolerance", "runs", "judged", "train", "eval"),
        *("verdict", "warnings"),
    }
    assert found["schema"] == "mfsdp.compare/1"
    assert [set(run) for run in found["runs"]] == [
        {
            *("path", "format", "train_points", "eval_points", "nan", "inf", "missing"),
            *("skipped", "repeated_steps", "first_step", "last_step"),
        }
    ] * 2
    assert set(found["train"]) == PAIR
    assert set(found["eval"]) == PAIR | {"points"}
    assert found["eval"]["points"] == [{"step": 2, "a": 4.5, "b": 4.25}]
    assert set(found["verdict"]) == {"pass", "reasons"}
    counts = [v for run in found["runs"] for k, v in run.items() if k not in ("path", "format")]
    assert all(type(count) is int for count in counts)


def test_more_than_two_runs_are_each_against_the_first(tmp_path: Path) -> None:
    values = ({1: 5.0, 2: 4.0}, {1: 5.0, 2: 4.0}, {1: 5.0, 2: 4.5})
    paths = [losses(tmp_path / f"{i}.jsonl", v) for i, v in enumerate(values)]
    comparisons = compare_paths([str(path) for path in paths], Policy())
    found = document(comparisons)
    assert [run["path"] for run in found["runs"]] == [str(path) for path in paths]
    assert found["ok"] is found["verdict"]["pass"] is False
    assert found["train"]["max_abs"] == 0.0
    assert [(p["b"], p["train"]["max_abs"], p["verdict"]["pass"]) for p in found["pairs"]] == [
        (str(paths[1]), 0.0, True),
        (str(paths[2]), 0.5, False),
    ]
    assert len(found["verdict"]["reasons"]) == 1
    assert found["verdict"]["reasons"][0].startswith("C against A: beyond tolerance")
    same = verdict_of(compare_paths([str(paths[0])] * 3, Policy()))
    assert same.passed
    assert [reason[:11] for reason in same.reasons] == ["B against A", "C against A"]
