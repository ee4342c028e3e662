"""A worker whose rank 1 fails as ``MFSDP_TEST_FAIL`` says while rank 0 waits for it."""

from __future__ import annotations

import os
import signal
import sys


def main() -> int:
    import torch
    import torch.distributed as dist

    from mfsdp_cli.errors import MfsdpError
    from mfsdp_cli.runtime.report import write_report

    rank = int(os.environ["RANK"])
    how = os.environ["MFSDP_TEST_FAIL"]
    try:
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
        dist.all_reduce(torch.ones(1))
        if how != "nothing":
            dist.barrier()
    except Exception as error:
        write_report(rank, error)
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)
