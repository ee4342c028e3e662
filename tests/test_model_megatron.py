"""Megatron arguments and YAML: scripts as people keep them, and Megatron's own defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mfsdp_cli.errors import MfsdpError, Severity
from mfsdp_cli.model.load import LoadedModel, load_model
from mfsdp_cli.model.parameters import count_parameters
from mfsdp_cli.model.presets import preset

DATA = Path(__file__).parent / "data" / "megatron"
BASE = (
    "--num-layers 4 --hidden-size 4096 --num-attention-heads 32 --max-position-embeddings 2048 "
    "--vocab-size 32000 "
)
YAML = """
num_layers: 4
hidden_size: 4096
num_attention_heads: 32
max_position_embeddings: 2048
vocab_size: 32000
"""


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def read(text: str) -> LoadedModel:
        path = tmp_path / "input"
        path.write_text(text)
        return load_model(str(path))

    return read


@pytest.fixture
def fault(load: Any) -> Any:
    def read(text: str) -> str:
        with pytest.raises(MfsdpError) as caught:
            load(text)
        return f"{caught.value.finding.code} {caught.value.finding.message}"

    return read


def test_a_launch_script() -> None:
    loaded = load_model(str(DATA / "deepseek_v3.sh"))
    assert count_parameters(loaded.spec) == count_parameters(preset("deepseek-v3"))
    assert loaded.spec.moe == preset("deepseek-v3").moe
    assert loaded.parallel == {
        "pipeline_model_parallel_size": 16,
        "tensor_model_parallel_size": 1,
        "expert_model_parallel_size": 8,
        "micro_batch_size": 1,
        "global_batch_size": 256,
        "seq_length": 4096,
        "make_vocab_size_divisible_by": 3232,
        "pipeline_model_parallel_layout": "Et*3|(tt|)*29,m|L",
    }
    assert loaded.settings == {
        "precision": "bf16",
        "use_distributed_optimizer": True,
        "gradient_accumulation_fusion": False,
    }
    assert loaded.findings == []


def test_a_flat_list_of_flags() -> None:
    loaded = load_model(str(DATA / "llama_8b.txt"))
    assert count_parameters(loaded.spec).total == 8_030_261_248
    assert loaded.parallel["pipeline_model_parallel_layout"] == "Et*2|(t*4|)*7,ttL"
    assert loaded.settings == {
        "recompute_granularity": "full",
        "calculate_per_token_loss": True,
        "fp8_format": "hybrid",
        "cuda_graph_impl": "local",
        "outer_dp_sharding_strategy": "optim",
        "data_parallel_sharding_strategy": "optim_grads_params",
        "num_distributed_optimizer_instances": 2,
        "overlap_p2p_communication": False,
        "delay_wgrad_compute": True,
        "sequence_parallel": True,
    }


def test_yaml_in_sections() -> None:
    loaded = load_model(str(DATA / "gpt3.yaml"))
    assert count_parameters(loaded.spec).total == 354_871_296
    assert loaded.spec.padded_vocab_size == 50304
    assert loaded.parallel["num_virtual_stages_per_pipeline_rank"] == 2
    assert loaded.settings == {
        "precision": "bf16",
        "overlap_p2p_communication": True,
        "batch_p2p_communication": False,
        "gradient_accumulation_fusion": False,
        "deallocate_pipeline_outputs": False,
        "sequence_parallel": False,
        "calculate_per_token_loss": False,
    }


def test_yaml_of_flags(load: Any) -> None:
    text = "MODEL_ARGS:\n  --num-layers: 12\n  --hidden-size: 512\n  --num-attention-heads: 8\n"
    text += "  --seq-length: 1024\n  --max-position-embeddings: 1024\n  --swiglu: true\n"
    text += "  --vocab-size: 1000\n  --disable-bias-linear: true\n  --bf16: true\n"
    for document in (text, text.replace("MODEL_ARGS:\n", "").replace("  --", "--")):
        loaded = load(document)
        assert (loaded.spec.num_layers, loaded.spec.gated_linear_unit) == (12, True)
        assert loaded.spec.add_bias_linear is False
        assert loaded.settings == {"precision": "bf16"}


def test_defaults_of_arguments(load: Any) -> None:
    spec = load(BASE).spec
    assert spec.ffn_hidden_size == 4 * 4096
    assert (spec.gated_linear_unit, spec.activation) == (False, "gelu")
    assert (spec.normalization, spec.add_bias_linear) == ("LayerNorm", True)
    assert (spec.num_query_groups, spec.kv_channels) == (32, 128)
    assert spec.position_embedding_type == "learned_absolute"
    assert spec.untie_embeddings_and_output_weights is False
    assert spec.padded_vocab_size == 32000
    said = " ".join(spec.assumptions)
    assert "ffn_hidden_size is absent: 16384 (4h)" in said
    assert "no --untie-embeddings-and-output-weights: tied" in said
    assert "learned_absolute, Megatron's default" in said


def test_swiglu_without_a_width(load: Any) -> None:
    spec = load(BASE + "--swiglu").spec
    assert spec.ffn_hidden_size == 10880
    assert (spec.gated_linear_unit, spec.activation) == (True, "silu")


def test_query_groups_count_with_grouped_queries_alone(load: Any) -> None:
    loaded = load(BASE + "--num-query-groups 8")
    assert loaded.spec.num_query_groups == 32
    (warning,) = loaded.findings
    assert (warning.code, str(warning.severity)) == ("MF420", "warning")
    assert warning.message.startswith("--num-query-groups 8 is ignored")
    assert load(BASE + "--group-query-attention --num-query-groups 8").spec.num_query_groups == 8
    assert load(BASE + "--group-query-attention").spec.num_query_groups == 1
    assert load(YAML + "num_query_groups: 8\n").spec.num_query_groups == 8


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--squared-relu", ("squared_relu", False)),
        ("--openai-gelu", ("gelu_tanh", False)),
        ("--quick-geglu", ("quick_gelu", True)),
    ],
)
def test_activations(load: Any, flags: str, expected: tuple[str, bool]) -> None:
    spec = load(BASE + flags).spec
    assert (spec.activation, spec.gated_linear_unit) == expected


def test_activations_of_yaml(load: Any) -> None:
    for name, expected in (
        ("swiglu", ("silu", True)),
        ("torch.nn.functional.silu", ("silu", False)),
        ("squared_relu", ("squared_relu", False)),
    ):
        spec = load(f"{YAML}activation_func: {name}\n").spec
        assert (spec.activation, spec.gated_linear_unit) == expected


def test_expert_patterns(load: Any, fault: Any) -> None:
    def pattern(layers: int, text: str) -> tuple[bool, ...]:
        flags = BASE.replace("--num-layers 4", f"--num-layers {layers}")
        moe = load(f"{flags} --num-experts 8 --moe-layer-freq {text}").spec.moe
        assert moe.moe_ffn_hidden_size == 16384
        return moe.moe_layer_pattern

    dense_then_moe = (False,) * 3 + (True,) * 58
    assert pattern(61, '"([0]*3+[1]*58)"') == dense_then_moe
    assert pattern(61, "([0]*3+[1]*58)") == dense_then_moe
    assert pattern(46, "[0]*1+[1]*45") == (False,) + (True,) * 45
    assert pattern(8, "'([1]*3+[0]*1)*2'") == (True, True, True, False) * 2
    assert pattern(5, "2") == (True, False, True, False, True)
    experts = BASE.replace("--num-layers 4", "--num-layers 61") + "--num-experts 8 "
    assert fault(experts + '--moe-layer-freq "([0]*3+[1]*57)"') == (
        "MF407 --moe-layer-freq: the pattern has 60 layers, the model 61"
    )
    for wrong in ("[0]*3+[2]", "[0]*99999999999", "[x]", "0", "__import__('os')", "[0]*[1]"):
        assert fault(f'{experts} --moe-layer-freq "{wrong}"').startswith("MF405 --moe-layer-freq")
    yaml = YAML + "num_moe_experts: 8\nmoe_layer_freq: [0, 1, 1, 1]\n"
    assert load(yaml).spec.moe.moe_layer_pattern == (False, True, True, True)
    assert load(BASE + "--num-experts 0").spec.moe is None


def test_latent_attention_defaults(load: Any) -> None:
    latent = load(BASE + "--multi-latent-attention").spec.latent_attention
    assert (latent.q_lora_rank, latent.kv_lora_rank, latent.qk_head_dim) == (None, 32, 128)
    spec = load(YAML + "multi_latent_attention: true\n").spec
    assert (spec.latent_attention.q_lora_rank, spec.latent_attention.kv_lora_rank) == (512, 512)
    assert spec.normalization == "RMSNorm"
    assert "q_lora_rank is absent: 512, Megatron's default" in spec.assumptions


def test_vocabulary(load: Any, fault: Any) -> None:
    bare = BASE.replace("--vocab-size 32000", "")
    spec = load(bare + "--tokenizer-type GPT2BPETokenizer").spec
    assert (spec.vocab_size, spec.padded_vocab_size) == (50257, 50304)
    assert "vocabulary of 50257 assumed from GPT2BPETokenizer" in spec.assumptions
    assert fault(bare).startswith("MF404 the vocabulary's size is missing")
    assert "HuggingFaceTokenizer alone does not" in fault(
        bare + "--tokenizer-type HuggingFaceTokenizer"
    )


def test_positions(load: Any, fault: Any) -> None:
    assert load(BASE + "--use-rotary-position-embeddings").spec.position_embedding_type == "rope"
    yarn = load(BASE + "--position-embedding-type yarn").spec
    assert yarn.position_embedding_type == "rope"
    assert "positions yarn are taken as rope: they change no parameter" in yarn.assumptions
    assert fault(BASE + "--position-embedding-type relative").startswith(
        "MF408 --position-embedding-type: 'relative' is not supported"
    )
    bare = BASE.replace("--max-position-embeddings 2048", "")
    assert load(bare + "--seq-length 512").spec.max_position_embeddings == 512
    assert fault(bare) == "MF404 --max-position-embeddings is missing"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--fp16", {"precision": "fp16"}),
        ("--fp4-format e2m1", {"fp4_format": "e2m1"}),
        ("--fp8-hybrid", {"fp8_format": "hybrid"}),
        ("--recompute-activations", {"recompute_granularity": "selective"}),
        ("--enable-cuda-graph", {"cuda_graph_impl": "local"}),
        ("--external-cuda-graph", {"cuda_graph_impl": "transformer_engine"}),
        ("--use-distributed-optimizer", {"use_distributed_optimizer": True}),
        ("--no-overlap-p2p-communication", {"overlap_p2p_communication": False}),
        ("--no-gradient-accumulation-fusion", {"gradient_accumulation_fusion": False}),
        ("--data-parallel-sharding-strategy optim", {"data_parallel_sharding_strategy": "optim"}),
        ("--lr 1e-4 --weight-decay 0.1 --save /tmp/x --load $DIR", {}),
    ],
)
def test_settings(load: Any, flags: str, expected: dict[str, Any]) -> None:
    assert load(BASE + flags).settings == expected


def test_settings_of_yaml(load: Any) -> None:
    text = """
