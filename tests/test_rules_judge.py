"""The table of rules: the same answer from flags, plan files, Megatron arguments and YAML."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from mfsdp_cli.errors import Severity
from mfsdp_cli.model.presets import preset
from mfsdp_cli.parallel import Parallel, Settings
from mfsdp_cli.rules.judge import RULES, judge
from mfsdp_cli.rules.table import Binds, Subject, Target
from tests.helpers.inline import inline

MODEL = {
    "num_layers": 8,
    "hidden_size": 64,
    "ffn_hidden_size": 192,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "vocab_size": 256,
    "make_vocab_size_divisible_by": 1,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
}
INTERLEAVED = {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}
#: What each rule is broken with; flags without a value are True, ``no_...`` spellings too.
BREAKS: list[tuple[str, str, dict[str, Any]]] = [
    ("MF210", "error", {"tensor_model_parallel_size": 2}),
    ("MF211", "error", {"context_parallel_size": 2}),
    ("MF212", "error", {"sequence_parallel": True}),
    ("MF213", "note", {"pipeline_model_parallel_size": 2}),
    ("MF216", "warning", {"seq_length": 512}),
    ("MF220", "note", {"calculate_per_token_loss": True}),
    ("MF221", "warning", {"use_distributed_optimizer": True}),
    ("MF222", "error", {"gradient_accumulation_fusion": True}),
    ("MF223", "error", {"fp16": True}),
    ("MF224", "error", {"fp8_format": "hybrid"}),
    ("MF225", "error", {"fp4_format": "e2m1"}),
    ("MF226", "error", {"cuda_graph_impl": "local"}),
    ("MF226", "error", {"enable_cuda_graph": True}),
    ("MF226", "error", {"external_cuda_graph": True}),
    ("MF227", "error", {"outer_dp_sharding_strategy": "optim"}),
    ("MF228", "error", {"num_distributed_optimizer_instances": 3}),
    ("MF229", "error", {"delay_wgrad_compute": True}),
    ("MF230", "error", {"disable_bucketing": True}),
    ("MF231", "note", {"deallocate_pipeline_outputs": True}),
    ("MF232", "error", {"data_parallel_sharding_strategy": "optim_grads"}),
    ("MF241", "error", {**INTERLEAVED, "no_overlap_p2p_communication": True}),
    ("MF242", "error", {**INTERLEAVED, "batch_p2p_communication": True}),
    ("MF242", "error", {**INTERLEAVED, "overlap_p2p_communication": True}
     | {"batch_p2p_communication": True}),
    ("MF243", "warning", {"overlap_p2p_communication": True}),
    ("MF304", "error", {**INTERLEAVED, "global_batch_size": 1}),
]  # fmt: skip
NAMES = [f"{code}-{'-'.join(options)}" for code, _, options in BREAKS]


def words(options: dict[str, Any]) -> list[str]:
    found = []
    for name, value in options.items():
        found.append(f"--{name.replace('_', '-')}")
        if value is not True:
            found.append(str(value))
    return found


def answers(document: dict[str, Any]) -> list[tuple[str, str, str]]:
    """What was found, without the order and what depends on the file's name."""
    return sorted(
        (item["code"], item["severity"], item["message"]) for item in document["findings"]
    )


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rules") / "model.args"
    file.write_text(" ".join(words(MODEL)))
    return file


@pytest.mark.parametrize(("code", "severity", "options"), BREAKS, ids=NAMES)
def test_one_answer_whichever_way_it_comes_in(
    code: str, severity: str, options: dict[str, Any], model_file: Path, tmp_path: Path
) -> None:
    by_flags = inline("validate", model_file, *words(options), "--json")

    arguments = tmp_path / "run.sh"
    arguments.write_text(f"ARGS=(\n{' '.join(words(MODEL | options))}\n)\n")
    by_arguments = inline("validate", arguments, "--json")

    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(MODEL | options))
    by_yaml = inline("validate", config, "--json")

    plan = tmp_path / "plan.json"
    made = inline("plan", model_file, *words(options), "--out", plan)
    by_plan = inline("validate", plan, "--json")

    ways = {"flags": by_flags, "arguments": by_arguments, "yaml": by_yaml, "plan": by_plan}
    found = {way: answers(said.document) for way, said in ways.items()}
    assert (code, severity) in [(item[0], item[1]) for item in found["flags"]]
    assert all(answer == found["flags"] for answer in found.values()), found
    exit_code = 1 if severity == "error" else 0
    assert {said.code for said in ways.values()} == {exit_code}
    assert made.code == exit_code


def test_every_rule_is_broken_by_some_test() -> None:
    """MF215 and MF240, not in the list above, have a test of their own below."""
    elsewhere = {"MF215", "MF240"}
    assert {rule.code for rule in RULES} == {code for code, _, _ in BREAKS} - {"MF304"} | elsewhere


