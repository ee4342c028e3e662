"""A worker whose rank 1 fails as ``MFSDP_TEST_FAIL`` says while rank 0 waits for it.

Every worker starts with SIGINT ignored, or it would fail as well.
"""

from __future__ import annotations

import os
import signal
import sys
import time


def main() -> int:
    import torch
    import torch.distributed as dist

    from mfsdp_cli.errors import MfsdpError
    from mfsdp_cli.runtime.report import write_report
    from mfsdp_cli.runtime.watch import Watch

    rank = int(os.environ["RANK"])
    how = os.environ["MFSDP_TEST_FAIL"]
    try:
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN, "SIGINT is not ignored"
        Watch()
        dist.init_process_group("gloo")
        dist.barrier()
        if rank == 1 and how == "raise":
            raise ValueError("the rank's own words")
        if rank == 1 and how == "refuse":
            raise MfsdpError("MF506", "a token", where="--data x", hint="another")
        if rank == 1 and how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1 and how == "exit":
            os._exit(7)
        if rank == 1 and how == "hang up":
            for process in (os.getppid(), os.getpid()):
                os.kill(process, signal.SIGHUP)
            time.sleep(1)
        dist.all_reduce(torch.ones(1))
        if how not in ("nothing", "hang up"):
            dist.barrier()
    except Exception as error:
        write_report(rank, error)
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)
