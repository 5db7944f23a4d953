"""Loops that tracing wrote out: their iterations placed alike, where placing each by itself takes too much.

A recurrence over parts of a sequence (linear attention, a delta rule) is one op after another of each iteration, all
of which read the same values. Elimination has to tell apart what is made of these for all iterations at once, so its
tables are too large. With the same choice for an op in every iteration there is one vertex for all of them, whose costs
are their sum; only choices that all of them have are left. What comes before a loop settles, and after, stays by
itself.

Where that takes too much still, dims are split in a few ways (:meth:`Merged.in_few_ways`): a loop's many reshapes carry
strided ones from each value to all others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Final

import numpy as np

from autopar.planner.placement import Change, Edge, Problem, Vertex
from autopar.spmd import Type

_LEAST: Final = 4  # iterations that make a loop
_SHORTEST, _LONGEST = 3, 256  # ops of one iteration: the parts of what is split are fewer
_FEW: Final = 3  # ways in which a dim is split, those of the largest pieces


def repeated(kinds: Sequence[Hashable]) -> list[list[int]]:
    """Of ops of such ``kinds``, in order, those that are one op of several iterations, by their places.

    >>> repeated("qabcabcabcabco")
    [[1, 4, 7, 10], [2, 5, 8, 11], [3, 6, 9, 12]]
    """
    numbers: dict[Hashable, int] = {}
    row = np.array([numbers.setdefault(kind, len(numbers)) for kind in kinds])
    found: list[list[int]] = []
    free = np.ones(len(row), dtype=bool)
    for first, end, period in sorted(_runs(row), key=lambda run: (run[0] - run[1], run[2], run[0])):
        if free[first:end].all():
            free[first:end] = False
            found += [list(range(place, end, period)) for place in range(first, first + period)]
    return found


def _runs(row: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Iterator[tuple[int, int, int]]:
    """``(first, end, period)`` of all that repeats often enough."""
    for period in range(_SHORTEST, min(_LONGEST, len(row) // _LEAST) + 1):
        same = np.concatenate([[False], row[:-period] == row[period:], [False]])
        edges = np.flatnonzero(same[1:] != same[:-1]).reshape(-1, 2).tolist()
        yield from ((first, end + period, period) for first, end in edges if end - first >= (_LEAST - 1) * period)


@dataclass(frozen=True)
class Merged:
    """``problem`` has one vertex for several of another one: vertex v of that is ``place[v]`` here, and choice c here
    is its choice ``own[v][c]``."""

    problem: Problem
    place: Sequence[int]
    own: Sequence[Sequence[int]]

    def choices(self, found: Sequence[int]) -> tuple[int, ...]:
        """Of the other problem, for those of this one."""
        return tuple(own[found[place]] for place, own in zip(self.place, self.own, strict=True))

    def in_few_ways(self) -> Merged:
        """Without choices that split a dim in other than the plainest ways, where an op has others."""
        kept = [_plain(vertex) or list(range(len(vertex.results))) for vertex in self.problem.vertices]
        vertices = tuple(_together([pair]) for pair in zip(self.problem.vertices, kept, strict=True))
        own = [[row[c] for c in kept[here]] for here, row in zip(self.place, self.own, strict=True)]
        return Merged(replace(self.problem, vertices=vertices), self.place, own)


def merged(problem: Problem, alike: Iterable[Sequence[int]]) -> Merged | None:
    """Vertices that are ``alike`` as one each, but for those that have no choice in common; None where none are."""
    place, own = list(range(len(problem.vertices))), [list(range(len(v.results))) for v in problem.vertices]
    for some in alike:
        shared = _shared([problem.vertices[v] for v in some])
        if len(some) > 1 and shared:
            for v, row in zip(some, shared, strict=True):
                place[v], own[v] = some[0], row
    if len(set(place)) == len(place):
        return None
    numbers = {v: number for number, v in enumerate(sorted(set(place)))}
    place = [numbers[v] for v in place]
    rows: list[list[int]] = [[] for _ in numbers]
    for v, here in enumerate(place):
        rows[here].append(v)
    vertices = tuple(_together([(problem.vertices[v], own[v]) for v in row]) for row in rows)
    ties = dict.fromkeys((place[v], place[w]) for v, w in problem.ties)
    return Merged(Problem(vertices, tuple(_edges(problem, place)), tuple(ties), problem.budget_bytes), place, own)


def _shared(vertices: Sequence[Vertex]) -> list[list[int]]:
    """By vertex, its choices that all have, in the same order; none where they take other operands."""
    if len({len(vertex.operands[0]) for vertex in vertices}) > 1:
        return []
    known = [_numbered(vertex) for vertex in vertices]
    common = [choice for choice in known[0] if all(choice in others for others in known)]
    return [[numbers[choice] for choice in common] for numbers in known] if common else []


def _numbered(vertex: Vertex) -> dict[tuple[Hashable, ...], int]:
    """By the types of a choice, and how many with these came before it."""
    found: dict[tuple[Hashable, ...], int] = {}
    seen: defaultdict[Hashable, int] = defaultdict(int)
    for number, types in enumerate(zip(vertex.results, vertex.operands, strict=True)):
        found[*types, seen[types]] = number
        seen[types] += 1
    return found


def _plain(vertex: Vertex) -> list[int]:
    """Its choices that take and make shards in the plainest ways alone."""
    columns = (vertex.results, *zip(*vertex.operands, strict=True))
    ways = [_plainest(kinds) for kinds in columns]
    rows = enumerate(zip(*columns, strict=True))
    return [c for c, kinds in rows if all(not k.is_shard or k in some for k, some in zip(kinds, ways, strict=True))]


def _plainest(kinds: Iterable[Type]) -> set[Type]:
    """Of each dim those with the fewest pieces."""
    dims = defaultdict[int, set[Type]](set)
    for kind in kinds:
        if kind.is_shard:
            dims[kind.dim].add(kind)
    return {kind for some in dims.values() for kind in sorted(some, key=attrgetter("outer"))[:_FEW]}


def _together(some: Sequence[tuple[Vertex, Sequence[int]]]) -> Vertex:
    (first, own), *_ = some
    seconds = (sum(costs) for costs in zip(*([v.seconds[c] for c in row] for v, row in some), strict=True))
    held = (sum(costs) for costs in zip(*([v.bytes[c] for c in row] for v, row in some), strict=True))
    results, operands = tuple(first.results[c] for c in own), tuple(first.operands[c] for c in own)
    return Vertex(first.name, results, operands, tuple(seconds), tuple(held))


_End = tuple[int, int]
"""A target and its operand."""


def _edges(problem: Problem, place: Sequence[int]) -> Iterator[Edge]:
    """Edges between the same vertices are one, which costs as much as all; and so are shares that go to the same."""
    alone, shares = problem.parts
    beside = defaultdict[tuple[int, _End], list[Edge]](list)
    for edge in alone:
        beside[place[edge.source], (place[edge.target], edge.position)].append(edge)
    for (source, (target, position)), edges in beside.items():
        yield Edge(source, target, position, _summed([edge.prices for edge in edges]))
    groups = defaultdict[tuple[int, frozenset[_End]], list[dict[_End, list[Edge]]]](list)
    for share in shares:
        ends = defaultdict[_End, list[Edge]](list)
        for edge in share.edges:
            ends[place[edge.target], edge.position].append(edge)
        groups[place[share.edges[0].source], frozenset(ends)].append(ends)
    for number, ((source, _), each) in enumerate(groups.items()):
        for target, position in each[0]:
            same = [ends[target, position] for ends in each]
            prices = _summed([edges[-1].prices for edges in same])
            allowed = set(prices).intersection(*(edge.prices for edges in same for edge in edges))
            yield Edge(source, target, position, {c: prices[c] for c in prices if c in allowed}, ("loop", number))


def _summed(every: Sequence[Mapping[Change, float]]) -> Mapping[Change, float]:
    """Of changes that all allow."""
    first, *others = every
    if not others:
        return first
    return {change: sum(prices[change] for prices in every) for change in first if all(change in o for o in others)}
