"""Standard streams that may be closed, full, cut off or of a narrow encoding.

A reader that goes away (``| head``) is no error of ours, a full disk is one to be named, and a
message that cannot be shown must not change how a command ends.
"""

from __future__ import annotations

import os
import sys
from typing import IO, Any, cast

from mfsdp_cli.errors import ExitCode, MfsdpError


def guard_streams() -> None:
    """Put a :class:`Guarded` stream in the place of standard output and of standard error.

    Both must be there before anything else opens a file: a closed descriptor would be taken by it,
    and data meant for a plan would mix with what is printed.
    """
    sys.stdout = cast("IO[str]", GuardedOutput(sys.stdout))
    sys.stderr = cast("IO[str]", GuardedError(sys.stderr))


class Guarded:
    """A text stream; what the wrapped one cannot take is handed to :meth:`_failed`.

    Args:
        stream: the stream; None where the process was started with a closed descriptor.
    """

    def __init__(self, stream: IO[str] | None) -> None:
        self.missing = stream is None
        self._stream = open(os.devnull, "w") if stream is None else stream  # noqa: SIM115
        if hasattr(self._stream, "reconfigure"):
            # A bar that ASCII has no sign for, a file name that is no Unicode: shown as "?".
            self._stream.reconfigure(errors="replace")

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._failed(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._failed(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _failed(self, error: OSError) -> None:
        """Nothing more can be written: what is still buffered must not fail again at the exit."""
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)


class GuardedOutput(Guarded):
    """Standard output: data that cannot be written is an error, a reader that left is none."""

    def write(self, text: str) -> int:
        if self.missing:
            raise _unwritable("it is closed")
        return super().write(text)

    def _failed(self, error: OSError) -> None:
        super()._failed(error)
        if isinstance(error, BrokenPipeError):
            raise SystemExit(ExitCode.OK) from error
        raise _unwritable(error.strerror or str(error)) from error


class GuardedError(Guarded):
    """Standard error: what cannot be said there is left unsaid."""


def _unwritable(reason: str) -> MfsdpError:
    return MfsdpError("MF902", f"cannot write to standard output: {reason}")
