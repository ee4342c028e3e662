"""What a worker process is told, as JSON. Knows no torch."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from mfsdp_cli.runtime.settings import TrainSettings

ENVIRONMENT = "MFSDP_JOB"
REPORTS = "MFSDP_REPORTS"
LAUNCHER = "MFSDP_LAUNCHER"


@dataclass(frozen=True)
class Job:
    """One run.

    Args:
        plan: the plan's file; absolute.
        plan_digest: what the plan was when the run was started.
        run_dir: the run folder; absolute.
        backend: ``gloo`` or ``nccl``.
        ranks_per_device: ranks that share one GPU.
        data: what ``--data`` named.
        save_interval: save a checkpoint after every so many steps; 0: never.
        resume: go on from the run folder's latest checkpoint.
    """

    plan: Path
    plan_digest: str
    run_dir: Path
    engine: str
    settings: TrainSettings
    backend: str = "gloo"
    ranks_per_device: int = 1
    data: tuple[str, ...] = ()
    tokenizer: str = "bytes"
    tensorboard: bool = True
    progress: bool = True
    save_interval: int = 0
    resume: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> Job:
        values = json.loads(text)
        values["plan"] = Path(values["plan"])
        values["run_dir"] = Path(values["run_dir"])
        values["settings"] = TrainSettings(**values["settings"])
        values["data"] = tuple(values["data"])
        return cls(**values)

    @classmethod
    def from_environment(cls) -> Job:
        """The job that the launcher left for this process."""
        return cls.from_json(os.environ[ENVIRONMENT])
