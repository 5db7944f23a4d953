"""Rows of a tensor to the ranks that they belong to: an all-to-all of uneven parts, and the way back.

Rows lie in order of their destination. A flat exchange sends one message to each other rank. Where the ranks span
``nodes``, one hop goes :meth:`Road.across` nodes, to the ranks at this one's place in each, and one :meth:`Road.within`
a node: each rank then speaks with one rank of every other node only (:mod:`autopar.runtime.hops`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from autopar.errors import ShardingError
from autopar.runtime.axes import Axis
from autopar.runtime.collectives import exchange_uneven, start_exchange_uneven


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

    def counts(self, sent: Tensor) -> Tensor:
        """``sent [ranks, ...]``, whole numbers for each rank: ``[ranks, ...]`` that they sent here."""
        even = (1,) * self.axis.size
        return exchange_uneven(sent.contiguous(), even, even, self.axis)

    def start(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Flight:
        """To and from all ranks."""
        rows = rows.contiguous()
        return Flight(*start_exchange_uneven(rows, sent, received, self.axis), rows)

    def start_across(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Flight:
        """To and from the ranks at this one's place in each node."""
        peers = range(self.axis.index % self.width, self.axis.size, self.width)
        return self.start(rows, self._only(peers, sent), self._only(peers, received))

    def within(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """To and from the ranks of this node."""
        if self.width == 1:
            return rows
        first = self.axis.index // self.width * self.width
        peers = range(first, first + self.width)
        return self.start(rows, self._only(peers, sent), self._only(peers, received)).wait()

    def _only(self, peers: Iterable[int], counts: Sequence[int]) -> list[int]:
        by_peer = dict(zip(peers, counts, strict=True))
        return [by_peer.get(rank, 0) for rank in range(self.axis.size)]


@dataclass
class Flight:
    """Rows on their way: ``rows`` are there after :meth:`wait`; ``sent`` must stay until then."""

    rows: Tensor | None
    work: dist.Work | None = None
    sent: Tensor | None = None

    def wait(self) -> Tensor:
        """The rows, once: whoever waits for them has them alone."""
        if self.work is not None:
            self.work.wait()
        rows, self.rows = self.rows, None
        self.work = self.sent = None
        assert rows is not None, "rows are waited for once"
        return rows


@dataclass(frozen=True, eq=False)
class Journey:
    """How many rows go from this rank to each of ``road``, and come from each: ``sent`` and ``received``, in order."""

    road: Road
    sent: tuple[int, ...]
    received: tuple[int, ...]

    @property
    def arriving(self) -> int:
        return sum(self.received)

    def start_there(self, rows: Tensor) -> Flight:
        """``rows [sum(sent), ...]`` in order of destination; ``[sum(received), ...]`` in order of origin."""
        return self.road.start(rows, self.sent, self.received)

    def start_back(self, rows: Tensor) -> Flight:
        """The inverse, for rows of any width."""
        return self.road.start(rows, self.received, self.sent)
