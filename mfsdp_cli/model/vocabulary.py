"""Padding of the vocabulary, as Megatron allocates it."""

from __future__ import annotations

from dataclasses import replace

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.model.spec import ModelSpec
from mfsdp_cli.model.validity import MAX_SIZE


def padded(vocabulary: int, divisor: int, tensor_parallel: int) -> int:
    """The smallest multiple of ``divisor * tensor_parallel`` that holds the vocabulary."""
    multiple = divisor * tensor_parallel
    return -(-vocabulary // multiple) * multiple


def with_padding(spec: ModelSpec, divisor: int, tensor_parallel: int) -> ModelSpec:
    """The model with its own vocabulary padded anew.

    Raises:
        MfsdpError: MF405 where divisor or TP is no positive number.
    """
    for name, value in (
        ("--make-vocab-size-divisible-by", divisor),
        ("--tensor-model-parallel-size", tensor_parallel),
    ):
        if not 1 <= value <= MAX_SIZE:
            raise MfsdpError("MF405", f"{name} must be at least 1, got {value}")
    size = padded(spec.vocab_size, divisor, tensor_parallel)
    return spec if size == spec.padded_vocab_size else replace(spec, padded_vocab_size=size)
