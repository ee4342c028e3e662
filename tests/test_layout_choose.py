from __future__ import annotations

from dataclasses import replace

import pytest

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.layout.auto import auto_split
from mfsdp_cli.layout.choose import LayoutRequest, choose_layout
from mfsdp_cli.model.presets import preset

MODEL = replace(preset("llama-tiny"), num_layers=24)


def _ranks(**request: object) -> list[int]:
    return choose_layout(MODEL, LayoutRequest(**request)).decoder_layers_per_pp_rank()  # type: ignore[arg-type]


def test_each_wish_is_followed() -> None:
    assert _ranks(pp=4, layout="Et*3|t*9|t*9|t*3L") == [3, 9, 9, 3]
    assert _ranks(pp=4, split="even") == [6, 6, 6, 6]
    assert _ranks(pp=5, split="balanced") == [5, 5, 5, 5, 4]
    assert _ranks(pp=4, first_layers=3, last_layers=5) == [3, 8, 8, 5]
    assert _ranks(pp=4, vpp=2, first_layers=4, last_layers=4) == [4, 8, 8, 4]


def test_without_a_wish_the_split_is_by_cost() -> None:
    assert choose_layout(MODEL, LayoutRequest(pp=4)) == auto_split(MODEL, 4)
    assert choose_layout(MODEL, LayoutRequest(pp=4, vpp=2)) == auto_split(MODEL, 4, 2)


def test_layers_a_virtual_stage_make_an_even_split() -> None:
    layout = choose_layout(MODEL, LayoutRequest(pp=4, layers_per_virtual_stage=3))
    assert (layout.vpp, {len(stage.layers) for stage in layout.stages}) == (2, {3})
    accounts = LayoutRequest(pp=13, account_for_embedding=True, account_for_loss=True)
    assert choose_layout(MODEL, accounts).decoder_layers_per_pp_rank() == [1, *[2] * 11, 1]


def test_a_virtual_size_may_be_said_twice_but_not_differently() -> None:
    assert _ranks(pp=4, vpp=2, layers_per_virtual_stage=3) == [6, 6, 6, 6]
    with pytest.raises(MfsdpError, match=r"makes 2 virtual stages a rank, but .* says 3"):
        _ranks(pp=4, vpp=3, layers_per_virtual_stage=3)
    with pytest.raises(MfsdpError, match="MF106"):
        _ranks(pp=2, vpp=3, layout="Et*6|t*6|t*6|t*6L")


@pytest.mark.parametrize(
    "wishes",
    [
        {"layout": "Et*24L", "split": "even"},
        {"layout": "Et*24L", "first_layers": 3},
        {"layout": "Et*24L", "layers_per_virtual_stage": 3},
        {"layout": "Et*24L", "account_for_loss": True},
        {"first_layers": 3, "account_for_embedding": True},
        {"last_layers": 3, "split": "auto"},
        {"last_layers": 3, "layers_per_virtual_stage": 1},
        {"split": "balanced", "account_for_loss": True},
        {"split": "auto", "layers_per_virtual_stage": 1},
    ],
)
def test_contradictions(wishes: dict[str, object]) -> None:
    with pytest.raises(MfsdpError, match=r"MF115.* both say how layers are split"):
        _ranks(pp=1, **wishes)


def test_an_unknown_split() -> None:
    with pytest.raises(MfsdpError, match=r"MF115.*there is no split 'fair'"):
        _ranks(pp=4, split="fair")


@pytest.mark.parametrize("first", [0, -1])
def test_zero_is_given_too(first: int) -> None:
    with pytest.raises(MfsdpError, match="MF112"):
        _ranks(pp=4, first_layers=first)
