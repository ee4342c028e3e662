"""Hugging Face ``config.json`` as a model description.

Which class reads a file is decided by ``model_type``; what a key means and what its absence means
depends on that class (:mod:`mfsdp_cli.model.families`). Only the text part of a model with several
parts is taken. An unknown ``model_type`` is an error, never a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.model.families import FAMILIES, build
from mfsdp_cli.model.fields import Fields
from mfsdp_cli.model.nearest import did_you_mean
from mfsdp_cli.model.spec import ModelSpec

_TEXT_PARTS = ("text_config", "llm_config", "language_config")
_OTHER_PARTS = ("vision_config", "audio_config", "speech_config", "vision_tower_config")
_ARCHITECTURES = {
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "GPT2LMHeadModel": "gpt2",
    "GemmaForCausalLM": "gemma",
    "Glm4MoeForCausalLM": "glm4_moe",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}


def looks_like_config(document: Mapping[str, Any]) -> bool:
    """Whether a JSON object is a Hugging Face model configuration."""
    return any(key in document for key in ("model_type", "architectures", *_TEXT_PARTS))


def read_config(document: Mapping[str, Any], *, name: str, where: str) -> ModelSpec:
    """The model of a ``config.json``.

    Args:
        document: the JSON object.
        name: what to call the model.
        where: the file, for messages.

    Raises:
        MfsdpError: MF404 a key is missing, MF405 a value is of the wrong kind, MF406 the
            ``model_type`` is unknown, MF408 the model has something that cannot be described.
    """
    fields = _text_part(document, where)
    return build(_model_type(fields), fields, name)


def _text_part(document: Mapping[str, Any], where: str) -> Fields:
    """The keys of the text model; those around a nested one count where it has none."""
    for part in _TEXT_PARTS:
        nested = document.get(part)
        if nested is None:
            continue
        if not isinstance(nested, dict):
            raise MfsdpError(
                "MF405", f"{part} must be an object, got {type(nested).__name__}", where=where
            )
        outer = {key: document[key] for key in ("tie_word_embeddings",) if key in document}
        fields = Fields(nested, f"{where}, {part}", outer)
        fields.assume(f"only the text part ({part}) is taken")
        for other in _OTHER_PARTS:
            if other in document:
                fields.assume(f"{other} is left out: its parameters are not counted")
        return fields
    return Fields(document, where)


def _model_type(fields: Fields) -> str:
    model_type = fields.text("model_type", default="")
    if model_type in FAMILIES:
        return model_type
    if not model_type and (found := _from_architecture(fields)):
        fields.assume(f"model_type is absent: {found} assumed from architectures")
        return found
    known = sorted(FAMILIES)
    said = f"model_type {model_type!r} is not known" if model_type else "there is no model_type"
    raise MfsdpError(
        "MF406",
        said,
        where=fields.where,
        hint=_misspelt(model_type, known) or f"known: {', '.join(known)}",
    )


def _misspelt(model_type: str, known: list[str]) -> str:
    """What a typing error may have stood for; never another generation of the same family, which
    would be counted as if it were this one (``gemma2`` as ``gemma``).
    """
    digits = [sign for sign in model_type if sign.isdigit()]
    same = [name for name in known if [sign for sign in name if sign.isdigit()] == digits]
    return did_you_mean(model_type, same, cutoff=0.85)


def _from_architecture(fields: Fields) -> str | None:
    architectures = fields.raw("architectures")
    if not isinstance(architectures, list) or not architectures:
        return None
    return _ARCHITECTURES.get(str(architectures[0]))
