"""The placement problem of one axis: one choice per vertex, a price per change of type on each edge.

It says what is to be solved; :mod:`autopar.planner.solve_placement` solves it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.spmd import Type

Change = tuple[Type, Type]


@dataclass(frozen=True)
class Vertex:
    """``results[c]`` and ``operands[c]`` are the types of choice c; ``seconds[c]`` and ``bytes[c]`` what it costs."""

    name: str
    results: tuple[Type, ...]
    operands: tuple[tuple[Type, ...], ...]
    seconds: tuple[float, ...]
    bytes: tuple[int, ...]


Ways = Mapping[Change, int]
"""Changes of type by number, those that have a price in common under one."""


@dataclass(frozen=True, eq=False)
class WayPrices(Mapping[Change, float]):
    """Seconds of changes: of each of the ``ways``, which edges that are alike but for prices have in common."""

    ways: Ways
    seconds: tuple[float, ...]

    def __getitem__(self, change: Change) -> float:
        return self.seconds[self.ways[change]]

    def __iter__(self) -> Iterator[Change]:
        return iter(self.ways)

    def __len__(self) -> int:
        return len(self.ways)


class NumberedWays(NamedTuple):
    """Changes between types by number, and by both numbers the way (-1: there is none). ``of`` is what they were made
    of, whose id is its own as long as it is there."""

    changes: list[tuple[int, int]]
    table: NDArray[np.intp]
    of: object


@dataclass(frozen=True, eq=False)
class NumberedTypes:
    """Some types by number, in their order, and changes between them. ``states`` of shares, by what is paid for (values
    of a table, its rows) and how many consumers there are: what is made, and what that is changed to."""

    places: Mapping[Type, int]
    states: dict[tuple[bytes, int, int], tuple[NDArray[np.intp], NDArray[np.bool_]]] = field(default_factory=dict)
    _ways: dict[int, NumberedWays] = field(default_factory=dict)

    @classmethod
    def of(cls, kinds: Sequence[Type]) -> NumberedTypes:
        return cls({kind: number for number, kind in enumerate(kinds)})

    def ways(self, prices: Mapping[Change, float]) -> NumberedWays:
        """Those of changes that have ``prices``, between types that there are."""
        of = prices.ways if isinstance(prices, WayPrices) else prices
        if id(of) not in self._ways:
            ways = prices.ways if isinstance(prices, WayPrices) else {change: n for n, change in enumerate(prices)}
            places = self.places
            found = {(places[a], places[b]): way for (a, b), way in ways.items() if a in places and b in places}
            table = np.full((len(places), len(places)), -1)
            for change, way in found.items():
                table[change] = way
            self._ways[id(of)] = NumberedWays(list(found), table, of)
        return self._ways[id(of)]


@dataclass(frozen=True)
class Edge:
    """``prices`` has every allowed change of type, in seconds; edges of one source and ``share`` pay each once."""

    source: int
    target: int
    position: int
    prices: Mapping[Change, float]
    share: Hashable = None


@dataclass(frozen=True)
class Share:
    """Edges of one source that share its changed copies; a change costs what the last edge that has it says."""

    edges: tuple[Edge, ...]

    @cached_property
    def prices(self) -> dict[Change, float]:
        found: dict[Change, float] = {}
        for edge in self.edges:
            found |= edge.prices
        return found


@dataclass(frozen=True)
class Problem:
    """``ties``: vertices that are one stored tensor, and so of one type. ``numbered``: what was found out for problems
    with the same types."""

    vertices: tuple[Vertex, ...]
    edges: tuple[Edge, ...]
    ties: tuple[tuple[int, int], ...] = ()
    budget_bytes: int | None = None
    numbered: dict[tuple[Type, ...], NumberedTypes] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def parts(self) -> tuple[list[Edge], list[Share]]:
        """Edges that pay for themselves, and those that share, two or more together."""
        groups: dict[tuple[int, Hashable], list[Edge]] = defaultdict(list)
        alone = [edge for edge in self.edges if edge.share is None]
        for edge in self.edges:
            if edge.share is not None:
                groups[edge.source, edge.share].append(edge)
        alone += [edges[0] for edges in groups.values() if len(edges) == 1]
        return alone, [Share(tuple(edges)) for edges in groups.values() if len(edges) > 1]

    def seconds(self, choices: Sequence[int]) -> float:
        """What an assignment costs. Raises KeyError where it takes a change that isn't allowed."""
        alone, shares = self.parts
        total = math.fsum(vertex.seconds[c] for vertex, c in zip(self.vertices, choices, strict=True))
        total += math.fsum(edge.prices[self._change(edge, choices)] for edge in alone)
        for share in shares:
            prices, changes = share.prices, {self._allowed(edge, choices) for edge in share.edges}
            total += math.fsum(max(0.0, prices[change]) for change in changes)
        return total

    def bytes(self, choices: Sequence[int]) -> int:
        return sum(vertex.bytes[c] for vertex, c in zip(self.vertices, choices, strict=True))

    def _allowed(self, edge: Edge, choices: Sequence[int]) -> Change:
        """Raises KeyError where the edge's own target can't take it so, whatever others of a share can."""
        change = self._change(edge, choices)
        if change not in edge.prices:
            raise KeyError(change)
        return change

    def _change(self, edge: Edge, choices: Sequence[int]) -> Change:
        made = self.vertices[edge.source].results[choices[edge.source]]
        return made, self.vertices[edge.target].operands[choices[edge.target]][edge.position]


@dataclass(frozen=True)
class Solution:
    """``choices[v]`` is an index into C_v; the bound is proven: no assignment costs less."""

    choices: tuple[int, ...]
    seconds: float
    bound_seconds: float
