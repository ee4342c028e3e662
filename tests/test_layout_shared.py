from __future__ import annotations

from dataclasses import replace

import pytest

from mfsdp_cli.layout.grammar import parse_layout
from mfsdp_cli.layout.shared import SharedGroup, SharedMember, shared_groups
from mfsdp_cli.model.presets import preset
from mfsdp_cli.model.spec import ModelSpec

DEEPSEEK = preset("deepseek-v3")
TIED_DEEPSEEK = replace(DEEPSEEK, untie_embeddings_and_output_weights=False)
EMBEDDING = "embedding.word_embeddings.weight"


def _groups(spec: ModelSpec, text: str, pp: int) -> tuple[SharedGroup, ...]:
    layout = parse_layout(
        text, num_layers=spec.num_layers, mtp_num_layers=spec.mtp_num_layers, pp=pp, vpp=None
    )
    return shared_groups(spec, layout)


@pytest.mark.parametrize(
    ("spec", "pp", "kind", "ranks"),
    [
        (DEEPSEEK, 16, "mtp", (0, 14)),
        (TIED_DEEPSEEK, 16, "tied", (0, 14, 15)),
        (DEEPSEEK, 8, "mtp", (0, 6)),
        (TIED_DEEPSEEK, 8, "tied", (0, 6, 7)),
    ],
)
def test_mtp_on_a_stage_of_its_own(
    spec: ModelSpec, pp: int, kind: str, ranks: tuple[int, ...]
) -> None:
    (group,) = _groups(spec, "Et*3|(tt|)*29,m|L", pp)
    assert (group.kind, group.pp_ranks) == (kind, ranks)
    assert group.owner == SharedMember(0, 0, EMBEDDING)
    assert group.members[1] == SharedMember(ranks[1], 32 // pp - 1, EMBEDDING)
    if kind == "tied":
        assert group.members[2] == SharedMember(ranks[2], 32 // pp - 1, "output_layer.weight")


def test_a_tied_head_joins_the_first_and_last_rank_alone() -> None:
    spec = replace(preset("gpt2"), num_layers=16)
    (group,) = _groups(spec, "E(t*4|)*3t*4L", 4)
    assert group.pp_ranks == (0, 3)
    assert group.to_json() == {
        "name": "word_embeddings",
        "kind": "tied",
        "pp_ranks": [0, 3],
        "members": [
            {"pp_rank": 0, "vp_stage": 0, "parameter": EMBEDDING},
            {"pp_rank": 3, "vp_stage": 0, "parameter": "output_layer.weight"},
        ],
    }


def test_one_stage_shares_nothing() -> None:
    assert _groups(preset("gpt2"), "Et*12L", 1) == ()
    assert _groups(DEEPSEEK, "Et*61mL", 1) == ()


def test_an_untied_model_without_mtp_shares_nothing() -> None:
    assert _groups(preset("llama-tiny"), "E(t*4|)*1t*4L", 2) == ()


def test_mtp_beside_the_loss_is_a_copy_too() -> None:
    (group,) = _groups(DEEPSEEK, "E(t*16|)*3t*13mL", 4)
    assert (group.kind, group.pp_ranks) == ("mtp", (0, 3))
