"""Rows of a tensor to the ranks that they belong to: an all-to-all of uneven parts, and the way back.

Rows lie in order of their destination. The flat exchange sends one message to each other rank. Where the ranks span
``nodes``, the hierarchical one first takes a row to the rank of its own node that has the destination's place among the
ranks of a node, and from there to the other node: each rank then speaks with one rank of every other node only, in
messages as many times larger as a node has ranks, and the result is the same.
(Rajbhandari et al., "DeepSpeed-MoE", ICML 2022, section 5.2; Hwang et al., "Tutel", MLSys 2023, section 3.3.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import ShardingError
from autopar.runtime.axes import Axis
from autopar.runtime.collectives import exchange_uneven, start_exchange_uneven

Grid = Sequence[Sequence[int]]


@dataclass(frozen=True, eq=False)
class Road:
    """The ranks between which rows travel, ``axis``: at once, or in two hops where they are several ``nodes``.

    A node's ranks are neighbours on the axis. A hop is an all-to-all of the axis in which most messages are empty, and
    those are not sent. Raises ShardingError where the ranks don't divide into ``nodes``.
    """

    axis: Axis
    nodes: int = 1

    def __post_init__(self) -> None:
        if self.axis.size % self.nodes:
            raise ShardingError(f"{self.axis.size} ranks of {self.axis.name!r} don't divide into {self.nodes} nodes")

    @property
    def width(self) -> int:
        """Ranks of a node."""
        return self.axis.size // self.nodes

    @property
    def has_hops(self) -> bool:
        return self.nodes > 1 and self.width > 1

    def counts(self, sent: Tensor) -> tuple[Tensor, Tensor | None]:
        """``sent [ranks, ...]``, whole numbers for each rank: ``[ranks, ...]`` that they sent here.

        And on a road of two hops, ``[width, nodes, ...]`` that the ranks of this node sent by way of here.
        """
        if not self.has_hops:
            even = (1,) * self.axis.size
            return exchange_uneven(sent.contiguous(), even, even, self.axis), None
        grid = sent.view(self.nodes, self.width, *sent.shape[1:])
        near = self.within(grid.transpose(0, 1).flatten(0, 1), (self.nodes,) * self.width, (self.nodes,) * self.width)
        near = near.view(self.width, self.nodes, *sent.shape[1:])
        sizes = (self.width,) * self.nodes
        return self.across(near.transpose(0, 1).flatten(0, 1), sizes, sizes), near

    def within(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """To and from the ranks of this node."""
        first = self.axis.index // self.width * self.width
        peers = range(first, first + self.width)
        return exchange_uneven(rows.contiguous(), self._only(peers, sent), self._only(peers, received), self.axis)

    def across(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """To and from the ranks at this one's place in each node."""
        peers = range(self.axis.index % self.width, self.axis.size, self.width)
        return exchange_uneven(rows.contiguous(), self._only(peers, sent), self._only(peers, received), self.axis)

    def _only(self, peers: Iterable[int], counts: Sequence[int]) -> list[int]:
        by_peer = dict(zip(peers, counts, strict=True))
        return [by_peer.get(rank, 0) for rank in range(self.axis.size)]


@dataclass
class Flight:
    """Rows on their way: ``rows`` are there after :meth:`wait`; ``sent`` must stay until then."""

    rows: Tensor
    work: dist.Work | None = None
    sent: Tensor | None = None

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        self.work = self.sent = None
        return self.rows


@dataclass(frozen=True, eq=False)
class Journey:
    """How many rows go from this rank to each of ``road``, and come from each: ``sent`` and ``received``, in order.

    ``near [width][nodes]``: on a road of two hops, rows that come from each rank of the node, by the node they go on
    to; () on a flat one.
    """

    road: Road
    sent: tuple[int, ...]
    received: tuple[int, ...]
    near: tuple[tuple[int, ...], ...] = ()

    @property
    def arriving(self) -> int:
        return sum(self.received)

    def there(self, rows: Tensor) -> Tensor:
        """``rows [sum(sent), ...]`` in order of destination; ``[sum(received), ...]`` in order of origin."""
        if not self.near:
            return self.start_there(rows).wait()
        leaving, arriving = self._grid(self.sent), self._grid(self.received)
        near = self.road.within(_turned(rows, leaving), _sums(_flipped(leaving)), _sums(self.near))
        return self.road.across(_turned(near, self.near), _sums(_flipped(self.near)), _sums(arriving))

    def back(self, rows: Tensor) -> Tensor:
        """The inverse of :meth:`there`, for rows of any width."""
        if not self.near:
            return self.start_back(rows).wait()
        leaving, arriving, onward = self._grid(self.sent), self._grid(self.received), _flipped(self.near)
        near = self.road.across(rows, _sums(arriving), _sums(onward))
        home = self.road.within(_turned(near, onward), _sums(self.near), _sums(_flipped(leaving)))
        return _turned(home, _flipped(leaving))

    def start_there(self, rows: Tensor) -> Flight:
        """:meth:`there`, under way; where there are two hops, at its end."""
        if self.near:
            return Flight(self.there(rows))
        rows = rows.contiguous()
        return Flight(*start_exchange_uneven(rows, self.sent, self.received, self.road.axis), rows)

    def start_back(self, rows: Tensor) -> Flight:
        """:meth:`back`, under way."""
        if self.near:
            return Flight(self.back(rows))
        rows = rows.contiguous()
        return Flight(*start_exchange_uneven(rows, self.received, self.sent, self.road.axis), rows)

    def _grid(self, counts: Sequence[int]) -> Grid:
        """``[nodes][width]``."""
        width = self.road.width
        return [counts[first : first + width] for first in range(0, len(counts), width)]


def _flipped(grid: Grid) -> Grid:
    return list(zip(*grid, strict=True))


def _sums(grid: Grid) -> list[int]:
    return [sum(row) for row in grid]


def _turned(rows: Tensor, grid: Grid) -> Tensor:
    """Rows that lie in blocks of ``grid[i][j]`` rows, by i and then j: by j and then i."""
    width = len(grid[0])
    blocks = torch.split(rows, [count for line in grid for count in line])
    return torch.cat([blocks[i * width + j] for j in range(width) for i in range(len(grid))])
