"""Start the ranks of a run with torch's elastic launcher, or join one that was started already.

Started plainly, this process becomes the launcher: it starts one worker a rank
(:mod:`mfsdp_cli.runtime.worker`), waits, and says how it ended. Under ``torchrun`` or ``srun``
the environment says which rank this is, and the process itself is the worker.

Imports torch when it launches, not before.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mfsdp_cli.errors import ExitCode, Finding, MfsdpError, Severity
from mfsdp_cli.runtime import job as job_
from mfsdp_cli.runtime.job import Job
from mfsdp_cli.runtime.record import finish, last_values
from mfsdp_cli.runtime.report import Report, read_reports

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

COMPLETED = "completed"
FAILED = "failed"
NAN = "nan"
INTERRUPTED = "interrupted"
WORKER = "mfsdp_cli.runtime.worker"
_SHUTDOWN_S = "5"
_TERMINATED = (128 + signal.SIGTERM, -signal.SIGTERM)


@dataclass(frozen=True)
class Hosts:
    """Where the ranks run.

    Args:
        nnodes: number of hosts.
        node_rank: this host's number.
        rdzv_endpoint: ``host:port`` where hosts meet; needed with more than one.
    """

    nnodes: int = 1
    node_rank: int = 0
    rdzv_endpoint: str = ""

    def check(self, world_size: int) -> None:
        """Raise MF508 for hosts that cannot hold the ranks evenly or cannot meet."""
        where = f"--nnodes {self.nnodes} --node-rank {self.node_rank}"
        if self.nnodes < 1 or not 0 <= self.node_rank < self.nnodes:
            raise MfsdpError(
                "MF508", f"host {self.node_rank} of {self.nnodes} does not exist", where=where
            )
        if world_size % self.nnodes:
            raise MfsdpError(
                "MF508",
                f"{world_size} ranks do not divide into {self.nnodes} hosts",
                where=where,
            )
        if self.nnodes > 1 and ":" not in self.rdzv_endpoint:
            raise MfsdpError(
                "MF508",
                f"{self.nnodes} hosts need a place to meet",
                where=where,
                hint="pass --rdzv-endpoint HOST:PORT, the same on every host",
            )


@dataclass(frozen=True)
class Joined:
    """This process among ranks that somebody else started."""

    rank: int
    world_size: int


def joined(environment: Mapping[str, str]) -> Joined | None:
    """The rank this process was started as by ``torchrun`` or ``srun``; None: started plainly.

    For Slurm, sets what torch's process groups read (``MASTER_ADDR`` must be given or be one
    that Slurm tells).
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return Joined(int(environment["RANK"]), int(environment["WORLD_SIZE"]))
    if "SLURM_STEP_ID" in environment and int(environment.get("SLURM_NTASKS", "1")) > 1:
        return Joined(int(environment["SLURM_PROCID"]), int(environment["SLURM_NTASKS"]))
    return None


