"""The sizes of a run and the training settings that rules judge. Knows no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Parallel:
    """Sizes of every parallel dimension and of the batch.

    ``virtual_pipeline_model_parallel_size`` is 1 where the schedule is not interleaved.
    ``data_parallel_size`` counts ranks that hold the same stage: world / (pp * tp * cp); experts
    under expert parallelism shard over data_parallel_size / ep of them.
    """

    world_size: int
    pipeline_model_parallel_size: int
    virtual_pipeline_model_parallel_size: int
    data_parallel_size: int
    tensor_model_parallel_size: int
    context_parallel_size: int
    expert_model_parallel_size: int
    micro_batch_size: int
    global_batch_size: int
    num_microbatches: int
    seq_length: int
    microbatch_group_size_per_virtual_pipeline_stage: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Parallel:
        return cls(**{field.name: document[field.name] for field in fields(cls)})


@dataclass(frozen=True)
class Settings:
    """Training settings, in Megatron's names, that decide whether a run can be right.

    None of them changes the layout; the rules table (``mfsdp_cli.rules``) judges them. Defaults
    are what ``mfsdp train`` does. ``batch_p2p_communication`` None: Megatron's default, batched
    exactly where point-to-point is not overlapped.
    """

    schedule: str = "1f1b"
    overlap_p2p_communication: bool = False
    batch_p2p_communication: bool | None = None
    recompute_granularity: str = "none"
    resident_chunks: int = 1
    gradient_reduction: str = "microbatch"
    precision: str = "fp32"
    use_distributed_optimizer: bool = False
    calculate_per_token_loss: bool = False
    gradient_accumulation_fusion: bool = False
    fp8_format: str | None = None
    fp4_format: str | None = None
    cuda_graph_impl: str = "none"
    outer_dp_sharding_strategy: str = "no_shard"
    num_distributed_optimizer_instances: int = 1
    delay_wgrad_compute: bool = False
    disable_bucketing: bool = False
    deallocate_pipeline_outputs: bool = False
    data_parallel_sharding_strategy: str = "optim_grads_params"
    sequence_parallel: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Settings:
        return cls(**{f.name: document[f.name] for f in fields(cls) if f.name in document})
