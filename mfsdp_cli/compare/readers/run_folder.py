"""The run folder that ``mfsdp train`` writes: ``metrics.jsonl`` and, beside it, ``run.json``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mfsdp_cli.compare.collector import Collector

NAME = "run-folder"
METRICS, RUN = "metrics.jsonl", "run.json"
LOOKED_FOR = f"a run folder ({METRICS} or {RUN})"

PLAN = "plan.json"
#: Top level entries of run.json that should agree between two runs.
_COMPARED = ("seed", "data_digest", "precision", "seq_length", "global_batch_size")


def add_settings(folder: Path, collector: Collector) -> None:
    """Take settings, model, batch size and status from ``run.json`` and the plan beside it."""
    run, document = collector.run, _load(folder / RUN, collector)
    nested = document.get("settings")
    run.settings = dict(_flat(nested)) if isinstance(nested, dict) else {}
    run.settings |= {name: document[name] for name in _COMPARED if name in document}
    run.settings |= _model(document, _load(folder / PLAN, collector))
    collector.batch_size({name.rpartition(".")[2]: v for name, v in run.settings.items()})
    status = document.get("status")
    if isinstance(status, str) and run.status in (None, "running"):
        run.status = status


def _model(document: Mapping[str, Any], plan: Mapping[str, Any]) -> dict[str, Any]:
    """What was trained, from either document: its name, sizes and number of parameters."""
    model = document.get("model") or plan.get("model")
    if not isinstance(model, dict):
        return {} if model is None else {"model": model}
    sizes = dict(_flat(model, "model."))
    return {name: value for name, value in sizes.items() if not isinstance(value, list)}


def _load(path: Path, collector: Collector) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        collector.run.notes.append(f"{path.name} cannot be read ({error}): it is not compared")
        return {}
    return document if isinstance(document, dict) else {}


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings by dotted name."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
