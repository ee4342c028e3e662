"""Bytes of weights, gradients and optimizer state of a rank under our own sharding.

Everything is sharded by element over the data-parallel ranks (ZeRO-3): a unit's parameters lie end
to end in one buffer and each rank owns a range of ``ceil(n / DP)`` elements. Routed experts under
expert parallelism are sharded over the ``DP / EP`` ranks that hold the same experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mfsdp_cli.model.spec import ModelSpec
from mfsdp_cli.parallel import Parallel

FP32 = 4
#: Exponential averages of the gradient and of its square, fp32.
ADAM_STATES = 2


@dataclass(frozen=True)
class UnitShare:
    """A unit as memory sees it: whole elements on a rank, and how many ranks shard it."""

    parameters: int
    ranks: int

    @property
    def shard(self) -> int:
        """Elements the rank with the largest share owns."""
        return -(-self.parameters // self.ranks)


@dataclass(frozen=True)
class Precision:
    """Bytes an element of what training keeps."""

    compute: int
    main: int = FP32

    @property
    def separate_model_weight(self) -> bool:
        """Whether compute weights are stored beside the main ones (dtypes differ)."""
        return self.compute != self.main


def precision_of(name: str) -> Precision:
    """``fp32`` computes in 4 bytes; bf16 and fp16 in 2, with fp32 main weights and gradients."""
    return Precision(FP32 if name == "fp32" else 2)


def sharding_ranks(parallel: Parallel, *, experts: bool, replicas: int = 1) -> int:
    """Ranks over which a unit is sharded: data times context parallel, for experts without EP.

    Args:
        replicas: copies of the shards under hybrid sharding.
    """
    ranks = max(1, parallel.data_parallel_size * parallel.context_parallel_size // replicas)
    if not experts:
        return ranks
    return max(
        1, ranks * parallel.tensor_model_parallel_size // parallel.expert_model_parallel_size
    )


def persistent_state(units: Iterable[UnitShare], precision: Precision) -> dict[str, int]:
    """Bytes a rank keeps all the time, by component."""
    owned = sum(unit.shard for unit in units)
    return {
        "main_weights": owned * precision.main,
        "model_weights": owned * precision.compute if precision.separate_model_weight else 0,
        "main_gradients": owned * FP32,
        "optimizer_state": owned * FP32 * ADAM_STATES,
    }


def buffers(spec: ModelSpec, router_bias: int) -> int:
    """Bytes of buffers that no optimizer sees: router biases and their token counts, fp32."""
    return 2 * router_bias * FP32 if spec.moe is not None else 0


def two_largest(units: Sequence[UnitShare]) -> int:
    """Elements of the two largest units: one in use, the next on its way."""
    sizes = sorted((unit.parameters for unit in units), reverse=True)
    return sum(sizes[:2])
