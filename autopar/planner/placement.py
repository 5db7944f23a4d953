"""The placement problem of one axis: one choice per vertex, a price per change of type on each edge.

It says what is to be solved; :mod:`autopar.planner.solve_placement` solves it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

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

    @property
    def prices(self) -> dict[Change, float]:
        found: dict[Change, float] = {}
        for edge in self.edges:
            found |= edge.prices
        return found


@dataclass(frozen=True)
class Problem:
    """``ties``: vertices that are one stored tensor, and so of one type."""

    vertices: tuple[Vertex, ...]
    edges: tuple[Edge, ...]
    ties: tuple[tuple[int, int], ...] = ()
    budget_bytes: int | None = None

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
        alone, shares = self.parts()
        total = math.fsum(vertex.seconds[c] for vertex, c in zip(self.vertices, choices, strict=True))
        total += math.fsum(edge.prices[self._change(edge, choices)] for edge in alone)
        for share in shares:
            prices = share.prices
            total += math.fsum(max(0.0, prices[c]) for c in {self._change(edge, choices) for edge in share.edges})
        return total

    def bytes(self, choices: Sequence[int]) -> int:
        return sum(vertex.bytes[c] for vertex, c in zip(self.vertices, choices, strict=True))

    def _change(self, edge: Edge, choices: Sequence[int]) -> Change:
        made = self.vertices[edge.source].results[choices[edge.source]]
        return made, self.vertices[edge.target].operands[choices[edge.target]][edge.position]


@dataclass(frozen=True)
class Solution:
    """``choices[v]`` is an index into C_v; the bound is proven: no assignment costs less."""

    choices: tuple[int, ...]
    seconds: float
    bound_seconds: float
