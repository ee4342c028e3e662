"""One rank of a run: ``python -m mfsdp_cli.runtime.worker``, started by the launcher.

Says nothing but rank 0's progress; an error goes into a report that the launcher shows.
"""

from __future__ import annotations

import os
import signal
import sys

from mfsdp_cli.errors import ExitCode
from mfsdp_cli.runtime.job import REPORTS, Job
from mfsdp_cli.runtime.report import write_report
from mfsdp_cli.runtime.watch import Watch

INTERRUPTED = "interrupted"
FAILED = "failed"


def main() -> int:
    """Run this rank of the job in the environment; returns the exit code."""
    watch = Watch()
    try:
        run(Job.from_environment(), watch)
    except BaseException as error:
        write_report(int(os.environ.get("RANK", "0")), error)
        return ExitCode.PROBLEM
    return ExitCode.OK


def run(job: Job, watch: Watch) -> str:
    """Train as one rank; returns the run's status.

    A launcher of ours gives a run that was terminated its last line; where there is none
    (``torchrun``, Slurm), rank 0 does it.
    """
    from mfsdp_cli.runtime.session import Session

    session = Session(job)
    launched = REPORTS in os.environ

    def last_words(number: signal.Signals | None) -> None:
        if number == signal.SIGINT or not launched:
            session.end(INTERRUPTED)
        elif number is None:
            session.end(FAILED, reason="the launcher is gone")

    watch.last_words = last_words
    try:
        return session.run()
    except BaseException as error:
        if not launched or watch.orphaned():
            session.end(FAILED, reason=f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Without destructors: threads of process groups may otherwise wait for peers that are gone.
    os._exit(code)
