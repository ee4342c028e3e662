"""Writing files whole or not at all, and never over what a command reads."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

from mfsdp_cli.errors import MfsdpError


def write_whole(path: Path, data: str | bytes) -> None:
    """Write a file through a neighbour that takes its place, so that no half of it ever shows.

    A link is followed; a device or a pipe is written to, since it cannot be replaced.

    Raises:
        OSError: what the system said; the file is as it was before.
    """
    content = data.encode() if isinstance(data, str) else data
    target = Path(os.path.realpath(path))
    mode = _mode(target)
    if mode is not None and not stat.S_ISREG(mode):
        target.write_bytes(content)
        return
    if mode is not None and not os.access(target, os.W_OK):
        raise PermissionError(13, "it is write-protected")
    handle, name = tempfile.mkstemp(prefix=".mfsdp-", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(name, 0o666 & ~_umask() if mode is None else stat.S_IMODE(mode))
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


def refuse_same_file(
    flag: str, path: Path | None, others: Iterable[tuple[str, str | Path | None]]
) -> None:
    """Raise MF207 where a file to be written is another one of the command, by whatever name.

    Args:
        flag: the flag that names ``path``; None: not given.
        others: what each other file is, and its path; None, or no such file: nothing to lose.
    """
    for what, other in others:
        if path is None or other is None or not os.path.isfile(other):
            continue
        if os.path.realpath(path) == os.path.realpath(other):
            raise MfsdpError(
                "MF207",
                f"{flag} {path} would overwrite {what}",
                where=f"{flag} {path}",
                hint="name another file",
            )


def _mode(path: Path) -> int | None:
    """Type and permissions of what is there; None: nothing."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def _umask() -> int:
    """The process's umask; it can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
