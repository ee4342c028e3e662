"""Rules on the sizes of the parallel dimensions and of the sequence."""

from __future__ import annotations

from mfsdp_cli.errors import Severity
from mfsdp_cli.rules.table import Binds, Rule, Subject

_ADAPTER = "Megatron-LM main, mcore_fsdp_adapter.py, FullyShardedDataParallelV2._validate_config"


def _tensor_parallel(subject: Subject) -> str | None:
    size = subject.parallel.tensor_model_parallel_size
    if size == 1:
        return None
    return f"M-FSDP v2 does not take tensor parallelism: size {size}, it must be 1"


def _context_parallel(subject: Subject) -> str | None:
    size = subject.parallel.context_parallel_size
    if size == 1:
        return None
    return f"M-FSDP v2 does not take context parallelism: size {size}, it must be 1"


def _sequence_parallel(subject: Subject) -> str | None:
    if not subject.settings.sequence_parallel:
        return None
    size = subject.parallel.tensor_model_parallel_size
    return (
        f"sequence parallelism splits activations over tensor-parallel ranks: size {size}, and "
        "M-FSDP v2 takes no size but 1"
    )


def _pipeline(subject: Subject) -> str | None:
    size = subject.parallel.pipeline_model_parallel_size
    if size == 1:
        return None
    return (
        f"Megatron's own M-FSDP v2 (its main branch of August 2026) refuses pipeline "
        f"parallelism: size {size}, it must be 1 there"
    )


def _learned_positions(subject: Subject) -> str | None:
    length, most = subject.parallel.seq_length, subject.model.max_position_embeddings
    if length <= most or subject.model.position_embedding_type != "learned_absolute":
        return None
    return f"the sequence length {length} is beyond the {most} learned positions of the model"


def _trained_positions(subject: Subject) -> str | None:
    length, most = subject.parallel.seq_length, subject.model.max_position_embeddings
    if length <= most or subject.model.position_embedding_type == "learned_absolute":
        return None
    return f"the sequence length {length} is beyond the model's {most} positions"


SIZE_RULES = (
    Rule(
        "MF210",
        "tensor parallel size",
        Binds.BOTH,
        _tensor_parallel,
        where="--tensor-model-parallel-size",
        hint="--tensor-model-parallel-size 1: parameters are sharded over data parallelism, "
        "more pipeline stages divide the layers",
        source=_ADAPTER,
    ),
    Rule(
        "MF211",
        "context parallel size",
        Binds.BOTH,
        _context_parallel,
        where="--context-parallel-size",
        hint="--context-parallel-size 1, and recompute activations where sequences are long",
        source=_ADAPTER,
    ),
    Rule(
        "MF212",
        "sequence parallelism",
        Binds.BOTH,
        _sequence_parallel,
        where="--sequence-parallel",
        hint="leave --sequence-parallel out",
        source="megatron-core 0.19.2, model_parallel_config.py: needs tensor parallelism",
    ),
    Rule(
        "MF213",
        "pipeline parallelism in Megatron's own M-FSDP v2",
        Binds.MEGATRON,
        _pipeline,
        where="--pipeline-model-parallel-size",
        hint="mfsdp train runs it; the Megatron flags serve Megatron's other engines",
        source=_ADAPTER,
        elsewhere=Severity.NOTE,
    ),
    Rule(
        "MF215",
        "sequence length and learned positions",
        Binds.BOTH,
        _learned_positions,
        where="--seq-length",
        hint="a shorter --seq-length",
        source="the position table has no row beyond its size",
    ),
    Rule(
        "MF216",
        "sequence length and the model's positions",
        Binds.BOTH,
        _trained_positions,
        where="--seq-length",
        hint="a shorter --seq-length, unless the positions are meant to be extended",
        source="max_position_embeddings of the model description",
        severity=Severity.WARNING,
    ),
)
