from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.runtime.topology import connect
from tests.helpers.alone import alone
from tests.helpers.ranks import run_ranks


def _members(group: dist.ProcessGroup | None) -> list[int]:
    return [] if group is None else dist.get_process_group_ranks(group)


def _look(rank: int, world: int) -> dict[str, Any]:
    with pytest.raises(MfsdpError, match="the plan needs 6 ranks"):
        connect(pp=3, dp=2)
    from megatron.core import parallel_state

    deep = connect(pp=4, dp=1, shared_pp_ranks=[(0, 3)])
    shared = _members(deep.shared_group([0, 3])) if rank in (0, 3) else sorted(deep.shared)
    parallel_state.destroy_model_parallel()
    topology = connect(pp=2, dp=2, vpp=2, shared_pp_ranks=[(0, 1)])
    assert topology.dp_gather is not topology.dp_reduce
    assert topology.pp_forward is not topology.pp_backward
    return {
        "place": (topology.pp_rank, topology.dp_rank),
        "dp": (_members(topology.dp_gather), _members(topology.dp_reduce)),
        "pp": (_members(topology.pp_forward), _members(topology.pp_backward)),
        "shared": (shared, _members(topology.shared_group([0, 1]))),
        "other": topology.rank_of(1 - topology.pp_rank),
        "megatron": (
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        ),
    }


def test_ranks_are_laid_out_as_megatron_does() -> None:
    looks = run_ranks(4, _look)
    assert [look["place"] for look in looks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [look["dp"][0] for look in looks] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [look["pp"][0] for look in looks] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert all(look["dp"][0] == look["dp"][1] for look in looks)
    assert all(look["pp"][0] == look["pp"][1] for look in looks)
    assert [look["shared"][0] for look in looks] == [[0, 3], [], [], [0, 3]]
    assert all(look["shared"][1] == [0, 1, 2, 3] for look in looks)
    assert [look["other"] for look in looks] == [2, 3, 0, 1]
    assert [look["megatron"] for look in looks] == [(*look["place"], 2) for look in looks]


def test_one_rank_needs_no_communicators() -> None:
    topology = alone()
    assert (topology.rank, topology.world_size) == (0, 1)
    assert topology.dp_gather is topology.dp_reduce is None
    assert topology.pp_forward is topology.pp_backward is None
    topology.barrier()
