"""Which rows go to which expert: made once per layer and microbatch from a router's choice, on all ranks.

A *slot* is one choice of one token: token t of n, with k choices, has slots ``t k`` to ``t k + k - 1``. A slot whose
expert is no number from 0 to E - 1 (a dropped token) has no row. Experts are split over the ranks in order, as a
weight ``[E, ...]`` of type ``S(0)`` is. Rows are sorted by expert, those of one expert by where they come from and
then by slot, which on one device is the order of tokens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from autopar.errors import ShardingError
from autopar.node_rows import node_rows
from autopar.runtime.axes import Axes, Axis
from autopar.runtime.exchange import Flight, Journey, Road
from autopar.runtime.hops import Hops, hops_of
from autopar.runtime.later import Later


@dataclass(frozen=True, eq=False)
class Routing:
    """The rows of this rank's experts, and how they come about from this rank's ``tokens`` with ``choices`` slots each.

    ``order [r]``: the slots that have a row, by expert. ``journey`` (None: all stay) takes these rows to the ranks of
    their experts, in order of origin; ``by_expert`` (None: they are so already) are their places there by expert.
    By way of nodes, ``hops`` stand in place of both. ``counts``: rows of each of this rank's experts. ``is_estimate``:
    counts are a guess, there being no values.
    """

    tokens: int
    choices: int
    order: Tensor
    counts: tuple[int, ...]
    journey: Journey | None = None
    by_expert: Tensor | None = None
    later: Later | None = None
    is_estimate: bool = False
    hops: Hops | None = None

    @property
    def rows(self) -> int:
        return sum(self.counts)

    @cached_property
    def ends(self) -> Tensor:
        """The end of each expert's rows, as torch's grouped product takes them."""
        return self._on_device(list(itertools.accumulate(self.counts)), torch.int32)

    @cached_property
    def idle(self) -> Tensor:
        """This rank's experts that have no rows."""
        return self._on_device([expert for expert, count in enumerate(self.counts) if not count], torch.int64)

    def _on_device(self, numbers: list[int], dtype: torch.dtype) -> Tensor:
        """Without waiting for what the device does."""
        return torch.tensor(numbers, dtype=dtype).to(self.order.device, non_blocking=True)

    def spans(self) -> list[tuple[int, int, int]]:
        """``(expert, first row, end)`` of each of this rank's experts that has rows."""
        found, first = [], 0
        for expert, count in enumerate(self.counts):
            if count:
                found.append((expert, first, first + count))
            first += count
        return found

    def to_experts(self, rows: Tensor) -> Tensor:
        """Rows ``[r, ...]`` by :attr:`order`, brought to the ranks of their experts and there in order of experts."""
        return self.in_order(self._start_there(rows).wait())

    def to_tokens(self, rows: Tensor) -> Tensor:
        """The inverse, as ``[tokens * choices, ...]`` by slot; zeros for slots without a row."""
        return self._by_slot(self._start_back(self.as_come(rows)).wait())

    def start_to_experts(self, x: Tensor) -> Flight:
        """Of tokens ``x [n, h]``, a row for each slot to its expert, until they are on their way."""
        if self.hops is not None:
            return self.hops.start_there(x)
        return self._start_there(x.index_select(0, self.sources))

    def at_experts(self, flight: Flight) -> Tensor:
        """The rest of it: ``[rows, h]`` by expert."""
        return self.in_order(flight.wait() if self.hops is None else self.hops.there(flight))

    def start_to_tokens(self, rows: Tensor) -> Flight:
        """The way back of rows that are added up, until they are on their way."""
        rows = self.as_come(rows)
        return self._start_back(rows) if self.hops is None else self.hops.start_back(rows)

    def at_tokens(self, flight: Flight, dtype: torch.dtype) -> Tensor:
        """The rest of it: ``[n, h]``, of each token the sum of its rows."""
        if self.hops is not None:
            return self.hops.back(flight, dtype)
        slots = self._by_slot(flight.wait())
        return slots.view(self.tokens, self.choices, *slots.shape[1:]).sum(1) if self.choices > 1 else slots

    def in_order(self, rows: Tensor) -> Tensor:
        """Rows in order of origin: by expert."""
        return rows if self.by_expert is None else rows.index_select(0, self.by_expert)

    def as_come(self, rows: Tensor) -> Tensor:
        """The inverse."""
        return rows if self._by_origin is None else rows.index_select(0, self._by_origin)

    def _start_there(self, rows: Tensor) -> Flight:
        return Flight(rows) if self.journey is None else self.journey.start_there(rows)

    def _start_back(self, rows: Tensor) -> Flight:
        return Flight(rows) if self.journey is None else self.journey.start_back(rows)

    def _by_slot(self, returned: Tensor) -> Tensor:
        slots = self.tokens * self.choices
        if returned.shape[0] == slots:
            return returned.index_select(0, self._places)
        return returned.new_zeros((slots, *returned.shape[1:])).index_copy_(0, self.order, returned)

    @property
    def sources(self) -> Tensor:
        """The token of each slot that has a row, in their :attr:`order`; made again rather than kept."""
        return self.order // self.choices

    @cached_property
    def _places(self) -> Tensor:
        """Of each slot the place of its row, where each has one: kernels pick rows faster than they put them."""
        return _inverse(self.order)

    @cached_property
    def _by_origin(self) -> Tensor | None:
        return None if self.by_expert is None else _inverse(self.by_expert)


