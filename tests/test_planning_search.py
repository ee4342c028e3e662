"""The search over pipelines, and the estimate it starts from."""

from __future__ import annotations

import pytest

from mfsdp_cli.cost.hardware import load_hardware
from mfsdp_cli.layout.grammar import parse_layout
from mfsdp_cli.model.presets import preset
from mfsdp_cli.planning.assemble import Assembly, assemble
from mfsdp_cli.planning.costs import Costs
from mfsdp_cli.planning.estimate import estimate, in_flight
from mfsdp_cli.planning.pipeline import PipelineRequest
from mfsdp_cli.planning.request import PlanningFaults
from mfsdp_cli.planning.search import search
from mfsdp_cli.planning.settings import resolve_settings
from mfsdp_cli.planning.sizes import resolve_parallel

H100 = load_hardware("h100")
GIB = 1 << 30


def costs(pp: int, vpp: int, *, exact: bool, gbs: int = 64) -> Costs:
    spec = preset("llama3-8b")
    layout = parse_layout(
        "|".join(["Et"] + ["t"] * 30 + ["tL"]) if pp * vpp == 32 else "Et*8|t*8|t*8|t*8L",
        num_layers=32,
        mtp_num_layers=0,
        pp=pp,
        vpp=vpp,
    )
    sizes = {"global_batch_size": gbs, "world_size": pp * 2}
    parallel, _ = resolve_parallel(sizes, spec, pp=pp, vpp=vpp)
    settings, _ = resolve_settings({"precision": "bf16"}, vpp=vpp)
    assert parallel is not None
    built = assemble(spec, parallel, layout, settings)
    if exact:
        return Costs(built, H100)
    return Costs(Assembly(spec, parallel, layout, settings, None, (), built.units, []), H100)


@pytest.mark.parametrize(("pp", "vpp"), [(4, 1), (4, 8), (8, 4)])
def test_the_estimate_is_near_the_exact_costs(pp: int, vpp: int) -> None:
    guess = estimate(costs(pp, vpp, exact=False))
    exact = costs(pp, vpp, exact=True)
    prediction = exact.prediction()
    assert prediction is not None
    assert guess.seconds == pytest.approx(prediction.step_time, rel=0.1)
    peak = max(exact.memory(rank).peak for rank in range(pp))
    assert guess.peak == pytest.approx(peak, rel=0.1)


def test_forwards_in_flight_are_those_of_the_schedule() -> None:
    for pp, vpp in ((4, 1), (4, 8), (8, 4)):
        exact = costs(pp, vpp, exact=True)
        assert exact.plan.schedule is not None
        found = [in_flight(exact, rank) for rank in range(pp)]
        assert found == exact.plan.schedule.in_flight_chunks


def request(**sizes: int) -> PipelineRequest:
    return PipelineRequest(preset("llama3-8b"), sizes)


def test_what_fits_comes_before_what_is_fast() -> None:
    free = search(request(world_size=16), {"precision": "bf16"}, H100, None, top=50)
    limit = sorted(item.peak for item in free.shown if not item.fault)[2]
    assert free.best.peak > limit
    bound = search(request(world_size=16), {"precision": "bf16"}, H100, limit, top=50)
    assert bound.best.peak <= limit
    assert bound.best.seconds >= free.best.seconds
    over = [item for item in bound.shown if not item.fault and item.peak > limit]
    assert over
    assert all("the limit is" in item.reason for item in over)


def test_where_nothing_fits_the_smallest_is_chosen() -> None:
    found = search(request(world_size=16), {"precision": "bf16"}, H100, GIB, top=50)
    exact = [item for item in found.shown if item.exact]
    assert found.best.peak == min(item.peak for item in exact)
    assert found.best.reason.startswith("chosen; needs")


def test_pipelines_that_cannot_be_say_why() -> None:
    """A batch of 16 over 16 ranks leaves too few microbatches to interleave."""
    sizes = {"world_size": 16, "global_batch_size": 16}
    found = search(request(**sizes), {}, H100, None, top=100)
    faults = [item for item in found.shown if item.fault]
    assert not found.best.fault
    assert any("too few to interleave" in item.reason for item in faults) or not faults
    tried = {(item.pp, item.vpp) for item in found.shown}
    assert {(1, 1), (2, 1), (4, 2), (16, 1)} <= tried


def test_no_pipeline_at_all() -> None:
    sizes = {"world_size": 3, "tensor_model_parallel_size": 2}
    with pytest.raises(PlanningFaults, match="3 ranks do not divide") as caught:
        search(request(**sizes), {}, H100, None, top=5)
    assert caught.value.finding.code == "MF219"
