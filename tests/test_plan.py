"""The plan document: its digest, its text, its file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.plan import Plan, canonical_json, json_text, run_digest
from mfsdp_cli.planning.build import build_plan
from mfsdp_cli.planning.request import PlanRequest


def plan(**sizes: int) -> Plan:
    return build_plan(PlanRequest("llama-tiny", sizes={"world_size": 4, **sizes}))


def test_loading_gives_the_same_plan(tmp_path: Path) -> None:
    made = plan(pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2)
    made.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    for name in ("model", "parallel", "layout", "settings", "shared_groups", "findings"):
        assert getattr(loaded, name) == getattr(made, name)
    assert loaded.schedule.digest == made.schedule.digest
    assert loaded.schedule.actions == made.schedule.actions
    assert loaded.plan_digest == made.plan_digest
    assert loaded.document == made.document


def test_the_digest_depends_on_what_runs_alone() -> None:
    made = plan(pipeline_model_parallel_size=2)
    assert made.plan_digest == plan(pipeline_model_parallel_size=2).plan_digest
    assert made.plan_digest != plan(pipeline_model_parallel_size=4).plan_digest
    assert made.plan_digest != plan(pipeline_model_parallel_size=2, seq_length=64).plan_digest
    parts = (made.parallel, "Et|tL", made.settings, "0")
    digest = run_digest(made.model, *parts)
    renamed = replace(made.model, name="other", source="elsewhere", assumptions=("so",))
    assert run_digest(renamed, *parts) == digest
    assert run_digest(replace(made.model, rotary_base=5e5), *parts) != digest


def test_a_plan_without_schedule_says_why() -> None:
    broken = plan(
        world_size=4,
        pipeline_model_parallel_size=4,
        num_virtual_stages_per_pipeline_rank=2,
        global_batch_size=5,
    )
    if broken.built is not None:
        broken = replace(broken, built=None)
    with pytest.raises(MfsdpError, match="MF304"):
        _ = broken.schedule


def test_canonical_json_sorts_and_refuses_nan() -> None:
    assert canonical_json({"b": [1, None], "a": 0.5}) == '{"a":0.5,"b":[1,null]}'
    with pytest.raises(ValueError, match="Out of range"):
        canonical_json({"a": float("nan")})


@pytest.mark.parametrize(
    "document", [{}, {"a": {}, "b": []}, {"a": {"b": [1, {"c": "é\n"}]}, "d": [[1], {"e": None}]}]
)
def test_json_text_reads_back(document: dict) -> None:
    assert json.loads(json_text(document)) == document


def test_json_text_refuses_what_is_not_strict() -> None:
    with pytest.raises(ValueError, match="Out of range"):
        json_text({"a": {"b": float("inf")}})
