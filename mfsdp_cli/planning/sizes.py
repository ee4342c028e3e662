"""From given sizes to all of them: world, data parallelism, batch. Contradictions are collected.

What is not given is the contract's default::

    world = PP * max(TP * CP, EP)        DP = world / (PP * TP * CP)
    micro batch 1, global batch 4 * PP * micro batch * DP, group of microbatches PP
    sequence = the smaller of 4096 and the model's positions
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mfsdp_cli.errors import Finding, Severity
from mfsdp_cli.model.spec import ModelSpec
from mfsdp_cli.parallel import Parallel

DEFAULT_SEQUENCE = 4096
#: Sizes beyond this are typing errors; below it every product stays exact and printable.
LARGEST = 10**9

#: Uses of layers in one step that a plan lists; beyond it the document takes gigabytes.
MOST_USES = 4_000_000

_COUNTS = (
    "world_size",
    "pipeline_model_parallel_size",
    "num_virtual_stages_per_pipeline_rank",
    "virtual_pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "tensor_model_parallel_size",
    "context_parallel_size",
    "micro_batch_size",
    "global_batch_size",
    "seq_length",
    "microbatch_group_size_per_virtual_pipeline_stage",
)


def check_counts(sizes: Mapping[str, Any]) -> list[Finding]:
    """MF201 for every size that is no integer from 1 to :data:`LARGEST`."""
    findings = []
    for name in _COUNTS:
        value = sizes.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST:
            message = f"{name} must be an integer from 1 to {LARGEST}, got {value!r}"
            findings.append(_fault("MF201", message, flag(name)))
    return findings


def flag(name: str) -> str:
    """The flag of a size's name."""
    return "--" + name.replace("_", "-")


@dataclass
class _Resolver:
    """One resolution; ``findings`` grows while it runs."""

    sizes: Mapping[str, Any]
    spec: ModelSpec
    findings: list[Finding]

    def get(self, name: str, default: int) -> int:
        value = self.sizes.get(name)
        return default if value is None else int(value)

    def fault(self, code: str, message: str, where: str, hint: str = "") -> None:
        self.findings.append(_fault(code, message, where, hint))

    def data_parallel(self, pp: int) -> tuple[int, int]:
        """World and data-parallel size."""
        tp = self.get("tensor_model_parallel_size", 1)
        cp = self.get("context_parallel_size", 1)
        ep = self.get("expert_model_parallel_size", 1)
        model_ranks = pp * tp * cp
        world = self.get("world_size", pp * max(tp * cp, ep))
        if world % model_ranks:
            self.fault(
                "MF202",
                f"{world} ranks do not divide by pipeline {pp} x tensor {tp} x context {cp} "
                f"= {model_ranks}",
                f"--world-size {world}, --pipeline-model-parallel-size {pp}",
                f"a multiple of {model_ranks} ranks, such as "
                f"{-(-world // model_ranks) * model_ranks}",
            )
        self.experts(world, pp, ep)
        self.expert_tensors()
        return world, max(1, world // model_ranks)

    def experts(self, world: int, pp: int, ep: int) -> None:
        where = f"--expert-model-parallel-size {ep}"
        moe = self.spec.moe
        if ep == 1:
            return
        if moe is None:
            self.fault("MF204", f"{self.spec.name} has no experts to divide over {ep} ranks", where)
        elif moe.num_moe_experts % ep:
            self.fault(
                "MF204", f"{moe.num_moe_experts} experts do not divide over {ep} ranks", where
            )
        if world // pp % ep:
            self.fault(
                "MF204",
                f"{ep} expert-parallel ranks do not divide the {world // pp} ranks of a stage",
                f"{where}, --world-size {world}",
            )

    def expert_tensors(self) -> None:
        size = self.get("expert_tensor_parallel_size", 1)
        if size != 1:
            self.fault(
                "MF204",
                f"routed experts are divided by expert parallelism alone: expert tensor parallel "
                f"size {size}, it must be 1",
                f"--expert-tensor-parallel-size {size}",
                "--expert-tensor-parallel-size 1",
            )

    def microbatches(self, micro: int, batch: int, dp: int) -> int:
        if batch % (micro * dp):
            low = batch // (micro * dp) * micro * dp
            near = f"{low} or {low + micro * dp}" if low else str(micro * dp)
            self.fault(
                "MF203",
                f"a global batch of {batch} does not divide by micro batch {micro} x "
                f"data-parallel size {dp} = {micro * dp}",
                f"--global-batch-size {batch}, --micro-batch-size {micro}",
                f"--global-batch-size {near}",
            )
        return max(1, batch // (micro * dp))

    def uses(self, microbatches: int) -> None:
        """Refuse a step whose order of uses no document holds."""
        layers = self.spec.num_layers + self.spec.mtp_num_layers
        uses = 2 * microbatches * layers
        if uses > MOST_USES:
            self.fault(
                "MF235",
                f"{microbatches} microbatches through {layers} layers are {uses} forwards and "
                f"backwards of layers; a plan lists at most {MOST_USES}",
                "--global-batch-size",
                "fewer microbatches: a larger --micro-batch-size or --world-size",
            )


def resolve_parallel(
    sizes: Mapping[str, Any], spec: ModelSpec, *, pp: int, vpp: int
) -> tuple[Parallel | None, list[Finding]]:
    """All sizes, or None and every contradiction among those given (MF202 to MF204, MF235)."""
    findings: list[Finding] = []
    resolver = _Resolver(sizes, spec, findings)
    world, dp = resolver.data_parallel(pp)
    micro = resolver.get("micro_batch_size", 1)
    batch = resolver.get("global_batch_size", 4 * pp * micro * dp)
    microbatches = resolver.microbatches(micro, batch, dp)
    resolver.uses(microbatches)
    if findings:
        return None, findings
    length = min(DEFAULT_SEQUENCE, spec.max_position_embeddings)
    parallel = Parallel(
        world_size=world,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        data_parallel_size=dp,
        tensor_model_parallel_size=resolver.get("tensor_model_parallel_size", 1),
        context_parallel_size=resolver.get("context_parallel_size", 1),
        expert_model_parallel_size=resolver.get("expert_model_parallel_size", 1),
        micro_batch_size=micro,
        global_batch_size=batch,
        num_microbatches=microbatches,
        seq_length=resolver.get("seq_length", length),
        microbatch_group_size_per_virtual_pipeline_stage=resolver.get(
            "microbatch_group_size_per_virtual_pipeline_stage", pp
        ),
    )
    return parallel, []


def _fault(code: str, message: str, where: str, hint: str = "") -> Finding:
    return Finding(code, Severity.ERROR, message, hint, where)
