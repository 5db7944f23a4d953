"""Exact minima of sums over sparse graphs: variables with few values, eliminated one by one.

Sets
    V variables, each with values C_v; pairs (u, v) of variables that have a price together
Objective
    min over x  sum_v own_v[x_v] + sum_(u,v) pair_uv[x_u, x_v]        (infinite: not allowed)
Method
    Nonserial dynamic programming (U. Bertele, F. Brioschi, "Nonserial Dynamic Programming", Academic Press, 1972;
    bucket elimination, R. Dechter, Artificial Intelligence 113, 1999): everything about v is summed in one table over v
    and its neighbours, and v's best value for each of their values replaces it. What is left has the same minimum.

What it takes is the size of the largest table, which the order decides: greedy orders are tried on sizes alone, and
:func:`eliminate` refuses a graph for which all of them need tables that are too large.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, log2, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]

LARGEST = 1 << 23
"""Entries of the largest table that is made: 64 MiB."""

_TABLES = 16  # as large as the largest that is allowed: all together sum up no more than these
_SMALL = 1 << 23  # an order that sums up fewer entries than this is good enough
_CACHED = 1 << 16  # larger ones, of half a MiB, are made value by value

_EQUAL = 1e-12  # values this close (relative) are equal: the first is taken, whatever the rounding of their sums


@dataclass(frozen=True)
class Network:
    """``own[v][c]``: price of value c of v; ``pairs[u, v][c, d]`` with u < v: price of both together."""

    own: Sequence[Table]
    pairs: Mapping[tuple[int, int], Table]


@dataclass(frozen=True)
class _Step:
    """``variable`` and everything about it when it was eliminated: factors over it and variables of ``scope``."""

    variable: int
    scope: tuple[int, ...]
    own: Table
    factors: Sequence[Table]

    def least(self, sizes: Sequence[int]) -> Table:
        """Of its values, for each combination of values of ``scope``; value by value where a table of all is large."""
        shape = tuple(sizes[w] for w in self.scope)
        if len(self.own) * prod(shape) < _CACHED:
            least: Table = _total(self.own.reshape(-1, *[1] * len(shape)), self.factors).min(axis=0)
            return least
        least, start = np.full(shape, np.inf), [1] * len(shape)
        for value, price in enumerate(self.own):
            total = _total(np.full(start, price), [factor[value] for factor in self.factors])
            np.minimum(least, total, out=least)
        return least

    def best(self, values: Sequence[int]) -> int:
        """The first value that is the least but for rounding, where ``scope`` has these ``values``."""
        place = [values[w] for w in self.scope]
        column = self.own
        for factor in self.factors:
            extents = zip(factor.shape[1:], place, strict=True)
            where: tuple[Any, ...] = (slice(None), *(0 if extent == 1 else value for extent, value in extents))
            column = column + factor[where]
        least = column.min()
        return int((column <= least + abs(least) * _EQUAL).argmax())


def _total(table: Table, factors: Sequence[Table]) -> Table:
    """Of ``table`` and all ``factors``, which broadcast."""
    for factor in factors:
        shape = tuple(map(max, table.shape, factor.shape))
        table = np.add(table, factor, out=table if table.shape == shape and table.base is None else np.empty(shape))
    return table


def eliminate(network: Network, largest: int = LARGEST) -> tuple[list[int], float] | None:
    """Values of all variables whose sum is the least, and that sum (infinite where nothing is allowed).

    Of equal values the first is taken, so the result depends on the order of variables and values alone. None where
    every order that was tried needs a table of more than ``largest`` entries.
    """
    own, pairs = _condition(network)
    sizes = [len(table) for table in own]
    order = _order(sizes, list(pairs), largest)
    if order is None:
        return None
    factors: list[dict[int, tuple[tuple[int, ...], Table]]] = [{} for _ in own]
    for number, (pair, table) in enumerate(pairs.items()):
        for v in pair:
            factors[v][number] = pair, table
    number, total, steps = len(pairs), 0.0, list[_Step]()
    for v in order:
        mine = [factors[v][n] for n in sorted(factors[v])]
        for n in list(factors[v]):
            for w in factors[v][n][0]:
                if w != v:
                    del factors[w][n]
        step = _step(v, own[v], mine)
        steps.append(step)
        least = step.least(sizes)
        if not step.scope:
            total += float(least)
        elif len(step.scope) == 1:
            own[step.scope[0]] = own[step.scope[0]] + least
        else:
            for w in step.scope:
                factors[w][number] = step.scope, least
            number += 1
    return _decode(steps, len(own)), total


def _condition(network: Network) -> tuple[list[Table], dict[tuple[int, int], Table]]:
    """Variables with one value left are that value: their prices are their neighbours' own."""
    own, pairs = list(network.own), {}
    for (u, v), table in network.pairs.items():
        if len(own[u]) == 1:
            own[v] = own[v] + table[0]
        elif len(own[v]) == 1:
            own[u] = own[u] + table[:, 0]
        else:
            pairs[u, v] = table
    return own, pairs


