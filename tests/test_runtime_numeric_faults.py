"""Numeric validation on real runs: the sound engine passes, every fault put into it is named.

The faults are in ``tests/helpers/faults.py``; those of one plan run one after the other in the
same ranks. Among them are cases T03 (the norm counts a copy), T04 (the norm counts replicas), T06
(only the last microbatch survives) and T12 (initial weights depend on the layout).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mfsdp_cli.plan import Plan
from mfsdp_cli.runtime.engine import Engine
from mfsdp_cli.runtime.numeric.capture import numeric_settings, save_steps
from mfsdp_cli.runtime.numeric.job import Capture
from mfsdp_cli.runtime.numeric.load import load_steps
from mfsdp_cli.runtime.numeric.run import judge
from mfsdp_cli.runtime.topology import Topology
from tests.helpers import faults
from tests.helpers.alone import alone
from tests.helpers.faults import Fault
from tests.helpers.plans import plan_of
from tests.helpers.ranks import run_ranks
from tests.helpers.training import engine_of, reconnect

STEPS = 2
SETTINGS = numeric_settings(STEPS, 1234)
CATALOGUE: dict[str, dict[str, Fault]] = {
    "tied": faults.TIED,
    "experts": faults.EXPERTS,
    "spread experts": faults.SPREAD_EXPERTS,
    "hybrid": faults.HYBRID,
    "ahead": faults.AHEAD,
    "alone": faults.ALONE,
}


def _plan(name: str) -> Plan:
    if name == "tied":
        return plan_of("gpt2-tiny", pp=2, vpp=2, dp=2, resident_chunks=2)
    if name == "experts":
        return plan_of("deepseek-v3-proxy-tiny", pp=2, dp=2, gbs=4, layers=4)
    if name == "spread experts":
        return plan_of("deepseek-v3-proxy-tiny", pp=2, dp=2, ep=2, gbs=4, layers=4)
    if name == "hybrid":
        return plan_of("gpt2-tiny", pp=2, dp=2, num_distributed_optimizer_instances=2, layers=4)
    if name == "ahead":
        return plan_of("llama-tiny", pp=4, gbs=4, layers=4, mtp=1, layout="Ett|tt|m|L")
    return plan_of("llama-tiny", pp=4, gbs=4, layers=4)


def _save(engine: Engine, name: str, folder: Path, topology: Topology) -> Capture:
    capture = Capture(str(folder), name, STEPS, "gloo", full=True)
    save_steps(engine, capture, topology)
    return capture


def _run_all(rank: int, world: int, folder: Path) -> None:
    for name, catalogue in CATALOGUE.items():
        plan = _plan(name)
        topology = reconnect(plan)
        for fault, what in catalogue.items():
            with what.install():
                _save(
                    engine_of("mfsdp", plan, topology, SETTINGS),
                    f"{name} {fault}",
                    folder,
                    topology,
                )


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    for name in CATALOGUE:
        engine = engine_of("single", _plan(name), alone(), SETTINGS)
        _save(engine, f"{name} single", folder, alone())
    run_ranks(4, _run_all, folder)
    return folder


@pytest.mark.parametrize(
    ("name", "fault"), [(name, fault) for name in CATALOGUE for fault in CATALOGUE[name]]
)
def test_a_fault_is_named_and_explained(name: str, fault: str, captured: Path) -> None:
    expected = CATALOGUE[name][fault]

    def steps(engine: str, ranks: int) -> list[object]:
        return load_steps(Capture(str(captured), f"{name} {engine}", STEPS, "gloo", True), ranks)

    result = judge(_plan(name), steps(fault, 4), steps("single", 1), None)
    first = result.document["first_divergence"]
    print(name, fault, first, *(finding.hint for finding in result.findings), sep=" | ")
    found = f"{first['step']} {first['phase']}" if first else ""
    assert (found, len(result.findings)) == (expected.found, int(first is not None))
    if first:
        assert expected.said in (result.findings[0].hint or "")


def _run_early(rank: int, world: int) -> None:
    plan = plan_of("gpt2-tiny", pp=2, vpp=2, layers=4, gradient_reduction="last")
    with faults.early_last_microbatch():
        engine_of("mfsdp", plan, reconnect(plan), SETTINGS).train_step(1)


def test_a_last_microbatch_that_comes_early_on_one_chunk_ends_the_run() -> None:
    with pytest.raises(AssertionError, match="to find nothing left to reduce"):
        run_ranks(2, _run_early)
