"""Where ranks run: hosts that can meet, and the rank that the environment names."""

from __future__ import annotations

import pytest

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.runtime.hosts import Hosts, Joined, joined, slurm_variables

MEET = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"RANK": "3", "WORLD_SIZE": "4", **MEET}, Joined(3, 4)),
        ({"RANK": "x"}, None),  # without WORLD_SIZE it is somebody else's
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),  # the batch script, not a step
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, None),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "8"}, Joined(5, 8)),
    ],
)
def test_the_environment_says_whether_ranks_were_started(
    environment: dict[str, str], expected: Joined | None
) -> None:
    assert joined(environment) == expected


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "abc", "WORLD_SIZE": "2", **MEET}, "RANK=abc WORLD_SIZE=2 names no rank"),
        ({"RANK": "0", "WORLD_SIZE": "", **MEET}, "RANK=0 WORLD_SIZE= names no rank"),
        ({"RANK": "2", "WORLD_SIZE": "2", **MEET}, "RANK=2 WORLD_SIZE=2: there is no such rank"),
        ({"RANK": "-1", "WORLD_SIZE": "2", **MEET}, "there is no such rank"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "MASTER_ADDR is not"),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "head"}, "MASTER_PORT is not"),
        ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "x"}, "SLURM_PROCID= SLURM_NTASKS=x names no"),
        ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}, "SLURM_PROCID= SLURM_NTASKS=2 names no"),
    ],
)
def test_an_environment_that_names_no_rank(environment: dict[str, str], words: str) -> None:
    with pytest.raises(MfsdpError, match=words) as caught:
        joined(environment)
    assert caught.value.finding.code == "MF508"


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
    assert slurm_variables({**slurm, "RANK": "5"}) == {}
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
        (Hosts(2, 0, "nowhere"), "cannot meet at 'nowhere': it is no HOST:PORT"),
        (Hosts(2, 0, "head:"), "cannot meet at 'head:': it is no HOST:PORT"),
        (Hosts(2, 0, ":29500"), "cannot meet at ':29500': it is no HOST:PORT"),
        (Hosts(2, 0, "localhost:0"), "it is no HOST:PORT"),
        (Hosts(2, 0, "localhost:65536"), "it is no HOST:PORT"),
        (Hosts(1, 0, "x:y:z"), "it is no HOST:PORT"),
        (Hosts(2, 0, "nobody.invalid:29500"), "'nobody.invalid' has no address"),
        (Hosts(2, 0, "a" * 64 + ".b:29500"), "has no address"),
    ],
)
def test_hosts_that_cannot_be_are_named(hosts: Hosts, words: str) -> None:
    with pytest.raises(MfsdpError, match=words) as caught:
        hosts.check(4)
    assert caught.value.finding.code == "MF508"


def test_hosts_that_can_be_pass() -> None:
    Hosts().check(5)
    Hosts(1, 0, "localhost:0").check(5)
    Hosts(2, 1, "localhost:29500").check(4)
    Hosts(2, 1, "[::1]:29500").check(4)
