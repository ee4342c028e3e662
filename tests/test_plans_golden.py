"""The ready plans are what their commands write, and every number said about them is true."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from mfsdp_cli.plan import Plan
from tests.helpers.inline import inline

PLANS = Path(__file__).parents[1] / "plans"
README = (PLANS / "README.md").read_text()
COMMANDS = re.findall(r"^mfsdp plan .*--out (\S+)$", README, re.MULTILINE)


def command(name: str) -> list[str]:
    (line,) = re.findall(rf"^mfsdp (plan .*--out {re.escape(name)})$", README, re.MULTILINE)
    return shlex.split(line)


def document(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((PLANS / name).read_text())
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_a_plan_is_what_its_command_writes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.environ.get("MFSDP_UPDATE_GOLDEN"):
        monkeypatch.chdir(PLANS)
        assert inline(*command(name)).code == 0
        return
    monkeypatch.chdir(tmp_path)
    assert inline(*command(name)).code == 0
    assert (tmp_path / name).read_text() == (PLANS / name).read_text()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_plan_is_valid(name: str) -> None:
    assert inline("validate", PLANS / name).code == 0
    assert Plan.load(PLANS / name).errors == []


def test_every_plan_is_listed() -> None:
    files = {path.name for path in PLANS.glob("*.json")}
    assert files == set(COMMANDS) == set(re.findall(r"\]\((\S+\.json)\)", README))


def test_what_the_readme_says() -> None:
    plain, interleaved = document("llama-tiny-1f1b.json"), document("llama-tiny-interleaved.json")
    assert plain["schedule"]["bubble_fraction"] == pytest.approx(1 / 9)
    assert plain["schedule"]["gathers_per_step"] == 1
    assert interleaved["schedule"]["bubble_fraction"] == pytest.approx(1 / 17)
    assert [item["ranks"][0]["in_flight_chunks"] for item in (plain, interleaved)] == [2, 5]
    tied = document("gpt2-tiny-tied.json")
    assert [group["pp_ranks"] for group in tied["shared_groups"]] == [[0, 3]]
    held = sum(rank["parameters"] for rank in tied["ranks"])
    assert held > tied["model"]["parameters"]["total"]
    assert document("llama-tiny-head-alone.json")["layout"]["stages"][3]["layers"] == []
    assert document("llama-tiny-unit-by-unit.json")["schedule"]["gathers_per_step"] == 128
    deepseek = document("deepseek-v3-pp16-vpp2.json")
    assert [group["pp_ranks"] for group in deepseek["shared_groups"]] == [[0, 14]]
    llama = document("llama3-70b-h100.json")
    assert llama["layout"]["decoder_layers_per_pp_rank"] == [10, 10, 10, 11, 10, 10, 10, 9]
    assert max(rank["memory"]["peak_bytes"] for rank in llama["ranks"]) < 80 * 2**30
