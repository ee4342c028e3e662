"""Compute orders against Megatron-Core's own tables and torch's own schedules."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table
from megatron.core.transformer.cuda_graphs import convert_schedule_table_to_order
from torch.distributed.pipelining import schedules as torch_schedules

from mfsdp_cli.schedule.actions import Action, Kind, parse_action
from mfsdp_cli.schedule.orders import compute_orders, schedule_table, warmup_forwards
from mfsdp_cli.schedule.spec import microbatch_findings
from tests.helpers.schedules import spec

# (pp, vpp, microbatches, group size)
INTERLEAVED = [
    (2, 2, 2, 2),
    (2, 2, 4, 2),
    (2, 2, 8, 4),
    (2, 2, 5, 3),
    (2, 3, 7, 5),
    (2, 4, 6, 6),
    (4, 2, 4, 4),
    (4, 2, 8, 4),
    (4, 2, 12, 8),
    (4, 3, 13, 9),
    (4, 4, 16, 4),
    (8, 2, 64, 8),
    (8, 4, 32, 16),
    (8, 5, 64, 8),
    (16, 2, 32, 16),
]
PLAIN = [(1, 1), (1, 5), (2, 1), (2, 8), (3, 2), (4, 3), (4, 8), (8, 1), (8, 20), (16, 64)]


def megatron_warmup(pp, rank, vpp, microbatches, group):
    """Megatron's own count of warm-up forwards, asked for one rank of a pipeline."""
    communicator = SimpleNamespace(
        pp_group=SimpleNamespace(size=lambda: pp, rank=lambda: rank),
        virtual_pipeline_model_parallel_size=vpp,
    )
    numbers = get_pp_rank_microbatches(microbatches, vpp or 1, group, p2p_communicator=communicator)
    return numbers[2]


def signed_chunks(order, pp):
    """Chunks from 1, negative for backwards: the form of Megatron's converted order."""
    sign = {Kind.FORWARD: 1, Kind.BACKWARD: -1}
    return [sign[action.kind] * (action.stage // pp + 1) for action in order]


@pytest.mark.parametrize(("pp", "vpp", "microbatches", "group"), INTERLEAVED)
def test_interleaved_is_megatrons_table(pp, vpp, microbatches, group):
    table = get_schedule_table(microbatches, vpp, group)
    assert schedule_table(microbatches, vpp, group) == table
    orders = compute_orders(spec(pp, vpp, microbatches, group_size=group))
    for rank, order in enumerate(orders):
        warmup = megatron_warmup(pp, rank, vpp, microbatches, group)
        assert signed_chunks(order, pp) == convert_schedule_table_to_order(warmup, vpp, table)
        forwards = [(a.microbatch, a.stage // pp) for a in order if a.kind is Kind.FORWARD]
        assert forwards == table
        assert {a.stage % pp for a in order} == {rank}


@pytest.mark.parametrize(("pp", "vpp", "microbatches", "group"), INTERLEAVED)
def test_backwards_take_microbatches_first_in_first_out(pp, vpp, microbatches, group):
    """Megatron pops the oldest forward of a chunk for its next backward."""
    for order in compute_orders(spec(pp, vpp, microbatches, group_size=group)):
        live = defaultdict(list)
        for action in order:
            if action.kind is Kind.FORWARD:
                live[action.stage].append(action.microbatch)
            else:
                assert live[action.stage].pop(0) == action.microbatch
        assert not any(live.values())


@pytest.mark.parametrize(("pp", "microbatches"), PLAIN)
def test_1f1b_warmup_is_megatrons(pp, microbatches):
    given = spec(pp, 1, microbatches)
    for rank, order in enumerate(compute_orders(given)):
        expected = megatron_warmup(pp, rank, None, microbatches, pp)
        assert warmup_forwards(given, rank) == expected == min(microbatches, pp - rank - 1)
        first_backward = next(i for i, a in enumerate(order) if a.kind is Kind.BACKWARD)
        # The forward right before the first backward belongs to the steady phase, if there is one.
        assert first_backward == min(microbatches, expected + 1)


def torch_1f1b(pp, microbatches):
    instance = torch_schedules.Schedule1F1B.__new__(torch_schedules.Schedule1F1B)
    instance._num_stages, instance._n_microbatches = pp, microbatches
    return instance._get_pipeline_order()


def torch_interleaved(pp, vpp, microbatches):
    cls = torch_schedules.ScheduleInterleaved1F1B
    instance = cls.__new__(cls)
    instance.pp_group_size, instance.n_local_stages = pp, vpp
    instance._n_microbatches = microbatches
    instance.number_of_rounds = max(1, microbatches // pp)
    instance.microbatches_per_round = microbatches // instance.number_of_rounds
    return {rank: instance._calculate_single_rank_operations(rank) for rank in range(pp)}


def texts(order):
    return [str(action) for action in order if action is not None]


def without_torchs_shift(text):
    """torch counts the forwards of a rank without warm-up from 1: 3F1 for its first."""
    action = parse_action(text)
    if action.kind is Kind.FORWARD:
        action = Action(Kind.FORWARD, action.stage, action.microbatch - 1)
    return str(action)


# torch's 1F1B needs at least as many microbatches as stages.
@pytest.mark.parametrize(("pp", "microbatches"), [(1, 3), (2, 2), (2, 8), (4, 4), (4, 8), (8, 20)])
def test_1f1b_is_torchs(pp, microbatches):
    expected = torch_1f1b(pp, microbatches)
    for rank, order in enumerate(compute_orders(spec(pp, 1, microbatches))):
        compute = [text for text in texts(expected[rank]) if "REDUCE" not in text]
        if rank == pp - 1:
            compute = [without_torchs_shift(text) for text in compute]
        assert texts(order) == compute


@pytest.mark.parametrize(
    ("pp", "vpp", "microbatches"), [(2, 2, 4), (2, 3, 6), (4, 2, 8), (4, 4, 16), (8, 2, 32)]
)
def test_interleaved_is_torchs_with_full_groups(pp, vpp, microbatches):
    expected = torch_interleaved(pp, vpp, microbatches)
    for rank, order in enumerate(compute_orders(spec(pp, vpp, microbatches))):
        assert texts(order) == texts(expected[rank])


def test_worked_order_of_one_rank():
    order = compute_orders(spec(2, 2, 2))[0]
    assert texts(order) == ["0F0", "0F1", "2F0", "2F1", "2B0", "2B1", "0B0", "0B1"]


@pytest.mark.sweep
def test_every_count_megatron_takes_is_its_table():
    for pp in range(2, 9):
        for vpp in range(2, 5):
            for microbatches in range(pp, 4 * pp):
                for group in range(pp, microbatches + 1):
                    if not microbatch_findings(spec(pp, vpp, microbatches, group_size=group)):
                        test_interleaved_is_megatrons_table(pp, vpp, microbatches, group)
