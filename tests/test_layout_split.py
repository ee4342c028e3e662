from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.layout.layout import Layout
from mfsdp_cli.layout.split import (
    balanced_split,
    even_split,
    layout_of_counts,
    uneven_ends,
    virtual_stages,
)
from mfsdp_cli.model.presets import preset
from mfsdp_cli.model.spec import ModelSpec


def _model(layers: int, name: str = "toy") -> ModelSpec:
    return replace(preset("llama-tiny"), name=name, num_layers=layers)


def _counts(layout: Layout) -> list[int]:
    return [len(stage.layers) for stage in layout.stages]


def _fault(call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[str, str, str]:
    with pytest.raises(MfsdpError) as caught:
        call(*args, **kwargs)
    finding = caught.value.finding
    assert caught.value.exit_code == 2
    return finding.code, finding.message, finding.hint


@pytest.mark.parametrize(("layers", "pp", "vpp"), [(30, 4, 1), (10, 3, 1), (61, 16, 2), (61, 8, 4)])
def test_balanced_holds_every_layer_once(layers: int, pp: int, vpp: int) -> None:
    layout = balanced_split(_model(layers), pp, vpp)
    assert [layer for stage in layout.stages for layer in stage.layers] == list(range(layers))
    ranks = layout.decoder_layers_per_pp_rank()
    assert sorted(set(ranks)) == sorted({layers // pp, -(-layers // pp)})
    stages = _counts(layout)
    assert max(stages) - min(stages) == 1
    assert (layout.stages[0].embedding, layout.stages[-1].loss) == (True, True)


def test_balanced_ends_are_the_lighter_ones() -> None:
    assert balanced_split(_model(30), 4).decoder_layers_per_pp_rank() == [7, 8, 8, 7]
    assert balanced_split(_model(10), 3).decoder_layers_per_pp_rank() == [3, 4, 3]
    assert balanced_split(_model(31), 4).decoder_layers_per_pp_rank() == [8, 8, 8, 7]
    assert _counts(balanced_split(_model(10), 2, 3)) == [1, 2, 2, 2, 2, 1]


def test_balanced_needs_a_layer_for_each_stage() -> None:
    code, message, hint = _fault(balanced_split, _model(8), 4, 3)
    assert (code, message) == (
        "MF114",
        "8 layers cannot fill 12 stages (4 pipeline ranks x 3 virtual)",
    )
    assert hint == "a layout string may leave stages without decoder layers"


def test_even() -> None:
    assert _counts(even_split(_model(32), 4)) == [8, 8, 8, 8]
    assert _counts(even_split(_model(32), 4, 2)) == [4] * 8


def test_even_refuses_a_remainder() -> None:
    code, message, hint = _fault(even_split, _model(30, "smollm2-135m"), 4)
    assert code == "MF104"
    assert message == "30 layers do not divide into 4 pipeline stages (4 x 7 would build 28)"
    assert hint == (
        "drop the forced even split (an uneven one is [7, 8, 8, 7]), or pass --layout "
        '"Et*7|t*8|t*8|t*7L"'
    )
    assert _fault(even_split, _model(10), 3)[1].endswith("(3 x 3 would build 9)")
    assert _fault(even_split, _model(30), 5, 4)[1] == (
        "30 layers do not divide into 20 stages (5 pipeline ranks x 4 virtual) "
        "(20 x 1 would build 20)"
    )
    assert _fault(even_split, _model(3), 4)[2] == "at most 3 stages can hold a layer each"


def test_even_with_embedding_and_loss_counted() -> None:
    layout = even_split(_model(30), 4, account_for_embedding=True, account_for_loss=True)
    assert _counts(layout) == [7, 8, 8, 7]
    layout = even_split(_model(31), 4, 2, account_for_loss=True)
    assert _counts(layout) == [4, 4, 4, 4, 4, 4, 4, 3]
    assert _fault(even_split, _model(32), 4, account_for_loss=True)[1] == (
        "32 layers (33 with embedding and loss counted) do not divide into 4 pipeline stages "
        "(4 x 8 would build 32)"
    )


@pytest.mark.parametrize(
    ("layers", "pp", "first", "last", "ranks"),
    [
        (94, 4, None, 22, [24, 24, 24, 22]),
        (61, 8, None, 5, [8, 8, 8, 8, 8, 8, 8, 5]),
        (61, 8, 7, 6, [7, 8, 8, 8, 8, 8, 8, 6]),
        (61, 4, None, 13, [16, 16, 16, 13]),
        (48, 4, None, 9, [13, 13, 13, 9]),
        (20, 2, 12, 8, [12, 8]),
        (20, 1, 20, None, [20]),
    ],
)
def test_uneven_ends(
    layers: int, pp: int, first: int | None, last: int | None, ranks: list[int]
) -> None:
    layout = uneven_ends(_model(layers), pp, first=first, last=last)
    assert layout.decoder_layers_per_pp_rank() == ranks


def test_uneven_ends_with_virtual_stages() -> None:
    layout = uneven_ends(_model(28), 4, 2, first=6, last=6)
    assert _counts(layout) == [3, 4, 4, 3, 3, 4, 4, 3]


FIRST = "--decoder-first-pipeline-num-layers"
LAST = "--decoder-last-pipeline-num-layers"


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "first", "last", "message"),
    [
        (20, 1, 1, None, 1, f"{LAST} 1 with one pipeline rank would build 1 of 20 layers"),
        (20, 1, 1, 5, None, f"{FIRST} 5 with one pipeline rank would build 5 of 20 layers"),
        (20, 4, 1, 0, None, f"{FIRST} 0 is not between 1 and the model's 20 layers"),
        (20, 4, 1, None, 21, f"{LAST} 21 is not between 1 and the model's 20 layers"),
        (20, 4, 1, -3, None, f"{FIRST} -3 is not between 1 and the model's 20 layers"),
        (20, 4, 1, 3, None, "17 layers are left for 3 pipeline ranks, which they do not divide"),
        (20, 4, 1, 10, 10, "0 layers are left for 2 pipeline ranks, which they do not divide"),
        (20, 4, 1, 12, 10, "-2 layers are left for 2 pipeline ranks, which they do not divide"),
        (20, 2, 1, 12, 9, f"{FIRST} 12 and {LAST} 9 hold 21 of 20 layers and no rank is left"),
        (28, 4, 2, 7, None, f"{FIRST} 7 does not divide into 2 virtual stages a rank"),
        (27, 4, 2, 6, None, "7 layers of pipeline rank 1 do not divide into 2 virtual stages"),
    ],
)
def test_uneven_ends_that_do_not_add_up(
    layers: int, pp: int, vpp: int, first: int | None, last: int | None, message: str
) -> None:
    code, found, _ = _fault(uneven_ends, _model(layers), pp, vpp, first=first, last=last)
    assert code == "MF112"
    assert found.startswith(message)


def test_layers_a_virtual_stage() -> None:
    assert virtual_stages(_model(80), 16, 1) == 5
    assert virtual_stages(_model(80), 16, 5) == 1
    assert virtual_stages(_model(78), 16, 5, account_for_embedding=True, account_for_loss=True) == 1
    code, message, hint = _fault(virtual_stages, _model(80), 16, 2)
    assert code == "MF113"
    assert message == (
        "80 layers on 16 pipeline ranks are 5 a rank, which do not divide into virtual stages of 2"
    )
    assert hint == "usable: 1 (v=5), 5 (v=1)"
    assert _fault(virtual_stages, _model(30), 4, 2)[0] == "MF104"


@pytest.mark.parametrize("split", [even_split, balanced_split])
def test_impossible_sizes(split: Callable[..., Layout]) -> None:
    assert _fault(split, _model(8), 0)[0] == "MF116"
    assert _fault(split, _model(8), -4, 2)[0] == "MF116"
    assert _fault(split, _model(8), 4, 0)[0] == "MF116"
    assert _fault(split, _model(8), 1, 2)[:2] == (
        "MF116",
        "one pipeline rank cannot interleave 2 virtual stages",
    )
    assert _fault(split, _model(8), 10**12)[0] in ("MF104", "MF114")


def test_mtp_goes_with_the_loss() -> None:
    layout = layout_of_counts([2, 1], 2, mtp_num_layers=2)
    assert [stage.mtp for stage in layout.stages] == [(), (0, 1)]
