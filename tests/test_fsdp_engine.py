"""The engine on plain torch modules: parity, sharding, order, shared parameters, norm."""

from __future__ import annotations

import gc
import math
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mfsdp_cli.fsdp import (
    AdamSettings,
    Context,
    Event,
    GradientReduction,
    LocalMember,
    ShardedOptimizer,
    ShardMesh,
    SharedParameter,
    full_gradients,
    full_weights,
    fully_shard,
    fully_shard_context,
    microbatch,
    persistent_bytes,
    unit_of,
)
from tests.helpers.ranks import run_ranks
from tests.helpers.sharding import shard_whole

WIDTH = 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Chunk(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make_chunk(layers: int = 3) -> Chunk:
    torch.manual_seed(7)
    return Chunk(layers)


def mesh_of(world: int) -> ShardMesh:
    if world == 1:
        return ShardMesh()
    ranks = list(range(world))
    return ShardMesh(dist.new_group(ranks), dist.new_group(ranks))


def shard(chunk: Chunk, mesh: ShardMesh, reduction: str = "microbatch") -> Context:
    with fully_shard_context("cpu", gradient_reduction=reduction) as context:
        for number, layer in enumerate(chunk.layers):
            fully_shard(layer, mesh, name=f"layers.{number}")
        fully_shard(chunk, mesh, name="root")
    return context


def batch(step: int, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + index)
    return torch.randn(2, WIDTH, generator=generator)


def reference(steps: int, microbatches: int, settings: AdamSettings) -> tuple[list[float], Any]:
    """Norms and final weights of plain torch over all microbatches of all ranks."""
    chunk = make_chunk()
    decay = [p for n, p in chunk.named_parameters() if p.ndim > 1]
    no_decay = [p for n, p in chunk.named_parameters() if p.ndim == 1]
    adam = torch.optim.AdamW(
        [
            {"params": decay, "weight_decay": settings.weight_decay},
            {"params": no_decay, "weight_decay": 0.0},
        ],
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
    )
    norms = []
    for step in range(steps):
        adam.zero_grad()
        for index in range(microbatches):
            (chunk(batch(step, index)).square().mean() / microbatches).backward()
        norm = torch.nn.utils.clip_grad_norm_(chunk.parameters(), 0.5)
        norms.append(float(norm))
        adam.step()
    return norms, dict(chunk.named_parameters())


def train(
    rank: int, world: int, reduction: str, held: bool, steps: int = 4, microbatches: int = 4
) -> dict[str, Any]:
    settings = AdamSettings(lr=1e-2, eps=1e-6, weight_decay=0.1)
    chunk = make_chunk()
    context = shard(chunk, mesh_of(world), reduction)
    events: list[list[Event]] = []
    context.on_event = lambda event: events[-1].append(event)
    optimizer = ShardedOptimizer(
        [chunk], settings, norm_group=dist.group.WORLD if world > 1 else None
    )
    norms = []
    local = microbatches // world
    for step in range(steps):
        events.append([])
        context.zero_grad()
        if held:
            context.hold(context.units)
        for index in range(local):
            with microbatch(context, is_last=index == local - 1):
                loss = chunk(batch(step, index * world + rank)).square().mean() / local
                loss.backward()
        context.finish_reductions()
        norms.append(float(optimizer.grad_norm()))
        optimizer.clip(0.5, norms[-1])
        optimizer.step()
    expected_norms, expected = reference(steps, microbatches, settings)
    weights = {
        _global(unit.name, name): tensor
        for unit in context.units
        for name, tensor in full_weights(unit)
    }
    assert weights.keys() == expected.keys()
    worst = max(
        float(
            (weights[n] - expected[n].detach()).norm()
            / expected[n].detach().norm().clamp_min(1e-12)
        )
        for n in expected
    )
    total = sum(p.numel() for p in expected.values())
    return {
        "norm": max(abs(a - b) / b for a, b in zip(norms, expected_norms, strict=True)),
        "weights": worst,
        "events": [[(e.operation, e.unit) for e in step] for step in events],
        "persistent": persistent_bytes(context.groups),
        "total": total,
        "gathered_now": context.gathered_bytes,
        "peak": context.peak_gathered_bytes,
        "state": optimizer.state_bytes,
    }


def _global(unit: str, name: str) -> str:
    return name if unit == "root" else f"{unit}.{name}"


@cache
def trained(world: int, reduction: str, held: bool) -> list[dict[str, Any]]:
    return run_ranks(world, train, reduction, held)


@pytest.mark.parametrize(
    ("world", "reduction", "held"),
    [(1, "microbatch", False), (1, "last", True), (2, "microbatch", False), (2, "last", True)],
)
def test_trains_like_plain_torch(world: int, reduction: str, held: bool) -> None:
    for result in trained(world, reduction, held):
        assert result["norm"] < 1e-6
        assert result["weights"] < 1e-6


def test_more_ranks_than_elements_of_a_group() -> None:
    # The root's bias alone has 3 elements: on 4 ranks some own nothing of a class.
    for result in trained(4, "microbatch", False):
        assert result["norm"] < 1e-6
        assert result["weights"] < 1e-6


def test_state_is_sharded_and_gathers_are_counted() -> None:
    results = trained(2, "microbatch", False)
    for result in results:
        whole = 8 * result["total"]  # fp32 weight and gradient
        padding = 4 * 2 * 4  # at most one element a group and buffer
        assert result["persistent"] <= whole / 2 + padding
        assert result["state"] <= whole / 2 + padding
        root = -(-(3 * WIDTH + 3) // 2) * 2 * 4
        assert result["gathered_now"] == root  # what the next step begins with
        steps = result["events"]
        # Four units, two microbatches, forward and backward, each gathered for every use; the
        # first use of a step is gathered at the end of the one before, once the order is known.
        assert [len([e for e in step if e[0] == "gather"]) for step in steps] == [17, 16, 16, 16]
        assert [len([e for e in step if e[0] == "reduce"]) for step in steps] == [8] * 4
    assert results[0]["events"] == results[1]["events"]


def test_held_units_are_gathered_once_a_step_and_reduced_once() -> None:
    result = trained(2, "last", True)[0]
    for number, step in enumerate(result["events"]):
        begun = ["root"] if number == 0 else []  # later steps find the first unit gathered
        assert [unit for op, unit in step if op == "gather"] == [
            *("layers.0", "layers.1", "layers.2"),
            *begun,
            "root",
        ]
        assert [unit for op, unit in step if op == "reduce"] == [
            "layers.2",
            "layers.1",
            "layers.0",
            "root",
        ]


def test_the_traced_order_prefetches_the_next_unit() -> None:
    result = trained(2, "microbatch", False)[0]
    first, second = result["events"][:2]
    # On use, without an order; one ahead of use once the order is known.
    assert [unit for op, unit in first if op == "gather"][:4] == [
        "root",
        "layers.0",
        "layers.1",
        "layers.2",
    ]
    layer_bytes = 4 * (2 * WIDTH + WIDTH * 2 * WIDTH * 2 + 2 * WIDTH)
    root_bytes = 4 * (3 * WIDTH + 3)
    assert result["peak"] <= root_bytes + 4 + 2 * (layer_bytes + 4)
    assert sorted(first) == sorted([*second, ("gather", "root")])


# -- misuse ------------------------------------------------------------------------------------


def test_misuse_is_named() -> None:
    chunk = make_chunk()
    with pytest.raises(RuntimeError, match="inside `with fully_shard_context"):
        fully_shard(chunk, ShardMesh())
    with pytest.raises(ValueError, match="at least one module"), fully_shard_context("cpu"):
        pass
    with (
        pytest.raises(RuntimeError, match="nested"),
        fully_shard_context("cpu"),
        fully_shard_context("cpu"),
    ):
        pass
    with fully_shard_context("cpu"):
        fully_shard(chunk, ShardMesh())
        with pytest.raises(ValueError, match="wrapped once"):
            fully_shard(chunk, ShardMesh())
        with pytest.raises(RuntimeError, match="scope to have ended"):
            chunk(batch(0, 0))
    with pytest.raises(RuntimeError, match="inside `with microbatch"):
        chunk(batch(0, 0)).sum().backward()


def test_an_unknown_optimizer_class_is_refused() -> None:
    with (
        pytest.raises(ValueError, match=r"class of head\.bias, got 'other'"),
        fully_shard_context("cpu"),
    ):
        fully_shard(
            make_chunk(),
            ShardMesh(),
            optimizer_class=lambda name, _p: "other" if name == "head.bias" else "decay",
        )


def test_a_parameter_of_two_units_is_refused() -> None:
    chunk = make_chunk()
    chunk.layers[1].up.weight = chunk.layers[0].up.weight
    with pytest.raises(ValueError, match=r"up\.weight of layers\.1 in one unit"):
        shard(chunk, ShardMesh())


def norm_of_a_step(chunk: Chunk, context: Context, optimizer: ShardedOptimizer) -> float:
    context.zero_grad()
    for index in (1, 2):
        with microbatch(context, is_last=index == 2):
            chunk(batch(0, index)).sum().backward()
    context.finish_reductions()
    norm = float(optimizer.grad_norm())
    optimizer.step()
    return norm


@pytest.mark.parametrize("reduction", ["microbatch", "last"])
@pytest.mark.parametrize("broken", ["layers.0.up", "layers.1", "head"])
def test_a_step_that_broke_off_leaves_nothing_to_the_next(reduction: str, broken: str) -> None:
    def break_off(*_: object) -> None:
        raise ArithmeticError("broken off")

    def prepared() -> tuple[Chunk, Context, ShardedOptimizer]:
        chunk = make_chunk()
        context = shard(chunk, ShardMesh(), reduction)
        return chunk, context, ShardedOptimizer([chunk], AdamSettings(lr=1e-2))

    sound, other = prepared(), prepared()
    expected = [norm_of_a_step(*sound) for _ in range(3)]
    assert norm_of_a_step(*other) == expected[0]
    chunk, context, _ = other
    context.zero_grad()
    with microbatch(context, is_last=False):
        chunk(batch(0, 3)).sum().backward()
    hook = chunk.get_submodule(broken).register_full_backward_pre_hook(break_off)
    with pytest.raises(ArithmeticError), microbatch(context, is_last=True):
        chunk(batch(0, 4)).sum().backward()
    hook.remove()
    assert [norm_of_a_step(*other) for _ in range(2)] == expected[1:]
    assert context.order.divergences == 0


def frozen_case(rank: int, world: int) -> dict[str, Any]:
    """A unit frozen whole, one in part: norm and weights against plain torch."""

    def frozen() -> Chunk:
        chunk = make_chunk()
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad = not name.startswith(("layers.1.", "layers.2.norm"))
        return chunk

    chunk, plain = frozen(), frozen()
    context = shard(chunk, mesh_of(world))
    optimizer = ShardedOptimizer(
        [chunk], AdamSettings(lr=1e-2, weight_decay=0.0), norm_group=dist.group.WORLD
    )
    trained = [p for p in plain.parameters() if p.requires_grad]
    adam = torch.optim.AdamW(trained, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    norms = []
    for step in range(3):
        context.zero_grad()
        with microbatch(context, is_last=True):
            chunk(batch(step, rank)).square().mean().backward()
        context.finish_reductions()
        adam.zero_grad()
        for index in range(world):
            (plain(batch(step, index)).square().mean() / world).backward()
        expected = torch.nn.utils.clip_grad_norm_(trained, 1e9)
        norms.append(float(optimizer.grad_norm()) / float(expected))
        optimizer.step()
        adam.step()
    expected_weights = dict(plain.named_parameters())
    differences = {
        name: float((tensor - expected_weights[_global(unit.name, name)].detach()).abs().max())
        for unit in context.units
        for name, tensor in full_weights(unit)
    }
    root = unit_of(chunk)
    assert root is not None
    left = context.gathered_bytes - root.gathered_bytes  # the root: what the next step begins with
    return {"norms": norms, "worst": max(differences.values()), "left": left}


def test_frozen_parameters_are_gathered_and_stay_as_they_are() -> None:
    for result in run_ranks(2, frozen_case):
        assert result["norms"] == pytest.approx([1.0] * 3, rel=1e-6)
        assert result["worst"] < 1e-6
        assert result["left"] == 0


def test_a_forgotten_last_microbatch_is_an_error() -> None:
    chunk = make_chunk()
    context = shard(chunk, ShardMesh(), GradientReduction.LAST_MICROBATCH)
    optimizer = ShardedOptimizer([chunk], AdamSettings())
    with microbatch(context, is_last=False):
        chunk(batch(0, 0)).sum().backward()
    with pytest.raises(RuntimeError, match="is_last=True"):
        optimizer.step()


def test_deleting_the_model_frees_its_storage_at_once() -> None:
    gc.disable()
    try:
        chunk = make_chunk()
        context = shard(chunk, ShardMesh())
        with microbatch(context, is_last=True):
            chunk(batch(0, 0)).sum().backward()
        context.finish_reductions()
        assert len(context.units) == 4
        del chunk
        assert context.units == []
    finally:
        gc.enable()


def test_a_parameter_without_gradient_counts_zeros() -> None:
    chunk = make_chunk()
    context = shard(chunk, ShardMesh())
    with microbatch(context, is_last=True):
        chunk.layers[1](batch(0, 0)).sum().backward()
    context.finish_reductions()
    gradients = {
        unit.name: sum(float(g.abs().sum()) for _, g in full_gradients(unit))
        for unit in context.units
    }
    assert gradients["layers.1"] > 0
    assert gradients["layers.0"] == 0


# -- shared parameters and the norm ------------------------------------------------------------


class Holder(nn.Module):
    """A chunk that holds the shared matrix after ``before`` other elements."""

    def __init__(self, before: int, rows: int, columns: int) -> None:
        super().__init__()
        if before:
            self.first = nn.Parameter(torch.zeros(before, 1))
        self.word = nn.Parameter(torch.zeros(rows, columns))


def shared_case(rank: int, world: int, before: list[int], rows: int) -> dict[str, Any]:
    """Members on consecutive pairs of ranks (DP 2), each at an offset of its own."""
    dp = 2
    members = world // dp
    mine = rank // dp
    groups = [
        (dist.new_group([m * dp, m * dp + 1]), dist.new_group([m * dp, m * dp + 1]))
        for m in range(members)
    ]
    holder = Holder(before[mine], rows, 2)
    group = shard_whole(holder, ShardMesh(*groups[mine]), name="root")
    index = group.names.index("word")
    shared = SharedParameter("word", dist.group.WORLD, members, [LocalMember(mine, group, index)])
    # The gradient of member m at element i is (m + 1) * (i + 1): the sum is known in closed form.
    assert group.main_grad is not None
    owned = group.layout.owned(index)
    values = torch.arange(owned.start + 1, owned.stop + 1, dtype=torch.float32) * (mine + 1)
    group.shard_of(index, group.main_grad).copy_(values)
    optimizer = ShardedOptimizer(
        [holder], AdamSettings(), shared=[shared], norm_group=dist.group.WORLD
    )
    optimizer.sum_shared_gradients()
    summed = group.shard_of(index, group.main_grad).tolist()
    scale = sum(range(1, members + 1))
    return {
        "right": summed == [scale * (i + 1) for i in range(owned.start, owned.stop)],
        "norm": float(optimizer.grad_norm()),
        "expected": scale * math.sqrt(sum((i + 1) ** 2 for i in range(2 * rows))),
    }


@pytest.mark.parametrize(
    ("world", "before", "rows"),
    [(4, [0, 0], 5), (4, [3, 8], 5), (6, [0, 7, 1], 6), (4, [0, 50], 3)],
)
def test_copies_are_summed_by_logical_element(world: int, before: list[int], rows: int) -> None:
    for result in run_ranks(world, shared_case, before, rows):
        assert result["right"]
        assert result["norm"] == pytest.approx(result["expected"], rel=1e-6)


def tied_norm(rank: int, world: int, count_copy: bool) -> dict[str, float]:
    """Case T03: the tied matrix alone has gradient, squared sum 800, a copy on every rank."""
    holder = Holder(rank, 4, 2)
    group = shard_whole(holder, ShardMesh(), name="root")
    index = group.names.index("word")
    assert group.main_grad is not None
    group.shard_of(index, group.main_grad).fill_(10.0 / world)  # 10 an element, 8 elements
    member = LocalMember(rank, group, index)
    shared = [SharedParameter("word", dist.group.WORLD, world, [member])]
    for parameter in shared:
        parameter.sum_gradients()
    optimizer = ShardedOptimizer(
        [holder],
        AdamSettings(),
        shared=[] if count_copy else shared,
        norm_group=dist.group.WORLD,
    )
    norm = float(optimizer.grad_norm())
    return {"norm": float(norm), "factor": float(optimizer.clip(1.0, norm))}


def test_the_tied_norm_is_28_and_counting_the_copy_gives_40() -> None:
    for members in (2, 3):  # embedding and head; an MTP stage's copy as well
        for result in run_ranks(members, tied_norm, False):
            assert result["norm"] == pytest.approx(28.2843, abs=1e-4)
            assert result["factor"] == pytest.approx(0.035355, abs=1e-6)
    for result in run_ranks(2, tied_norm, True):
        assert result["norm"] == pytest.approx(40.0)


def test_members_must_share_one_optimizer_setting() -> None:
    def hold(kind: str) -> tuple[Holder, LocalMember]:
        holder = Holder(0, 4, 2)
        group = shard_whole(holder, ShardMesh(), optimizer_class=lambda _n, _p: kind)
        return holder, LocalMember(0 if kind == "decay" else 1, group, 0)

    one, first = hold("decay")
    other, second = hold("no_decay")
    with pytest.raises(ValueError, match="one optimizer setting"):
        SharedParameter("word", None, 2, [first, second])
    assert one is not other


def test_members_must_be_trained() -> None:
    holder = Holder(0, 4, 2)
    holder.word.requires_grad = False
    group = shard_whole(holder, ShardMesh())
    with pytest.raises(ValueError, match="word to be trained"):
        SharedParameter("word", None, 1, [LocalMember(0, group, 0)])


def incomplete_group(rank: int, world: int) -> str:
    """Pairs of equal data-parallel rank hold half of each copy only."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    meshes = [(dist.new_group(r), dist.new_group(r)) for r in ([0, 1], [2, 3])]
    holder = Holder(3 * (rank // 2), 5, 2)
    group = shard_whole(holder, ShardMesh(*meshes[rank // 2]), name="root")
    member = LocalMember(rank // 2, group, group.names.index("word"))
    try:
        SharedParameter("word", pairs[rank % 2], 2, [member])
    except ValueError as error:
        return str(error)
    return "accepted"


def test_a_group_that_misses_shards_is_refused() -> None:
    for message in run_ranks(4, incomplete_group):
        assert "all 10 elements" in message