def _step(v: int, own: Table, factors: Sequence[tuple[tuple[int, ...], Table]]) -> _Step:
    """All that is about ``v``, each table with ``v`` first and then an axis for each other variable, in order."""
    scope = tuple(sorted({w for about, _ in factors for w in about if w != v}))
    place = {w: axis for axis, w in enumerate((v, *scope))}
    found = []
    for about, factor in sorted(factors, key=lambda item: item[1].size):  # small ones first: fewer large sums
        axes = sorted(range(len(about)), key=lambda axis: place[about[axis]])
        shape = [1] * len(place)
        for w, extent in zip(about, factor.shape, strict=True):
            shape[place[w]] = extent
        found.append(factor.transpose(axes).reshape(shape))
    return _Step(v, scope, own, found)


def _decode(steps: Sequence[_Step], count: int) -> list[int]:
    values = [0] * count
    for step in reversed(steps):
        values[step.variable] = step.best(values)
    return values


# --- orders ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Graph:
    """Variables that are left: ``sizes`` and their logarithms (``weights``, in steps that are the same on every
    machine), and which have a price together with which."""

    sizes: Sequence[int]
    weights: Sequence[int]
    near: list[set[int]]

    @classmethod
    def of(cls, sizes: Sequence[int], pairs: Iterable[tuple[int, int]]) -> _Graph:
        near: list[set[int]] = [set() for _ in sizes]
        for u, v in pairs:
            near[u].add(v)
            near[v].add(u)
        return cls(sizes, [round(16 * log2(size)) for size in sizes], near)

    def result(self, v: int) -> int:
        """Entries of the table that replaces ``v``."""
        return prod([self.sizes[w] for w in self.near[v]])


_Key = Callable[[int, _Graph], tuple[int, int]]


def _by_fill(v: int, graph: _Graph) -> tuple[int, int]:
    """Pairs of neighbours that get a price together, large ones counting more (weighted min-fill)."""
    around, near, weights, fill = list(graph.near[v]), graph.near, graph.weights, 0
    for i, a in enumerate(around):
        for b in around[:i]:
            if b not in near[a]:
                fill += weights[a] * weights[b]
    return fill, graph.result(v)


def _by_table(v: int, graph: _Graph) -> tuple[int, int]:
    return graph.sizes[v] * graph.result(v), 0


def _by_degree(v: int, graph: _Graph) -> tuple[int, int]:
    return len(graph.near[v]), graph.result(v)


def _order(sizes: Sequence[int], pairs: Sequence[tuple[int, int]], largest: int) -> list[int] | None:
    """The order that sums up the fewest entries, of the greedy ones; None where each takes too many."""
    found: tuple[int, list[int]] | None = None
    for key in (_by_fill, _by_table, _by_degree):
        most = min(_TABLES * largest, found[0] - 1 if found else inf)
        found = _greedy(sizes, pairs, key, largest, most) or found
        if found and found[0] <= _SMALL:
            break
    return found[1] if found else None


def _greedy(
    sizes: Sequence[int], pairs: Sequence[tuple[int, int]], key: _Key, largest: int, most: float
) -> tuple[int, list[int]] | None:
    """Entries of all tables, and the order that takes next what has the least ``key``; None where one table has more
    than ``largest``, or all have more than ``most``."""
    graph = _Graph.of(sizes, pairs)
    near = graph.near
    current = [key(v, graph) for v in range(len(sizes))]
    heap = [(k, v) for v, k in enumerate(current)]
    heapq.heapify(heap)
    entries, order, done = 0, list[int](), [False] * len(sizes)
    while heap:
        k, v = heapq.heappop(heap)
        if done[v] or k != current[v]:
            continue
        done[v] = True
        order.append(v)
        size = sizes[v] * graph.result(v)
        entries += size
        if size > largest or entries > most:
            return None
        for w in near[v]:
            near[w] |= near[v]
            near[w] -= {v, w}
        for w in near[v]:
            current[w] = key(w, graph)
            heapq.heappush(heap, (current[w], w))
    return entries, order
