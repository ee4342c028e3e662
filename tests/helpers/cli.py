"""Run the installed command as a person would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def mfsdp(
    *arguments: str | Path,
    code: int | None = 0,
    cwd: Path | None = None,
    timeout: float = 300,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """``python -m mfsdp_cli ARGUMENTS``; asserts the exit code unless ``code`` is None."""
    result = subprocess.run(
        [sys.executable, "-m", "mfsdp_cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=timeout,
        env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1", **environment},
        stdin=subprocess.DEVNULL,
        check=False,
    )
    if code is not None:
        assert result.returncode == code, (
            f"exit code {result.returncode}, expected {code}\n{result.stdout}\n{result.stderr}"
        )
    return result
