"""The plan: one document that every command understands, and the objects it stands for.

A plan file holds everything that defines a run (the model, sizes, layout, settings) and what
follows from it (counts, schedule, memory). Reading one rebuilds what follows and compares, so that
a file edited by hand cannot run as something else than it says.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mfsdp_cli.errors import Finding, MfsdpError, Severity
from mfsdp_cli.files import write_whole
from mfsdp_cli.layout.layout import Layout
from mfsdp_cli.layout.shared import SharedGroup
from mfsdp_cli.model.spec import ModelSpec
from mfsdp_cli.parallel import Parallel, Settings
from mfsdp_cli.schedule.build import Schedule

SCHEMA = "mfsdp.plan/1"
#: Fields of a model that say where its description came from, not what it is.
_PROVENANCE = ("name", "source", "assumptions")


@dataclass(frozen=True)
class Plan:
    """A plan, ready to be executed or judged.

    Args:
        built: the schedule; None where the number of microbatches allows none.
        findings: everything judged when the plan was made; an error keeps it from running.
        document: the contract's JSON document.
    """

    model: ModelSpec
    parallel: Parallel
    layout: Layout
    settings: Settings
    built: Schedule | None
    shared_groups: tuple[SharedGroup, ...]
    findings: tuple[Finding, ...]
    document: dict[str, Any]

    @property
    def schedule(self) -> Schedule:
        """What every pipeline rank executes. Raises the finding that says why there is none."""
        if self.built is None:
            raise MfsdpError.of(self.errors[0])
        return self.built

    @property
    def plan_digest(self) -> str:
        """SHA-256 over what defines the run."""
        return str(self.document["plan_digest"])

    @property
    def errors(self) -> list[Finding]:
        """Findings of severity error."""
        return [finding for finding in self.findings if finding.severity is Severity.ERROR]

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan file.

        Raises:
            MfsdpError: MF208 where it is no plan, MF209 where it contradicts itself (edited).
        """
        from mfsdp_cli.planning.reader import read_plan

        plan, contradictions = read_plan(Path(path))
        if contradictions:
            raise MfsdpError.of(contradictions[0])
        return plan

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the document, whole or not at all. Raises MF902 where that is impossible."""
        try:
            write_whole(Path(path), json_text(self.document))
        except OSError as error:
            raise MfsdpError(
                "MF902",
                f"cannot write {path}: {error.strerror or error}",
                where=f"--out {path}",
                hint="name a file in a folder that exists and can be written",
            ) from error


def run_digest(
    model: ModelSpec,
    parallel: Parallel,
    layout: str,
    settings: Settings,
    schedule_digest: str | None,
) -> str:
    """SHA-256 of the canonical JSON of everything that defines a run.

    The model's name and where it came from are left out: the same numbers are the same run.
    """
    spec = {key: value for key, value in model.to_json().items() if key not in _PROVENANCE}
    defining = {
        "schema": SCHEMA,
        "model": spec,
        "parallel": parallel.to_json(),
        "layout": layout,
        "settings": settings.to_json(),
        "schedule": schedule_digest,
    }
    return hashlib.sha256(canonical_json(defining).encode()).hexdigest()


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no blanks: equal values give equal texts."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def json_text(document: Mapping[str, Any]) -> str:
    """The document as strict JSON, a line for each entry of its top two levels.

    Deeper levels stay on one line: the orders of a large plan have tens of thousands of entries.
    """
    lines = [f" {json.dumps(key)}: {_block(value)}" for key, value in document.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _block(value: Any) -> str:
    if isinstance(value, dict) and value:
        inner = [f"  {json.dumps(key)}: {_compact(item)}" for key, item in value.items()]
        return "{\n" + ",\n".join(inner) + "\n }"
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(f"  {_compact(item)}" for item in value) + "\n ]"
    return _compact(value)


def _compact(value: Any) -> str:
    return json.dumps(value, allow_nan=False)
