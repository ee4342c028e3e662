from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mfsdp_cli.runtime import launch
from mfsdp_cli.runtime.hosts import Hosts
from mfsdp_cli.runtime.job import Job
from mfsdp_cli.runtime.launch import run_workers
from mfsdp_cli.runtime.report import finding_of
from mfsdp_cli.runtime.settings import TrainSettings

WORKER = "tests.helpers.failing_worker"


@pytest.mark.parametrize(
    ("how", "code", "message"),
    [
        ("raise", "MF512", "rank 1: ValueError: the rank's own words"),
        ("refuse", "MF506", "a token"),
        ("kill", "MF512", "rank 1: was killed by SIGKILL"),
        ("exit", "MF512", "rank 1: left with code 7"),
    ],
)
def test_the_rank_that_died_is_named_first_and_soon(
    how: str, code: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    status, failures = run_workers(WORKER, {"MFSDP_TEST_FAIL": how}, 2, Hosts())
    assert time.monotonic() - began < 30  # most of it is the start of two processes
    assert status == launch.FAILED
    assert failures[0].rank == 1
    finding = finding_of(failures[0], others=0)
    assert (finding.code, finding.message) == (code, message)
    assert capfd.readouterr() == ("", ""), "the launcher and the ranks say nothing of their own"


def test_a_run_that_goes_well_has_no_failures_and_changes_no_environment() -> None:
    before = dict(os.environ)
    assert run_workers(WORKER, {"MFSDP_TEST_FAIL": "nothing"}, 2, Hosts()) == ("completed", [])
    assert dict(os.environ) == {
        **before,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"],
    }


def test_a_hang_up_that_is_ignored_ends_nothing() -> None:
    """What ``nohup`` is for; torch's launcher by itself would obey."""
    script = (
        "import signal\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "from mfsdp_cli.runtime.hosts import Hosts\n"
        "from mfsdp_cli.runtime.launch import run_workers\n"
        f"status, _ = run_workers({WORKER!r}, {{'MFSDP_TEST_FAIL': 'hang up'}}, 2, Hosts())\n"
        "assert status == 'completed', status\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_a_worker_whose_launcher_was_gone_before_it_looked() -> None:
    script = "import time\nfrom mfsdp_cli.runtime.watch import Watch\nWatch()\ntime.sleep(60)\n"
    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"],
        capture_output=True,
        text=True,
        check=True,
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "MFSDP_LAUNCHER": gone.stdout.strip()},
        timeout=20,
        check=False,
    )
    assert done.returncode == 1


def test_a_job_survives_its_way_through_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(
        plan=tmp_path / "p.json",
        plan_digest="d",
        run_dir=tmp_path / "run",
        engine="distopt",
        settings=TrainSettings(lr=1 / 3, seed=2**62),
        data=("a b", "ü"),
    )
    monkeypatch.setenv("MFSDP_JOB", job.to_json())
    again: Any = Job.from_environment()
    assert again == job
