from __future__ import annotations

import pytest

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.model.parameters import ParameterTotals, count_parameters
from mfsdp_cli.model.presets import preset, preset_names

NAMES = [
    "deepseek-v3",
    "deepseek-v3-proxy",
    "deepseek-v3-proxy-tiny",
    "gpt2",
    "gpt2-tiny",
    "llama-tiny",
    "llama3-70b",
    "llama3-8b",
]


def test_names() -> None:
    assert preset_names() == NAMES
    assert [preset(name).name for name in NAMES] == NAMES


def test_published_sizes() -> None:
    assert count_parameters(preset("deepseek-v3")) == ParameterTotals(
        671_026_404_352, 11_610_067_968, 14_848, 926_679_040, 37_552_282_624
    )
    assert count_parameters(preset("llama3-8b")).total == 8_030_261_248
    assert count_parameters(preset("llama3-70b")).total == 70_553_706_496
    assert count_parameters(preset("gpt2")).total == 124_439_808


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("-tiny")])
def test_tiny_presets_keep_their_promises(name: str) -> None:
    spec = preset(name)
    assert spec.num_layers >= 8
    assert spec.max_position_embeddings >= 64
    assert spec.mtp_num_layers == 0
    assert spec.vocab_size == spec.padded_vocab_size == 256
    if spec.moe is not None:
        assert spec.moe.moe_router_topk < spec.moe.num_moe_experts
    assert count_parameters(spec).total < 1_500_000


def test_the_tiny_proxy_has_every_part_of_deepseek_v3() -> None:
    for name in ("deepseek-v3-proxy", "deepseek-v3-proxy-tiny"):
        spec = preset(name)
        assert spec.untie_embeddings_and_output_weights
        assert spec.latent_attention is not None
        assert spec.latent_attention.q_lora_rank is not None
        assert spec.moe is not None
        assert spec.moe.moe_layer_pattern == (False, *[True] * (spec.num_layers - 1))
        assert spec.moe.moe_router_enable_expert_bias
        assert spec.moe.moe_shared_expert_intermediate_size > 0


def test_a_misspelt_name() -> None:
    with pytest.raises(MfsdpError) as caught:
        preset("deepseek-v4")
    assert caught.value.finding.code == "MF411"
    assert caught.value.finding.hint.startswith("did you mean deepseek-v3")
    with pytest.raises(MfsdpError) as caught:
        preset("???")
    assert caught.value.finding.hint == f"presets: {', '.join(NAMES)}"
