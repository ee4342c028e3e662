"""Which communication backend the ranks of this host use. Imports torch when it has to ask."""

from __future__ import annotations

from mfsdp_cli.errors import MfsdpError


def choose_backend(asked: str, ranks: int, ranks_per_device: int = 1) -> str:
    """``gloo`` or ``nccl`` for a number of ranks on this host.

    Args:
        asked: ``gloo``, ``nccl``, or ``auto``: NCCL where the GPUs hold the ranks.

    Raises:
        MfsdpError: MF511 where NCCL is asked for and the GPUs do not hold the ranks.
    """
    if asked == "gloo":
        return "gloo"
    gpus = count_gpus()
    if asked == "auto":
        return "nccl" if gpus * ranks_per_device >= ranks else "gloo"
    if gpus * ranks_per_device < ranks:
        raise MfsdpError(
            "MF511",
            f"{ranks} ranks on this host and {gpus} GPUs with {ranks_per_device} rank(s) each",
            where="--backend nccl",
            hint="use --backend gloo (CPU), or --ranks-per-device",
        )
    return "nccl"


def rehearsal_note(backend: str, ranks_per_device: int) -> str:
    """What to say where several ranks share a GPU; empty where none do."""
    if backend != "nccl" or ranks_per_device == 1:
        return ""
    return (
        f"{ranks_per_device} ranks share one GPU and talk through sockets: this rehearses "
        "correctness, its speed says nothing"
    )


def count_gpus() -> int:
    """CUDA devices that this process sees."""
    import torch

    kind = torch.accelerator.current_accelerator()
    return torch.accelerator.device_count() if kind is not None and kind.type == "cuda" else 0
