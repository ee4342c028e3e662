"""Standard streams that are closed, full, cut off or narrow: the exit code says what happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PLAN = "plan llama-tiny --pp 1"
FULL = "/dev/full"


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command line in a shell, where ``mfsdp`` is the command; pipes report the first failure."""
    script = f"set -o pipefail; mfsdp() {{ '{sys.executable}' -m mfsdp_cli \"$@\"; }}; {command}"
    return subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "NO_COLOR": "1", **environment},
        stdin=subprocess.DEVNULL,
        check=False,
    )


@pytest.mark.parametrize("flags", [PLAN, f"{PLAN} --json", "plan --help", "--version"])
def test_a_reader_that_leaves_is_no_error(flags: str) -> None:
    done = shell(f"mfsdp {flags} | true")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("flags", [PLAN, f"{PLAN} --json", "--help"])
def test_a_full_disk_is_named(flags: str) -> None:
    done = shell(f"mfsdp {flags} > {FULL}")
    assert done.returncode == 2
    expected = "error[MF902]: cannot write to standard output: No space left on device\n"
    assert done.stderr == expected


@pytest.mark.parametrize("flags", [PLAN, f"{PLAN} --json"])
def test_a_closed_standard_output_is_named(flags: str) -> None:
    done = shell(f"mfsdp {flags} >&-")
    assert done.returncode == 2
    assert done.stderr == "error[MF902]: cannot write to standard output: it is closed\n"


def test_a_closed_standard_output_does_not_run_into_the_plan(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    shell(f"mfsdp {PLAN} --json --out '{file}' <&- >&- 2>&-")
    assert json.loads(file.read_text())["schema"] == "mfsdp.plan/1"


@pytest.mark.parametrize("where", ["2>&-", f"2>{FULL}"])
@pytest.mark.parametrize(("flags", "code"), [("plan llama-tiny --pp 2", 0), ("plan nosuch", 2)])
def test_a_message_that_cannot_be_shown_changes_nothing(flags: str, code: int, where: str) -> None:
    assert shell(f"mfsdp {flags} {where}").returncode == code


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_narrow_encoding_is_no_error(encoding: str) -> None:
    done = shell(f"mfsdp {PLAN}", PYTHONIOENCODING=encoding)
    assert done.returncode == 0
    assert "????" in done.stdout  # the bar of a rank's memory


def test_a_file_name_that_is_no_unicode(tmp_path: Path) -> None:
    config = Path(__file__).parent / "data/configs/llama-3.2-1b.json"
    done = shell(f"cp '{config}' $'{tmp_path}/\\xff.json'; mfsdp plan $'{tmp_path}/\\xff.json'")
    assert done.returncode == 0
    assert done.stdout.startswith("?: 1.24B parameters\n")


def test_a_traceback_on_request_keeps_the_exit_code() -> None:
    done = shell("mfsdp plan nosuch", MFSDP_DEBUG="1")
    assert done.returncode == 2
    assert done.stderr.startswith("Traceback")
    assert "error[MF411]: 'nosuch' is neither a preset nor a file" in done.stderr
