"""A placement problem as variables with values and prices of pairs of them, which elimination takes.

Vertices are variables, what an edge allows and asks is a pair. Consumers that share changed copies of a value make one
more variable: its values are the type that was made and the set of types it was changed to, each of which is paid once;
a consumer takes what was made or one of the set. Choices that no neighbour can go with are left out beforehand
(arc consistency: A. K. Mackworth, "Consistency in networks of relations", Artificial Intelligence 8, 1977).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from math import comb, inf

import numpy as np
from numpy.typing import NDArray

from autopar.errors import ShardingError
from autopar.planner.elimination import Network, Table
from autopar.planner.placement import Change, Edge, NumberedTypes, Problem, Share, Vertex, WayPrices

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
    numbers, (alone, shares) = _Numbers.of(problem), problem.parts
    kept = _consistent(problem, numbers)
    if any(_too_many(numbers, kept, share) for share in shares):
        return None
    pairs = list(zip(problem.vertices, kept, strict=True))
    own = [np.array([vertex.seconds[c] for c in choices]) for vertex, choices in pairs]
    stored = [np.array([float(vertex.bytes[c]) for c in choices]) for vertex, choices in pairs]
    building = _Building(numbers, kept, own)
    for edge in alone:
        building.add_edge(edge)
    for share in shares:
        building.add_share(share)
    for v, w in problem.ties:
        made, other = building.made(v), building.made(w)
        building.add(v, w, np.where(made[:, None] == other, 0.0, inf))
    return PlacementNetwork(Network(building.own, building.pairs), kept, stored)


_Kinds = NDArray[np.intp]
"""Types, by number."""


@dataclass
class _Numbers:
    """The types of a problem by number, in their order: ``results[v][c]`` of choice c of vertex v, ``operands[v][i]``
    of its operand i by choice."""

    kinds: NumberedTypes
    results: list[list[int]]
    operands: list[list[tuple[int, ...]]]
    _tables: dict[int, tuple[Mapping[Change, float], Table]] = field(default_factory=dict)

    @classmethod
    def of(cls, problem: Problem) -> _Numbers:
        found = {kind for vertex in problem.vertices for row in (vertex.results, *vertex.operands) for kind in row}
        key = tuple(sorted(found))
        if key not in problem.numbered:
            problem.numbered[key] = NumberedTypes.of(key)
        kinds = problem.numbered[key]
        places = kinds.places
        results = [[places[kind] for kind in vertex.results] for vertex in problem.vertices]
        rows = ([tuple(places[kind] for kind in row) for row in vertex.operands] for vertex in problem.vertices)
        return cls(kinds, results, [list(zip(*row, strict=True)) for row in rows])

    def taken(self, edge: Edge) -> tuple[int, ...]:
        """The type that the edge's target takes it as, by choice."""
        return self.operands[edge.target][edge.position]

    def changes(self, edge: Edge) -> list[tuple[int, int]]:
        """Those that are allowed and may be."""
        return self.kinds.ways(edge.prices).changes

    def prices(self, prices: Mapping[Change, float]) -> Table:
        """By what a value was made and taken as; infinite: not allowed."""
        if id(prices) not in self._tables:
            seconds = prices.seconds if isinstance(prices, WayPrices) else prices.values()
            table = np.array([*seconds, inf])[self.kinds.ways(prices).table]
            self._tables[id(prices)] = prices, table  # with the mapping, whose id is its own that long
        return self._tables[id(prices)][1]


