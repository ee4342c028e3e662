"""The sharding engine. Knows torch and nothing else of this package.

A training loop with two chunks a rank::

    with fully_shard_context(device) as context:
        for chunk in chunks:
            for layer in chunk.layers:
                fully_shard(layer, mesh)
            fully_shard(chunk, mesh)
    optimizer = ShardedOptimizer(chunks, AdamSettings(lr=1e-3))

    context.zero_grad()
    with microbatch(context, is_last=True):
        loss(chunks[1](chunks[0](inputs))).backward()
    context.finish_reductions()
    norm = optimizer.grad_norm()
    optimizer.clip(1.0, norm)
    optimizer.step()
"""

from mfsdp_cli.fsdp.chunk import Chunk
from mfsdp_cli.fsdp.context import (
    Context,
    Event,
    GradientReduction,
    fully_shard_context,
    microbatch,
)
from mfsdp_cli.fsdp.mesh import ShardMesh
from mfsdp_cli.fsdp.module import context_of, fully_shard, megatron_optimizer_class, unit_of
from mfsdp_cli.fsdp.optimizer import AdamSettings, ShardedOptimizer, persistent_bytes
from mfsdp_cli.fsdp.order import Orientation, Use
from mfsdp_cli.fsdp.shared_parameters import LocalMember, SharedParameter
from mfsdp_cli.fsdp.state import (
    Shard,
    full_gradients,
    full_state_dict,
    full_weights,
    sharded_state_dict,
)

__all__ = [
    "AdamSettings",
    "Chunk",
    "Context",
    "Event",
    "GradientReduction",
    "LocalMember",
    "Orientation",
    "Shard",
    "ShardMesh",
    "ShardedOptimizer",
    "SharedParameter",
    "Use",
    "context_of",
    "full_gradients",
    "full_state_dict",
    "full_weights",
    "fully_shard",
    "fully_shard_context",
    "megatron_optimizer_class",
    "microbatch",
    "persistent_bytes",
    "sharded_state_dict",
    "unit_of",
]
