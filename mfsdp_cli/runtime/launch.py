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

from mfsdp_cli.errors import ExitCode, Finding, Severity
from mfsdp_cli.output import output
from mfsdp_cli.runtime import job as job_
from mfsdp_cli.runtime.hosts import Hosts, slurm_variables
from mfsdp_cli.runtime.job import Job
from mfsdp_cli.runtime.record import finish, last_values
from mfsdp_cli.runtime.report import Report, read_reports
from mfsdp_cli.runtime.watch import obeyed

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

COMPLETED = "completed"
FAILED = "failed"
NAN = "nan"
INTERRUPTED = "interrupted"
WORKER = "mfsdp_cli.runtime.worker"
_SHUTDOWN_S = "5"
#: Starts a worker with SIGINT ignored until it has its own handler (runtime/watch.py): a Ctrl-C
#: that comes while Python starts is the launcher's to pass on, and no traceback of the worker's.
_SHELL = ("/bin/sh", "-c", 'trap "" INT; exec "$@"', "mfsdp-worker")
_TERMINATED = (128 + signal.SIGTERM, -signal.SIGTERM)


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
    try:
        status, failures = run_workers(WORKER, {job_.ENVIRONMENT: job.to_json()}, local, hosts)
    except KeyboardInterrupt:  # before the launcher's own handlers were there
        status, failures = INTERRUPTED, []
    except Exception as error:
        _finish(job, hosts, FAILED, f"{type(error).__name__}: {error}")
        raise
    first = failures[0] if status == FAILED and failures else None
    reason = "" if first is None else f"rank {first.rank}: {first.message}"
    status = _finish(job, hosts, status, reason)
    return Outcome(status, first, max(0, len(failures) - 1))


def _finish(job: Job, hosts: Hosts, status: str, reason: str) -> str:
    """The run's status, after its last line was written, which the first host does.

    A folder that cannot be written any more must not hide why the run ended.
    """
    if hosts.node_rank != 0:
        return status
    try:
        return finish(job.run_dir, status, **({"reason": reason} if reason else {}))
    except OSError as error:
        output.log(f"{job.run_dir} has no last line: {error.strerror or error}")
        return status


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
    values = {
        job_.REPORTS: reports,
        job_.LAUNCHER: str(os.getpid()),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": _SHUTDOWN_S,
    }
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
        signals_to_handle=",".join(_launchers_signals()),
    )
    try:
        elastic_launch(config, _SHELL[0])(*_SHELL[1:], sys.executable, "-m", module)
    except ChildFailedError as error:
        return FAILED, _silent_death(error.failures, reports)
    except (SignalException, KeyboardInterrupt):
        return INTERRUPTED, None
    return COMPLETED, None  # or what the last line of the run folder says


def _launchers_signals() -> list[str]:
    """What torch's launcher handles; it passes its signal on to the workers.

    SIGINT is left to Python, which raises KeyboardInterrupt: then the launcher ends the workers
    with SIGTERM, which they obey from their first moment.
    """
    obeys = [number.name for number in obeyed() if number != signal.SIGINT]
    return [*obeys, signal.SIGQUIT.name]


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
    step = last.get("end", {}).get("step")
    return Finding(
        "MF513",
        Severity.ERROR,
        f"the loss is not finite at step {step}: the run ended there",
        hint="a lower --lr, a longer --lr-warmup-steps or a smaller --clip-grad usually helps",
        where=str(run_dir),
    )


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"
