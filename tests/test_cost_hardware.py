"""Hardware by name and from files."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from mfsdp_cli.cost.hardware import GIB, Hardware, hardware_names, load_hardware
from mfsdp_cli.errors import MfsdpError


def test_names_of_the_contract() -> None:
    assert {"h100", "h200", "b200", "a100", "cpu"} <= set(hardware_names())


def test_rates() -> None:
    h100 = load_hardware("h100")
    assert h100.memory_bytes == 80 * GIB
    assert h100.flops("bf16") == 989e12 * 0.5
    assert h100.flops("fp32") == 494e12 * 0.5
    assert h100.link(8) == 450e9 * 0.8
    assert h100.link(9) == 50e9 * 0.8
    assert load_hardware("h100", gpus_per_node=16).link(9) == 450e9 * 0.8


def test_a_file_changes_what_it_names(tmp_path: Path) -> None:
    file = tmp_path / "ours.yaml"
    file.write_text("base: h200\nmemory_bytes: 1e11\nnetwork_bandwidth: 25e9\nlatency_s: 0\n")
    ours = load_hardware(str(file))
    assert ours.name == "ours"
    assert ours.memory_bytes == 100_000_000_000
    assert isinstance(ours.memory_bytes, int)
    assert ours.network_bandwidth == 25e9
    assert ours.latency_s == 0
    assert ours.memory_bandwidth == load_hardware("h200").memory_bandwidth


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("memory: 80", "memory"),
        ("memory_bytes: lots", "lots"),
        ("memory_bytes: -1", "-1"),
        ("memory_bytes: 0", "0"),
        ("memory_bytes: 1.5", "1.5"),
        ("memory_bytes: .nan", "nan"),
        ("memory_bytes: .inf", "inf"),
        ("memory_bytes: true", "True"),
        ("latency_s: -1", "-1"),
        ("compute_efficiency: 1.5", "1.5"),
        ("base: abacus", "abacus"),
        ("base: [h100]", "h100"),
        ("memory_bytes: 1" + "0" * 400, "memory_bytes"),
        ("[" * 100_000, "not a hardware file"),
        ("- 1", "maps names to numbers"),
        ("", "maps names to numbers"),
        ("a: [", "not a hardware file"),
    ],
)
def test_a_file_that_is_wrong(text: str, named: str, tmp_path: Path) -> None:
    file = tmp_path / "hardware.yaml"
    file.write_text(text)
    with pytest.raises(MfsdpError, match="MF206") as caught:
        load_hardware(str(file))
    assert named in caught.value.finding.message
    assert str(file) in caught.value.finding.where


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "hardware.yaml"
    file.write_bytes(b"\xff\x00\xfe")
    with pytest.raises(MfsdpError, match="MF206"):
        load_hardware(str(file))


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(MfsdpError, match="abacus") as caught:
        load_hardware("abacus")
    assert "h100" in caught.value.finding.hint


def test_the_file_in_the_documentation(tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "cost-model.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    file = tmp_path / "cluster.yaml"
    file.write_text(block)
    ours = load_hardware(str(file))
    assert ours.name == "our-cluster"
    assert ours.compute_efficiency == 0.45
    names = {field.name for field in fields(Hardware)}
    assert all(f"`{name}`" in page or f"{name}:" in page for name in names)
