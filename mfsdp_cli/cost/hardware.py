"""What the ranks run on: memory, arithmetic, links. By name or from a YAML file.

Rates are peaks from the makers' data sheets (dense arithmetic, no sparsity; both directions of a
link together halved to one direction); ``*_efficiency`` says how much of a peak large operations
reach in practice. A YAML file names the fields it changes; the rest comes from ``base``.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from mfsdp_cli.errors import MfsdpError

GIB = 1 << 30
DEFAULT_NAME = "h100"


@dataclass(frozen=True)
class Hardware:
    """One kind of accelerator (or processor) and its links.

    Args:
        memory_bytes: memory of one device.
        flops_fp32, flops_bf16: peak floating-point operations a second (fp32 as training runs
            it: TF32 matrix units where the device has them).
        memory_bandwidth: bytes a second from the device's memory.
        gpus_per_node: ranks that share the fast link.
        node_bandwidth: bytes a second a rank sends inside a node, one direction.
        network_bandwidth: bytes a second a rank sends to other nodes, one direction.
        latency_s: seconds a message takes however small it is.
        compute_efficiency, link_efficiency: reached share of the peaks.
        framework_bytes: context, libraries and communicators of a rank, outside the allocator.
    """

    name: str
    memory_bytes: int
    flops_fp32: float
    flops_bf16: float
    memory_bandwidth: float
    gpus_per_node: int
    node_bandwidth: float
    network_bandwidth: float
    latency_s: float = 10e-6
    compute_efficiency: float = 0.5
    link_efficiency: float = 0.8
    framework_bytes: int = 2 * GIB

    def flops(self, precision: str) -> float:
        """Operations a second that matrix products of a precision reach."""
        peak = self.flops_fp32 if precision == "fp32" else self.flops_bf16
        return peak * self.compute_efficiency

    def link(self, ranks: int) -> float:
        """Bytes a second a rank sends within a group of ``ranks`` consecutive ranks."""
        inside = ranks <= self.gpus_per_node
        return (self.node_bandwidth if inside else self.network_bandwidth) * self.link_efficiency


_H100 = Hardware("h100", 80 * GIB, 494e12, 989e12, 3.35e12, 8, 450e9, 50e9)
_KNOWN = {
    "h100": _H100,
    "h200": replace(_H100, name="h200", memory_bytes=141 * GIB, memory_bandwidth=4.8e12),
    "a100": Hardware("a100", 80 * GIB, 156e12, 312e12, 2.0e12, 8, 300e9, 25e9),
    "b200": Hardware("b200", 180 * GIB, 1125e12, 2250e12, 7.7e12, 8, 900e9, 50e9),
    "cpu": Hardware(
        "cpu",
        16 * GIB,
        flops_fp32=5e10,
        flops_bf16=1e10,
        memory_bandwidth=2e10,
        gpus_per_node=64,
        node_bandwidth=2e9,
        network_bandwidth=1e9,
        latency_s=1e-4,
        framework_bytes=GIB // 2,
    ),
}
_WHOLE = {"memory_bytes", "gpus_per_node", "framework_bytes"}
_MAY_BE_ZERO = {"framework_bytes", "latency_s"}
_SHARES = {"compute_efficiency", "link_efficiency"}


def hardware_names() -> list[str]:
    """Hardware known by name."""
    return sorted(_KNOWN)


def load_hardware(source: str, *, gpus_per_node: int | None = None) -> Hardware:
    """Hardware by name, or from a YAML file.

    Raises:
        MfsdpError: MF206 for a name that is neither known nor a file, or a file that is no
            hardware description.
    """
    if source in _KNOWN:
        found = _KNOWN[source]
    elif os.path.isfile(source):
        found = _read(Path(source))
    else:
        raise MfsdpError(
            "MF206",
            f"there is no hardware {source!r}",
            where="--hardware",
            hint=f"one of {', '.join(hardware_names())}, or a YAML file",
        )
    return found if gpus_per_node is None else replace(found, gpus_per_node=gpus_per_node)


def _read(path: Path) -> Hardware:
    import yaml

    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise MfsdpError("MF206", f"not a hardware file: {reason}", where=str(path)) from error
    if not isinstance(document, dict):
        raise MfsdpError("MF206", "a hardware file maps names to numbers", where=str(path))
    values = {str(key): value for key, value in document.items()}
    base = values.pop("base", DEFAULT_NAME)
    if not isinstance(base, str) or base not in _KNOWN:
        raise MfsdpError(
            "MF206",
            f"base is {base!r}; it is one of {', '.join(hardware_names())}",
            where=str(path),
        )
    name = str(values.pop("name", path.stem))
    return replace(_KNOWN[base], name=name, **_checked(values, path))


def _checked(values: dict[str, Any], path: Path) -> dict[str, Any]:
    known = {field.name for field in fields(Hardware)} - {"name"}
    if unknown := sorted(set(values) - known):
        raise MfsdpError(
            "MF206",
            f"a hardware file has no field {', '.join(unknown)}",
            where=str(path),
            hint=f"fields: base, name, {', '.join(sorted(known))}",
        )
    return {name: _number(name, value, path) for name, value in values.items()}


def _number(name: str, value: Any, path: Path) -> float | int:
    """YAML reads ``1e12`` as a text; take every spelling of a positive finite number."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    most = 1.0 if name in _SHARES else 1e30
    enough = number >= 0 if name in _MAY_BE_ZERO else number > 0
    if not (enough and number <= most) or (name in _WHOLE and number != int(number)):
        wanted = "a share from 0 to 1" if name in _SHARES else "a positive number"
        raise MfsdpError("MF206", f"{name} must be {wanted}, got {value!r}", where=str(path))
    return int(number) if name in _WHOLE else number