def subject(**changes: Any) -> Subject:
    sizes = Parallel(1, 1, 1, 1, 1, 1, 1, 1, 4, 4, 64, 1)
    own = {name: value for name, value in changes.items() if hasattr(sizes, name)}
    rest = {name: value for name, value in changes.items() if name not in own}
    return Subject(preset("gpt2-tiny"), replace(sizes, **own), Settings(**rest))


def test_a_sound_run_has_no_finding() -> None:
    assert judge(subject()) == []
    assert judge(subject(), Target.MEGATRON) == []


def test_hybrid_sharding_is_refused_beside_expert_parallelism() -> None:
    model = preset("deepseek-v3-proxy-tiny")
    sizes = replace(
        subject().parallel, data_parallel_size=4, expert_model_parallel_size=2, world_size=4
    )
    assert judge(Subject(model, sizes, Settings())) == []
    hybrid = Settings(num_distributed_optimizer_instances=2)
    (finding,) = judge(Subject(model, sizes, hybrid))
    assert finding.code == "MF228"
    assert "EP 2" in finding.message
    assert judge(Subject(model, replace(sizes, expert_model_parallel_size=1), hybrid)) == []


def test_learned_positions_end_where_the_table_ends() -> None:
    (finding,) = judge(subject(seq_length=100_000))
    assert (finding.code, finding.severity) == ("MF215", Severity.ERROR)


def test_virtual_stages_on_one_rank() -> None:
    alone = subject(
        virtual_pipeline_model_parallel_size=2,
        schedule="interleaved-1f1b",
        overlap_p2p_communication=True,
    )
    assert [finding.code for finding in judge(alone)] == ["MF240"]


@pytest.mark.parametrize(
    ("changes", "code", "here", "there"),
    [
        ({"use_distributed_optimizer": True}, "MF221", "warning", "error"),
        ({"deallocate_pipeline_outputs": True}, "MF231", "note", "error"),
        ({"num_distributed_optimizer_instances": 3}, "MF228", "error", "warning"),
        ({"fp8_format": "e4m3"}, "MF224", "error", "error"),
    ],
)
def test_severity_by_target(changes: dict[str, Any], code: str, here: str, there: str) -> None:
    for target, severity in ((Target.MFSDP, here), (Target.MEGATRON, there)):
        (finding,) = judge(subject(**changes), target)
        assert (finding.code, str(finding.severity)) == (code, severity)


def test_pipeline_parallelism_is_an_error_for_megatrons_own() -> None:
    said = inline("validate", "llama-tiny", "--pp", "2", "--target", "megatron", "--json")
    assert said.code == 1
    assert said.codes("error") == ["MF213"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_a_rule_for_one_target_is_never_an_error_for_the_other(rule: Any) -> None:
    if rule.binds is not Binds.BOTH:
        assert rule.elsewhere is not Severity.ERROR


def test_two_ranks_with_overlap_and_three_without_are_valid() -> None:
    flags = ["--vpp", "2", "--num-layers", "12", "--json"]
    assert inline("validate", "llama-tiny", "--pp", "2", "--gbs", "4", *flags).code == 0
    unbatched = ["--no-overlap-p2p-communication", "--no-batch-p2p-communication"]
    assert inline("validate", "llama-tiny", "--pp", "2", *unbatched, *flags).code == 0
    batched = inline(
        "validate", "llama-tiny", "--pp", "3", "--no-overlap-p2p-communication", *flags
    )
    assert batched.code == 0
    document = inline("plan", "llama-tiny", "--pp", "2", "--gbs", "4", *flags).document
    assert document["schedule"]["bubble_fraction"] == pytest.approx(1 / 9)


def test_batched_between_two_ranks_names_them() -> None:
    said = inline(
        "validate", "llama-tiny", "--pp", "2", "--vpp", "2", "--no-overlap-p2p-communication"
    )
    assert said.code == 1
    assert "pipeline size 2" in said.err


def test_settings_of_a_plan_file_are_judged_again(tmp_path: Path) -> None:
    """A file whose findings were emptied by hand is judged as if they were there."""
    file = tmp_path / "plan.json"
    inline("plan", "llama-tiny", "--fp16", "--out", file)
    document = json.loads(file.read_text())
    document["findings"] = []
    file.write_text(json.dumps(document))
    assert inline("validate", file, "--json").codes("error") == ["MF223"]


def test_the_page_of_rules_is_current() -> None:
    script = Path(__file__).parents[1] / "scripts" / "make_rules_page.py"
    done = subprocess.run([sys.executable, script, "--check"], check=False)
    assert done.returncode == 0, "run python scripts/make_rules_page.py"
