"""Planning answers at once: processor time of whole commands, the best of a few runs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

DEEPSEEK = ["plan", "deepseek-v3", "--pp", "16", "--vpp", "2", "--layout", "Et*3|(tt|)*29,m|L"]


def processor_seconds(arguments: list[str]) -> float:
    """User and system time of one run, the interpreter's start included."""
    child = subprocess.Popen(
        [sys.executable, "-m", "mfsdp_cli", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize(
    ("arguments", "limit"),
    [(["--help"], 0.3), (DEEPSEEK, 0.6), ([*DEEPSEEK, "--json"], 0.6)],
    ids=["help", "plan", "json"],
)
def test_time_of_a_command(arguments: list[str], limit: float) -> None:
    """Two processes may share a core here: time is the process's own, and the best of five."""
    best = min(processor_seconds(arguments) for _ in range(5))
    assert best < limit
