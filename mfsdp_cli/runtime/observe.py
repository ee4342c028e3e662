"""What the layers of a model take and give, microbatch by microbatch, in a few numbers each.

For numeric validation: two engines ran the same forward pass where every layer took and gave the
same. Whole activations would fill the disk, so each is kept as a *sketch*: its elements with signs
drawn once, added up in 128 buckets. A sketch is linear, and the norm of the difference of two
sketches is, on average, the norm of the difference of what they were made of (Charikar, Chen,
Farach-Colton 2002, "Finding frequent items in data streams").
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from mfsdp_cli.runtime.chunks import Chunk, global_name

BUCKETS = 128
EMBEDDING = "embedding"
TAKEN, CHOSEN, GIVEN = "taken", "chosen", "given"
_LAYER = re.compile(r"^(embedding|(decoder|mtp)\.layers\.\d+)$")
_ROUTER = re.compile(r"^(decoder|mtp)\.layers\.\d+\.(\w+\.)?mlp\.router$")

#: (microbatch of the global batch, module's global name, TAKEN, CHOSEN or GIVEN, which time)
Key = tuple[int, str, str, int]
Records = dict[Key, torch.Tensor]


def sketch(tensor: torch.Tensor) -> torch.Tensor:
    """The sketch of a tensor: ``BUCKETS`` numbers, float64, on the CPU."""
    flat = tensor.detach().double().flatten()
    signed = flat * _signs(flat.numel(), flat.device)
    missing = -signed.numel() % BUCKETS
    return torch.nn.functional.pad(signed, (0, missing)).view(-1, BUCKETS).sum(0).cpu()


@lru_cache(maxsize=64)
def _signs(numel: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(numel)
    signs = torch.randint(0, 2, (numel,), generator=generator, dtype=torch.int8)
    return signs.mul_(2).sub_(1).to(device)


def chosen_experts(routing_map: torch.Tensor) -> torch.Tensor:
    """The experts of each token, ascending, one token after the other.

    Tokens that go nowhere (dropped) are left out.

    Args:
        routing_map: (tokens, experts), bool.
    """
    return routing_map.detach().nonzero()[:, 1].to(torch.int16).cpu()


class Observer:
    """Records the layers of chunks during the forward passes of a step.

    Args:
        dp, dp_rank: microbatch ``m`` of this rank is number ``m * dp + dp_rank`` of the global
            batch.
    """

    def __init__(self, dp: int = 1, dp_rank: int = 0) -> None:
        self._dp = dp
        self._dp_rank = dp_rank
        self._index: int | None = None
        self.records: Records = {}

    def attach(self, chunk: Chunk) -> None:
        """Watch the model's embedding (not copies of it), every layer and router of a chunk."""
        for name, module in chunk.module.named_modules():
            is_copy = name == EMBEDDING and not chunk.stage.embedding
            if _ROUTER.match(name) or (_LAYER.match(name) and not is_copy):
                hook = self._hook(_module_name(chunk, name), chooses=bool(_ROUTER.match(name)))
                module.register_forward_hook(hook, with_kwargs=True)

    @contextlib.contextmanager
    def microbatch(self, number: int) -> Iterator[None]:
        """The forward pass of a microbatch; what runs outside of it is not recorded.

        Recomputation in the backward pass is outside, and so is evaluation.
        """
        self._index = number * self._dp + self._dp_rank
        try:
            yield
        finally:
            self._index = None

    def begin_step(self) -> None:
        self.records = {}

    def _hook(self, name: str, *, chooses: bool) -> Any:
        def record(_module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            if self._index is None:
                return
            taken = _first_tensor((args, kwargs))
            if taken is not None:
                self._record(name, TAKEN, sketch(taken))
            if chooses:
                self._record(name, CHOSEN, chosen_experts(output[1]))
            elif (given := _first_tensor(output)) is not None:
                self._record(name, GIVEN, sketch(given))

        return record

    def _record(self, name: str, side: str, what: torch.Tensor) -> None:
        assert self._index is not None
        time = 0
        while (key := (self._index, name, side, time)) in self.records:
            if name == EMBEDDING:
                return  # an MTP layer on the same stage embeds its tokens as well
            time += 1
        self.records[key] = what


def _module_name(chunk: Chunk, name: str) -> str:
    """The module's name in the unsplit model, by the name that a parameter of it would have."""
    return global_name(chunk, f"{name}.weight").removesuffix(".weight")


def _first_tensor(value: Any) -> torch.Tensor | None:
    """The first tensor in nested tuples and dicts: hidden states, or tokens."""
    if isinstance(value, torch.Tensor):
        return value
    values: Any = ()
    if isinstance(value, dict):
        # Keyword arguments come in the caller's order, in which the hidden states need not lead.
        first = value.get("hidden_states", value.get("input_ids"))
        values = (first, *value.values())
    elif isinstance(value, tuple | list):
        values = value
    for item in values:
        if (tensor := _first_tensor(item)) is not None:
            return tensor
    return None
