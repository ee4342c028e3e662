"""Multi-token prediction in every engine, wherever a layout puts it, against one rank.

The reference is engine single: the unsplit model, plain torch. Models are tied and untied, dense
and mixtures of experts with latent attention; layouts put MTP beside the loss, on a stage of its
own, and behind that a stage that only hands (1 + k) hidden states on.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mfsdp_cli.plan import Plan
from mfsdp_cli.runtime.chunks import routers_with_bias
from tests.helpers.alone import alone
from tests.helpers.cli import mfsdp
from tests.helpers.copies import digests_of_the_embedding
from tests.helpers.plans import plan_of
from tests.helpers.ranks import run_ranks
from tests.helpers.training import SETTINGS, engine_of, largest_difference, reconnect, train

LAYERS = 4
#: Small models with a tied head and rotary positions, as Hugging Face writes them.
DENSE = {
    "model_type": "llama",
    "tie_word_embeddings": True,
    "num_hidden_layers": LAYERS,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "vocab_size": 256,
    "initializer_range": 0.06,
}
EXPERTS = {
    **DENSE,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "moe_intermediate_size": 48,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 4,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 16,
}
MODELS = ("llama-tiny", "deepseek-v3-proxy-tiny", "tied", "tied-experts")
LAYOUTS: dict[str, dict[str, Any]] = {
    "data parallel": {"dp": 4},
    "pipeline": {"pp": 2, "dp": 2},
    "interleaved": {"pp": 2, "vpp": 2, "dp": 2},
    "own stage": {"pp": 4, "layout": "Ett|tt|{m}|L"},
    "beside an empty decoder": {"pp": 2, "layout": "Ett|t|t|{m}L", "dp": 2},
    "handed on": {"pp": 4, "layout": "Et|t|t|t||{m}||L"},
    "experts apart": {"pp": 2, "vpp": 2, "dp": 2, "ep": 2},
    "experts and data": {"dp": 4, "ep": 2},
    "replicated": {"pp": 2, "dp": 2, "num_distributed_optimizer_instances": 2},
    "recomputed": {"pp": 4, "layout": "Ett|tt|{m}|L", "recompute_granularity": "full"},
    "unit by unit": {
        **{"pp": 2, "vpp": 2, "dp": 2},
        **{"resident_chunks": 0, "gradient_reduction": "last"},
    },
}
#: Engine, model, MTP layers, layout: what `make test` trains, one of each kind.
FEW = [
    ("mfsdp", "tied", 1, "own stage"),
    ("mfsdp", "tied-experts", 2, "experts apart"),
    ("mfsdp", "deepseek-v3-proxy-tiny", 1, "unit by unit"),
    ("mfsdp", "llama-tiny", 1, "data parallel"),
    ("distopt", "tied", 1, "own stage"),
]
#: Every model in every layout, with one MTP layer or two.
MANY = [
    *(
        ("mfsdp", model, 1 + (place + kind) % 2, layout)
        for kind, model in enumerate(MODELS)
        for place, layout in enumerate(LAYOUTS)
        if "ep" not in LAYOUTS[layout] or model in ("deepseek-v3-proxy-tiny", "tied-experts")
    ),
    *(
        ("distopt", model, 1 + (place + kind) % 2, layout)
        for kind, model in enumerate(MODELS)
        for place, layout in enumerate(("interleaved", "own stage", "handed on"))
    ),
]
Case = tuple[str, str, int, str]


def model_of(name: str, folder: str) -> str:
    """A preset, or the file of a model of this page."""
    written = {"tied": DENSE, "tied-experts": EXPERTS}
    if name not in written:
        return name
    file = Path(folder, f"{name}.json")
    if not file.exists():
        file.write_text(json.dumps(written[name]))
    return str(file)


def plan_with_mtp(name: str, mtp: int, folder: str, layout: str = "data parallel") -> Plan:
    sizes = dict(LAYOUTS[layout])
    if "layout" in sizes:
        sizes["layout"] = sizes["layout"].format(m="m" * mtp)
    return plan_of(model_of(name, folder), layers=LAYERS, mtp=mtp, **sizes)


def biases_of_mtp(module: torch.nn.Module) -> dict[str, list[float]]:
    """The router biases of MTP layers, which have the same names in every layout."""
    return {
        name: router.expert_bias.tolist()
        for name, router in routers_with_bias(module)
        if name.startswith("mtp.")
    }


def _trained(
    rank: int, world: int, folder: str, cases: list[Case], steps: int
) -> list[dict[str, Any]]:
    """On each rank: every case against the saved reference."""
    found = []
    for name, model, mtp, layout in cases:
        plan = plan_with_mtp(model, mtp, folder, layout)
        reference = torch.load(Path(folder, f"{model}-{mtp}.pt"), weights_only=False)
        topology = reconnect(plan, engine=name)
        engine: Any = engine_of(name, plan, topology)
        sharded = name == "mfsdp"
        before = digests_of_the_embedding(engine) if sharded else []
        mine = train(engine, steps)
        chunks = engine.chunks if sharded else engine._chunks
        found.append(
            {
                "case": f"{name}: {model}, {mtp} MTP layers, {layout}",
                "reference": f"{model}-{mtp}",
                "steps": mine.steps,
                "gradients": largest_difference(mine.gradients, reference.gradients),
                "weights": largest_difference(mine.weights, reference.weights),
                "names": sorted(mine.weights),
                "evaluations": (mine.before, mine.after),
                "biases": {k: v for c in chunks for k, v in biases_of_mtp(c.module).items()},
                "copies": list(zip(before, digests_of_the_embedding(engine), strict=True))
                if sharded
                else [],
                # Backward goes through MTP layers first: units come in the plan's order.
                "divergences": engine.context.order.divergences if sharded else 0,
                "members": plan.parallel.data_parallel_size
                * max(1, sum(len(group.members) for group in plan.shared_groups)),
            }
        )
    return found


def check(cases: list[Case], folder: Path, steps: int) -> None:
    """Train the references here and the cases on four ranks, and compare everything."""
    references, biases = {}, {}
    for model, mtp in sorted({(model, mtp) for _, model, mtp, _ in cases}):
        key = f"{model}-{mtp}"
        engine: Any = engine_of("single", plan_with_mtp(model, mtp, str(folder)), alone())
        references[key] = train(engine, steps)
        biases[key] = biases_of_mtp(engine._model)
        torch.save(references[key], Path(folder, f"{key}.pt"))
    for ranks in zip(*run_ranks(4, _trained, str(folder), cases, steps), strict=True):
        reference = references[ranks[0]["reference"]]
        what = ranks[0]["case"]
        assert {name for rank in ranks for name in rank["names"]} == set(reference.weights), what
        assert {k: v for rank in ranks for k, v in rank["biases"].items()} == biases[
            ranks[0]["reference"]
        ], what
        for rank in ranks:
            assert rank["divergences"] == 0, what
            assert rank["steps"][0] == pytest.approx(reference.steps[0], rel=1e-6), what
            for step, expected in zip(rank["steps"], reference.steps, strict=True):
                assert step == pytest.approx(expected, rel=1e-5), what
            assert rank["gradients"][0] < 1e-5, (what, rank["gradients"])
            assert rank["weights"][0] < 1e-5, (what, rank["weights"])
            before, after = rank["evaluations"]
            assert before == pytest.approx(reference.before, rel=1e-6), what
            assert after == pytest.approx(reference.after, rel=1e-5), what
        if what.startswith("mfsdp"):
            _check_copies([copy for rank in ranks for copy in rank["copies"]], ranks[0])


def _check_copies(copies: list[tuple[str, str]], case: dict[str, Any]) -> None:
    """Every member of the shared group is there, moved, and equal to the others bit by bit."""
    assert len(copies) == case["members"], case["case"]
    assert len(set(copies)) == 1, case["case"]
    before, after = copies[0]
    assert before != after, case["case"]


def test_mtp_layers_train_as_on_one_rank(tmp_path: Path) -> None:
    check(FEW, tmp_path, steps=3)


@pytest.mark.sweep
@pytest.mark.parametrize("model", MODELS)
def test_mtp_layers_train_as_on_one_rank_in_every_layout(model: str, tmp_path: Path) -> None:
    check([case for case in MANY if case[1] == model], tmp_path, steps=10)


def test_a_tied_embedding_has_three_members(tmp_path: Path) -> None:
    # The head beside MTP layers is allocated by Megatron-Core and never used; it is kept equal.
    for layout in ("own stage", "interleaved", "pipeline", "handed on"):
        (group,) = plan_with_mtp("tied", 1, str(tmp_path), layout).shared_groups
        assert len(group.members) == 3, layout
    (group,) = plan_with_mtp("llama-tiny", 1, str(tmp_path), "own stage").shared_groups
    assert group.pp_ranks == (0, 2)


def test_losses_have_no_mtp_terms(tmp_path: Path) -> None:
    plain = train(engine_of("single", plan_of("llama-tiny", layers=LAYERS), alone()), 1)
    with_mtp = train(engine_of("single", plan_with_mtp("llama-tiny", 1, str(tmp_path)), alone()), 1)
    assert with_mtp.before == plain.before
    assert with_mtp.steps[0][0] == plain.steps[0][0]
    assert with_mtp.steps[0][1] != pytest.approx(plain.steps[0][1], rel=1e-3)


def _gradients(plan: Plan) -> dict[str, torch.Tensor]:
    engine = engine_of("mfsdp", plan, alone())
    engine.train_step(1)
    return engine.named_gradients()


def test_an_unscaled_mtp_loss_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    plan = plan_of("llama-tiny", layers=LAYERS, mtp=1, gbs=4)
    reference = train(engine_of("single", plan, alone()), 1).gradients
    right = _gradients(plan)
    assert largest_difference(right, reference)[0] < 1e-5
    monkeypatch.setattr(MTPLossAutoScaler, "set_loss_scale", staticmethod(lambda scale: None))
    monkeypatch.setattr(MTPLossAutoScaler, "main_loss_backward_scale", torch.ones(1))
    wrong = _gradients(plan)
    # What only MTP trains has its gradient times the number of microbatches; the rest is mixed.
    for name in reference:
        if name.startswith("mtp."):
            torch.testing.assert_close(wrong[name], 4 * reference[name], rtol=1e-4, atol=1e-7)
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    assert largest_difference({name: wrong[name]}, reference)[0] > 0.01


def test_megatrons_own_totals_do_not_grow() -> None:
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    # One layer, then two: totals of the first would not fit the second.
    for mtp in (1, 2):
        plan = plan_of("deepseek-v3-proxy-tiny", layers=LAYERS, mtp=mtp, gbs=2)
        for name in ("single", "mfsdp"):
            engine = engine_of(name, plan, alone())
            engine.train_step(1)
            engine.evaluate()
            assert MTPLossLoggingHelper.tracker == {}
            assert get_moe_metrics_tracker().metrics == {}


def test_bf16_trains_mtp_near_fp32() -> None:
    plan = plan_of("llama-tiny", layers=LAYERS, mtp=1, gbs=2)
    fp32 = train(engine_of("mfsdp", plan, alone()), 2)
    bf16 = train(engine_of("mfsdp", plan, alone(), replace(SETTINGS, precision="bf16")), 2)
    for mine, reference in zip(bf16.steps, fp32.steps, strict=True):
        assert mine[0] == pytest.approx(reference[0], abs=0.02)
        assert mine[0] != reference[0]


def command_line_plan(folder: Path) -> Path:
    """A plan file with a stage of MTP layers between the decoder and the loss."""
    plan = folder / "plan.json"
    mfsdp(
        *("plan", "llama-tiny", "--num-layers", "3", "--mtp-num-layers", "1", "--pp", "3"),
        *("--layout", "Ettt|m|L", "--world-size", "3", "--gbs", "4", "--seq", "32"),
        *("--out", plan),
    )
    return plan


def test_the_command_line_trains_a_stage_of_mtp_alone(tmp_path: Path) -> None:
    plan, run = command_line_plan(tmp_path), tmp_path / "run"
    mfsdp(
        *("train", plan, "--steps", "2", "--eval-interval", "1", "--eval-steps", "1", "--trace"),
        *("--run-dir", run),
    )
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["train", "eval", "train", "eval", "end"]
    assert lines[-1]["status"] == "completed"
    document = json.loads(mfsdp("validate", run, "--json").stdout)
    statuses = {check["code"]: check["status"] for check in document["checks"]}
    assert {statuses[code] for code in ("MF341", "MF342", "MF343")} == {"pass"}
    context = json.loads((run / "plan.json").read_text())["context"]
    assert [unit["unit"] for unit in context[1]["units"]] == ["root", "mtp.layers.0"]


@pytest.mark.sweep
def test_numeric_validation_keeps_the_mtp_layers(tmp_path: Path) -> None:
    plan = command_line_plan(tmp_path)
    document = json.loads(mfsdp("validate", plan, "--numeric", "--json").stdout)
    assert document["ok"]
    assert document["numeric"]["steps"] == 10
    assert document["numeric"]["copies_bit_equal"]