@dataclass
class _Building:
    numbers: _Numbers
    kept: list[list[int]]
    own: list[Table]
    pairs: dict[tuple[int, int], Table] = field(default_factory=dict)

    def made(self, v: int) -> _Kinds:
        results = self.numbers.results[v]
        return np.array([results[c] for c in self.kept[v]])

    def taken(self, edge: Edge) -> _Kinds:
        operands = self.numbers.taken(edge)
        return np.array([operands[c] for c in self.kept[edge.target]])

    def add(self, u: int, v: int, table: Table) -> None:
        if u == v:
            self.own[u] = self.own[u] + table.diagonal()
            return
        key, table = ((u, v), table) if u < v else ((v, u), table.T)
        before = self.pairs.get(key)
        self.pairs[key] = table if before is None else before + table

    def add_edge(self, edge: Edge) -> None:
        prices = self.numbers.prices(edge.prices)
        self.add(edge.source, edge.target, prices[self.made(edge.source)[:, None], self.taken(edge)])

    def add_share(self, share: Share) -> None:
        """The variable of a share, its pair with the source, and one with each consumer."""
        source, here = share.edges[0].source, len(self.own)
        made, rows = _numbered(self.made(source))
        takes = [self.taken(edge) for edge in share.edges]
        kinds = np.unique(np.concatenate(takes))
        prices = self.numbers.prices(share.prices)[made[:, None], kinds]
        origin, changed = self._states_of(prices, len(share.edges))
        self.own.append(np.where(changed, prices[origin], 0.0).sum(axis=1))
        self.add(source, here, np.where(rows[:, None] == origin, 0.0, inf))
        free = changed | (prices[origin] <= 0)
        for edge, taken in zip(share.edges, takes, strict=True):
            allowed = self.numbers.prices(edge.prices)[made[origin][:, None], taken] < inf
            allowed &= free[:, np.searchsorted(kinds, taken)]
            self.add(here, edge.target, np.where(allowed, 0.0, inf))

    def _states_of(self, prices: Table, consumers: int) -> tuple[_Kinds, NDArray[np.bool_]]:
        """By state: which type was made, and into which it is changed: no more than there are consumers."""
        paid = (prices > 0) & (prices < inf)
        key, known = (paid.tobytes(), len(paid), consumers), self.numbers.kinds.states
        if key not in known:
            known[key] = _states(paid, consumers)
        return known[key]


def _numbered(kinds: _Kinds) -> tuple[_Kinds, _Kinds]:
    """The different types in the order in which they come, and which of them each is."""
    places: dict[int, int] = {}
    numbers = [places.setdefault(kind, len(places)) for kind in kinds.tolist()]
    return np.array(list(places)), np.array(numbers)


def _states(paid: NDArray[np.bool_], consumers: int) -> tuple[_Kinds, NDArray[np.bool_]]:
    origin: list[int] = []
    changed: list[NDArray[np.bool_]] = []
    for i, row in enumerate(paid):
        places = np.flatnonzero(row)
        for count in range(min(len(places), consumers) + 1):
            for some in combinations(places, count):
                origin.append(i)
                mask = np.zeros(len(row), dtype=bool)
                mask[list(some)] = True
                changed.append(mask)
    return np.array(origin), np.array(changed)


def _too_many(numbers: _Numbers, kept: Sequence[Sequence[int]], share: Share) -> bool:
    source = share.edges[0].source
    made = {numbers.results[source][c] for c in kept[source]}
    prices = numbers.prices(share.prices)
    paid = np.count_nonzero((prices > 0) & (prices < inf), axis=1)
    consumers = len(share.edges)
    return sum(comb(n, k) for n in paid[list(made)].tolist() for k in range(min(n, consumers) + 1)) > _STATES


# --- arc consistency ------------------------------------------------------------------------------

_Groups = list[tuple[int, int]]
"""By type that a pair's first vertex makes: its choices that do, the second's that go with them, as bits."""


def _consistent(problem: Problem, numbers: _Numbers) -> list[list[int]]:
    """The choices that every neighbour has some choice to go with. Raises ShardingError where none are left."""
    alive = [(1 << len(results)) - 1 for results in numbers.results]
    arcs: list[list[tuple[int, _Groups]]] = [[] for _ in alive]
    for u, v, groups in _relations(problem, numbers):
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


def _relations(problem: Problem, numbers: _Numbers) -> list[tuple[int, int, _Groups]]:
    found = []
    makes = [_bits(results) for results in numbers.results]
    for edge in problem.edges:
        takes, goes = _bits(numbers.taken(edge)), dict.fromkeys(makes[edge.source], 0)
        for a, b in numbers.changes(edge):
            if a in goes and b in takes:
                goes[a] |= takes[b]
        found.append((edge.source, edge.target, [(bits, goes[kind]) for kind, bits in makes[edge.source].items()]))
    for v, w in problem.ties:
        found.append((v, w, [(bits, makes[w].get(kind, 0)) for kind, bits in makes[v].items()]))
    return found


def _bits(kinds: Sequence[int]) -> dict[int, int]:
    found: dict[int, int] = {}
    for c, kind in enumerate(kinds):
        found[kind] = found.get(kind, 0) | 1 << c
    return found
