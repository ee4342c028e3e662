"""Rules on training settings: what M-FSDP v2 and the engine here cannot do right."""

from __future__ import annotations

from mfsdp_cli.errors import Severity
from mfsdp_cli.rules.table import Binds, Rule, Subject

_ADAPTER = "Megatron-LM main, mcore_fsdp_adapter.py, FullyShardedDataParallelV2._validate_config"
_FULL_SHARDING = "optim_grads_params"


def _per_token_loss(subject: Subject) -> str | None:
    if not subject.settings.calculate_per_token_loss:
        return None
    return "Megatron's own M-FSDP v2 averages gradients over microbatches and ranks, not by token"


def _distributed_optimizer(subject: Subject) -> str | None:
    if not subject.settings.use_distributed_optimizer:
        return None
    return (
        "M-FSDP v2 shards the optimizer state itself and is not compatible with Megatron's "
        "distributed optimizer"
    )


def _gradient_accumulation_fusion(subject: Subject) -> str | None:
    if not subject.settings.gradient_accumulation_fusion:
        return None
    return (
        "gradient accumulation fusion writes weight gradients into a full main_grad buffer, "
        "which a sharded parameter does not have"
    )


def _half_precision(subject: Subject) -> str | None:
    if subject.settings.precision != "fp16":
        return None
    return "fp16 needs loss scaling, which M-FSDP v2 does not have"


def _fp8(subject: Subject) -> str | None:
    if subject.settings.fp8_format is None:
        return None
    return f"M-FSDP v2 does not gather or compute in fp8 (format {subject.settings.fp8_format})"


def _fp4(subject: Subject) -> str | None:
    if subject.settings.fp4_format is None:
        return None
    return f"M-FSDP v2 does not gather or compute in fp4 (format {subject.settings.fp4_format})"


def _cuda_graphs(subject: Subject) -> str | None:
    if subject.settings.cuda_graph_impl == "none":
        return None
    return (
        f"CUDA graphs (implementation {subject.settings.cuda_graph_impl}) fix addresses, while "
        "gathered parameters get new storage at every use"
    )


def _outer_sharding(subject: Subject) -> str | None:
    strategy = subject.settings.outer_dp_sharding_strategy
    if strategy == "no_shard":
        return None
    return f"M-FSDP v2 does not shard over the outer data-parallel axis: {strategy}, not no_shard"


def _optimizer_instances(subject: Subject) -> str | None:
    instances = subject.settings.num_distributed_optimizer_instances
    dp = subject.parallel.data_parallel_size
    ep = subject.parallel.expert_model_parallel_size
    if instances == 1:
        return None
    if dp % instances:
        return f"{instances} optimizer instances (hybrid sharding) do not divide {dp} replicas"
    if ep > 1:
        return (
            f"mfsdp train shards experts over all ranks that hold them: EP {ep} does not go with "
            f"{instances} optimizer instances (hybrid sharding)"
        )
    return None


def _delayed_weight_gradients(subject: Subject) -> str | None:
    if not subject.settings.delay_wgrad_compute:
        return None
    return (
        "delayed weight gradients come after the hook that reduces a unit, so their part of the "
        "gradient would be lost"
    )


def _disabled_bucketing(subject: Subject) -> str | None:
    if not subject.settings.disable_bucketing:
        return None
    return (
        "bucketing is disabled: a unit is the bucket of M-FSDP v2, and every chunk keeps its "
        "units (Megatron disables it on all chunks but the first)"
    )


def _output_freeing(subject: Subject) -> str | None:
    if not subject.settings.deallocate_pipeline_outputs:
        return None
    return (
        "Megatron frees a stage's output after sending it, but M-FSDP v2's backward hooks make "
        "that output a view, which must not be freed"
    )


def _sharding_strategy(subject: Subject) -> str | None:
    strategy = subject.settings.data_parallel_sharding_strategy
    if strategy == _FULL_SHARDING:
        return None
    return f"M-FSDP v2 shards parameters, gradients and optimizer state: {strategy}"


