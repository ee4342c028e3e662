"""A model from whatever a person names: preset, ``config.json``, Megatron arguments or YAML.

What a file holds decides how it is read, never its name.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mfsdp_cli.errors import Finding, MfsdpError, Severity
from mfsdp_cli.model.huggingface import looks_like_config, read_config
from mfsdp_cli.model.megatron import model_of, parallel_of, settings_of
from mfsdp_cli.model.megatron_files import read_arguments, read_yaml
from mfsdp_cli.model.megatron_options import Options
from mfsdp_cli.model.nearest import did_you_mean
from mfsdp_cli.model.presets import preset, preset_names
from mfsdp_cli.model.spec import ModelSpec
from mfsdp_cli.model.validity import MAX_LAYERS
from mfsdp_cli.model.vocabulary import with_padding

_LARGEST_FILE = 4 * 2**20
_CONFIG = "config.json"
_FLAGS_FIRST = re.compile(r"\s*(#!|--\w[\w-]*(?![\w-]*:\s))")
"""A script, or flags: not ``---`` and not ``--num-layers: 12``, which begin YAML."""


@dataclass(frozen=True)
class LoadedModel:
    """A model and what its file says beside it.

    Args:
        parallel: layout, batch and parallel options of a Megatron file, under their long names
            with underscores.
        settings: fields of :class:`mfsdp_cli.parallel.Settings` that a Megatron file speaks of.
        findings: warnings and notes about the input.
    """

    spec: ModelSpec
    parallel: dict[str, int | str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)


def load_model(
    source: str,
    *,
    num_layers: int | None = None,
    mtp_num_layers: int | None = None,
    make_vocab_size_divisible_by: int | None = None,
    tensor_parallel: int | None = None,
) -> LoadedModel:
    """Read a model.

    Args:
        source: a preset's name, a file, or a folder with a ``config.json``.
        num_layers: another depth; MoE patterns are cut, or go on with their last kind.
        mtp_num_layers: another number of MTP layers.
        make_vocab_size_divisible_by: padding of the vocabulary; default: none for presets and
            Hugging Face (but up to a multiple of TP), for Megatron what the file says or 128.
        tensor_parallel: TP that the padding is for; default: what the file says or 1.

    Raises:
        MfsdpError: MF401 to MF419, each naming file, key and value.
    """
    loaded = _read(source, tensor_parallel)
    try:
        spec = _with_depth(loaded.spec, num_layers)
        if mtp_num_layers is not None:
            spec = replace(spec, mtp_num_layers=mtp_num_layers)
        tp = tensor_parallel or int(loaded.parallel.get("tensor_model_parallel_size", 1))
        if make_vocab_size_divisible_by is not None:
            spec = with_padding(spec, make_vocab_size_divisible_by, tp)
        elif tp > 1 and spec.padded_vocab_size % tp:
            spec = with_padding(spec, 1, tp)
    except MfsdpError as error:
        raise _located(error, source) from None
    return replace(loaded, spec=spec, findings=[*loaded.findings, *_limits(spec)])


def _read(source: str, tensor_parallel: int | None) -> LoadedModel:
    if source in preset_names():
        return LoadedModel(preset(source), findings=_shadowed(source))
    try:
        path = _file_of(source)
        text = _text_of(path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise MfsdpError("MF403", f"cannot read {source}: {reason}", where=source) from None
    return _read_text(text, path, tensor_parallel)


def _shadowed(name: str) -> list[Finding]:
    if not Path(name).exists():
        return []
    message = f"{name} is a preset and a path here; the preset is taken"
    return [Finding("MF431", Severity.NOTE, message, f"write ./{name} for the path", name)]


def _file_of(source: str) -> Path:
    if not source.strip() or "\0" in source:
        raise _not_found(source)
    path = Path(source)
    if path.is_dir():
        path = path / _CONFIG
        if not path.is_file():
            raise MfsdpError("MF411", f"the folder {source} holds no {_CONFIG}", where=source)
    if not path.is_file():
        raise _not_found(source)
    return path


def _not_found(source: str) -> MfsdpError:
    names = preset_names()
    return MfsdpError(
        "MF411",
        f"{source!r} is neither a preset nor a file",
        hint=did_you_mean(source, names) or f"presets: {', '.join(names)}",
    )


def _text_of(path: Path) -> str:
    size = path.stat().st_size
    if size > _LARGEST_FILE:
        raise MfsdpError(
            "MF403", f"{path} has {size} bytes; a configuration has at most {_LARGEST_FILE}"
        )
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise MfsdpError("MF403", f"{path} is no text file", where=str(path)) from None
    if not text.strip() or "\0" in text:
        state = "is no text file" if text.strip() else "is empty"
        raise MfsdpError("MF403", f"{path} {state}", where=str(path))
    return text


def _read_text(text: str, path: Path, tensor_parallel: int | None) -> LoadedModel:
    """Tell the kinds of file apart and read the one at hand."""
    name = path.parent.resolve().name if path.name == _CONFIG else path.stem
    name, where = name or "model", str(path)
    try:
        if text.lstrip().startswith(("{", "[")):
            return LoadedModel(_read_json(text, name, where))
        document = _yaml_mapping(text, where)
        if document is not None:
            options, config_names = read_yaml(document, where), True
        else:
            options, config_names = read_arguments(text, where), False
        return _read_options(options, name, config_names, tensor_parallel)
    except MfsdpError as error:
        raise _located(error, where) from None
    except RecursionError:
        raise MfsdpError("MF403", f"{where} is nested too deeply", where=where) from None


def _read_json(text: str, name: str, where: str) -> ModelSpec:
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        place = f"{where}, line {error.lineno} column {error.colno}"
        raise MfsdpError("MF403", f"{where} is no JSON: {error.msg}", where=place) from None
    except ValueError as error:  # a number of thousands of digits
        raise MfsdpError("MF403", f"{where} is no JSON: {error}", where=where) from None
    if not isinstance(document, dict):
        raise MfsdpError("MF403", f"{where} holds a {type(document).__name__}, not an object")
    if str(document.get("schema", "")).startswith("mfsdp.plan"):
        raise MfsdpError("MF403", f"{where} is a plan, not a model", where=where)
    if not looks_like_config(document):
        raise MfsdpError(
            "MF403",
            f"{where} is no model configuration: it has no model_type",
            where=where,
            hint="a Hugging Face config.json has model_type, num_hidden_layers, hidden_size, ...",
        )
    return read_config(document, name=name, where=where)


def _yaml_mapping(text: str, where: str) -> dict[Any, Any] | None:
    """The mapping that a YAML file holds; None where the text is no YAML mapping."""
    if _FLAGS_FIRST.match(text):
        return None
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        document = yaml.load(text, Loader=loader)
    except (yaml.YAMLError, ValueError) as error:
        if " --" in text or "\n--" in text:
            return None
        raise MfsdpError("MF403", f"{where} is no YAML: {_short(error)}", where=where) from None
    return document if isinstance(document, dict) else None


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _read_options(
    options: Options, name: str, config_names: bool, tensor_parallel: int | None
) -> LoadedModel:
    if not options.values:
        raise MfsdpError(
            "MF403",
            f"{options.where} holds neither a model configuration nor Megatron arguments",
            where=options.where,
        )
    parallel = parallel_of(options)
    tp = tensor_parallel or int(parallel.get("tensor_model_parallel_size", 1))
    spec = model_of(options, name=name, config_names=config_names, tensor_parallel=tp)
    return LoadedModel(spec, parallel, settings_of(options), options.findings)


def _with_depth(spec: ModelSpec, num_layers: int | None) -> ModelSpec:
    if num_layers is None or num_layers == spec.num_layers:
        return spec
    if not 1 <= num_layers <= MAX_LAYERS:
        raise MfsdpError("MF405", f"--num-layers must be 1 to {MAX_LAYERS}, got {num_layers}")
    moe, assumptions = spec.moe, spec.assumptions
    if moe is not None:
        pattern = moe.moe_layer_pattern[:num_layers]
        pattern += pattern[-1:] * (num_layers - len(pattern))
        moe = replace(moe, moe_layer_pattern=pattern)
    if num_layers > spec.num_layers:
        assumptions += (f"layers {spec.num_layers} to {num_layers - 1} are like the last one",)
    return replace(spec, num_layers=num_layers, moe=moe, assumptions=assumptions)


def _limits(spec: ModelSpec) -> list[Finding]:
    """Notes on what is counted exactly but differs from what Megatron-Core can build."""
    partial = spec.add_attention_output_bias or spec.add_mlp_bias
    if not partial or spec.add_bias_linear:
        return []
    biased = "attention outputs" if spec.add_attention_output_bias else "MLP layers"
    return [
        Finding(
            "MF430",
            Severity.NOTE,
            f"{spec.name} has biases on {biased} alone, which are counted, but which "
            "Megatron-Core does not build",
            where=spec.source,
        )
    ]


def _located(error: MfsdpError, where: str) -> MfsdpError:
    """The error with the file as its place, where it names none."""
    finding = error.finding
    if finding.where:
        return error
    return MfsdpError(finding.code, finding.message, where=where, hint=finding.hint)
