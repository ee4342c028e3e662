"""What a rank of a numeric run is told, as JSON. Knows no torch."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ENVIRONMENT = "MFSDP_CAPTURE"
#: The names under which the reference saves its further trainings, by the order they add up in.
FLOORS = ("floor", "floor-2", "floor-3")
FLOOR = FLOORS[0]


@dataclass(frozen=True)
class Capture:
    """What a rank is told.

    Args:
        folder: where the files go; ``plan.json`` is in it.
        full: use the plan's model and sizes instead of the proxy.
        ranks_per_device: ranks that share one GPU.
    """

    folder: str
    engine: str
    steps: int
    backend: str
    full: bool
    seed: int = 1234
    ranks_per_device: int = 1

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_environment(cls) -> Capture:
        return cls(**json.loads(os.environ[ENVIRONMENT]))

    def of(self, engine: str) -> Capture:
        """The same run of another engine."""
        return replace(self, engine=engine)

    def file(self, rank: int, step: int) -> Path:
        return Path(self.folder, f"{self.engine}-{rank}-{step}.pt")
