"""The copies of a tied word embedding on a rank, and where their shards lie."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from mfsdp_cli.fsdp import full_weights
from mfsdp_cli.runtime.chunks import WORD_EMBEDDING
from mfsdp_cli.runtime.engine_mfsdp import MfsdpEngine, _weight_name


@dataclass(frozen=True)
class EmbeddingCopy:
    """One copy, gathered from its own shards.

    Args:
        digest: of its bytes.
        owned: first and last + 1 of its logical elements on this rank.
        offset: where it begins in its group's flat buffer.
    """

    digest: str
    owned: tuple[int, int]
    offset: int


def copies_of_the_embedding(engine: MfsdpEngine) -> list[EmbeddingCopy]:
    """Every copy on this rank; a collective."""
    found = []
    for chunk, sharded in zip(engine.chunks, engine.context.chunks, strict=True):
        for unit in sharded.units:
            values = dict(full_weights(unit))
            for group in unit.groups:
                for index, name in enumerate(group.names):
                    if _weight_name(chunk, unit, name) == WORD_EMBEDDING:
                        raw = values[name].cpu().numpy().tobytes()
                        owned = group.layout.owned(index)
                        found.append(
                            EmbeddingCopy(
                                hashlib.sha256(raw).hexdigest(),
                                (owned.start, owned.stop),
                                group.layout.offsets[index],
                            )
                        )
    return found


def digests_of_the_embedding(engine: MfsdpEngine) -> list[str]:
    """The digest of every copy on this rank; a collective."""
    return [copy.digest for copy in copies_of_the_embedding(engine)]
