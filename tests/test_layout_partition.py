"""The split against brute force: every way to divide up to 12 layers is tried."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations_with_replacement, pairwise

import pytest

from mfsdp_cli.layout.contiguous import contiguous
from mfsdp_cli.layout.interleaved import interleaved
from mfsdp_cli.layout.partition import Found, Part, Problem

# (pipeline ranks, virtual stages, most layers): all splits can be tried one by one.
SHAPES = [(2, 1, 12), (3, 1, 12), (4, 1, 12), (6, 1, 12), (8, 1, 10)]
SHAPES += [(2, 2, 12), (3, 2, 12), (4, 2, 11), (2, 3, 12), (3, 3, 10), (2, 4, 9)]


def _solve(problem: Problem) -> Found | None:
    return interleaved(problem) if problem.vpp > 1 else contiguous(problem)


def _brute_force(problem: Problem) -> tuple[int, int] | None:
    """The heaviest rank and the squares of the best split, straight from the definition."""
    best: tuple[int, int] | None = None
    for counts in _splits(len(problem.parts), problem):
        ranks, room = [0] * problem.pp, list(problem.limits or [0] * problem.pp)
        layer = 0
        for stage, count in enumerate(counts):
            rank = stage % problem.pp
            ranks[rank] += problem.extra[stage]
            room[rank] -= problem.fixed[stage] if problem.limits else 0
            for part in problem.parts[layer : layer + count]:
                ranks[rank] += part.cost
                if problem.limits:
                    room[rank] -= part.state + problem.in_flight[stage] * part.held
            layer += count
        score = max(ranks), sum(cost**2 for cost in ranks)
        if min(room) >= 0 and (best is None or score < best):
            best = score
    return best


def _splits(layers: int, problem: Problem) -> Iterator[list[int]]:
    """All counts that give each stage the layers it must hold, and none behind the open ones."""
    for inner in combinations_with_replacement(range(layers + 1), problem.open_stages - 1):
        counts = [end - start for start, end in pairwise([0, *inner, layers])]
        counts += [0] * (problem.stages - problem.open_stages)
        if all(count >= least for count, least in zip(counts, problem.least, strict=True)):
            yield counts


def _problem(draw: random.Random, pp: int, vpp: int, most: int, *, limited: bool) -> Problem:
    stages = pp * vpp
    number = draw.randrange(stages, most + 1)
    kinds = [
        Part(draw.randrange(1, 1000), draw.randrange(50), draw.randrange(20))
        for _ in range(draw.choice([1, 2, 3, number]))
    ]
    front = draw.randrange(number)
    parts = draw.choice(
        [
            [kinds[0]] * front + [kinds[-1]] * (number - front),
            [kinds[layer % len(kinds)] for layer in range(number)],
            [draw.choice(kinds) for _ in range(number)],
        ]
    )
    mtp = draw.randrange(stages - pp + (pp > 1), stages)
    extra = [0] * stages
    extra[0], extra[mtp] = draw.choice([0, 300]), draw.choice([0, 700])
    extra[-1] += draw.randrange(2000)
    least = tuple(int(stage < min(mtp, stages - 1)) for stage in range(stages))
    sizes = [part.state + 3 * part.held for part in parts]
    fair = sum(sizes) // pp
    limits = tuple(draw.randrange(fair // 2, 2 * fair + 40) for _ in range(pp))
    return Problem(
        tuple(parts),
        pp,
        vpp,
        tuple(extra),
        least,
        mtp + 1,
        tuple(draw.randrange(1, 6) for _ in range(stages)),
        tuple(draw.choice([0, 0, 10]) for _ in range(stages)),
        limits if limited else None,
    )


@pytest.mark.parametrize("limited", [False, True], ids=["free", "limited"])
@pytest.mark.parametrize(("pp", "vpp", "most"), SHAPES)
def test_equal_to_brute_force(pp: int, vpp: int, most: int, limited: bool) -> None:
    draw = random.Random(1000 * pp + 10 * vpp + limited)
    possible = 0
    for _ in range(20):
        problem = _problem(draw, pp, vpp, most, limited=limited)
        found, best = _solve(problem), _brute_force(problem)
        if best is None:
            assert found is None
            continue
        possible += 1
        assert found is not None
        assert (found.score.heaviest, found.score.squares) == best
        assert found.proven
        assert problem.fits(found.score.counts)
        assert problem.score(found.score.counts) == found.score
    assert possible == 20 or (limited and possible > 0)


def test_some_limits_cannot_be_kept() -> None:
    """The draw above meets both: with limits around a fair share, and below any."""
    draw = random.Random(3)
    verdicts = {
        _brute_force(_problem(draw, 3, vpp, 9, limited=True)) is None
        for vpp in (1, 2)
        for _ in range(40)
    }
    assert verdicts == {True, False}


def test_a_limit_costs_time() -> None:
    """Three equal layers on two ranks; the one with room for one gets one, wherever it is."""
    free = Problem((Part(1, 10),) * 3, 2, 1, (0, 0), (1, 0), 2, (1, 1), (0, 0))
    assert contiguous(free) == Found(free.score([1, 2]), proven=True)
    tight = Problem((Part(1, 10),) * 3, 2, 1, (0, 0), (1, 0), 2, (1, 1), (0, 0), (20, 19))
    assert contiguous(tight) == Found(tight.score([2, 1]), proven=True)
    none = Problem((Part(1, 10),) * 3, 2, 1, (0, 0), (1, 0), 2, (1, 1), (0, 0), (19, 19))
    assert contiguous(none) is None


def test_of_equal_ranks_the_chunk_with_fewer_in_flight_takes_more() -> None:
    """Ten layers of 1 + 4 or 1 + 1 bytes on two chunks of a rank that has room for 20."""
    parts = (Part(1, 1, 1),) * 20
    problem = Problem(parts, 2, 2, (0,) * 4, (1, 1, 1, 0), 4, (4, 1, 1, 1), (0,) * 4, (30, 99))
    found = interleaved(problem)
    assert found is not None
    assert found.score.counts == (3, 5, 7, 5)


def test_a_pattern_that_alternates_to_the_end() -> None:
    """Branches are bounded; what is found is good all the same, and says what is known of it."""
    parts = tuple(Part(7 if layer % 2 else 13) for layer in range(60))
    problem = Problem(parts, 8, 2, (0,) * 16, (1,) * 15 + (0,), 16)
    found = interleaved(problem)
    assert found is not None
    assert found.score.heaviest <= 1.07 * (600 / 8)
    assert problem.fits(found.score.counts)