gradient_accumulation_fusion: true
disable_bucketing: true
deallocate_pipeline_outputs: true
calculate_per_token_loss: true
delay_wgrad_compute: true
fp8: hybrid
cuda_graph_impl: none
resident_chunks: 2
schedule: 1f1b
"""
    assert load(YAML + text).settings == {
        "gradient_accumulation_fusion": True,
        "disable_bucketing": True,
        "deallocate_pipeline_outputs": True,
        "calculate_per_token_loss": True,
        "delay_wgrad_compute": True,
        "fp8_format": "hybrid",
        "resident_chunks": 2,
        "schedule": "1f1b",
    }


def test_layout_options(load: Any) -> None:
    loaded = load(
        BASE + "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
        "--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 3 "
        "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
        "--num-virtual-stages-per-pipeline-rank 2 --context-parallel-size 1 "
        "--microbatch-group-size-per-virtual-pipeline-stage 4"
    )
    assert loaded.parallel == {
        "pipeline_model_parallel_size": 2,
        "num_layers_per_virtual_pipeline_stage": 1,
        "decoder_first_pipeline_num_layers": 1,
        "decoder_last_pipeline_num_layers": 3,
        "account_for_embedding_in_pipeline_split": True,
        "account_for_loss_in_pipeline_split": True,
        "num_virtual_stages_per_pipeline_rank": 2,
        "context_parallel_size": 1,
        "microbatch_group_size_per_virtual_pipeline_stage": 4,
    }
    stages = "[[embedding, decoder, decoder], [decoder, decoder, loss]]"
    yaml = load(f"{YAML}pipeline_model_parallel_layout: {stages}\n")
    assert yaml.parallel == {"pipeline_model_parallel_layout": "Ett|ttL"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--num-layers $((N_DENSE+N_MOE))",
            "MF409 $((N_DENSE+N_MOE)) was not expanded: the value of --num-layers",
        ),
        (
            "--hidden-size ${HIDDEN}",
            "MF409 ${HIDDEN} was not expanded: the value of --hidden-size",
        ),
        (
            "${MODEL_ARGS[@]}",
            "MF409 ${MODEL_ARGS[@]} was not expanded: these arguments are not in the file",
        ),
        ("$GPT_ARGS", "MF409 $GPT_ARGS was not expanded"),
        ("--moe-layer-freq [0]*$D+[1]*$M", "MF409 [0]*$D+[1]*$M was not expanded: the value of"),
        ("--num-layers `nproc`", "MF409 `nproc` was not expanded: the value of --num-layers"),
        ("--num-layers $(cat n)", "MF409 $(cat n) was not expanded: the value of --num-layers"),
        ("--num-layers", "MF410 --num-layers has no value"),
        ("--num-layers --swiglu", "MF410 --num-layers has no value"),
        ("--num-layers four", "MF405 --num-layers must be a whole number, got 'four'"),
        ("--num-layers 4.0", "MF405 --num-layers must be a whole number, got '4.0'"),
        ("--num-layers 0", "MF405 --num-layers: must be at least 1, got 0"),
        ("--num-layers -3", "MF405 --num-layers: must be at least 1, got -3"),
        ("--num-layers " + "9" * 400, "MF405 --num-layers must be a whole number, got '999"),
        ("--num-layers 99999", "MF405 --num-layers: at most 10000, got 99999"),
        ("--rotary-base x", "MF405 --rotary-base must be a number, got 'x'"),
        ("--num-attention-heads 3", "MF405 --num-attention-heads: 3 heads do not divide the hid"),
        ("--pipeline-model-parallel-size 0", "MF405 --pipeline-model-parallel-size: must be at"),
        ("--hybrid-layer-pattern M*M*", "MF408 --hybrid-layer-pattern: hybrid layer patterns are"),
        ("--attention-output-gate", "MF408 --attention-output-gate: gated attention outputs are"),
        ("--moe-shared-expert-gate", "MF408 --moe-shared-expert-gate: gated shared experts are"),
        ("--softmax-type learnable", "MF408 --softmax-type: attention sinks are not supported"),
        ("--normalization GroupNorm", "MF402 normalization must be one of RMSNorm, LayerNorm"),
        ("--mtp-num-layers 1", "MF402 multi-token prediction needs rotary positions"),
        ('--data "x', 'MF403 " is not closed'),
        ("x=$(echo", "MF403 ( is not closed"),
    ],
)
def test_arguments_that_cannot_be(fault: Any, flags: str, message: str) -> None:
    assert fault(BASE + flags).startswith(message)


def test_a_harmless_choice_of_an_unsupported_option(load: Any) -> None:
    assert load(BASE + "--softmax-type vanilla").spec.num_layers == 4
    assert load(YAML + "moe_shared_expert_gate: false\nmoe_latent_size: null\n").spec.moe is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_layers: four\n", "MF405 num_layers must be a whole number, got 'four'"),
        ("num_layers: 4.5\n", "MF405 num_layers must be a whole number, got 4.5"),
        ("num_layers: true\n", "MF405 num_layers must be a whole number, got True"),
        ("num_layers: [4]\n", "MF405 num_layers must be a whole number, got [4]"),
        ("num_layers: ${LAYERS}\n", "MF409 ${LAYERS} was not expanded: the value of num_layers"),
        ("other: {num_layers: 5}\n", "MF407 "),
        ("swiglu: 3\n", "MF405 swiglu must be true or false, got 3"),
        ("rotary_base: .nan\n", "MF402 rotary_base must be above zero and finite, got nan"),
        ("normalization: 5\n", "MF405 normalization must be a text, got 5"),
        (
            "pipeline_model_parallel_layout: 5\n",
            "MF405 pipeline_model_parallel_layout must be a la",
        ),
        (
            "pipeline_model_parallel_layout: [[x]]\n",
            "MF405 pipeline_model_parallel_layout must be ",
        ),
    ],
)
def test_yaml_that_cannot_be(fault: Any, text: str, message: str) -> None:
    base = "" if text.startswith("num_layers") else YAML
    rest = YAML.replace("num_layers: 4\n", "") if text.startswith("num_layers") else ""
    assert fault(base + rest + text).startswith(message)


def test_yaml_that_grows_without_end(fault: Any) -> None:
    lines = ["a0: &a0 {k: 1, l: 2}"]
    lines += [f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}, z: *a{n - 1}}}" for n in range(1, 11)]
    assert fault("\n".join(lines)).startswith("MF403 the YAML has too many keys or levels")


def test_variables_that_the_script_assigns(load: Any) -> None:
    script = """
    L=$((2+2)); H=${HIDDEN:-4096}   # one line
    export HEADS="32"
    GPT_ARGS="--num-layers $L \\
        --hidden-size $H"
    GPT_ARGS+=" --num-attention-heads ${HEADS} --vocab-size 32000"
    # --num-layers 99 is a comment \\
    LAST='--max-position-embeddings 2048'
    python pretrain_gpt.py $GPT_ARGS "$@" $LAST \\
        --data-path ${DATA[@]} --swiglu
    """
    loaded = load(script)
    spec = loaded.spec
    assert (spec.num_layers, spec.hidden_size, spec.num_attention_heads) == (4, 4096, 32)
    assert spec.gated_linear_unit
    (note,) = loaded.findings
    assert note.code == "MF423"
    assert note.message.startswith("${HIDDEN:-4096} taken as 4096")


def test_a_variable_assigned_twice_is_not_guessed(fault: Any) -> None:
    script = "L=4\nif big; then L=8; fi\nA=(" + BASE.replace("--num-layers 4", "--num-layers $L")
    assert fault(script + ")\n").startswith("MF409 $L was not expanded: the value of --num-layers")


def test_conditions_are_said_not_followed(load: Any) -> None:
    loaded = load(f"A=({BASE})\nif [ $X = 1 ]; then A+=(--swiglu); fi\nrun ${{A[@]}}\n")
    assert loaded.spec.gated_linear_unit
    assert [finding.code for finding in loaded.findings] == ["MF422"]


@pytest.mark.parametrize("word", ["$EXTRA", '"${EXTRA}"', '"$@"', "${@:2}", "$(cat extra)", "`x`"])
@pytest.mark.parametrize(
    "script",
    [
        "--swiglu WORD",
        "train.py --micro-batch-size 1 WORD",
        "A=(\n  WORD\n  --micro-batch-size 1\n)\nrun ${A[@]}",
    ],
)
def test_a_variable_that_may_be_arguments(script: str, word: str, load: Any) -> None:
    """Nothing is read from it, and that is said."""
    loaded = load(f"{BASE}\n{script.replace('WORD', word)}\n")
    (warning,) = loaded.findings
    assert (warning.code, warning.severity) == ("MF424", Severity.WARNING)
    assert warning.message.startswith(word.strip('"'))


@pytest.mark.parametrize(
    "script",
    [
        "torchrun $SCRIPT --log $LOG",  # a program, and another program's value
        "cd $FOLDER\nmkdir -p $OUT | tee $LOG",
        "EXTRA=--swiglu\nrun --micro-batch-size 1 $EXTRA",  # assigned in the file
        "run --micro-batch-size 1 ${EXTRA:-}",
        "FILES=($A $B)",
    ],
)
def test_a_variable_that_is_no_argument(script: str, load: Any) -> None:
    assert not load(f"{BASE}\n{script}\n").findings


def test_a_default_that_is_a_flag(load: Any) -> None:
    for default in ("--swiglu", '"--swiglu"'):
        loaded = load(f"{BASE} ${{EXTRA:-{default}}}")
        assert loaded.spec.gated_linear_unit
        assert [finding.code for finding in loaded.findings] == ["MF423"]


def test_a_repeated_flag(load: Any) -> None:
    loaded = load(BASE + "--num-layers 6")
    assert loaded.spec.num_layers == 6
    assert [finding.message for finding in loaded.findings] == [
        "--num-layers says 4 and later --num-layers 6; the last counts"
    ]


def test_windows_line_ends(load: Any) -> None:
    assert load(BASE.replace(" --", " \\\r\n--")).spec.num_layers == 4
