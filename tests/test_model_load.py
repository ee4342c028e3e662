"""Any input that a person may name, right or wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mfsdp_cli.errors import MfsdpError, Severity
from mfsdp_cli.model.load import LoadedModel, load_model
from mfsdp_cli.model.parameters import count_parameters
from mfsdp_cli.model.presets import preset

DATA = Path(__file__).parent / "data"
FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 256 "
    "--max-position-embeddings 64 "
)


def _fault(source: Path | str, **overrides: Any) -> str:
    with pytest.raises(MfsdpError) as caught:
        load_model(str(source), **overrides)
    assert caught.value.exit_code == 2
    finding = caught.value.finding
    return f"{finding.code} {finding.message} | {finding.where} | {finding.hint}"


def _load(folder: Path, text: str, name: str = "input", **overrides: Any) -> LoadedModel:
    path = folder / name
    path.write_text(text)
    return load_model(str(path), **overrides)


def test_a_preset() -> None:
    assert load_model("gpt2") == LoadedModel(preset("gpt2"))


def test_content_decides_not_the_name(tmp_path: Path) -> None:
    config = (DATA / "configs" / "llama-3.2-1b.json").read_text()
    assert _load(tmp_path, config, "model.yaml").spec.num_layers == 16
    assert _load(tmp_path, f"\ufeff\n{config}", "x.sh").spec.num_layers == 16
    assert _load(tmp_path, FLAGS, "config.json").spec.num_layers == 4
    yaml = FLAGS.replace("--", "\n").replace("-", "_")
    yaml = "\n".join(": ".join(line.split()) for line in yaml.strip().splitlines())
    assert _load(tmp_path, yaml, "flags.txt").spec.num_layers == 4


def test_a_folder_with_a_config(tmp_path: Path) -> None:
    folder = tmp_path / "TinyLlama"
    folder.mkdir()
    (folder / "config.json").write_text((DATA / "configs" / "tinyllama-1.1b.json").read_text())
    spec = load_model(str(folder)).spec
    assert (spec.name, count_parameters(spec).total) == ("TinyLlama", 1_100_048_384)
    assert load_model(str(DATA / "configs" / "gpt2.json")).spec.name == "gpt2"
    assert _fault(tmp_path).startswith(f"MF411 the folder {tmp_path} holds no config.json")


def test_a_preset_that_is_also_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    loaded = load_model("gpt2")
    assert loaded.spec == preset("gpt2")
    assert [(f.code, f.severity) for f in loaded.findings] == [("MF431", Severity.NOTE)]


def test_what_is_no_model() -> None:
    assert _fault("lama-tiny").startswith("MF411 'lama-tiny' is neither a preset nor a file |  | d")
    assert "did you mean llama-tiny" in _fault("lama-tiny")
    for source in ("", " ", "a\0b", "/no/such/file.json"):
        assert _fault(source).startswith("MF411 ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b" \n\t", "is empty"),
        (b"\x7fELF\x02\x01\xff\xfe", "is no text file"),
        (b"\0\0\0\0", "is no text file"),
        (b"{", "is no JSON: Expecting property name enclosed in double quotes"),
        (b'{"a": 1,}', "is no JSON: "),
        (b"[1, 2]", "holds a list, not an object"),
        (b'{"a": 1}', "is no model configuration: it has no model_type"),
        (b'{"schema": "mfsdp.plan/1"}', "is a plan, not a model"),
        (b'{"x": ' + b"[" * 100_000, "is nested too deeply"),
        (b'{"num_hidden_layers": ' + b"9" * 5000 + b"}", "is no JSON: "),
        (b"hello world\n", "holds neither a model configuration nor Megatron arguments"),
        (b"a: 1\nb: 2\n", "holds neither a model configuration nor Megatron arguments"),
        (b"a: [1\nb: }", "is no YAML: "),
        (b"x" * (4 * 2**20 + 1), "has 4194305 bytes; a configuration has at most 4194304"),
    ],
)
def test_files_that_are_no_model(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    fault = _fault(path)
    assert fault.startswith("MF403 ")
    assert f"{path} {message}" in fault


def test_json_errors_name_the_place(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{\n "a": 1\n "b": 2}')
    assert f"{path}, line 3 column 2" in _fault(path)


def test_nan_elsewhere_in_a_config_does_no_harm(tmp_path: Path) -> None:
    text = (DATA / "configs" / "smollm2-135m.json").read_text()
    spec = _load(tmp_path, text.replace("{", '{"x": NaN, "y": [0.0, Infinity],', 1)).spec
    assert count_parameters(spec).total == 134_515_008
    changed = text.replace('"hidden_size": 576', '"hidden_size": NaN')
    with pytest.raises(MfsdpError, match=r"MF405.*hidden_size must be a whole number, got nan"):
        _load(tmp_path, changed)


def test_faults_of_the_description_name_the_file(tmp_path: Path) -> None:
    text = json.dumps(
        json.loads((DATA / "configs" / "llama-3.2-1b.json").read_text())
        | {"num_key_value_heads": 5}
    )
    path = tmp_path / "config.json"
    path.write_text(text)
    assert f"| {path} |" in _fault(path)


def test_an_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}")

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert _fault(path).startswith(f"MF403 cannot read {path}: Permission denied")


def test_another_depth_cuts_the_expert_pattern() -> None:
    spec = load_model("deepseek-v3", num_layers=5).spec
    assert spec.moe is not None
    assert spec.moe.moe_layer_pattern == (False, False, False, True, True)
    assert load_model("deepseek-v3", num_layers=2).spec.is_moe_layer(1) is False
    deeper = load_model("deepseek-v3", num_layers=63).spec
    assert deeper.is_moe_layer(62)
    assert deeper.assumptions == ("layers 61 to 62 are like the last one",)
    assert load_model("llama3-8b", num_layers=2).spec.num_layers == 2
    for wrong in (0, -1, 10**9):
        assert _fault("llama3-8b", num_layers=wrong).startswith("MF405 --num-layers must be 1 to")


def test_another_number_of_mtp_layers() -> None:
    assert load_model("deepseek-v3", mtp_num_layers=0).spec.mtp_num_layers == 0
    assert count_parameters(load_model("deepseek-v3", mtp_num_layers=2).spec).mtp == (
        2 * 11_610_067_968
    )
    assert _fault("gpt2", mtp_num_layers=1).startswith("MF402 multi-token prediction needs rotary")
    assert _fault("llama3-8b", mtp_num_layers=-1).startswith("MF402 mtp_num_layers must be between")


def test_vocabulary_padding_by_source(tmp_path: Path) -> None:
    def size(source: str, **flags: int) -> int:
        return load_model(source, **flags).spec.padded_vocab_size  # type: ignore[arg-type]

    gpt2 = str(DATA / "configs" / "gpt2.json")
    qwen = str(DATA / "configs" / "qwen3-0.6b.json")
    assert size(gpt2) == size("gpt2") == 50257
    padded = [size(gpt2, make_vocab_size_divisible_by=128, tensor_parallel=tp) for tp in (1, 2, 4)]
    assert padded == [50304, 50432, 50688]
    assert size(gpt2, make_vocab_size_divisible_by=1, tensor_parallel=2) == 50258
    assert size(qwen, make_vocab_size_divisible_by=128, tensor_parallel=2) == 152064
    arguments = tmp_path / "args.txt"
    arguments.write_text(FLAGS.replace("256", "50257") + "--tensor-model-parallel-size 2")
    assert size(str(arguments)) == 50432
    assert size(str(arguments), tensor_parallel=8) == 51200
    assert size(str(arguments), make_vocab_size_divisible_by=1) == 50258
    assert size(str(arguments), make_vocab_size_divisible_by=1, tensor_parallel=1) == 50257
    assert _fault("gpt2", make_vocab_size_divisible_by=0).startswith("MF405 --make-vocab-size-div")


def test_a_padded_size_is_never_padded_again(tmp_path: Path) -> None:
    text = FLAGS.replace("--vocab-size 256", "--padded-vocab-size 151936")
    loaded = _load(tmp_path, text + "--tensor-model-parallel-size 2")
    assert loaded.spec.padded_vocab_size == 151936


def test_biases_that_megatron_does_not_build_are_a_note(tmp_path: Path) -> None:
    config = json.loads((DATA / "configs" / "tinyllama-1.1b.json").read_text())
    loaded = _load(tmp_path, json.dumps(config | {"attention_bias": True}))
    assert [(f.code, f.severity) for f in loaded.findings] == [("MF430", Severity.NOTE)]
    assert _load(tmp_path, json.dumps(config)).findings == []
