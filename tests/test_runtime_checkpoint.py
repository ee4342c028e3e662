"""A checkpoint loads into any other layout, and training goes on with the same numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.plan import Plan
from mfsdp_cli.runtime import checkpoint, checkpoint_folder
from tests.helpers.plans import plan_of
from tests.helpers.ranks import run_ranks
from tests.helpers.training import engine_of, reconnect

SAVED, STEPS = 2, 4
EXPERTS = "deepseek-v3-proxy-tiny"
SOURCES: dict[str, dict[str, Any]] = {
    "tied": {"model": "gpt2-tiny", "pp": 2, "vpp": 2, "dp": 2},
    "experts": {"model": EXPERTS, "pp": 2, "vpp": 2, "dp": 2, "ep": 2},
}
TARGETS: dict[str, dict[str, dict[str, Any]]] = {
    "tied": {
        "same": SOURCES["tied"],
        "pp4": {"pp": 4},
        "dp4": {"dp": 4},
        "hybrid": {"dp": 4, "num_distributed_optimizer_instances": 2},
        "uneven": {"pp": 2, "dp": 2, "layout": "Et*3|t|tt|ttL"},
    },
    "experts": {"dp4": {"dp": 4}, "pp2-dp2": {"pp": 2, "dp": 2}, "ep4": {"dp": 4, "ep": 4}},
}


def _plan(source: str, target: dict[str, Any] | None = None) -> Plan:
    case = SOURCES[source]
    return plan_of(**(case if target is None else {"model": case["model"], **target}))


def _train_on(
    _rank: int, _world: int, files: dict[str, str], folder: str
) -> dict[str, list[tuple[float, float]]]:
    """Save in the middle of one layout, then go on in each of the others."""

    results = {}
    for name, file in files.items():
        plan = Plan.load(Path(file))
        source = name.split("/")[0]
        engine_name = "single" if dist.get_world_size() == 1 else "mfsdp"
        topology = reconnect(plan, engine_name)
        engine = engine_of(engine_name, plan, topology)
        run_dir = Path(folder, source)
        first = 1
        if "/" in name:
            found = checkpoint_folder.latest(run_dir)
            found.check_model(plan.model)
            checkpoint.load(found, engine)
            first = found.step + 1
        steps = []
        for step in range(first, STEPS + 1):
            result = engine.train_step(step)
            steps.append((result.loss, result.grad_norm))
            if "/" not in name and step == SAVED:
                checkpoint.save(run_dir, step, engine, plan.model, topology)
        steps.append((engine.evaluate(), 0.0))
        results[name] = steps
        topology.barrier()
    return results


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("checkpoints")
    files, alone = {}, {}
    for source in SOURCES:
        plans = {source: _plan(source)}
        plans |= {f"{source}/{name}": _plan(source, t) for name, t in TARGETS[source].items()}
        for name, plan in plans.items():
            files[name] = str(folder / f"{name.replace('/', '-')}.json")
            plan.save(files[name])
        alone[f"{source}/single"] = files[source]
    results: dict[str, Any] = run_ranks(4, _train_on, files, str(folder))[0]
    results |= run_ranks(1, _train_on, alone, str(folder))[0]
    results["folder"] = folder
    return results


@pytest.mark.parametrize(
    "case", [f"{source}/{name}" for source in SOURCES for name in [*TARGETS[source], "single"]]
)
def test_training_goes_on_with_the_same_numbers(case: str, trained: dict[str, Any]) -> None:
    whole = trained[case.split("/")[0]][SAVED:]
    assert len(trained[case]) == len(whole) == STEPS - SAVED + 1
    for (loss, norm), (expected_loss, expected_norm) in zip(trained[case], whole, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        assert norm == pytest.approx(expected_norm, rel=1e-5)


def test_each_element_is_saved_once(trained: dict[str, Any]) -> None:
    folder = trained["folder"] / "tied" / "checkpoints" / f"step-{SAVED}"
    elements = 4 * _plan("tied").document["model"]["parameters"]["total"]
    size = sum(file.stat().st_size for file in folder.glob("*.distcp"))
    # fp32 weight and two moments; the rest is what the files say about themselves.
    assert 3 * elements < size < 3.5 * elements


# -- refusals, before anything starts ----------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A complete checkpoint on disk, as far as the folder goes."""
    folder = checkpoint_folder.begin(tmp_path, 3)
    (folder / "__0_0.distcp").write_bytes(b"values")
    checkpoint_folder.complete(tmp_path, 3, plan_of("gpt2-tiny").model)
    return tmp_path


def test_a_save_that_was_cut_off_leaves_the_one_before(saved: Path) -> None:
    (checkpoint_folder.begin(saved, 6) / "__0_0.distcp").write_bytes(b"half")
    assert checkpoint_folder.latest(saved).step == 3
    checkpoint_folder.complete(saved, 6, plan_of("gpt2-tiny").model)
    assert checkpoint_folder.latest(saved).step == 6


def test_another_model_is_refused_by_name(saved: Path) -> None:
    found = checkpoint_folder.latest(saved)
    model = plan_of("gpt2-tiny").model
    found.check_model(replace(model, name="called otherwise"))
    with pytest.raises(MfsdpError, match=r"another model: ffn_hidden_size is \d+ there and 96"):
        found.check_model(replace(model, ffn_hidden_size=96))


@pytest.mark.parametrize(
    ("damage", "code", "words"),
    [
        (lambda root: (root / "latest").unlink(), "MF530", "no checkpoint"),
        (lambda root: (root / "step-3" / "__0_0.distcp").unlink(), "MF532", "is missing"),
        (lambda root: (root / "step-3" / "manifest.json").write_text("{"), "MF532", "damaged"),
        (lambda root: (root / "latest").write_text("step-9\n"), "MF532", "step-9"),
        (
            lambda root: (root / "step-3" / "manifest.json").write_text(json.dumps({"schema": 0})),
            "MF532",
            "schema 0",
        ),
    ],
)
def test_a_damaged_checkpoint_is_named(saved: Path, damage: Any, code: str, words: str) -> None:
    damage(saved / "checkpoints")
    with pytest.raises(MfsdpError, match=words) as caught:
        checkpoint_folder.latest(saved)
    assert caught.value.finding.code == code
