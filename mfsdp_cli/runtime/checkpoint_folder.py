"""Checkpoints of a run on disk: which there are, and what they hold. Knows no torch.

::

    RUN_DIR/checkpoints/
        step-200/         a distributed checkpoint, and manifest.json: written last
        step-400.tmp/     being written, or cut off while it was
        latest            the name of the newest complete one

A save that is cut off leaves the one before as it is.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.files import write_whole
from mfsdp_cli.model.spec import ModelSpec

CHECKPOINTS = "checkpoints"
LATEST = "latest"
MANIFEST = "manifest.json"
SCHEMA = "mfsdp.checkpoint/1"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint.

    Args:
        folder: where it is.
        step: the optimizer step after which it was taken.
        model: the model's description, as JSON.
    """

    folder: Path
    step: int
    model: dict[str, Any]

    def check_model(self, spec: ModelSpec) -> None:
        """Raise MF531 naming what differs where the checkpoint is of another model."""
        mine = _comparable(spec)
        names = sorted(mine.keys() | self.model.keys())
        differing = [name for name in names if mine.get(name) != self.model.get(name)]
        if differing:
            first = differing[0]
            raise MfsdpError(
                "MF531",
                f"the checkpoint {self.folder} is of another model: {first} is"
                f" {self.model.get(first)!r} there and {mine.get(first)!r} in the plan"
                + (f", and {', '.join(differing[1:4])} differ too" if differing[1:] else ""),
                where=str(self.folder),
                hint="resume with a plan of the same model, or start a new --run-dir",
            )


def _comparable(spec: ModelSpec) -> dict[str, Any]:
    """What decides a model's tensors and numbers: everything but what it is called."""
    document = json.loads(json.dumps(asdict(spec), default=str))
    return {name: value for name, value in document.items() if name not in ("name", "assumptions")}


def latest(run_dir: Path) -> Checkpoint:
    """The newest complete checkpoint of a run.

    Raises:
        MfsdpError: MF530 where there is none, MF532 where it is damaged.
    """
    root = run_dir / CHECKPOINTS
    try:
        name = (root / LATEST).read_text().strip()
    except OSError as error:
        raise MfsdpError(
            "MF530",
            f"there is no checkpoint in {run_dir}",
            where="--resume",
            hint="a run saves with --save-interval STEPS",
        ) from error
    folder = root / name
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if manifest["schema"] != SCHEMA:
            raise ValueError(f"schema {manifest['schema']!r}")
        missing = [file for file in manifest["files"] if not (folder / file).is_file()]
        if missing:
            raise ValueError(f"{missing[0]} is missing")
        return Checkpoint(folder, int(manifest["step"]), dict(manifest["model"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MfsdpError(
            "MF532", f"the checkpoint {folder} is damaged: {error}", where=str(folder)
        ) from error


def partial(run_dir: Path, step: int) -> Path:
    """Where a checkpoint is written until it is complete."""
    return run_dir / CHECKPOINTS / f"step-{step}.tmp"


def begin(run_dir: Path, step: int) -> Path:
    """An empty folder to write a checkpoint to."""
    folder = partial(run_dir, step)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def complete(run_dir: Path, step: int, spec: ModelSpec) -> None:
    """Make what was written the latest checkpoint, in one piece."""
    root = run_dir / CHECKPOINTS
    written = partial(run_dir, step)
    document = {
        "schema": SCHEMA,
        "step": step,
        "model": _comparable(spec),
        "files": sorted(file.name for file in written.iterdir()),
    }
    write_whole(written / MANIFEST, json.dumps(document, indent=1) + "\n")
    final = root / f"step-{step}"
    if final.exists():
        shutil.rmtree(final)
    written.rename(final)
    write_whole(root / LATEST, final.name + "\n")
