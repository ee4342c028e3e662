"""What scripts rely on: flags, short forms, JSON keys, exit codes. It may grow, never shrink."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer.main

from mfsdp_cli.cli import app
from mfsdp_cli.errors import ExitCode
from mfsdp_cli.rules.judge import RULES
from tests.helpers.inline import inline

PLAN_FLAGS = """
--world-size --gpus --gpus-per-node --hardware --pipeline-model-parallel-size --pp
--num-virtual-stages-per-pipeline-rank --vpp --num-layers-per-virtual-pipeline-stage
--pipeline-model-parallel-layout --layout --decoder-first-pipeline-num-layers
--decoder-last-pipeline-num-layers --account-for-embedding-in-pipeline-split
--account-for-loss-in-pipeline-split --expert-model-parallel-size --ep
--tensor-model-parallel-size --tp --context-parallel-size --cp --micro-batch-size --mbs
--global-batch-size --gbs --seq-length --seq --microbatch-group-size-per-virtual-pipeline-stage
--make-vocab-size-divisible-by --recompute-granularity --resident-chunks --memory-limit --split
--mtp-num-layers --overlap-p2p-communication --no-overlap-p2p-communication --schedule
--num-layers
"""
#: Megatron's names of the settings that the rules judge.
JUDGED_FLAGS = """
--bf16 --fp16 --precision --fp8-format --fp4-format --cuda-graph-impl --enable-cuda-graph
--external-cuda-graph --use-distributed-optimizer --num-distributed-optimizer-instances
--data-parallel-sharding-strategy --outer-dp-sharding-strategy --calculate-per-token-loss
--gradient-accumulation-fusion --no-gradient-accumulation-fusion --delay-wgrad-compute
--disable-bucketing --deallocate-pipeline-outputs --no-deallocate-pipeline-outputs
--sequence-parallel --batch-p2p-communication --no-batch-p2p-communication --gradient-reduction
"""
FLAGS = {
    "plan": f"{PLAN_FLAGS} {JUDGED_FLAGS} --top --out -o --graph --json --list-presets --target",
    "validate": f"{PLAN_FLAGS} {JUDGED_FLAGS} --numeric --steps --backend --tolerance "
    "--schedule-csv --p2p --json --full --target",
    "train": """--engine --steps --train-iters --eval-interval --eval-steps --eval-iters --seed --lr
        --lr-warmup-steps --lr-warmup-iters --weight-decay --clip-grad --adam-beta1 --adam-beta2
        --adam-eps --data --tokenizer --precision --backend --ranks-per-device --nnodes --node-rank
        --rdzv-endpoint --run-dir --overwrite --save-interval --resume --trace --tensorboard
        --no-tensorboard --wandb --no-progress""",
    "compare-runs": "--metric --abs-tolerance --rel-tolerance --x --html --png --allow-nan --json",
}
KEYS: dict[str, str] = {
    "": "schema signature plan_digest model parallel settings layout ranks shared_groups context "
    "schedule predicted candidates megatron_args findings",
    "model": "name num_layers hidden_size vocab_size padded_vocab_size parameters assumptions spec",
    "model.parameters": "total mtp router_bias embedding active",
    "parallel": "world_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size "
    "data_parallel_size tensor_model_parallel_size context_parallel_size "
    "expert_model_parallel_size micro_batch_size global_batch_size num_microbatches seq_length",
    "layout": "string decoder_layers_per_pp_rank stages",
    "layout.stages.0": "stage pp_rank vp_stage layers embedding loss mtp parameters "
    "mtp_parameters copied_parameters",
    "ranks.0": "parameters mtp_parameters copied_parameters routed_parameters in_flight_chunks "
    "memory",
    "ranks.0.memory": "main_weights model_weights main_gradients optimizer_state "
    "gathered_parameters unsharded_gradients activations pipeline_buffers framework_overhead "
    "peak_bytes",
    "shared_groups.0": "name kind pp_ranks members",
    "shared_groups.0.members.0": "pp_rank vp_stage parameter",
    "context.0": "chunks units forward_order backward_order residency",
    "context.0.forward_order.0": "unit stage microbatch",
    "context.0.backward_order.0": "unit stage microbatch",
    "schedule": "name bubble_fraction bubble_ratio digest gathers_per_step actions_per_rank",
    "predicted": "step_time_s tokens_per_s_per_gpu communication_bytes",
    "findings.0": "code severity message hint where",
}


@pytest.mark.parametrize("command", FLAGS)
def test_flags(command: str) -> None:
    commands: Any = typer.main.get_command(app)
    known = set()
    for parameter in commands.commands[command].params:
        known |= {*parameter.opts, *parameter.secondary_opts}
    assert [flag for flag in FLAGS[command].split() if flag not in known] == []


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return inline("plan", "gpt2-tiny", "--pp", "2", "--vpp", "2", "--json").document


@pytest.mark.parametrize("place", KEYS)
def test_keys_of_the_plan_document(place: str, document: dict[str, Any]) -> None:
    value: Any = document
    for step in place.split(".") if place else ():
        value = value[int(step)] if step.isdigit() else value[step]
    assert [key for key in KEYS[place].split() if key not in value] == []


def test_values_that_scripts_rely_on(document: dict[str, Any]) -> None:
    assert document["schema"] == "mfsdp.plan/1"
    assert isinstance(document["schedule"]["gathers_per_step"], int)
    assert len(document["schedule"]["actions_per_rank"]) == 2
    assert all(isinstance(word, str) for word in document["megatron_args"])
    plain = inline("plan", "gpt2-tiny", "--pp", "2", "--json").document
    assert plain["parallel"]["virtual_pipeline_model_parallel_size"] == 1


def test_keys_of_the_validation_document() -> None:
    said = inline("validate", "gpt2-tiny", "--pp", "2", "--vpp", "2", "--json")
    document = said.document
    assert set(document) == {"schema", "ok", "findings", "checks", "numeric"}
    assert document["schema"] == "mfsdp.validate/1"
    assert document["ok"] is True
    assert document["numeric"] is None
    assert all(set(check) == {"code", "name", "status"} for check in document["checks"])
    assert {check["status"] for check in document["checks"]} <= {"pass", "fail", "skip"}


def test_exit_codes() -> None:
    assert (ExitCode.OK, ExitCode.PROBLEM, ExitCode.USAGE) == (0, 1, 2)
    assert (ExitCode.INTERNAL, ExitCode.INTERRUPTED) == (3, 130)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["plan", "llama-tiny", "--pp", "2"], 0),
        (["plan", "llama-tiny", "--tp", "2"], 1),
        (["plan", "llama-tiny", "--memory-limit", "0.001"], 1),
        (["plan", "llama-tiny", "--layout", "Et"], 2),
        (["plan", "llama-tiny", "--no-such-flag"], 2),
        (["plan", "llama-tiny", "--pp", "two"], 2),
        (["plan", "no-such-model"], 2),
        (["plan"], 2),
        (["validate", "llama-tiny"], 0),
        (["validate", "llama-tiny", "--layout", "Et"], 1),
        (["validate", "llama-tiny", "--cp", "2"], 1),
        (["validate", "no-such-model"], 2),
        (["validate"], 2),
        (["no-such-command"], 2),
    ],
)
def test_exit_code_of_a_call(arguments: list[str], code: int) -> None:
    said = inline(*arguments)
    assert said.code == code
    if code == 2:
        assert said.out == ""
        assert said.err
    assert "Traceback" not in said.err


def test_every_rule_has_a_code_of_its_own_and_says_whom_it_binds() -> None:
    codes = [rule.code for rule in RULES]
    assert len(set(codes)) == len(codes)
    assert all(code.startswith("MF2") and len(code) == 5 for code in codes)
    assert all(rule.hint and rule.where and rule.source for rule in RULES)


def test_a_plan_file_is_the_printed_document(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    said = inline("plan", "llama-tiny", "--pp", "2", "--json", "--out", file)
    assert file.read_text() == said.out
