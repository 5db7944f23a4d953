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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log2, prod

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]

LARGEST = 1 << 23
"""Entries of the largest table that is made: 64 MiB."""

_TABLES = 16  # as large as the largest that is allowed: all together sum up no more than these
_SMALL = 1 << 20  # an order that sums up fewer entries than this is good enough
_EQUAL = 1e-12  # values this close (relative) are equal: the first is taken, whatever the rounding of their sums


@dataclass(frozen=True)
class Network:
    """``own[v][c]``: price of value c of v; ``pairs[u, v][c, d]`` with u < v: price of both together."""

    own: Sequence[Table]
    pairs: Mapping[tuple[int, int], Table]


@dataclass(frozen=True)
class _Step:
    """``best``: the value of ``variable`` for each combination of values of ``scope``."""

    variable: int
    scope: tuple[int, ...]
    best: NDArray[np.intp]


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
        scope, table = _sum(v, own[v], mine, sizes)
        least, best = _least(table)
        steps.append(_Step(v, scope, best))
        if not scope:
            total += float(least)
        elif len(scope) == 1:
            own[scope[0]] = own[scope[0]] + least
        else:
            for w in scope:
                factors[w][number] = scope, least
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


def _sum(
    v: int, own: Table, factors: Sequence[tuple[tuple[int, ...], Table]], sizes: Sequence[int]
) -> tuple[tuple[int, ...], Table]:
    """All that is about ``v`` as one table over the variables it is about, in order, and ``v`` last."""
    scope = tuple(sorted({w for about, _ in factors for w in about if w != v}))
    place = {w: axis for axis, w in enumerate((*scope, v))}
    table: Table = own
    for about, factor in sorted(factors, key=lambda item: item[1].size):  # small ones first: fewer large sums
        axes = sorted(range(len(about)), key=lambda axis: place[about[axis]])
        shape = [1] * len(place)
        for w in about:
            shape[place[w]] = sizes[w]
        table = table + factor.transpose(axes).reshape(shape)
    return scope, table


def _least(table: Table) -> tuple[Table, NDArray[np.intp]]:
    """The least along the last axis, and the first place that has it but for rounding."""
    least = table.min(axis=-1)
    near = least + np.abs(least) * _EQUAL
    best: NDArray[np.intp] = (table <= near[..., None]).argmax(axis=-1)
    return least, best


def _decode(steps: Sequence[_Step], count: int) -> list[int]:
    values = [0] * count
    for step in reversed(steps):
        values[step.variable] = int(step.best[tuple(values[w] for w in step.scope)])
    return values


# --- orders ---------------------------------------------------------------------------------------

_Key = Callable[[int, Sequence[int], Sequence[set[int]]], tuple[int, int]]


def _by_fill(v: int, sizes: Sequence[int], near: Sequence[set[int]]) -> tuple[int, int]:
    """Pairs of neighbours that get a price together, large ones counting more (weighted min-fill)."""
    around = sorted(near[v])
    new = [(a, b) for i, a in enumerate(around) for b in around[:i] if b not in near[a]]
    return sum(_weight(sizes[a]) * _weight(sizes[b]) for a, b in new), _result(v, sizes, near)


def _weight(size: int) -> int:
    """Its logarithm, in steps that are the same on every machine."""
    return round(16 * log2(size))


def _by_table(v: int, sizes: Sequence[int], near: Sequence[set[int]]) -> tuple[int, int]:
    return sizes[v] * _result(v, sizes, near), 0


def _by_degree(v: int, sizes: Sequence[int], near: Sequence[set[int]]) -> tuple[int, int]:
    return len(near[v]), _result(v, sizes, near)


def _result(v: int, sizes: Sequence[int], near: Sequence[set[int]]) -> int:
    return prod(sizes[w] for w in near[v])


def _order(sizes: Sequence[int], pairs: Sequence[tuple[int, int]], largest: int) -> list[int] | None:
    """The order that sums up the fewest entries, of the greedy ones; None where each takes too many."""
    found: tuple[int, list[int]] | None = None
    for key in (_by_fill, _by_table, _by_degree):
        entries, most, order = _greedy(sizes, pairs, key)
        if most <= largest and entries <= _TABLES * largest and (found is None or entries < found[0]):
            found = entries, order
            if entries <= _SMALL:
                break
    return found[1] if found else None


def _greedy(sizes: Sequence[int], pairs: Sequence[tuple[int, int]], key: _Key) -> tuple[int, int, list[int]]:
    """Entries of all tables, of the largest, and the order that takes next what has the least ``key``."""
    near: list[set[int]] = [set() for _ in sizes]
    for u, v in pairs:
        near[u].add(v)
        near[v].add(u)
    current = [key(v, sizes, near) for v in range(len(sizes))]
    heap = [(k, v) for v, k in enumerate(current)]
    heapq.heapify(heap)
    entries, most, order, done = 0, 0, list[int](), [False] * len(sizes)
    while heap:
        k, v = heapq.heappop(heap)
        if done[v] or k != current[v]:
            continue
        done[v] = True
        order.append(v)
        size = sizes[v] * _result(v, sizes, near)
        entries, most = entries + size, max(most, size)
        for w in near[v]:
            near[w] |= near[v]
            near[w] -= {v, w}
        for w in near[v]:
            current[w] = key(w, sizes, near)
            heapq.heappush(heap, (current[w], w))
    return entries, most, order