def _inverse(order: Tensor) -> Tensor:
    """Of a permutation ``[r]``."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def route(
    index: Tensor,
    experts: int,
    axes: Axes | None = None,
    *,
    exchange: Sequence[Axis] = (),
    filter: Sequence[Axis] = (),
    nodes: int = 1,
    layer: str = "",
    of: int = 0,
) -> Routing:
    """From ``index [n, k]``, the experts (0 to ``experts`` - 1) of this rank's tokens; others are no expert.

    ``exchange``: axes whose ranks hold other tokens and other experts, outermost first, so that rows travel.
    ``filter``: axes whose ranks hold the same tokens and other experts, so that each takes the rows of its own.
    ``nodes``: tokens travel once to each of so many nodes of neighbours (:mod:`autopar.runtime.hops`); 1: rows at once.
    ``layer``: the module path of the router below the axes' scope, under which its load is counted.
    ``of``: so many experts the router chooses among, of which others have a routing of their own (0: none has).
    One small message to each other rank of ``exchange`` (counts). Under ``axes.imbalance`` counts are not
    read but guessed: this rank's experts have as many times the mean. Raises ShardingError where shapes don't fit.
    """
    split = _Split.of(experts, axes, exchange, filter, nodes)
    if index.dim() != 2 or index.is_floating_point():
        raise ShardingError(
            f"route takes the experts of each token as whole numbers [tokens, choices], not {index.dtype} of shape "
            f"{tuple(index.shape)}; a router must return one row per token"
        )
    tokens, choices = index.shape
    later = axes.later if axes is not None else None
    if axes is not None:
        index = axes.routers.seen(axes.path(layer), index, experts)
    if axes is not None and axes.imbalance is not None:
        return _estimate(index, split, axes.imbalance * axes.routers.imbalance(axes.path(layer)), later, of)
    if split.road is not None and nodes > 1:
        return _by_nodes(index, split, split.road, later)
    keys, order = split.keys(index.flatten()).sort(stable=True)
    bounds = torch.searchsorted(keys, torch.arange(split.kept + 1, device=keys.device))
    sent = (bounds[1:] - bounds[:-1]).view(split.ranks, split.local)
    if split.road is None:
        counts = tuple(sent.flatten().tolist())
        return Routing(tokens, choices, order[: sum(counts)], counts, later=later)
    return _travelling(index, split.road, order, sent, later)


def _by_nodes(index: Tensor, split: _Split, road: Road, later: Later | None) -> Routing:
    hops, counts, received = hops_of(split.keys(index), road, split.local)
    by_expert = _by_expert(received, sum(hops.near_got))
    rows, (tokens, choices) = tuple(map(sum, zip(*counts, strict=True))), index.shape
    return Routing(tokens, choices, hops.slots, rows, by_expert=by_expert, later=later, hops=hops)


def _travelling(index: Tensor, road: Road, order: Tensor, sent: Tensor, later: Later | None) -> Routing:
    """Tell the ranks how many rows come; one copy to the host."""
    (tokens, choices), (ranks, local) = index.shape, sent.shape
    received = road.counts(sent)
    told = torch.cat([sent.sum(1), received.flatten()]).tolist()
    leaving, by_rank = told[:ranks], _rows(told[ranks:], local)
    journey = Journey(road, tuple(leaving), tuple(map(sum, by_rank)))
    counts = tuple(map(sum, zip(*by_rank, strict=True)))
    by_expert = _by_expert(received, journey.arriving)
    return Routing(tokens, choices, order[: sum(leaving)], counts, journey, by_expert, later)


def _by_expert(received: Tensor, arriving: int) -> Tensor | None:
    """Places by expert of rows that come by rank and then expert, ``received [ranks, experts]`` of each."""
    ranks, local = received.shape
    if local == 1 or ranks == 1:
        return None
    labels = torch.arange(local, device=received.device).repeat(ranks)
    return labels.repeat_interleave(received.flatten(), output_size=arriving).sort(stable=True).indices


def _estimate(index: Tensor, split: _Split, imbalance: float, later: Later | None, of: int) -> Routing:
    """As if tokens chose experts evenly, but this rank's were ``imbalance`` times the mean."""
    tokens, choices = index.shape
    rows = slots = math.ceil(tokens * choices * split.experts / of) if of else tokens * choices
    if split.road is not None or split.kept < split.experts:
        rows = math.ceil(slots * split.kept / split.experts * imbalance)
    leaving = rows if split.road is None else math.ceil(slots * split.kept / split.experts)
    order = index.new_empty(leaving)
    counts = _even(rows, split.local)
    if split.road is None:
        return Routing(tokens, choices, order, counts, later=later, is_estimate=True)
    if split.road.nodes > 1:
        mean = node_rows(
            tokens, choices, of or split.experts, split.kept, split.road.nodes, split.road.axis.size, imbalance
        )
        rows = mean.passed if split.road.width == 1 else rows
        hops, counts = Hops.estimate(split.road, mean, rows, index), _even(rows, split.local)
        by_expert = index.new_empty(rows) if split.local > 1 and split.road.width > 1 else None
        given = tokens, choices, hops.slots, counts
        return Routing(*given, by_expert=by_expert, later=later, is_estimate=True, hops=hops)
    sent = _even(leaving, split.ranks)
    journey = Journey(split.road, sent, _even(rows, split.ranks))
    by_expert = index.new_empty(rows) if split.local > 1 else None
    return Routing(tokens, choices, order, counts, journey, by_expert, later, is_estimate=True)


