"""Forms of data parallelism against one rank: hybrid sharding and expert parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.parity import differences
from tests.helpers.plans import plan_of

EXPERTS = "deepseek-v3-proxy-tiny"
ON_FOUR: dict[str, dict[str, Any]] = {
    "hybrid-2x2": {"model": "llama-tiny", "dp": 4, "num_distributed_optimizer_instances": 2},
    "hybrid-replicated": {"model": "llama-tiny", "dp": 4, "num_distributed_optimizer_instances": 4},
    "hybrid-tied-pp2-vpp2": {
        "model": "gpt2-tiny",
        "pp": 2,
        "vpp": 2,
        "dp": 2,
        "num_distributed_optimizer_instances": 2,
    },
    "hybrid-reduced-last": {
        "model": "llama-tiny",
        "dp": 4,
        "num_distributed_optimizer_instances": 2,
        "gradient_reduction": "last",
    },
    "ep4": {"model": EXPERTS, "dp": 4, "ep": 4},
    "ep2-edp2": {"model": EXPERTS, "dp": 4, "ep": 2},
    "ep2-pp2-vpp2": {"model": EXPERTS, "pp": 2, "vpp": 2, "dp": 2, "ep": 2},
    "ep2-pp2-vpp2-zero3": {
        "model": EXPERTS,
        "pp": 2,
        "vpp": 2,
        "dp": 2,
        "ep": 2,
        "resident_chunks": 0,
    },
}


@pytest.fixture(scope="module")
def on_four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    plans = {name: plan_of(**case) for name, case in ON_FOUR.items()}
    return differences(plans, 4, tmp_path_factory.mktemp("mfsdp"))


@pytest.mark.parametrize("case", ON_FOUR)
def test_equals_one_rank(case: str, on_four: dict[str, Any]) -> None:
    on_four[case].check()


def test_distopt_with_expert_parallelism_equals_one_rank(tmp_path: Path) -> None:
    plans = {"distopt": plan_of(EXPERTS, pp=2, vpp=2, dp=2, ep=2)}
    differences(plans, 4, tmp_path, engine="distopt")["distopt"].check()