def slurm_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables torch reads, from those that Slurm sets."""
    address = environment.get("MASTER_ADDR") or environment.get("SLURM_LAUNCH_NODE_IPADDR")
    if not address:
        raise MfsdpError(
            "MF508",
            "Slurm does not say where the ranks meet",
            hint="set MASTER_ADDR to the first host's name",
        )
    port = environment.get("MASTER_PORT", str(20000 + int(environment["SLURM_JOB_ID"]) % 20000))
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_NTASKS"],
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }


@dataclass(frozen=True)
class Outcome:
    """How a launched run ended.

    Args:
        status: the run folder's last word.
        failure: the first cause, where a rank failed.
        others: how many more ranks failed.
    """

    status: str
    failure: Report | None = None
    others: int = 0

    @property
    def exit_code(self) -> int:
        if self.status == INTERRUPTED:
            return ExitCode.INTERRUPTED
        if self.failure is not None:
            return self.failure.exit_code
        return ExitCode.OK if self.status == COMPLETED else ExitCode.PROBLEM


def launch(job: Job, world_size: int, hosts: Hosts) -> Outcome:
    """Start the ranks of this host and wait for their end; the run folder gets its last line.

    The folder is the first host's; another host tells its own ranks' status.
    """
    local = world_size // hosts.nnodes
    status, failures = run_workers(WORKER, {job_.ENVIRONMENT: job.to_json()}, local, hosts)
    first = failures[0] if status == FAILED and failures else None
    if hosts.node_rank == 0:
        reason = {} if first is None else {"reason": f"rank {first.rank}: {first.message}"}
        status = finish(job.run_dir, status, **reason)
    return Outcome(status, first, max(0, len(failures) - 1))


def run_workers(
    module: str, environment: Mapping[str, str], local: int, hosts: Hosts
) -> tuple[str, list[Report]]:
    """Run ``python -m module`` as every rank of this host, and wait.

    Args:
        environment: what the workers are told, besides their ranks.
        local: ranks on this host.

    Returns:
        ``completed``, ``failed`` or ``interrupted``, and what failed, the first cause first.
    """
    with (
        tempfile.TemporaryDirectory(prefix="mfsdp-") as reports,
        _environment({**_for_workers(local, reports, hosts), **environment}),
    ):
        status, report = _run_agent(module, local, hosts, Path(reports))
        failures = read_reports(Path(reports))
    if report is not None and (not failures or failures[0].consequence):
        failures.insert(0, report)
    return status, failures


def join(job: Job) -> str:
    """Be the rank that the environment says, inside this process; returns the status."""
    from mfsdp_cli.runtime.watch import Watch
    from mfsdp_cli.runtime.worker import run

    if "RANK" not in os.environ:
        os.environ.update(slurm_variables(os.environ))
    return run(job, Watch())


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for the processes that start inside; what was set before comes back."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _for_workers(local: int, reports: str, hosts: Hosts) -> dict[str, str]:
    """What the workers are told by their environment, whatever they do."""
    values = {job_.REPORTS: reports, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": _SHUTDOWN_S}
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        values["OMP_NUM_THREADS"] = str(max(1, (cores or 1) // local))
    if "OMP_WAIT_POLICY" not in os.environ:
        # Threads that spin while they wait are 30 times slower where other work wants the cores.
        values["OMP_WAIT_POLICY"] = "PASSIVE"
    loopback = _loopback()
    if hosts.nnodes == 1 and loopback and "GLOO_SOCKET_IFNAME" not in os.environ:
        # A host whose name does not resolve still has this interface.
        values["GLOO_SOCKET_IFNAME"] = loopback
    return values


def _loopback() -> str | None:
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), None)


def _run_agent(module: str, local: int, hosts: Hosts, reports: Path) -> tuple[str, Report | None]:
    """Run the workers under torch's agent; the status, and a rank that died without a word."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _quiet_launcher()
    config = LaunchConfig(
        min_nodes=hosts.nnodes,
        max_nodes=hosts.nnodes,
        nproc_per_node=local,
        run_id="mfsdp" if hosts.nnodes > 1 else uuid.uuid4().hex,
        rdzv_backend="static" if hosts.nnodes > 1 else "c10d",
        rdzv_endpoint=hosts.rdzv_endpoint or "localhost:0",
        rdzv_configs={"rank": hosts.node_rank, "timeout": 300} if hosts.nnodes > 1 else {},
        local_addr="localhost" if hosts.nnodes == 1 else None,
        max_restarts=0,
    )
    command = (sys.executable, "-m", module)
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        return FAILED, _silent_death(error.failures, reports)
    except (SignalException, KeyboardInterrupt):
        return INTERRUPTED, None
    return COMPLETED, None  # or what the last line of the run folder says


def _quiet_launcher() -> None:
    """Torch's launcher logs each death in its own words; ours come from the reports."""
    import logging

    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _silent_death(failures: Mapping[int, ProcessFailure], reports: Path) -> Report | None:
    """A report for a rank that could not write one: it was killed, or left the process.

    Not for ranks that the launcher itself terminated once another had failed.
    """
    written = {report.rank for report in read_reports(reports)}
    for rank, failure in sorted(failures.items()):
        if rank in written or failure.exitcode in _TERMINATED:
            continue
        how = f"left with code {failure.exitcode}"
        if failure.exitcode < 0:
            how = f"was killed by {failure.signal_name()}"
        return Report(rank, "", how, "", int(failure.timestamp) * 10**9)
    return None


def summary(run_dir: Path, status: str) -> str:
    """One line that says what a run came to."""
    last = last_values(run_dir)
    parts = [f"{run_dir}: {status}"]
    if "train" in last:
        train = last["train"]
        parts.append(f"step {train['step']}, loss {_number(train['loss'])}")
    if "eval" in last:
        parts.append(f"validation loss {_number(last['eval']['loss'])}")
    return ", ".join(parts)


def not_finite(run_dir: Path) -> Finding:
    """What is said last where a run ended because its loss was not finite."""
    last = last_values(run_dir)
    step = last["end"].get("step")
    return Finding(
        "MF513",
        Severity.ERROR,
        f"the loss is not finite at step {step}: the run ended there",
        hint="a lower --lr, a longer --lr-warmup-steps or a smaller --clip-grad usually helps",
        where=str(run_dir),
    )


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"
