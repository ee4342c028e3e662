"""From paths to comparisons: every run against the first."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_uppercase

from mfsdp_cli.compare.judge import Comparison, Policy, compare
from mfsdp_cli.compare.readers import read_run
from mfsdp_cli.errors import MfsdpError


def compare_paths(paths: Sequence[str], policy: Policy) -> list[Comparison]:
    """Read the runs and judge each against the first.

    Raises:
        MfsdpError: MF607 for fewer than two runs or more than letters; the errors of
            :func:`~mfsdp_cli.compare.readers.read_run`.
    """
    if not 2 <= len(paths) <= len(ascii_uppercase):
        raise MfsdpError(
            "MF607",
            f"compare-runs takes 2 to {len(ascii_uppercase)} runs, got {len(paths)}",
            where=" ".join(paths[:3]),
            hint="mfsdp compare-runs A B",
        )
    first, *others = (read_run(path, policy.metric) for path in paths)
    return [
        compare(first, other, policy, ("A", letter))
        for other, letter in zip(others, ascii_uppercase[1:], strict=False)
    ]
