"""Small runs on disk for the tests of compare-runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent.parent / "data" / "runs"

Values = Mapping[int, float | str | None]


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """JSON lines, NaN and Infinity as Python's literals."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def losses(path: Path, values: Values) -> Path:
    """JSON lines with step and training loss."""
    return write_rows(path, [{"step": step, "loss": loss} for step, loss in values.items()])


def run_folder(
    folder: Path,
    train: Values,
    evaluations: Values | None = None,
    *,
    status: str | None = "completed",
    **document: Any,
) -> Path:
    """A run folder as ``mfsdp train`` leaves it; ``status`` None: without an end line."""
    folder.mkdir(parents=True)
    run = {"engine": "mfsdp", "seed": 1234, "precision": "fp32", "data_digest": "d"}
    run |= {"global_batch_size": 8, "seq_length": 16, "settings": {"lr": 1e-3}, **document}
    (folder / "run.json").write_text(json.dumps({**run, "status": status or "running"}))
    rows: list[dict[str, Any]] = []
    for step, loss in train.items():
        rows.append({"kind": "train", "step": step, **_loss(loss), "tokens": step * 128})
        if evaluations and step in evaluations:
            rows.append({"kind": "eval", "step": step, **_loss(evaluations[step])})
    if status is not None:
        rows.append({"kind": "end", "status": status})
    write_rows(folder / "metrics.jsonl", rows)
    return folder


def _loss(loss: float | str | None) -> dict[str, Any]:
    """A text is what a loss that is not finite was."""
    if isinstance(loss, str):
        return {"loss": None, "nonfinite": loss}
    return {"loss": loss}


def megatron_line(step: int, loss: float | None = None, **fields: Any) -> str:
    """A training line of Megatron's log; without ``loss`` the field is absent."""
    parts = {"consumed samples": step * 64, "global batch size": 64}
    if loss is not None:
        parts["lm loss"] = f"{loss:.6E}"  # type: ignore[assignment]
    parts |= {"grad norm": "1.000", **{name.replace("_", " "): v for name, v in fields.items()}}
    text = " | ".join(f"{name}: {value}" for name, value in parts.items())
    return f" iteration {step:8d}/    1000 | {text} |\n"
