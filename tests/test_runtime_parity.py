"""Every layout against the one-rank reference, fp32, ten steps, all numbers.

The tolerances are those of ``mfsdp validate --numeric``: first step loss and norm 1e-6 and
gradients 1e-5, all steps loss, norm and weights 1e-5, copies bit-equal.
The model is the preset as
it is (no proxy). ``make test`` runs a few layouts, ``make test-all`` every one.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from mfsdp_cli.plan import Plan
from mfsdp_cli.runtime.numeric.captured import Step
from mfsdp_cli.runtime.numeric.job import FLOOR, Capture
from mfsdp_cli.runtime.numeric.load import load_steps
from mfsdp_cli.runtime.numeric.run import capture_steps, judge
from tests.helpers.cli import mfsdp

STEPS = 10
GLOBAL_BATCH = 8
MODELS = ("llama-tiny", "gpt2-tiny", "deepseek-v3-proxy-tiny")
LAYOUTS = {
    "pp1-dp2": ["--pp", "1", "--world-size", "2"],
    "pp2": ["--pp", "2", "--world-size", "2"],
    "pp2-dp2": ["--pp", "2", "--world-size", "4"],
    "pp2-vpp2": ["--pp", "2", "--vpp", "2", "--world-size", "2"],
    "pp2-vpp2-dp2": ["--pp", "2", "--vpp", "2", "--world-size", "4"],
    "pp2-vpp2-dp2-zero3": [
        *("--pp", "2", "--vpp", "2", "--world-size", "4", "--resident-chunks", "0")
    ],
    "pp4": ["--pp", "4", "--world-size", "4"],
    "pp4-vpp2": ["--pp", "4", "--vpp", "2", "--world-size", "4"],
    "uneven": ["--pp", "2", "--layout", "Et*3|t|tt|ttL", "--world-size", "4"],
    "empty-stage": ["--pp", "2", "--layout", "Ett|ttt||tttL", "--world-size", "4"],
}
ALWAYS = {
    ("llama-tiny", "uneven"),
    ("gpt2-tiny", "pp2-vpp2-dp2"),
    ("deepseek-v3-proxy-tiny", "pp2-vpp2-dp2-zero3"),
}


def cases() -> list[object]:
    return [
        pytest.param(
            model,
            layout,
            id=f"{model}-{layout}",
            marks=() if (model, layout) in ALWAYS else pytest.mark.sweep,
        )
        for model in MODELS
        for layout in LAYOUTS
    ]


def make_plan(model: str, layout: str, folder: Path) -> Path:
    file = folder / "plan.json"
    mfsdp(
        *("plan", model, *LAYOUTS[layout], "--mbs", "1", "--gbs", str(GLOBAL_BATCH)),
        *("--seq", "64", "--out", file),
    )
    return file


@cache
def reference(model: str, folder: Path) -> tuple[list[Step], list[Step]]:
    """The reference, and its second training in another order.

    It depends on the model and the batch alone: one for all layouts.
    """
    own = folder / model
    own.mkdir()
    make_plan(model, "pp1-dp2", own)
    capture = Capture(str(own), "single", STEPS, "gloo", full=True)
    steps = capture_steps(capture, 1)
    return steps, load_steps(replace(capture, engine=FLOOR), 1)


@pytest.mark.parametrize(("model", "layout"), cases())
def test_ten_steps_equal_the_one_rank_reference(
    model: str, layout: str, tmp_path: Path, reference_folder: Path
) -> None:
    plan = Plan.load(make_plan(model, layout, tmp_path))
    capture = Capture(str(tmp_path), "mfsdp", STEPS, "gloo", full=True)
    mine = capture_steps(capture, plan.parallel.world_size)
    single, other_order = reference(model, reference_folder)
    result = judge(plan, mine, single, None, other_order)
    assert result.findings == ()
    document = result.document
    print(
        f"\n{model} {layout}: loss {document['max_loss_rel']:.1e} "
        f"norm {document['max_norm_rel']:.1e} gradients {document['max_grad_rel']:.1e} "
        f"(later {document['max_later_grad_rel']:.1e}) "
        f"weights {document['max_weight_rel']:.1e}"
    )
    assert document["steps"] == STEPS
    for figure in ("max_loss_rel", "max_norm_rel", "max_grad_rel", "max_weight_rel"):
        assert document[figure] <= 1e-5, figure
    assert document["copies_bit_equal"]
    assert mine[0].grad_norm > 0.1
    assert mine[-1].loss < mine[0].loss


@pytest.fixture(scope="module")
def reference_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    yield folder  # type: ignore[misc]
    shutil.rmtree(folder, ignore_errors=True)
