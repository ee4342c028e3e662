"""Activation bytes: against what autograd really saves, and in closed form."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mfsdp_cli.cost.activations import Activations, Width, layer_width, sequences_after
from mfsdp_cli.layout.grammar import parse_layout
from mfsdp_cli.layout.layout import StageLayout
from mfsdp_cli.model.presets import preset
from mfsdp_cli.model.spec import ModelSpec
from mfsdp_cli.runtime.chunks import build_unsplit, unsplit_layout
from tests.helpers.alone import alone


def saved_bytes(spec: ModelSpec, micro_batch: int, length: int) -> int:
    """Bytes of all storages that autograd keeps after one forward, weights left out."""
    chunk = build_unsplit(spec, seed=1, dtype=torch.float32, device=alone().device)
    module = chunk.module
    known = {tensor.untyped_storage().data_ptr() for tensor in module.parameters()}
    known |= {tensor.untyped_storage().data_ptr() for tensor in module.buffers()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage
        return tensor

    tokens = torch.arange(micro_batch * length).reshape(micro_batch, length) % spec.vocab_size
    positions = torch.arange(length).expand(micro_batch, length)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(tokens, positions, None, labels=tokens)
    return sum(storage.nbytes() for storage in kept.values())


def on_this_processor(spec: ModelSpec, micro_batch: int, length: int) -> int:
    """What torch saves on a CPU beyond what it saves on a GPU, where norms and attention are fused.

    RMSNorm keeps the normalized input as well; attention whose values have another width than its
    keys keeps the attention matrix, and copies the values.
    """
    tokens, layers, hidden = micro_batch * length, spec.num_layers, spec.hidden_size
    extra = 0
    if spec.normalization == "RMSNorm":
        extra += tokens * hidden * (2 * layers + 1)
    mla = spec.latent_attention
    if mla is not None:
        heads = spec.num_attention_heads
        extra += layers * tokens * (mla.kv_lora_rank + (mla.q_lora_rank or 0))
        extra += layers * tokens * heads * (length - mla.qk_head_dim - 1)
    return 4 * extra


@pytest.mark.parametrize("shape", [(1, 128), (2, 64)])
@pytest.mark.parametrize("name", ["llama-tiny", "gpt2-tiny", "deepseek-v3-proxy-tiny"])
def test_held_is_what_autograd_saves(name: str, shape: tuple[int, int]) -> None:
    spec = preset(name)
    (stage,) = unsplit_layout(spec).stages
    predicted = Activations(spec, *shape, element=4).held(stage) + on_this_processor(spec, *shape)
    assert predicted == pytest.approx(saved_bytes(spec, *shape), rel=0.005)


def test_a_layer_in_closed_form() -> None:
    """Llama 3 8B: 4h + (32 + 8 + 8) heads and again 32 + 8 turned, 32 out, and 5 FFN widths."""
    width = layer_width(preset("llama3-8b"), is_moe=False)
    assert width == Width(
        compute=4 * 4096 + (32 + 16) * 128 + (32 + 8) * 128 + 32 * 128 + 5 * 14336,
        fp32=2 + 32,
        position=4 * 128,
    )


@pytest.mark.parametrize("element", [2, 4])
def test_recomputation_keeps_the_input_of_each_layer(element: int) -> None:
    spec = preset("llama3-8b")
    stage = StageLayout(1, 1, 0, layers=(8, 9, 10))
    full = Activations(spec, 2, 1024, element, "full")
    assert full.held(stage) == 3 * 2 * 1024 * 4096 * element
    none = Activations(spec, 2, 1024, element)
    assert full.working(stage) == none.held(stage) // 3
    assert none.working(stage) == 0
    selective = Activations(spec, 2, 1024, element, "selective")
    assert none.held(stage) - selective.held(stage) == 3 * 2 * 1024 * 32 * 4


def test_the_loss_stage_holds_logits_in_fp32() -> None:
    spec = preset("llama3-8b")
    with_loss = StageLayout(3, 3, 0, layers=(31,), loss=True)
    without = replace(with_loss, loss=False)
    model = Activations(spec, 1, 1024, element=2)
    logits = 1024 * spec.padded_vocab_size * 4
    assert model.held(with_loss) - model.held(without) == logits + 1024 * (2 * 4096 * 2 + 4)
    assert model.working(with_loss) == logits


def test_mtp_stages_pass_on_a_hidden_state_more() -> None:
    spec = replace(preset("deepseek-v3"), mtp_num_layers=1)
    layout = parse_layout("Et*3|(tt|)*29,m|L", num_layers=61, mtp_num_layers=1, pp=16, vpp=2)
    assert sequences_after(layout) == [1] * 30 + [2, 2]
    sent = Activations(spec, 1, 4096, element=2).boundaries(layout)
    assert sent[0] == 4096 * 7168 * 2
    assert sent[30] == 2 * sent[0]
    assert sent[31] == 0
