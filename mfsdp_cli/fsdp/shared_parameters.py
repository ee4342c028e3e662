"""One logical parameter held by several chunks: its gradients are summed by logical element.

The word embedding on the first stage and the tied head on the last are the same matrix, at
different offsets of different flat buffers. Rank ``r`` owns elements ``R(m, r)`` of member ``m``.
To sum, it needs those elements of every other member, from whichever ranks own them: the overlap
of ``R(m, r)`` and ``R(n, s)`` travels from ``s`` to ``r``, and the same range back. One all-to-all
with uneven splits does all of it; where the shards align each rank exchanges its own shard only.

Two members with 6 elements, cut differently (member 0 on ranks 0, 1; member 1 on ranks 2, 3)::

    element     0  1  2  3  4  5
    member 0    0  0  0  0  1  1        rank 0 <-> 2: 0..1    rank 0 <-> 3: 2..3
    member 1    2  2  3  3  3  3        rank 1 <-> 3: 4..5

Every rank adds in member order, never its own first, so the copies stay bit-equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mfsdp_cli.fsdp.flat_buffer import Range
from mfsdp_cli.fsdp.parameter_group import ParameterGroup

FROZEN = "frozen"


@dataclass(frozen=True)
class LocalMember:
    """A member on this rank: which member it is, and where it lies.

    Args:
        member: position of the member in the shared group, the owner first.
        group: the flat buffer that holds it.
        index: the parameter's index in that buffer.
    """

    member: int
    group: ParameterGroup
    index: int

    @property
    def owned(self) -> Range:
        """Elements of the parameter that this rank owns."""
        return self.group.layout.owned(self.index)

    @property
    def setting(self) -> str:
        """The member's optimizer class, ``frozen`` where it is not trained."""
        if not self.group.requires_grad:
            return FROZEN
        return self.group.optimizer_classes[self.index]

    def shard(self, buffer: torch.Tensor) -> torch.Tensor:
        return self.group.shard_of(self.index, buffer)


@dataclass(frozen=True)
class _Piece:
    """Elements that travel between two members, as a range of the logical parameter."""

    sender: int
    receiver: int
    range: Range


class SharedParameter:
    """A shared parameter as this rank sees it.

    Args:
        name: how errors call it.
        process_group: all ranks that hold a member (members times data-parallel ranks); None
            where this is one rank.
        members: number of members in all.
        local: the members on this rank, ascending.

    Raises:
        ValueError: the members do not agree in size or optimizer setting, are not trained, or
            are not whole on the ranks of the process group.
    """

    def __init__(
        self,
        name: str,
        process_group: dist.ProcessGroup | None,
        members: int,
        local: Sequence[LocalMember],
    ) -> None:
        if not local:
            raise ValueError(f"Expected a member of {name} on this rank, got none")
        self.name = name
        self.process_group = process_group
        self.members = members
        self.local = tuple(sorted(local, key=lambda member: member.member))
        self._ranges = self._exchange_ranges()

    def _exchange_ranges(self) -> list[dict[int, Range]]:
        """What every rank of the group owns of every member; checks that members agree."""
        mine = [
            (
                member.member,
                member.owned,
                member.group.layout.shapes[member.index],
                member.setting,
            )
            for member in self.local
        ]
        everyone = [mine]
        if self.process_group is not None:
            everyone = [mine for _ in range(self.process_group.size())]
            dist.all_gather_object(everyone, mine, group=self.process_group)
        settings = {(tuple(shape), setting) for rank in everyone for _, _, shape, setting in rank}
        if len(settings) != 1:
            raise ValueError(
                f"Expected all members of {self.name} with one shape and one optimizer setting, "
                f"got {sorted(settings)}"
            )
        if mine[0][3] == FROZEN:
            raise ValueError(f"Expected {self.name} to be trained, but its members are frozen")
        ranges = [{member: owned for member, owned, _, _ in rank} for rank in everyone]
        self._check_whole(ranges, mine[0][2].numel())
        return ranges

    def _check_whole(self, ranges: list[dict[int, Range]], numel: int) -> None:
        """Every member must be whole within the process group, or sums would miss elements."""
        for member in range(self.members):
            found = sum(of_rank[member].numel for of_rank in ranges if member in of_rank)
            if found != numel:
                raise ValueError(
                    f"Expected all {numel} elements of member {member} of {self.name} on the "
                    f"ranks of its process group, got {found}"
                )

    @property
    def rank(self) -> int:
        return 0 if self.process_group is None else self.process_group.rank()

    def _pieces(self, sender: int, receiver: int) -> list[_Piece]:
        """What one rank sends another, in the order both agree on."""
        return [
            _Piece(source, target, overlap)
            for source, owned in sorted(self._ranges[sender].items())
            for target, wanted in sorted(self._ranges[receiver].items())
            if source != target and (overlap := owned.overlap(wanted)).numel
        ]

    def sum_gradients(self) -> int:
        """Make every member's ``main_grad`` the sum over members. Returns elements received."""
        outgoing = [self._pieces(self.rank, peer) for peer in range(len(self._ranges))]
        incoming = [self._pieces(peer, self.rank) for peer in range(len(self._ranges))]
        received = self._exchange(outgoing, incoming)
        for member in self.local:
            self._add_up(member, incoming, received)
        return received.numel()

    def _exchange(self, outgoing: list[list[_Piece]], incoming: list[list[_Piece]]) -> torch.Tensor:
        gradients = {member.member: self._gradient(member) for member in self.local}
        owned = {member.member: member.owned for member in self.local}
        parts = [
            piece.range.shift(-owned[piece.sender].start).within(gradients[piece.sender])
            for pieces in outgoing
            for piece in pieces
        ]
        like = next(iter(gradients.values()))
        sent = torch.cat(parts) if parts else like.new_empty(0)
        if self.process_group is None:
            return sent
        received = like.new_empty(sum(_sizes(incoming)))
        dist.all_to_all_single(
            received, sent, _sizes(incoming), _sizes(outgoing), group=self.process_group
        )
        return received

    def _gradient(self, member: LocalMember) -> torch.Tensor:
        main_grad = member.group.main_grad
        assert main_grad is not None
        return member.shard(main_grad)

    def _add_up(
        self, member: LocalMember, incoming: list[list[_Piece]], received: torch.Tensor
    ) -> None:
        own = self._gradient(member)
        terms = [torch.zeros_like(own) for _ in range(self.members)]
        terms[member.member] = own.clone()
        position = 0
        for pieces in incoming:
            for piece in pieces:
                values = received[position : position + piece.range.numel]
                position += piece.range.numel
                if piece.receiver == member.member:
                    target = piece.range.shift(-member.owned.start)
                    target.within(terms[piece.sender]).copy_(values)
        own.copy_(terms[0])
        for term in terms[1:]:
            own.add_(term)


def _sizes(pieces: list[list[_Piece]]) -> list[int]:
    return [sum(piece.range.numel for piece in of_peer) for of_peer in pieces]
