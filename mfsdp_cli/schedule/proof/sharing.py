"""Invariant 11: one group for each shared parameter, summed after reductions, before the norm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from mfsdp_cli.errors import Finding
from mfsdp_cli.layout.layout import Layout
from mfsdp_cli.schedule.actions import Kind
from mfsdp_cli.schedule.proof.check import Check, Subject, fault, judged

CODE = "MF321"


class Member(Protocol):
    """One copy of a shared parameter."""

    @property
    def pp_rank(self) -> int: ...
    @property
    def vp_stage(self) -> int: ...
    @property
    def parameter(self) -> str: ...


class Group(Protocol):
    """A shared parameter and all its copies (:class:`mfsdp_cli.layout.shared.SharedGroup`)."""

    @property
    def name(self) -> str: ...
    @property
    def pp_ranks(self) -> Sequence[int]: ...
    @property
    def members(self) -> Sequence[Member]: ...


def check_sharing(
    subject: Subject,
    *,
    groups: Sequence[Group] | None = None,
    layout: Layout | None = None,
    tied: bool | None = None,
) -> Check:
    """Judge invariant 11: the lists always; groups and layout where they are given.

    Args:
        groups: the plan's shared groups.
        layout, tied: which stages hold a copy of the word embedding; both or neither.
    """
    return judged(CODE, _findings(subject, groups, layout, tied))


def _findings(
    subject: Subject, groups: Sequence[Group] | None, layout: Layout | None, tied: bool | None
) -> Iterator[Finding]:
    yield from _sums(subject)
    if groups is None:
        return
    yield from _group_ranks(subject, groups)
    yield from _members(groups)
    if layout is not None and tied is not None:
        yield from _embedding_copies(groups, layout, tied)


def _sums(subject: Subject) -> Iterator[Finding]:
    """Each rank with a copy sums once, after its last reduction and before its norm."""
    graph = subject.graph
    holders = {rank for ranks in graph.tied_pp_ranks for rank in ranks}
    for rank in range(len(graph.lists)):
        nodes = graph.nodes_of_rank(rank)
        sums = [node for node in nodes if graph.kinds[node] is Kind.TIED_ALLREDUCE]
        expected = int(rank in holders)
        if len(sums) != expected:
            yield fault(
                CODE,
                f"rank {rank} sums its copies {len(sums)} times in a step ({Kind.TIED_ALLREDUCE}), "
                f"not {expected}",
                where=subject.where(sums) if sums else f"rank {rank}",
            )
        for node in sums:
            yield from _sum_place(subject, node, nodes)


def _sum_place(subject: Subject, node: int, nodes: range) -> Iterator[Finding]:
    graph = subject.graph
    wrong = [
        other
        for other in nodes
        if (graph.kinds[other] is Kind.REDUCE_GRAD and other > node)
        or (graph.kinds[other] is Kind.GRAD_NORM and other < node)
    ]
    for other in wrong[:1]:
        way = "before" if other > node else "after"
        yield fault(
            CODE,
            f"{subject.name(node)} sums copies {way} {graph.actions[other]}; the sum comes after "
            "the gradient reductions and before the norm",
            where=subject.where([node]),
        )


def _group_ranks(subject: Subject, groups: Sequence[Group]) -> Iterator[Finding]:
    """The schedule sums over exactly the groups that the plan has."""
    planned = {tuple(sorted(group.pp_ranks)) for group in groups}
    scheduled = {tuple(sorted(ranks)) for ranks in subject.graph.tied_pp_ranks}
    for ranks in sorted(planned ^ scheduled):
        has, lacks = ("plan", "schedule") if ranks in planned else ("schedule", "plan")
        yield fault(
            CODE, f"the {has} shares a parameter over pipeline ranks {list(ranks)}, the {lacks} not"
        )


def _members(groups: Sequence[Group]) -> Iterator[Finding]:
    """No copy in two groups, none twice; a group's ranks are those of its members."""
    owner: dict[tuple[int, int, str], str] = {}
    for group in groups:
        ranks = sorted({member.pp_rank for member in group.members})
        if ranks != sorted(group.pp_ranks):
            yield fault(
                CODE,
                f"group {group.name} spans pipeline ranks {list(group.pp_ranks)}, but its copies "
                f"are on {ranks}",
            )
        for member in group.members:
            copy = (member.pp_rank, member.vp_stage, member.parameter)
            if copy in owner:
                yield fault(
                    CODE,
                    f"{member.parameter} on rank {member.pp_rank}, virtual stage "
                    f"{member.vp_stage} is in group {owner[copy]} and again in {group.name}",
                )
            owner[copy] = group.name


def _embedding_copies(groups: Sequence[Group], layout: Layout, tied: bool) -> Iterator[Finding]:
    """One group holds the word embedding's copies: first stage, MTP stages, a tied head."""
    holders = [
        (stage.pp_rank, stage.vp_stage)
        for stage in layout.stages
        if stage.embedding or stage.mtp or (tied and stage.loss)
    ]
    if len({rank for rank, _ in holders}) < 2:
        return
    for group in groups:
        places = {(member.pp_rank, member.vp_stage) for member in group.members}
        if places == set(holders):
            return
    found = [sorted({(m.pp_rank, m.vp_stage) for m in group.members}) for group in groups]
    yield fault(
        CODE,
        f"the word embedding has copies on (rank, virtual stage) {sorted(holders)}, but the "
        f"groups are {found}",
    )
