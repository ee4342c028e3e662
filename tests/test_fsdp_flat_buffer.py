"""Which elements of a flat buffer a rank owns, wherever parameters begin and end."""

from __future__ import annotations

import pytest
import torch

from mfsdp_cli.fsdp.flat_buffer import FlatLayout, Range


def layout(rank: int, world: int, *shapes: tuple[int, ...]) -> FlatLayout:
    return FlatLayout(tuple(torch.Size(shape) for shape in shapes), world, rank)


def test_the_example_of_the_module() -> None:
    layouts = [layout(rank, 4, (3,), (2, 2)) for rank in range(4)]
    assert [each.owned(0) for each in layouts[:2]] == [Range(0, 2), Range(2, 3)]
    assert [each.owned(1) for each in layouts[1:]] == [Range(0, 1), Range(1, 3), Range(3, 4)]
    assert [each.owned(0).numel for each in layouts] == [2, 1, 0, 0]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("shapes", [((3,),), ((2, 3), (1,), (4, 1)), ((1,), (5,)), ((),)])
def test_every_element_has_one_owner(world: int, shapes: tuple[tuple[int, ...], ...]) -> None:
    layouts = [layout(rank, world, *shapes) for rank in range(world)]
    for index, shape in enumerate(shapes):
        numel = torch.Size(shape).numel()
        elements = [
            element
            for each in layouts
            for element in range(each.owned(index).start, each.owned(index).stop)
        ]
        assert elements == list(range(numel))
        for each in layouts:
            in_shard = each.owned_in_shard(index)
            assert in_shard.numel == each.owned(index).numel
            assert 0 <= in_shard.start <= in_shard.stop <= each.shard_numel
    assert sum(each.shard().numel for each in layouts) == layouts[0].numel
    assert layouts[0].padded_numel == world * layouts[0].shard_numel


def test_a_rank_may_own_nothing() -> None:
    last = layout(3, 4, (3,))
    assert last.shard() == Range(3, 3)
    assert last.owned_in_shard(0) == Range(0, 0)


def test_ranks_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rank in 0\.\.1, got 2"):
        layout(2, 2, (1,))
    with pytest.raises(ValueError, match="at least one rank, got 0"):
        layout(0, 0, (1,))
