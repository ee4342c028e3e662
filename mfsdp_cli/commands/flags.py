"""The flags of a plan, written once for every command that takes them."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Annotated, Any

import typer

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.planning.request import PlanRequest

GIB = 1 << 30
_MODEL = "Model"
_RANKS = "Ranks and hardware"
_PIPELINE = "Pipeline"
_BATCH = "Batch"
_MEMORY = "Memory"
_JUDGED = "Training settings that validation judges"


def _option(panel: str, *names: str, text: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, metavar=metavar)


@dataclass(frozen=True)
class PlanFlags:
    """Every flag of a plan; None where it was not given."""

    num_layers: Annotated[
        int | None,
        _option(_MODEL, "--num-layers", text="Decoder layers, instead of the model's own."),
    ] = None
    mtp_num_layers: Annotated[
        int | None,
        _option(_MODEL, "--mtp-num-layers", text="MTP layers, instead of the model's own."),
    ] = None
    make_vocab_size_divisible_by: Annotated[
        int | None,
        _option(
            _MODEL,
            "--make-vocab-size-divisible-by",
            text="Pad the vocabulary to a multiple of this times TP. Default: no padding for "
            "Hugging Face models, 128 for Megatron arguments.",
        ),
    ] = None
    world_size: Annotated[
        int | None,
        _option(
            _RANKS,
            "--world-size",
            "--gpus",
            text="Number of ranks. Default: the smallest that the given sizes need.",
        ),
    ] = None
    gpus_per_node: Annotated[
        int | None,
        _option(_RANKS, "--gpus-per-node", text="Ranks that share the fast link of a node."),
    ] = None
    hardware: Annotated[
        str | None,
        _option(
            _RANKS,
            "--hardware",
            text="h100, h200, b200, a100, cpu, or a YAML file. Where given, memory is judged "
            "against it.",
        ),
    ] = None
    expert_model_parallel_size: Annotated[
        int | None,
        _option(_RANKS, "--expert-model-parallel-size", "--ep", text="Expert parallelism."),
    ] = None
    tensor_model_parallel_size: Annotated[
        int | None,
        _option(_RANKS, "--tensor-model-parallel-size", "--tp", text="Tensor parallelism."),
    ] = None
    context_parallel_size: Annotated[
        int | None,
        _option(_RANKS, "--context-parallel-size", "--cp", text="Context parallelism."),
    ] = None
    pipeline_model_parallel_size: Annotated[
        int | None,
        _option(
            _PIPELINE,
            "--pipeline-model-parallel-size",
            "--pp",
            text="Pipeline ranks. Not given: searched.",
        ),
    ] = None
    num_virtual_stages_per_pipeline_rank: Annotated[
        int | None,
        _option(
            _PIPELINE,
            "--num-virtual-stages-per-pipeline-rank",
            "--vpp",
            text="Virtual stages a rank; 1: not interleaved.",
        ),
    ] = None
    num_layers_per_virtual_pipeline_stage: Annotated[
        int | None,
        _option(
            _PIPELINE,
            "--num-layers-per-virtual-pipeline-stage",
            text="Megatron's other way to give the virtual stages.",
        ),
    ] = None
    pipeline_model_parallel_layout: Annotated[
        str | None,
        _option(
            _PIPELINE,
            "--pipeline-model-parallel-layout",
            "--layout",
            text="Megatron's layout string, such as 'Et*3|(tt|)*29,m|L'.",
        ),
    ] = None
    decoder_first_pipeline_num_layers: Annotated[
        int | None,
        _option(
            _PIPELINE,
            "--decoder-first-pipeline-num-layers",
            text="Decoder layers of the first pipeline rank.",
        ),
    ] = None
    decoder_last_pipeline_num_layers: Annotated[
        int | None,
        _option(
            _PIPELINE,
            "--decoder-last-pipeline-num-layers",
            text="Decoder layers of the last pipeline rank.",
        ),
    ] = None
    account_for_embedding_in_pipeline_split: Annotated[
        bool | None,
        _option(
            _PIPELINE,
            "--account-for-embedding-in-pipeline-split",
            text="The embedding stands for a layer in an even split.",
        ),
    ] = None
    account_for_loss_in_pipeline_split: Annotated[
        bool | None,
        _option(
            _PIPELINE,
            "--account-for-loss-in-pipeline-split",
            text="The loss stands for a layer in an even split.",
        ),
    ] = None
    split: Annotated[
        str | None,
        _option(
            _PIPELINE,
            "--split",
            text="even (an error unless it divides), balanced (ranks differ by at most a layer), "
            "auto (by cost; default).",
        ),
    ] = None
    microbatch_group_size_per_virtual_pipeline_stage: Annotated[
        int | None,
        _option(
            _PIPELINE,
            "--microbatch-group-size-per-virtual-pipeline-stage",
            text="Microbatches a virtual stage runs in a row. Default: PP.",
        ),
    ] = None
    schedule: Annotated[
        str | None,
        _option(
            _PIPELINE,
            "--schedule",
            text="1f1b, interleaved-1f1b (default by VPP); zb-h1, zb-v, combined-1f1b are not "
            "built yet.",
        ),
    ] = None
    overlap_p2p_communication: Annotated[
        bool | None,
        _option(
            _PIPELINE,
            "--overlap-p2p-communication/--no-overlap-p2p-communication",
            text="Overlap point-to-point with compute. Default: where VPP is above 1.",
        ),
    ] = None
    batch_p2p_communication: Annotated[
        bool | None,
        _option(
            _PIPELINE,
            "--batch-p2p-communication/--no-batch-p2p-communication",
            text="Send and receive in batches. Default: where not overlapped.",
        ),
    ] = None
    micro_batch_size: Annotated[
        int | None,
        _option(_BATCH, "--micro-batch-size", "--mbs", text="Samples a microbatch. Default: 1."),
    ] = None
    global_batch_size: Annotated[
        int | None,
        _option(
            _BATCH,
            "--global-batch-size",
            "--gbs",
            text="Samples a step. Default: 4 x PP x micro batch x DP.",
        ),
    ] = None
    seq_length: Annotated[
        int | None,
        _option(
            _BATCH,
            "--seq-length",
            "--seq",
            text="Tokens a sample. Default: the smaller of 4096 and the model's positions.",
        ),
    ] = None
    recompute_granularity: Annotated[
        str | None,
        _option(_MEMORY, "--recompute-granularity", text="none, selective or full."),
    ] = None
    resident_chunks: Annotated[
        int | None,
        _option(
            _MEMORY,
            "--resident-chunks",
            text="Chunks a rank keeps gathered; 0: unit by unit. Default: 2 where VPP is above 1.",
        ),
    ] = None
    gradient_reduction: Annotated[
        str | None,
        _option(
            _MEMORY,
            "--gradient-reduction",
            text="microbatch: reduce after every backward; last: once, after the chunk's last.",
        ),
    ] = None
    memory_limit: Annotated[
        float | None,
        _option(_MEMORY, "--memory-limit", text="GiB a rank may use.", metavar="GIB"),
    ] = None
    precision: Annotated[
        str | None, _option(_JUDGED, "--precision", text="fp32 (default), bf16 or fp16.")
    ] = None
    bf16: Annotated[
        bool | None, _option(_JUDGED, "--bf16", text="The same as --precision bf16.")
    ] = None
    fp16: Annotated[
        bool | None, _option(_JUDGED, "--fp16", text="The same as --precision fp16.")
    ] = None
    fp8_format: Annotated[str | None, _option(_JUDGED, "--fp8-format", text="e4m3 or hybrid.")] = (
        None
    )
    fp4_format: Annotated[str | None, _option(_JUDGED, "--fp4-format", text="e2m1.")] = None
    cuda_graph_impl: Annotated[
        str | None,
        _option(
            _JUDGED,
            "--cuda-graph-impl",
            text="none, local, transformer_engine or full_iteration.",
        ),
    ] = None
    enable_cuda_graph: Annotated[
        bool | None,
        _option(_JUDGED, "--enable-cuda-graph", text="The same as --cuda-graph-impl local."),
    ] = None
    external_cuda_graph: Annotated[
        bool | None,
        _option(
            _JUDGED,
            "--external-cuda-graph",
            text="The same as --cuda-graph-impl transformer_engine.",
        ),
    ] = None
    use_distributed_optimizer: Annotated[
        bool | None,
        _option(_JUDGED, "--use-distributed-optimizer", text="Megatron's own sharded optimizer."),
    ] = None
    num_distributed_optimizer_instances: Annotated[
        int | None,
        _option(_JUDGED, "--num-distributed-optimizer-instances", text="Above 1: hybrid sharding."),
    ] = None
    data_parallel_sharding_strategy: Annotated[
        str | None,
        _option(
            _JUDGED,
            "--data-parallel-sharding-strategy",
            text="no_shard, optim, optim_grads or optim_grads_params.",
        ),
    ] = None
    outer_dp_sharding_strategy: Annotated[
        str | None,
        _option(_JUDGED, "--outer-dp-sharding-strategy", text="no_shard or optim."),
    ] = None
    calculate_per_token_loss: Annotated[
        bool | None,
        _option(_JUDGED, "--calculate-per-token-loss", text="Mean by token, not by microbatch."),
    ] = None
    gradient_accumulation_fusion: Annotated[
        bool | None,
        _option(
            _JUDGED,
            "--gradient-accumulation-fusion/--no-gradient-accumulation-fusion",
            text="Weight gradients written into main_grad.",
        ),
    ] = None
    delay_wgrad_compute: Annotated[
        bool | None,
        _option(_JUDGED, "--delay-wgrad-compute", text="Weight gradients after input gradients."),
    ] = None
    disable_bucketing: Annotated[
        bool | None,
        _option(_JUDGED, "--disable-bucketing", text="Megatron's switch on all chunks but one."),
    ] = None
    deallocate_pipeline_outputs: Annotated[
        bool | None,
        _option(
            _JUDGED,
            "--deallocate-pipeline-outputs/--no-deallocate-pipeline-outputs",
            text="Free a stage's output after it is sent.",
        ),
    ] = None
    sequence_parallel: Annotated[
        bool | None, _option(_JUDGED, "--sequence-parallel", text="Split activations over TP.")
    ] = None

    def request(self, model: str, *, top: int = 5) -> PlanRequest:
        """The request these flags make."""
        return PlanRequest(
            model=model,
            sizes=self._given(_SIZES),
            settings=self._given(_SETTINGS) | self._spelled_otherwise(),
            num_layers=self.num_layers,
            mtp_num_layers=self.mtp_num_layers,
            make_vocab_size_divisible_by=self.make_vocab_size_divisible_by,
            hardware=self.hardware,
            gpus_per_node=_positive("--gpus-per-node", self.gpus_per_node),
            memory_limit=_gib(self.memory_limit),
            split=self.split,
            top=top,
        )

    def given(self) -> list[str]:
        """Names of the flags that were given."""
        return [field.name for field in fields(self) if getattr(self, field.name) is not None]

    def _given(self, names: tuple[str, ...]) -> dict[str, Any]:
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def _spelled_otherwise(self) -> dict[str, Any]:
        """Settings that a switch of another name gives."""
        values: dict[str, Any] = {}
        for switch, (name, value) in _SWITCHES.items():
            if not getattr(self, switch):
                continue
            said = values.get(name, getattr(self, name))
            if said not in (None, value):
                raise MfsdpError(
                    "MF207",
                    f"--{switch.replace('_', '-')} says {value}, another flag says {said}",
                    where=f"--{name.replace('_', '-')}, --{switch.replace('_', '-')}",
                )
            values[name] = value
        return values


_SIZES = (
    "world_size",
    "expert_model_parallel_size",
    "tensor_model_parallel_size",
    "context_parallel_size",
    "pipeline_model_parallel_size",
    "num_virtual_stages_per_pipeline_rank",
    "num_layers_per_virtual_pipeline_stage",
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "microbatch_group_size_per_virtual_pipeline_stage",
    "micro_batch_size",
    "global_batch_size",
    "seq_length",
)
_SETTINGS = (
    "schedule",
    "overlap_p2p_communication",
    "batch_p2p_communication",
    "recompute_granularity",
    "resident_chunks",
    "gradient_reduction",
    "precision",
    "fp8_format",
    "fp4_format",
    "cuda_graph_impl",
    "use_distributed_optimizer",
    "num_distributed_optimizer_instances",
    "data_parallel_sharding_strategy",
    "outer_dp_sharding_strategy",
    "calculate_per_token_loss",
    "gradient_accumulation_fusion",
    "delay_wgrad_compute",
    "disable_bucketing",
    "deallocate_pipeline_outputs",
    "sequence_parallel",
)
_SWITCHES = {
    "bf16": ("precision", "bf16"),
    "fp16": ("precision", "fp16"),
    "enable_cuda_graph": ("cuda_graph_impl", "local"),
    "external_cuda_graph": ("cuda_graph_impl", "transformer_engine"),
}


def _positive(flag: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise MfsdpError("MF201", f"{flag} must be at least 1, got {value}", where=flag)
    return value


def _gib(value: float | None) -> int | None:
    """GiB as bytes."""
    if value is None:
        return None
    if not (math.isfinite(value * GIB) and value > 0):
        raise MfsdpError(
            "MF201", f"--memory-limit must be a positive number of GiB, got {value}",
            where="--memory-limit",
        )  # fmt: skip
    return round(value * GIB)
