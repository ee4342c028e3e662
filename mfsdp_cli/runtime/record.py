"""The run folder: what a run was told, what it measured, how it ended. Knows no torch.

::

    run.json       plan_digest, schedule_digest, engine, ..., status
    plan.json      the plan, as it was given
    metrics.jsonl  one strict JSON object a line; the last has kind "end"
    events.out.*   TensorBoard, in Megatron's tags
    trace/         what each rank executed, with --trace

A folder is readable at any moment: a line is written in one piece, ``run.json`` is replaced in
one piece, and whoever outlives a run that was cut off writes its last line.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
from pathlib import Path
from typing import Any, Protocol

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.files import write_whole

RUN = "run.json"
METRICS = "metrics.jsonl"
PLAN = "plan.json"
TRACE = "trace"
SCHEMA = "mfsdp.run/1"


class Scalars(Protocol):
    """The part of TensorBoard's writer that a run uses."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


def is_run_folder(folder: Path) -> bool:
    """Whether a folder was written by a run (so that it may be overwritten as one)."""
    return (folder / RUN).is_file()


def create_run_folder(folder: Path, document: dict[str, Any], plan: str, overwrite: bool) -> None:
    """Make a new run folder with ``run.json`` (status ``running``) and ``plan.json``.

    Raises:
        MfsdpError: MF507 where the folder exists (and ``overwrite`` may not replace it), or
            cannot be written.
    """
    where = f"--run-dir {folder}"
    try:
        _make_room(folder, where, overwrite)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PLAN).write_text(plan)
        (folder / METRICS).touch()
        _write_run(folder, {"schema": SCHEMA, **document, "status": "running"})
    except OSError as error:
        raise MfsdpError(
            "MF507", f"cannot write the run folder {folder}: {error.strerror}", where=where
        ) from error


def resume_run_folder(folder: Path, document: dict[str, Any], plan: str) -> None:
    """Let a run folder go on: what it measured stays, the plan may be another of the same model.

    Cuts off a last line that was not written to its end.
    """
    before = read_run(folder)
    lines, torn = _complete_lines(folder / METRICS)
    if torn:
        with open(folder / METRICS, "r+b") as file:
            file.truncate(sum(len(line) for line in lines))
    write_whole(folder / PLAN, plan)
    resumed = [*before.get("resumed", []), before["plan_digest"]]
    _write_run(folder, {"schema": SCHEMA, **document, "resumed": resumed, "status": "running"})


def _make_room(folder: Path, where: str, overwrite: bool) -> None:
    """Empty a run folder that may be replaced (it may be a link to one); MF507 for any other."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not is_run_folder(folder):
        raise MfsdpError(
            "MF507",
            f"{folder} exists and is not a run folder",
            where=where,
            hint="choose another --run-dir",
        )
    if not overwrite:
        raise MfsdpError(
            "MF507",
            f"the run folder {folder} exists",
            where=where,
            hint="choose another --run-dir, or replace it with --overwrite",
        )
    for child in folder.iterdir():
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        else:
            child.unlink()


def read_run(folder: Path) -> dict[str, Any]:
    """The document in ``run.json``."""
    document: dict[str, Any] = json.loads((folder / RUN).read_text())
    return document


def update_run(folder: Path, **values: Any) -> None:
    """Change fields of ``run.json`` in one piece."""
    _write_run(folder, {**read_run(folder), **values})


def _write_run(folder: Path, document: dict[str, Any]) -> None:
    write_whole(folder / RUN, json.dumps(document, indent=1, allow_nan=False) + "\n")


def finish(folder: Path, status: str, **values: Any) -> str:
    """Give a run its last line and status, if it has none yet; returns the status it has.

    Cuts off a last line that was not written to its end.
    """
    lines, torn = _complete_lines(folder / METRICS)
    if torn:
        with open(folder / METRICS, "r+b") as file:
            file.truncate(sum(len(line) for line in lines))
    last = json.loads(lines[-1]) if lines else {}
    if last.get("kind") == "end":
        status = str(last["status"])
    else:
        with open(folder / METRICS, "ab") as file:
            file.write(_line({"kind": "end", "status": status, **values}))
    update_run(folder, status=status)
    return status


def last_values(folder: Path) -> dict[str, dict[str, Any]]:
    """The last line of each kind in ``metrics.jsonl``; none where it cannot be read any more."""
    try:
        lines, _ = _complete_lines(folder / METRICS)
    except OSError:
        return {}
    return {value["kind"]: value for value in map(json.loads, lines)}


def _complete_lines(path: Path) -> tuple[list[bytes], bool]:
    """All lines that were written to their end, and whether something follows them."""
    lines = path.read_bytes().splitlines(keepends=True)
    torn = bool(lines) and not lines[-1].endswith(b"\n")
    return (lines[:-1] if torn else lines), torn


def _line(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, allow_nan=False) + "\n").encode()


def _finite(name: str, value: float) -> dict[str, Any]:
    """A number, or null where strict JSON has none; a loss also says what it was."""
    if math.isfinite(value):
        return {name: value}
    if name != "loss":
        return {name: None}
    return {name: None, "nonfinite": "nan" if math.isnan(value) else f"{value:+}"}


class RunRecord:
    """What one process (rank 0) writes while the run goes on.

    Safe to end from another thread at any moment: after :meth:`end` nothing more is written.
    """

    def __init__(self, folder: Path, scalars: Scalars | None = None) -> None:
        self._folder = folder
        self._file = os.open(folder / METRICS, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._scalars = scalars
        self._lock = threading.Lock()
        self._ended = False

    def train(
        self,
        step: int,
        *,
        loss: float,
        grad_norm: float,
        lr: float,
        tokens: int,
        step_time_s: float,
        peak_bytes: int,
        step_tokens: int,
    ) -> None:
        """Record a training step; ``tokens`` counts from the start, ``step_tokens`` this step."""
        self._write(
            {
                "kind": "train",
                "step": step,
                **_finite("loss", loss),
                **_finite("grad_norm", grad_norm),
                "lr": lr,
                "tokens": tokens,
                "step_time_s": step_time_s,
                "peak_bytes": peak_bytes,
            }
        )
        self._scalar("lm loss", loss, step)
        self._scalar("grad-norm", grad_norm, step)
        self._scalar("learning-rate", lr, step)
        self._scalar("iteration-time", step_time_s, step)
        self._scalar("tokens-per-second", step_tokens / max(step_time_s, 1e-9), step)
        self._scalar("peak-memory-bytes", peak_bytes, step)

    def resumed(self, step: int) -> None:
        """Record that the run goes on from a checkpoint after a step."""
        self._write({"kind": "resume", "step": step})

    def evaluation(self, step: int, loss: float) -> None:
        """Record an evaluation after a step."""
        self._write({"kind": "eval", "step": step, **_finite("loss", loss)})
        self._scalar("lm loss validation", loss, step)
        if self._scalars is not None:
            self._scalars.flush()

    def end(self, status: str, **values: Any) -> None:
        """Write the last line and the status; what comes after it is dropped."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            self._append(_line({"kind": "end", "status": status, **values}))
        update_run(self._folder, status=status)
        if self._scalars is not None:
            self._scalars.flush()

    def _write(self, values: dict[str, Any]) -> None:
        with self._lock:
            if not self._ended:
                self._append(_line(values))

    def _append(self, line: bytes) -> None:
        """Write a line to its end: what a full disk cuts off must be an error, not a torn line."""
        while line:
            line = line[os.write(self._file, line) :]

    def _scalar(self, tag: str, value: float, step: int) -> None:
        if self._scalars is not None:
            self._scalars.add_scalar(tag, value, step)
