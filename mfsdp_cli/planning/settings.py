"""From given settings to all of them: defaults that depend on sizes, and choices checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from mfsdp_cli.errors import Finding, MfsdpError, Severity
from mfsdp_cli.parallel import Settings
from mfsdp_cli.schedule.spec import PLANNED, REDUCTIONS, SUPPORTED, check_name, default_name

_CHOICES: dict[str, tuple[str, ...]] = {
    "recompute_granularity": ("none", "selective", "full"),
    "gradient_reduction": REDUCTIONS,
    "precision": ("fp32", "bf16", "fp16"),
    "outer_dp_sharding_strategy": ("no_shard", "optim"),
    "data_parallel_sharding_strategy": (
        "no_shard",
        "optim",
        "optim_grads",
        "optim_grads_params",
    ),
}
_LEAST = {"resident_chunks": 0, "num_distributed_optimizer_instances": 1}


def resolve_settings(given: Mapping[str, Any], *, vpp: int) -> tuple[Settings, list[Finding]]:
    """All settings, and MF205 or MF302 for each value that is none of its choices."""
    defaults: dict[str, Any] = {
        "schedule": default_name(vpp),
        "overlap_p2p_communication": vpp > 1,
        "resident_chunks": 2 if vpp > 1 else 1,
    }
    values = defaults | {name: value for name, value in given.items() if value is not None}
    values["schedule"] = _spelled(values["schedule"])
    findings = [finding for name, value in values.items() if (finding := _check(name, value))]
    faulty = {finding.where for finding in findings}
    sound = {name: value for name, value in values.items() if _flag(name) not in faulty}
    return Settings(**sound), findings


def _spelled(schedule: Any) -> Any:
    """A schedule's name in lower case where it is known; torch writes 1F1B."""
    known = isinstance(schedule, str) and schedule.lower() in (*SUPPORTED, *PLANNED)
    return schedule.lower() if known else schedule


def _check(name: str, value: Any) -> Finding | None:
    expected = _TYPES.get(name)
    if expected is None:
        return _fault(name, f"there is no setting {name}")
    if not _has_type(value, expected):
        return _fault(name, f"{name} must be {_words(expected)}, got {value!r}")
    if name in _CHOICES and value not in _CHOICES[name]:
        return _fault(name, f"{name} is {value!r}; it is one of {', '.join(_CHOICES[name])}")
    if name in _LEAST and value < _LEAST[name]:
        return _fault(name, f"{name} must be at least {_LEAST[name]}, got {value}")
    return _check_schedule(value) if name == "schedule" else None


def _check_schedule(name: str) -> Finding | None:
    try:
        check_name(name)
    except MfsdpError as error:
        return error.finding
    return None


def _types() -> dict[str, tuple[type, ...]]:
    """The types each setting takes, read from the annotations of its field."""
    types: dict[str, tuple[type, ...]] = {}
    for item in fields(Settings):
        annotation = str(item.type)
        found: list[type] = [type(None)] if "None" in annotation else []
        found += [kind for kind in (bool, int, str) if kind.__name__ in annotation]
        types[item.name] = tuple(found)
    return types


def _has_type(value: Any, expected: tuple[type, ...]) -> bool:
    if isinstance(value, bool):
        return bool in expected
    return isinstance(value, expected)


def _words(expected: tuple[type, ...]) -> str:
    names = {bool: "true or false", int: "an integer", str: "a text", type(None): "nothing"}
    return " or ".join(names[kind] for kind in expected)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _fault(name: str, message: str) -> Finding:
    return Finding("MF205", Severity.ERROR, message, where=_flag(name))


_TYPES = _types()
