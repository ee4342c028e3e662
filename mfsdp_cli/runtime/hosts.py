"""Which hosts hold the ranks of a run, and which rank this process is where others started it.

Knows no torch.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from mfsdp_cli.errors import MfsdpError


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
        if self.nnodes > 1 and not self.rdzv_endpoint:
            raise MfsdpError(
                "MF508",
                f"{self.nnodes} hosts need a place to meet",
                where=where,
                hint="pass --rdzv-endpoint HOST:PORT, the same on every host",
            )
        if self.rdzv_endpoint:
            _check_endpoint(self.rdzv_endpoint, lowest=1 if self.nnodes > 1 else 0)


def _check_endpoint(endpoint: str, lowest: int) -> None:
    """Raise MF508 for what is no ``host:port``, or a host that has no address.

    Args:
        lowest: 0 where any free port will do.
    """
    host, _, port = endpoint.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    number = int(port) if port.isascii() and port.isdigit() and len(port) < 6 else -1
    reason = "it is no HOST:PORT"
    if host and lowest <= number < 2**16:
        try:
            socket.getaddrinfo(host, number)
        except (OSError, UnicodeError) as error:
            reason = f"{host!r} has no address ({getattr(error, 'strerror', None) or error})"
        else:
            return
    raise MfsdpError(
        "MF508",
        f"hosts cannot meet at {endpoint!r}: {reason}",
        where=f"--rdzv-endpoint {endpoint}",
        hint="the name or address of the first host and a free port, such as head:29500",
    )


@dataclass(frozen=True)
class Joined:
    """This process among ranks that somebody else started."""

    rank: int
    world_size: int


def joined(environment: Mapping[str, str]) -> Joined | None:
    """The rank this process was started as by ``torchrun`` or ``srun``; None: started plainly.

    Raises:
        MfsdpError: MF508 where the environment names no such rank, or no place to meet.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        mine = _rank_of(environment, "RANK", "WORLD_SIZE")
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not environment.get(name):
                raise _no_start(f"RANK and WORLD_SIZE are set and {name} is not")
        return mine
    if "SLURM_STEP_ID" in environment and environment.get("SLURM_NTASKS", "1") != "1":
        return _rank_of(environment, "SLURM_PROCID", "SLURM_NTASKS")
    return None


def _rank_of(environment: Mapping[str, str], rank: str, ranks: str) -> Joined:
    said = f"{rank}={environment.get(rank, '')} {ranks}={environment.get(ranks, '')}"
    try:
        mine = Joined(int(environment[rank]), int(environment[ranks]))
    except (KeyError, ValueError):
        raise _no_start(f"{said} names no rank") from None
    if not 0 <= mine.rank < mine.world_size:
        raise _no_start(f"{said}: there is no such rank")
    return mine


def _no_start(reason: str) -> MfsdpError:
    return MfsdpError(
        "MF508",
        f"the environment says that ranks were started, but not how they meet: {reason}",
        hint="start the ranks with torchrun or srun; or unset RANK, WORLD_SIZE and SLURM_STEP_ID",
    )


def slurm_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables torch reads, from those that Slurm sets; none where ``torchrun`` set them.

    ``MASTER_ADDR`` must be given or be one that Slurm tells.
    """
    if "RANK" in environment:
        return {}
    address = environment.get("MASTER_ADDR") or environment.get("SLURM_LAUNCH_NODE_IPADDR")
    if not address:
        raise MfsdpError(
            "MF508",
            "Slurm does not say where the ranks meet",
            hint="set MASTER_ADDR to the first host's name",
        )
    job = environment.get("SLURM_JOB_ID", "")
    port = environment.get("MASTER_PORT", str(20000 + (int(job) if job.isdigit() else 0) % 20000))
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_NTASKS"],
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