TRAINING_RULES = (
    Rule(
        "MF220",
        "per-token loss",
        Binds.MEGATRON,
        _per_token_loss,
        where="--calculate-per-token-loss",
        hint="leave --calculate-per-token-loss out for Megatron's own; the engine here divides by "
        "the tokens of the global batch",
        source=_ADAPTER,
        elsewhere=Severity.NOTE,
    ),
    Rule(
        "MF221",
        "distributed optimizer flag",
        Binds.MEGATRON,
        _distributed_optimizer,
        where="--use-distributed-optimizer",
        hint="leave --use-distributed-optimizer out; mfsdp train --engine distopt runs that "
        "optimizer as a baseline",
        source="Megatron-LM main, arguments.py: --megatron-fsdp-version 2",
    ),
    Rule(
        "MF222",
        "gradient accumulation fusion",
        Binds.BOTH,
        _gradient_accumulation_fusion,
        where="--gradient-accumulation-fusion",
        hint="--no-gradient-accumulation-fusion",
        source=_ADAPTER,
    ),
    Rule(
        "MF223",
        "fp16",
        Binds.BOTH,
        _half_precision,
        where="--fp16",
        hint="--bf16, or fp32",
        source="Megatron-LM pull request 5813: fp16 and loss scaling are refused",
    ),
    Rule(
        "MF224",
        "fp8",
        Binds.BOTH,
        _fp8,
        where="--fp8-format",
        hint="--bf16, or fp32",
        source=_ADAPTER,
    ),
    Rule(
        "MF225",
        "fp4",
        Binds.BOTH,
        _fp4,
        where="--fp4-format",
        hint="--bf16, or fp32",
        source=_ADAPTER,
    ),
    Rule(
        "MF226",
        "CUDA graphs",
        Binds.BOTH,
        _cuda_graphs,
        where="--cuda-graph-impl",
        hint="--cuda-graph-impl none",
        source=_ADAPTER,
    ),
    Rule(
        "MF227",
        "outer data-parallel sharding",
        Binds.BOTH,
        _outer_sharding,
        where="--outer-dp-sharding-strategy",
        hint="--outer-dp-sharding-strategy no_shard",
        source=_ADAPTER,
    ),
    Rule(
        "MF228",
        "hybrid sharding",
        Binds.MFSDP,
        _optimizer_instances,
        where="--num-distributed-optimizer-instances",
        hint="--num-distributed-optimizer-instances 1, or a divisor of the data-parallel size",
        source="mfsdp_cli.fsdp: shards inside, replicas outside",
    ),
    Rule(
        "MF229",
        "delayed weight gradients",
        Binds.BOTH,
        _delayed_weight_gradients,
        where="--delay-wgrad-compute",
        hint="leave --delay-wgrad-compute out",
        source=_ADAPTER,
    ),
    Rule(
        "MF230",
        "disabled bucketing",
        Binds.BOTH,
        _disabled_bucketing,
        where="--disable-bucketing",
        hint="leave disable_bucketing false on every chunk",
        source=_ADAPTER,
    ),
    Rule(
        "MF231",
        "output freeing",
        Binds.MEGATRON,
        _output_freeing,
        where="--deallocate-pipeline-outputs",
        hint="--no-deallocate-pipeline-outputs for Megatron's own; the engine here hooks the "
        "tensor instead of the module and frees",
        source="Megatron-LM pull request 6486; schedules.py: deallocate_output_tensor",
        elsewhere=Severity.NOTE,
    ),
    Rule(
        "MF232",
        "sharding strategy",
        Binds.BOTH,
        _sharding_strategy,
        where="--data-parallel-sharding-strategy",
        hint=f"--data-parallel-sharding-strategy {_FULL_SHARDING}",
        source=_ADAPTER,
    ),
)
