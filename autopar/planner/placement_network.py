"""A placement problem as variables with values and prices of pairs of them, which elimination takes.

Vertices are variables, what an edge allows and asks is a pair. Consumers that share changed copies of a value make one
more variable: its values are the type that was made and the set of types it was changed to, each of which is paid once;
a consumer takes what was made or one of the set. Choices that no neighbour can go with are left out beforehand
(arc consistency: A. K. Mackworth, "Consistency in networks of relations", Artificial Intelligence 8, 1977).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from math import comb, inf

import numpy as np
from numpy.typing import NDArray

from autopar.errors import ShardingError
from autopar.planner.elimination import Network, Table
from autopar.planner.placement import Edge, Problem, Share, Vertex
from autopar.spmd import Type

_STATES = 4096  # of one share
_KINDS = ("S", "I", "R", "P")  # which of equal choices is taken


@dataclass(frozen=True)
class PlacementNetwork:
    """``network``'s first variables are the problem's vertices; value c of v is choice ``kept[v][c]``, which stores
    ``bytes[v][c]``."""

    network: Network
    kept: list[list[int]]
    bytes: list[Table]

    def priced(self, seconds_per_byte: float) -> Network:
        """The network where bytes have a price."""
        if not seconds_per_byte:
            return self.network
        stored = [*self.bytes, *[np.zeros(1)] * (len(self.network.own) - len(self.bytes))]
        own = [seconds + seconds_per_byte * held for seconds, held in zip(self.network.own, stored, strict=True)]
        return Network(own, self.network.pairs)

    def choices(self, values: Sequence[int]) -> tuple[int, ...]:
        return tuple(kept[value] for kept, value in zip(self.kept, values, strict=False))


def network_of(problem: Problem) -> PlacementNetwork | None:
    """The same minimum as ``problem``'s, whose budget is left out.

    None where a share has too many states. Raises ShardingError where a vertex has no choice that others can go with.
    """
    kept, (alone, shares) = _consistent(problem), problem.parts()
    if any(_too_many(problem, kept, share) for share in shares):
        return None
    pairs = list(zip(problem.vertices, kept, strict=True))
    own = [np.array([vertex.seconds[c] for c in choices]) for vertex, choices in pairs]
    stored = [np.array([float(vertex.bytes[c]) for c in choices]) for vertex, choices in pairs]
    building = _Building(problem, kept, own, {})
    for edge in alone:
        building.add_edge(edge)
    for share in shares:
        building.add_share(share)
    for v, w in problem.ties:
        made, other = building.made(v), building.made(w)
        building.add(v, w, np.array([[0.0 if a == b else inf for b in other] for a in made]))
    return PlacementNetwork(Network(building.own, building.pairs), kept, stored)


@dataclass
class _Building:
    problem: Problem
    kept: list[list[int]]
    own: list[Table]
    pairs: dict[tuple[int, int], Table]

    def made(self, v: int) -> list[Type]:
        results = self.problem.vertices[v].results
        return [results[c] for c in self.kept[v]]

    def taken(self, edge: Edge) -> list[Type]:
        operands = self.problem.vertices[edge.target].operands
        return [operands[c][edge.position] for c in self.kept[edge.target]]

    def add(self, u: int, v: int, table: Table) -> None:
        if u == v:
            self.own[u] = self.own[u] + table.diagonal()
            return
        key, table = ((u, v), table) if u < v else ((v, u), table.T)
        before = self.pairs.get(key)
        self.pairs[key] = table if before is None else before + table

    def add_edge(self, edge: Edge) -> None:
        made, rows = _numbered(self.made(edge.source))
        taken, columns = _numbered(self.taken(edge))
        prices = np.array([[edge.prices.get((a, b), inf) for b in taken] for a in made])
        self.add(edge.source, edge.target, prices[rows][:, columns])

    def add_share(self, share: Share) -> None:
        """The variable of a share, its pair with the source, and one with each consumer."""
        source, here = share.edges[0].source, len(self.own)
        made, rows = _numbered(self.made(source))
        takes = [_numbered(self.taken(edge)) for edge in share.edges]
        places = {kind: n for n, kind in enumerate(sorted({kind for kinds, _ in takes for kind in kinds}))}
        known = share.prices
        prices = np.array([[known.get((a, b), inf) for b in places] for a in made])
        origin, changed = _states(prices, len(share.edges))
        self.own.append(np.where(changed, prices[origin], 0.0).sum(axis=1))
        self.add(source, here, np.where(np.asarray(rows)[:, None] == origin[None, :], 0.0, inf))
        free = changed | (prices[origin] <= 0)
        for edge, (kinds, columns) in zip(share.edges, takes, strict=True):
            allowed = np.array([[(a, b) in edge.prices for b in kinds] for a in made])[origin]
            allowed &= free[:, [places[kind] for kind in kinds]]
            self.add(here, edge.target, np.where(allowed, 0.0, inf)[:, columns])


def _numbered(types: Sequence[Type]) -> tuple[list[Type], list[int]]:
    """The different types, and which of them each is."""
    places: dict[Type, int] = {}
    numbers = [places.setdefault(kind, len(places)) for kind in types]
    return list(places), numbers


def _states(prices: Table, consumers: int) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    """By state: which type was made, and into which it is changed: no more than there are consumers."""
    origin: list[int] = []
    changed: list[NDArray[np.bool_]] = []
    for i, row in enumerate(prices):
        paid = np.flatnonzero((row > 0) & (row < inf))
        for count in range(min(len(paid), consumers) + 1):
            for some in combinations(paid, count):
                origin.append(i)
                mask = np.zeros(len(row), dtype=bool)
                mask[list(some)] = True
                changed.append(mask)
    return np.array(origin), np.array(changed)


def _too_many(problem: Problem, kept: Sequence[Sequence[int]], share: Share) -> bool:
    source = share.edges[0].source
    made = {problem.vertices[source].results[c] for c in kept[source]}
    paid = Counter(a for (a, _), price in share.prices.items() if price > 0 and a in made)
    return sum(comb(n, k) for n in paid.values() for k in range(min(n, len(share.edges)) + 1)) > _STATES


# --- arc consistency ------------------------------------------------------------------------------

_Groups = list[tuple[int, int]]
"""By type that a pair's first vertex makes: its choices that do, the second's that go with them, as bits."""


def _consistent(problem: Problem) -> list[list[int]]:
    """The choices that every neighbour has some choice to go with. Raises ShardingError where none are left."""
    alive = [(1 << len(vertex.results)) - 1 for vertex in problem.vertices]
    arcs: list[list[tuple[int, _Groups]]] = [[] for _ in alive]
    for u, v, groups in _relations(problem):
        arcs[u].append((v, groups))
        arcs[v].append((u, [(second, first) for first, second in groups]))
    waiting, queued = deque(range(len(alive))), [True] * len(alive)
    while waiting:
        u = waiting.popleft()
        queued[u] = False
        for v, groups in arcs[u]:
            fits = 0
            for first, second in groups:
                if first & alive[u]:
                    fits |= second
            if alive[v] & ~fits:
                alive[v] &= fits
                if not queued[v]:
                    queued[v] = True
                    waiting.append(v)
    if not all(alive):
        raise ShardingError("no placement satisfies every op: an op has no choice that its neighbours can go with")
    left = ([c for c in range(bits.bit_length()) if bits >> c & 1] for bits in alive)
    return [sorted(some, key=partial(_rank, vertex)) for some, vertex in zip(left, problem.vertices, strict=True)]


def _rank(vertex: Vertex, choice: int) -> tuple[int, int]:
    """Among equals ranks hold parts, plain ones before strided ones, rather than whole values."""
    kind = vertex.results[choice]
    return _KINDS.index(kind.kind), kind.outer


def _relations(problem: Problem) -> list[tuple[int, int, _Groups]]:
    vertices, found = problem.vertices, []
    makes = [_bits(vertex.results) for vertex in vertices]
    for edge in problem.edges:
        takes = _bits([row[edge.position] for row in vertices[edge.target].operands])
        goes: dict[Type, int] = {}
        for (a, b), _ in edge.prices.items():
            goes[a] = goes.get(a, 0) | takes.get(b, 0)
        groups = [(bits, goes.get(kind, 0)) for kind, bits in makes[edge.source].items()]
        found.append((edge.source, edge.target, groups))
    for v, w in problem.ties:
        found.append((v, w, [(bits, makes[w].get(kind, 0)) for kind, bits in makes[v].items()]))
    return found


def _bits(types: Sequence[Type]) -> dict[Type, int]:
    found: dict[Type, int] = {}
    for c, kind in enumerate(types):
        found[kind] = found.get(kind, 0) | 1 << c
    return found
