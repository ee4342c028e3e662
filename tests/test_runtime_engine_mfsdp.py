"""Engine mfsdp from the command line: it shards, it executes its plan, and the trace shows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mfsdp_cli.plan import Plan
from mfsdp_cli.runtime.traced import planned_units
from mfsdp_cli.schedule.actions import Kind
from tests.helpers.cli import mfsdp

STEPS = 2


def train(folder: Path, *flags: str) -> Path:
    """A traced run of the tied model on four ranks."""
    plan = folder / "plan.json"
    run = folder / "run"
    mfsdp(
        *("plan", "gpt2-tiny", "--pp", "2", "--vpp", "2", "--world-size", "4"),
        *("--gbs", "8", "--seq", "32", "--out", plan, *flags),
    )
    mfsdp(
        *("train", plan, "--steps", str(STEPS), "--eval-interval", "1", "--eval-steps", "1"),
        *("--trace", "--run-dir", run),
    )
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("resident"))


def traces(run: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((run / "trace").glob("rank-*.json"))]


def test_each_rank_keeps_its_share_of_its_stages(run: Path) -> None:
    plan = Plan.load(run / "plan.json")
    dp = plan.parallel.data_parallel_size
    bytes_an_element = 4 * 4  # fp32 weight, gradient and two moments
    for trace in traces(run):
        parameters = plan.document["ranks"][trace["pp_rank"]]["parameters"]
        whole = bytes_an_element * parameters
        # A group is padded to whole elements a rank: a few elements over one half at most.
        assert whole / dp <= trace["persistent_bytes"] <= whole / dp * 1.001


def test_the_trace_shows_the_plans_gathers_and_reductions(run: Path) -> None:
    plan = Plan.load(run / "plan.json")
    for trace in traces(run):
        for step in range(1, STEPS + 1):
            events = [
                event
                for record in trace["records"]
                if record["step"] == step
                for event in record["events"]
            ]
            gathers = [event for event in events if event["operation"] == "gather"]
            reductions = [event for event in events if event["operation"] == "reduce"]
            pp_rank = trace["pp_rank"]
            assert len(gathers) == planned_units(plan, pp_rank, {Kind.UNSHARD}).total()
            assert len(reductions) == planned_units(plan, pp_rank, {Kind.REDUCE_GRAD}).total()
            assert len(reductions) == plan.parallel.num_microbatches * len(
                plan.document["context"][pp_rank]["units"]
            )
            # What travels is the whole unit, gathered in fp32: its elements and a little padding.
            for event in gathers:
                unit = next(
                    unit
                    for unit in plan.document["context"][pp_rank]["units"]
                    if unit["unit"] == event["unit"]
                )
                assert 4 * unit["parameters"] <= event["bytes"] <= 4 * (unit["parameters"] + 8)


def test_validate_accepts_the_run_and_refuses_a_run_that_did_something_else(
    run: Path, tmp_path: Path
) -> None:
    document = json.loads(mfsdp("validate", run, "--json").stdout)
    assert document["ok"]
    statuses = {check["code"]: check["status"] for check in document["checks"]}
    assert {statuses[code] for code in ("MF341", "MF342", "MF343")} == {"pass"}

    other = tmp_path / "other"
    (other / "trace").mkdir(parents=True)
    for name in ("run.json", "plan.json", "metrics.jsonl"):
        (other / name).write_bytes((run / name).read_bytes())
    for trace in traces(run):
        if trace["rank"] == 3:
            swapped = trace["records"]
            swapped[4], swapped[5] = swapped[5], swapped[4]
        path = other / "trace" / f"rank-{trace['rank']}.json"
        path.write_text(json.dumps(trace))
    document = json.loads(mfsdp("validate", other, "--json", code=1).stdout)
    failed = [check["code"] for check in document["checks"] if check["status"] == "fail"]
    assert failed == ["MF341"]
    assert "rank 3, step 1" in json.dumps(document["findings"])


def test_without_residency_every_use_is_a_gather(tmp_path: Path) -> None:
    run = train(tmp_path, "--resident-chunks", "0")
    assert json.loads(mfsdp("validate", run, "--json").stdout)["ok"]
    plan = Plan.load(run / "plan.json")
    trace = traces(run)[0]
    units = len(plan.document["context"][0]["units"])
    gathers = [
        event
        for record in trace["records"]
        if record["step"] == 2
        for event in record["events"]
        if event["operation"] == "gather"
    ]
    assert len(gathers) == 2 * plan.parallel.num_microbatches * units
