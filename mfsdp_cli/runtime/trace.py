"""What a rank executed: its actions in order, with time and the communication inside each."""

from __future__ import annotations

import time
from typing import Any

from mfsdp_cli.fsdp import Event
from mfsdp_cli.schedule.actions import Action


class Trace:
    """Collects one record an action. ``Trace(enabled=False)`` costs a comparison an action."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.records: list[dict[str, Any]] = []
        self._step = 0
        self._open = False

    def begin_step(self, step: int) -> None:
        self._step = step

    def begin(self, action: Action) -> None:
        if self.enabled:
            self._open = True
            self.records.append(
                {
                    "step": self._step,
                    "action": str(action),
                    "start_s": time.perf_counter(),
                    "events": [],
                }
            )

    def end(self) -> None:
        if self.enabled:
            self.records[-1]["end_s"] = time.perf_counter()
            self._open = False

    def event(self, event: Event) -> None:
        """A gather or reduction that the engine issued; evaluation is not inside an action."""
        if self._open:
            self.records[-1]["events"].append(
                {"operation": event.operation, "unit": event.unit, "bytes": event.bytes}
            )
