"""Gloo or NCCL, by what was asked and what the host has."""

from __future__ import annotations

import pytest

from mfsdp_cli.errors import MfsdpError
from mfsdp_cli.runtime import backend
from mfsdp_cli.runtime.backend import choose_backend


@pytest.mark.parametrize(
    ("asked", "gpus", "ranks", "share", "chosen"),
    [
        ("auto", 0, 1, 1, "gloo"),
        ("auto", 1, 1, 1, "nccl"),
        ("auto", 1, 2, 1, "gloo"),
        ("auto", 1, 4, 4, "nccl"),
        ("gloo", 8, 8, 1, "gloo"),
        ("nccl", 8, 8, 1, "nccl"),
    ],
)
def test_the_backend_that_fits(
    monkeypatch: pytest.MonkeyPatch, asked: str, gpus: int, ranks: int, share: int, chosen: str
) -> None:
    monkeypatch.setattr(backend, "count_gpus", lambda: gpus)
    assert choose_backend(asked, ranks, share) == chosen


def test_nccl_needs_a_place_for_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "count_gpus", lambda: 2)
    with pytest.raises(MfsdpError, match=r"MF511.*5 ranks on this host and 2 GPUs with 2 rank"):
        choose_backend("nccl", 5, 2)
