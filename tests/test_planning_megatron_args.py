"""Megatron's flags for a plan: read back, they make the same plan."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from mfsdp_cli.model.presets import preset
from mfsdp_cli.planning.megatron_args import inexpressible
from tests.helpers.inline import inline

CONFIGS = Path(__file__).parent / "data" / "configs"


GROUPS_OF_3 = ("--microbatch-group-size-per-virtual-pipeline-stage", "3")


def config(name: str) -> str:
    return str(CONFIGS / f"{name}.json")


@pytest.mark.parametrize(
    "arguments",
    [
        ["llama-tiny", "--pp", "2", "--vpp", "2"],
        ["gpt2-tiny", "--pp", "2"],
        ["deepseek-v3-proxy-tiny", "--pp", "2", "--vpp", "2", "--bf16"],
        ["deepseek-v3", "--pp", "16", "--layout", "Et*3|(tt|)*29,m|L"],
        ["llama3-8b", "--pp", "4", "--vpp", "2", "--no-overlap-p2p-communication"],
        ["llama3-8b", "--recompute-granularity", "full", "--pp", "2"],
        ["llama-tiny", "--pp", "2", "--vpp", "2", "--gbs", "6", *GROUPS_OF_3],
        ["gpt2", "--tp", "2", "--make-vocab-size-divisible-by", "128"],
        [config("qwen3-30b-a3b"), "--ep", "8"],
        [config("deepseek-v2-lite"), "--pp", "3"],
        [config("mixtral-8x7b"), "--pp", "2"],
        [config("qwen2-0.5b"), "--pp", "2"],
        [config("kimi-k2-instruct"), "--pp", "2"],
    ],
    ids=lambda words: Path(words[0]).stem + "-" + "".join(words[1:3]),
)
def test_reading_the_flags_back_makes_the_same_plan(arguments: list[str], tmp_path: Path) -> None:
    plan = inline("plan", *arguments, "--json").document
    script = tmp_path / "train.sh"
    script.write_text(f"ARGS=(\n  {shlex.join(plan['megatron_args'])}\n)\n")
    ranks = str(plan["parallel"]["world_size"])
    again = inline("plan", script, "--world-size", ranks, "--json").document
    assert again["plan_digest"] == plan["plan_digest"]
    assert again["megatron_args"] == plan["megatron_args"]


def test_flags_that_megatrons_own_m_fsdp_v2_needs() -> None:
    words = inline("plan", "llama-tiny", "--pp", "2", "--json").document["megatron_args"]
    text = " ".join(words)
    assert "--use-megatron-fsdp --megatron-fsdp-version 2" in text
    assert "--data-parallel-sharding-strategy optim_grads_params" in text
    assert "--no-gradient-accumulation-fusion" in words
    assert "--use-distributed-optimizer" not in words
    assert "--pipeline-model-parallel-layout Et*4|t*4L" in text


def test_what_megatron_has_no_flag_for_is_a_note() -> None:
    document = inline("plan", config("gemma-2b"), "--json").document
    (note,) = [item for item in document["findings"] if item["code"] == "MF233"]
    assert note["message"].startswith("Megatron has no flag for gated gelu")
    assert "--swiglu" not in document["megatron_args"]
    assert inexpressible(preset("llama3-8b")) == []
