"""Lines of text files of any size, encoding and kind, one at a time."""

from __future__ import annotations

import codecs
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from mfsdp_cli.errors import MfsdpError

#: A longer line is no record of a run; what is beyond is skipped without being held.
MAX_LINE = 4 * 2**20
#: A longer line is no record of a text log (JSON rows may be longer).
MAX_RECORD = 2**16

_BYTE_ORDER_MARKS = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}


@dataclass(frozen=True)
class Line:
    """One line without its end.

    Attributes:
        text: decoded; bytes that are no text became replacement characters.
        ended: False for a last line without a line end: it may be cut anywhere.
        too_long: whether the rest beyond :data:`MAX_LINE` was left out.
    """

    text: str
    ended: bool = True
    too_long: bool = False


def require_file(path: Path) -> None:
    """Refuse what cannot be read twice: missing, unreadable, a device or a pipe.

    Raises:
        MfsdpError: MF601 if there is nothing there, MF602 if it cannot be read.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise MfsdpError("MF601", "no such file or folder", where=str(path)) from None
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise MfsdpError(
            "MF602",
            "neither a regular file nor a folder",
            where=str(path),
            hint="write the pipe's or device's content to a file first",
        )


def unreadable(path: Path, error: Exception) -> MfsdpError:
    """The error for a file that the system does not let us read."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return MfsdpError("MF602", f"cannot be read: {reason}", where=str(path))


def head(path: Path, size: int) -> bytes:
    """The first ``size`` bytes, fewer if the file is shorter."""
    try:
        with path.open("rb") as file:
            return file.read(size)
    except OSError as error:
        raise unreadable(path, error) from None


def lines(path: Path) -> Iterator[Line]:
    """Every line of a file, with at most :data:`MAX_LINE` bytes held at a time."""
    try:
        with path.open("rb") as file:
            encoding = _BYTE_ORDER_MARKS.get(file.read(2))
            if encoding:
                yield from _wide_lines(file, encoding)
            else:
                file.seek(0)
                yield from _byte_lines(file)
    except OSError as error:
        raise unreadable(path, error) from None


def _byte_lines(file: BinaryIO) -> Iterator[Line]:
    """Lines of UTF-8, or of any encoding that agrees with it on ASCII."""
    first = True
    while raw := file.readline(MAX_LINE):
        if first:
            raw, first = raw.removeprefix(codecs.BOM_UTF8), False
        too_long = len(raw) >= MAX_LINE and not raw.endswith(b"\n")
        ended = _skip_rest(file) if too_long else raw.endswith(b"\n")
        yield Line(raw.decode("utf-8", "replace").rstrip("\r\n"), ended, too_long)


def _skip_rest(file: BinaryIO) -> bool:
    """Skip to the next line; whether the line ended at all."""
    while raw := file.readline(MAX_LINE):
        if raw.endswith(b"\n"):
            return True
    return False


def _wide_lines(file: BinaryIO, encoding: str) -> Iterator[Line]:
    """Lines of UTF-16, as some shells write when output is redirected."""
    text = codecs.getreader(encoding)(file, "replace")
    while line := text.readline(MAX_LINE, keepends=True):
        yield Line(line.rstrip("\r\n"), line.endswith("\n"))
