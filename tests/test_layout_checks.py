from __future__ import annotations

from dataclasses import replace

from mfsdp_cli.errors import Severity
from mfsdp_cli.layout.checks import layout_findings
from mfsdp_cli.layout.grammar import parse_layout
from mfsdp_cli.model.presets import preset
from mfsdp_cli.model.spec import ModelSpec

TWO_LAYERS = replace(preset("llama-tiny"), num_layers=2)


def _findings(spec: ModelSpec, text: str, pp: int) -> list[tuple[str, Severity, str]]:
    layout = parse_layout(
        text, num_layers=spec.num_layers, mtp_num_layers=spec.mtp_num_layers, pp=pp, vpp=None
    )
    return [(f.code, f.severity, f.where) for f in layout_findings(spec, layout)]


def test_a_rank_without_parameters_is_named() -> None:
    assert _findings(TWO_LAYERS, "Et||tL", 3) == [
        ("MF120", Severity.WARNING, "pp_rank 1, model llama-tiny")
    ]


def test_a_rank_of_two_empty_stages_is_named_once() -> None:
    assert _findings(TWO_LAYERS, "Et||t|||L", 3) == [
        ("MF121", Severity.NOTE, "stage 3, pp_rank 0"),
        ("MF120", Severity.WARNING, "pp_rank 1, model llama-tiny"),
    ]


def test_an_empty_stage_beside_others_is_a_note() -> None:
    deep = replace(preset("llama3-8b"), num_layers=61)
    assert _findings(deep, "Ettt|(tt|)*14|(tt|)*15L", 16) == [
        ("MF121", Severity.NOTE, "stage 15, pp_rank 15")
    ]


def test_embedding_alone_and_loss_alone_are_no_finding() -> None:
    assert _findings(TWO_LAYERS, "E|t|t|L", 4) == []
