from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.runtime import launch
from mfsdp_cli.runtime.job import Job
from mfsdp_cli.runtime.launch import Hosts, Joined, joined, run_workers, slurm_variables
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


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"RANK": "3", "WORLD_SIZE": "4"}, Joined(3, 4)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),  # the batch script, not a step
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, None),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "8"}, Joined(5, 8)),
    ],
)
def test_the_environment_says_whether_ranks_were_started(
    environment: dict[str, str], expected: Joined | None
) -> None:
    assert joined(environment) == expected


def test_slurms_variables_become_torchs() -> None:
    slurm = {
        "SLURM_PROCID": "5",
        "SLURM_NTASKS": "8",
        "SLURM_LOCALID": "1",
        "SLURM_JOB_ID": "40001",
        "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
    }
    assert slurm_variables(slurm) == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "20001",
    }
    assert slurm_variables({**slurm, "MASTER_ADDR": "head"})["MASTER_ADDR"] == "head"
    del slurm["SLURM_LAUNCH_NODE_IPADDR"]
    with pytest.raises(MfsdpError, match="does not say where"):
        slurm_variables(slurm)


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        (Hosts(0), "host 0 of 0 does not exist"),
        (Hosts(2, 2, "a:1"), "host 2 of 2 does not exist"),
        (Hosts(2, -1, "a:1"), "host -1 of 2 does not exist"),
        (Hosts(3, 0, "a:1"), "4 ranks do not divide into 3 hosts"),
        (Hosts(2, 0), "2 hosts need a place to meet"),
        (Hosts(2, 0, "nowhere"), "2 hosts need a place to meet"),
    ],
)
def test_hosts_that_cannot_be_are_named(hosts: Hosts, words: str) -> None:
    with pytest.raises(MfsdpError, match=words) as caught:
        hosts.check(4)
    assert caught.value.finding.code == "MF508"


def test_hosts_that_can_be_pass() -> None:
    Hosts().check(5)
    Hosts(2, 1, "head:29500").check(4)


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
