"""Reading a plan file back, and everything in which it contradicts itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from mfsdp_cli.errors import Finding, MfsdpError, Severity
from mfsdp_cli.layout.grammar import parse_layout
from mfsdp_cli.layout.layout import Layout
from mfsdp_cli.model.spec import ModelSpec
from mfsdp_cli.parallel import Parallel, Settings
from mfsdp_cli.plan import SCHEMA, Plan, canonical_json
from mfsdp_cli.planning.assemble import Assembly, assemble
from mfsdp_cli.planning.document import derived, digest
from mfsdp_cli.planning.settings import resolve_settings
from mfsdp_cli.planning.sizes import check_counts, resolve_parallel
from mfsdp_cli.rules.judge import RULES
from mfsdp_cli.rules.table import Target

_SECTIONS: dict[str, type] = {
    "model": dict,
    "parallel": dict,
    "settings": dict,
    "layout": dict,
    "schedule": dict,
    "findings": list,
    "plan_digest": str,
}
_SHOWN = 60
_AGAIN = "write the plan again with mfsdp plan --out; a plan is not edited by hand"


def is_plan(text: str) -> bool:
    """Whether a text is meant as a plan document, whatever it is worth."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return text.lstrip().startswith("{") and '"mfsdp.plan/' in text
    return isinstance(document, dict) and str(document.get("schema", "")).startswith("mfsdp.plan/")


def read_plan(path: Path, *, target: Target = Target.MFSDP) -> tuple[Plan, list[Finding]]:
    """The plan of a file and its contradictions (MF209).

    Raises:
        MfsdpError: MF208 where the file is no plan document, or lacks what a plan needs.
    """
    where = str(path)
    document = _document(path)
    model = _within(where, "model.spec", lambda: ModelSpec.from_json(document["model"]["spec"]))
    parallel = _parallel(document["parallel"], where)
    settings = _settings(document["settings"], parallel, where)
    layout = _within(where, "layout.string", lambda: _layout(document, model, parallel))
    parts = _within(where, "", lambda: assemble(model, parallel, layout, settings, target=target))
    stored = _within(where, "findings", lambda: _findings(document["findings"]))
    plan = Plan(
        model,
        parallel,
        layout,
        settings,
        parts.schedule,
        parts.groups,
        tuple(_joined(parts.findings, stored)),
        document,
    )
    return plan, _contradictions(document, parts, where)


def _document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant)
    except OSError as error:
        raise _unreadable(str(error.strerror or error), path) from error
    except UnicodeDecodeError as error:
        raise _unreadable("it is not text", path) from error
    except (ValueError, RecursionError) as error:
        raise _unreadable(f"it is not JSON ({error})", path) from error
    if not isinstance(document, dict):
        raise _unreadable("it holds no JSON object", path)
    if document.get("schema") != SCHEMA:
        raise _unreadable(f"its schema is {document.get('schema')!r}, expected {SCHEMA!r}", path)
    for section, kind in _SECTIONS.items():
        if not isinstance(document.get(section), kind):
            found = "missing" if section not in document else "malformed"
            raise _unreadable(f"{section!r} is {found}", path)
    return document