def _rows(flat: list[int], width: int) -> list[list[int]]:
    return [flat[first : first + width] for first in range(0, len(flat), width)]


def _even(total: int, parts: int) -> tuple[int, ...]:
    return tuple(total // parts + (part < total % parts) for part in range(parts))


@dataclass(frozen=True, eq=False)
class _Split:
    """``experts`` over axes: for each its size, this rank's place, and whether it filters; the road of the others.

    ``kept`` experts are those of all ranks of the road, ``local`` those of this rank.
    """

    experts: int
    places: tuple[tuple[int, int, bool], ...]
    road: Road | None

    @classmethod
    def of(
        cls,
        experts: int,
        axes: Axes | None,
        exchange: Sequence[Axis],
        filter: Sequence[Axis],
        nodes: int,
    ) -> _Split:
        order = list(axes) if axes is not None else [axis.name for axis in exchange] + [axis.name for axis in filter]
        both = sorted((*exchange, *filter), key=lambda axis: order.index(axis.name))
        places = tuple((axis.size, axis.index, axis in filter) for axis in both if axis.size > 1)
        ranks = math.prod(size for size, _, _ in places)
        if experts % ranks:
            fits = [n for n in range(1, experts + 1) if experts % n == 0]
            names = " x ".join(f"{axis.name} {axis.size}" for axis in both)
            raise ShardingError(f"{experts} experts don't divide over {names}; they divide over one of {fits} ranks")
        travelled = [axis for axis in both if axis not in filter and axis.size > 1]
        return cls(experts, places, _road(travelled, axes, nodes))

    @property
    def ranks(self) -> int:
        """Of the road."""
        return math.prod(size for size, _, filters in self.places if not filters)

    @property
    def local(self) -> int:
        return self.experts // math.prod(size for size, _, _ in self.places)

    @property
    def kept(self) -> int:
        return self.ranks * self.local

    def keys(self, index: Tensor) -> Tensor:
        """What slots are sorted by: rank of the road, then expert of that rank; :attr:`kept` for no row here."""
        valid = (index >= 0) & (index < self.experts)
        if not self.places:
            return index.masked_fill(~valid, self.kept)
        key, block = torch.zeros_like(index), self.experts
        for size, here, filters in self.places:
            block //= size
            place = index // block % size
            if filters:
                valid &= place == here
            else:
                key = key * size + place
        return (key * self.local + index % self.local).masked_fill(~valid, self.kept)


def _road(travelled: Sequence[Axis], axes: Axes | None, nodes: int) -> Road | None:
    if not travelled:
        return None
    if len(travelled) == 1:
        return Road(travelled[0], nodes)
    if axes is None:
        names = [axis.name for axis in travelled]
        raise ShardingError(f"rows that travel over {names} at once need the groups of all axes: give route its axes")
    return Road(axes.joint(tuple(axis.name for axis in travelled)), nodes)
