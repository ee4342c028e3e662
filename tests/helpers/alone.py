"""A run of one rank inside the test process, for tests that build Megatron modules."""

from __future__ import annotations

from functools import cache

from mfsdp_cli.runtime.topology import Topology, connect_alone


@cache
def alone() -> Topology:
    """The topology of one rank; made once, since Megatron's parallel state is global."""
    return connect_alone()