def _parallel(section: dict[str, Any], where: str) -> Parallel:
    for field in fields(Parallel):
        if field.name not in section:
            raise _broken(f"parallel.{field.name} is missing", where)
        value = section[field.name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise _broken(f"parallel.{field.name} must be a positive integer: {value!r}", where)
    return Parallel.from_json(section)


def _settings(section: dict[str, Any], parallel: Parallel, where: str) -> Settings:
    vpp = parallel.virtual_pipeline_model_parallel_size
    for field in fields(Settings):
        if field.name not in section:
            raise _broken(f"settings.{field.name} is missing", where)
    # Judged as written: None is a value here, not a setting left out.
    settings, findings = resolve_settings(section, vpp=vpp)
    if findings:
        raise _broken(f"settings: {findings[0].message}", where)
    return settings


def _layout(document: dict[str, Any], model: ModelSpec, parallel: Parallel) -> Layout:
    return parse_layout(
        document["layout"]["string"],
        num_layers=model.num_layers,
        mtp_num_layers=model.mtp_num_layers,
        pp=parallel.pipeline_model_parallel_size,
        vpp=parallel.virtual_pipeline_model_parallel_size,
    )


def _findings(items: list[Any]) -> list[Finding]:
    return [
        Finding(
            str(item["code"]),
            Severity(item["severity"]),
            str(item["message"]),
            str(item.get("hint", "")),
            str(item.get("where", "")),
        )
        for item in items
    ]


def _joined(fresh: list[Finding], stored: list[Finding]) -> list[Finding]:
    """What holds now, and what only the making of the plan could see (limits, hardware).

    What the rules say is judged anew: it depends on the target, and on the rules of this version.
    """
    judged = {finding.code for finding in fresh} | {rule.code for rule in RULES}
    return fresh + [finding for finding in stored if finding.code not in judged]


def _contradictions(document: dict[str, Any], parts: Assembly, where: str) -> list[Finding]:
    faults = [*_sizes(parts), *_stages(document, parts), *_digests(document, parts)]
    faults = faults or _changed(document, parts)
    return [Finding("MF209", Severity.ERROR, text, _AGAIN, where) for text in faults]


def _sizes(parts: Assembly) -> list[str]:
    """Sizes that do not make each other up."""
    parallel = parts.parallel
    sizes = parallel.to_json()
    if wrong := check_counts(sizes):
        return [finding.message for finding in wrong]
    again, findings = resolve_parallel(
        sizes,
        parts.model,
        pp=parallel.pipeline_model_parallel_size,
        vpp=parallel.virtual_pipeline_model_parallel_size,
    )
    if again is None:
        return [finding.message for finding in findings]
    derived = again.to_json()
    return [
        f"parallel.{name} is {value}, but the other sizes make {derived[name]}"
        for name, value in sizes.items()
        if value != derived[name]
    ]


def _stages(document: dict[str, Any], parts: Assembly) -> list[str]:
    """Stages that differ from the layout string."""
    written = document["layout"].get("stages")
    if not isinstance(written, list) or len(written) != len(parts.layout.stages):
        return [f"layout.stages does not list the {len(parts.layout.stages)} stages of the string"]
    faults = []
    for stage, item in zip(parts.layout.stages, written, strict=True):
        wanted = {
            "stage": stage.stage,
            "pp_rank": stage.pp_rank,
            "vp_stage": stage.vp_stage,
            "layers": list(stage.layers),
            "embedding": stage.embedding,
            "loss": stage.loss,
            "mtp": list(stage.mtp),
        }
        for key, value in wanted.items():
            found = item.get(key) if isinstance(item, dict) else None
            if found != value:
                faults.append(
                    f"layout.stages[{stage.stage}].{key} is {found!r}, the layout string makes "
                    f"it {value!r}"
                )
    return faults


def _digests(document: dict[str, Any], parts: Assembly) -> list[str]:
    faults = []
    schedule = None if parts.schedule is None else parts.schedule.digest
    written = document["schedule"].get("digest")
    if written != schedule:
        faults.append(f"schedule.digest is {_short(written)}, its sizes make {_short(schedule)}")
    if document["plan_digest"] != digest(parts):
        faults.append(
            f"plan_digest is {_short(document['plan_digest'])}, its contents make "
            f"{_short(digest(parts))}: the file was changed after it was written"
        )
    return faults


def _changed(document: dict[str, Any], parts: Assembly) -> list[str]:
    """The first value in each section that differs from what the plan's contents make it."""
    made = json.loads(canonical_json(derived(parts)))
    faults = (_difference(document.get(name), value, name) for name, value in made.items())
    return [fault for fault in faults if fault is not None]


def _difference(written: Any, made: Any, place: str) -> str | None:
    """Where two JSON values part; keys beyond those that are made do not count."""
    if isinstance(made, dict) and isinstance(written, dict):
        pairs = [(f"{place}.{key}", written.get(key), value) for key, value in made.items()]
    elif isinstance(made, list) and isinstance(written, list) and len(made) == len(written):
        pairs = [(f"{place}[{i}]", *both) for i, both in enumerate(zip(written, made, strict=True))]
    else:
        same = type(written) is type(made) and written == made
        return None if same else f"{place} is {_brief(written)}, its contents make {_brief(made)}"
    return next((d for p, w, m in pairs if (d := _difference(w, m, p)) is not None), None)


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _short(digest: object) -> str:
    return "missing" if digest is None else f"{str(digest)[:12]}..."


def _within[T](where: str, place: str, read: Callable[[], T]) -> T:
    """Run a step of reading; whatever it cannot take becomes MF208 with its place."""
    try:
        return read()
    except MfsdpError as error:
        prefix = f"{place}: " if place else ""
        raise _broken(f"{prefix}{error.finding.message}", where) from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _broken(f"{place}: {type(error).__name__} {error}", where) from error


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not strict JSON")


def _broken(message: str, where: str) -> MfsdpError:
    return MfsdpError("MF208", f"not a sound plan: {message}", where=where, hint=_AGAIN)


def _unreadable(reason: str, path: Path) -> MfsdpError:
    return MfsdpError(
        "MF208",
        f"not a plan file: {reason}",
        where=str(path),
        hint="mfsdp plan MODEL --out FILE writes one",
    )
