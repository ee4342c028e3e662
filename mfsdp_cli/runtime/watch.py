"""Ends a worker at once when it is told to, or when whoever started it is gone.

The main thread may sit in a collective for as long as its peers do, and Python runs signal
handlers in the main thread only. So signals wake a thread of their own, which says its last words
and leaves the process without asking the main thread. Knows no torch: it is armed before the slow
imports.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable

from mfsdp_cli.runtime.job import LAUNCHER

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_S = 1.0


def obeyed() -> list[signal.Signals]:
    """The signals that end a run: not a hang-up that is ignored, as under ``nohup``."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in SIGNALS if number != signal.SIGHUP or not ignored]


class Watch:
    """Armed on construction, in the main thread.

    ``last_words`` is called with the signal, or with None where the parent process is gone: the
    launcher that the environment names, for it may be gone before this process looks.
    """

    def __init__(self) -> None:
        self.last_words: Callable[[signal.Signals | None], None] | None = None
        self._parent = int(os.environ.get(LAUNCHER, os.getppid()))
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        for number in obeyed():
            signal.signal(number, _ignore)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._run, name="mfsdp-watch", daemon=True).start()

    def orphaned(self) -> bool:
        """Whether the process that started this one is gone."""
        return os.getppid() != self._parent

    def _run(self) -> None:
        while True:
            ready, _, _ = select.select([self._read], [], [], _POLL_S)
            if ready:
                number = signal.Signals(os.read(self._read, 1)[0])
                if number in SIGNALS:
                    self._leave(number)
            elif self.orphaned():
                self._leave(None)

    def _leave(self, number: signal.Signals | None) -> None:
        code = 1 if number is None else 128 + number
        try:
            if self.last_words is not None:
                self.last_words(number)
        finally:
            os._exit(code)


def _ignore(number: int, frame: object) -> None:
    """A handler in Python, so that the wake-up descriptor is written."""
