"""Tokens to their experts by way of nodes: once to each node that has any of them, and there a row for each expert.

The first hop takes a token across, to the rank of the node that has the sender's place in its own; that one makes a row
of each of the token's slots there, and the second hop takes these within the node. On the way back rows are weighted
where they were made, and those of one token added up before they go across: so weights, a number for each slot, go
there too. Nothing is rounded on the way but each of these sums, to the rows' dtype.
(DeepSeek-V3, arXiv 2412.19437, section 3.2.2; Zhao et al., "DeepEP", 2025.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.node_rows import NodeRows
from autopar.runtime.exchange import Flight, Road

Counts = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Sums:
    """Sums over items, each of one of ``count`` targets: in turns, the first item of each target that has any, then the
    second ones, and so on. Of each turn, ``sizes`` has how many there are, and ``order [items]`` which. ``targets``
    have most items first: those of a later turn are the first ones of the turn before."""

    count: int
    sizes: Counts
    order: Tensor
    targets: Tensor

    @classmethod
    def of(cls, owner: Tensor, count: int, sizes: Counts) -> Sums:
        """``owner [items]``: the target of each."""
        items = owner.new_zeros(count).scatter_add_(0, owner, torch.ones_like(owner))
        targets = items.argsort(descending=True, stable=True)
        place = torch.empty_like(targets).index_copy_(0, targets, torch.arange(count, device=owner.device))
        turns = turn_of(owner, items)
        sizes = tuple(size for size in sizes if size)
        return cls(count, sizes, (turns * count + place[owner]).argsort(), targets[: sizes[0] if sizes else 0])

    @classmethod
    def estimate(cls, items: int, count: int, like: Tensor) -> Sums:
        """As if the first targets had an item more than the others."""
        full, rest = divmod(items, count) if count else (0, 0)
        sizes = (*(count,) * full, *((rest,) if rest else ()))
        return cls(count, sizes, like.new_empty(items), like.new_empty(sizes[0] if sizes else 0))

    def sums(self, items: Tensor, dtype: torch.dtype, weights: Tensor | None = None) -> Tensor:
        """``[count, h]`` in ``dtype``, of ``items [items, h]``, by ``weights [items]``; zeros of a target without any.
        Added up in float32 at least."""
        wide = torch.promote_types(torch.promote_types(items.dtype, dtype), torch.float32)
        made = items.new_empty if len(self.targets) == self.count else items.new_zeros
        placed = made((self.count, *items.shape[1:]), dtype=dtype)
        if not self.sizes:
            return placed
        first, *later = torch.split(self.order, list(self.sizes))
        total = items.index_select(0, first).to(wide)
        if weights is not None:
            total.mul_(weights.index_select(0, first).unsqueeze(1))
        for mine in later:
            taken = items.index_select(0, mine)
            if weights is None:
                total[: len(mine)].add_(taken)
            else:
                total[: len(mine)].addcmul_(taken, weights.index_select(0, mine).unsqueeze(1))
        return placed.index_put_((self.targets,), total.to(dtype))


def turn_of(owner: Tensor, items: Tensor) -> Tensor:
    """Of each of some items, how many of the same ``owner`` come before it; ``items`` are how many each owner has."""
    order = owner.argsort(stable=True)
    sorted_ = owner[order]
    starts = items.cumsum(0) - items
    places = torch.arange(len(owner), device=owner.device) - starts[sorted_]
    return torch.empty_like(owner).index_copy_(0, order, places)


@dataclass(frozen=True, eq=False)
class Hops:
    """How tokens get to the ranks of their experts and back.

    ``tokens [rows that leave]``, by node, and ``slots [slots that leave]``, by node and token, are those of this rank;
    ``rows_sent`` and ``slots_sent`` say how many go to each node, ``rows_got`` and ``slots_got`` how many come. Of the
    slots that came, ``order`` is the order in which they go on, by rank and expert, ``row`` the row of each, in that
    order; ``near_sent`` and ``near_got`` say how many go to each rank of the node, and come. ``here`` adds up rows of
    slots that went on, to rows that came; ``home`` rows that left, to tokens.
    """

    road: Road
    tokens: Tensor
    slots: Tensor
    rows_sent: Counts
    slots_sent: Counts
    rows_got: Counts
    slots_got: Counts
    order: Tensor
    row: Tensor
    near_sent: Counts
    near_got: Counts
    here: Sums
    home: Sums

    @classmethod
    def estimate(cls, road: Road, rows: NodeRows, arriving: int, like: Tensor) -> Hops:
        """As if all nodes and ranks got as many, of which ``arriving`` come to this one's experts."""

        def empty(count: int) -> Tensor:
            return like.new_empty(count)

        def over_nodes(count: int) -> Counts:
            return _even(count, road.nodes)

        return cls(
            road,
            tokens=empty(rows.sent),
            slots=empty(rows.slots),
            rows_sent=over_nodes(rows.sent),
            slots_sent=over_nodes(rows.slots),
            rows_got=over_nodes(rows.got),
            slots_got=over_nodes(rows.passed),
            order=empty(rows.passed),
            row=empty(rows.passed),
            near_sent=_even(rows.passed, road.width),
            near_got=_even(arriving, road.width),
            here=Sums.estimate(rows.passed, rows.got, like),
            home=Sums.estimate(rows.sent, rows.tokens, like),
        )

    def start_there(self, x: Tensor) -> Flight:
        """Tokens ``x [n, h]`` across nodes, under way."""
        return self.road.start_across(x.index_select(0, self.tokens), self.rows_sent, self.rows_got)

    def there(self, flight: Flight) -> Tensor:
        """The rest of it: a row of each slot of this rank's experts, by origin."""
        return self.road.within(self.spread(flight.wait()), self.near_sent, self.near_got)

    def spread(self, rows: Tensor) -> Tensor:
        """Of rows that came, one for each slot that goes on."""
        return rows[self.row]

    def start_back(self, rows: Tensor) -> Flight:
        """The way back: sums over the slots of a token in this node, under way."""
        return self.start_home(self.gathered(rows))

    def gathered(self, rows: Tensor) -> Tensor:
        """Rows from the experts of this node, where they went on from."""
        return self.road.within(rows, self.near_got, self.near_sent)

    def start_home(self, rows: Tensor, weights: Tensor | None = None) -> Flight:
        """The sums of these, by ``weights``, across nodes."""
        return self.road.start_across(self.here.sums(rows, rows.dtype, weights), self.rows_got, self.rows_sent)

    def back(self, flight: Flight, dtype: torch.dtype) -> Tensor:
        """The rest of it: ``[n, h]``, sums over each token's nodes."""
        return self.home.sums(flight.wait(), dtype)

    def weights_there(self, weights: Tensor) -> Tensor:
        """``weights [n, k]`` of tokens' slots, those of the slots that go on from here."""
        leaving = weights.flatten().index_select(0, self.slots)
        return self.road.start_across(leaving, self.slots_sent, self.slots_got).wait().index_select(0, self.order)

    def weights_back(self, weights: Tensor, shape: tuple[int, int]) -> Tensor:
        """The inverse, in the ``shape [n, k]`` of tokens' slots; zeros of those without a row."""
        came = torch.empty_like(weights).index_copy_(0, self.order, weights)
        returned = self.road.start_across(came, self.slots_got, self.slots_sent).wait()
        return weights.new_zeros(shape[0] * shape[1]).index_copy_(0, self.slots, returned).view(shape)


def _even(total: int, parts: int) -> Counts:
    return tuple(total // parts + (part < total % parts) for part in range(parts))


@dataclass(frozen=True, eq=False)
class _Told:
    """What ranks told each other: ``own`` and ``came`` of this rank's tokens and of those that come to it, by node: how
    many of them have more than j slots there; ``slots_sent`` and ``slots_got``; ``received [width][experts]``, rows
    from each rank of the node for each of this rank's experts, ``near_sent`` those that go there; ``spans``: how many
    of this rank's tokens have experts on more than j nodes."""

    own: tuple[Counts, ...]
    came: tuple[Counts, ...]
    slots_sent: Counts
    slots_got: Counts
    near_sent: Counts
    received: tuple[Counts, ...]
    spans: Counts


def hops_of(keys: Tensor, road: Road, local: int) -> tuple[Hops, tuple[Counts, ...], Tensor]:
    """From ``keys [n, k]``, the place of each slot's expert among ``local`` ones of each rank of the road (as many as
    those of all: no row): the hops, rows from each rank of the node by expert, and ``received``, the same on the
    device. One small message to each rank of two groups, one copy to the host, and which slots go where."""
    tokens, own = keys.shape[0], road.width * local
    node = keys // own  # one more than there are: none
    slots = keys.new_zeros(tokens, road.nodes + 1).scatter_add_(1, node, torch.ones_like(keys))[:, :-1]
    told, received = _tell(keys, slots, road, local)
    rows_sent, rows_got = (tuple(counts[0] for counts in side) for side in (told.own, told.came))
    is_hit = slots > 0
    leaving = (~is_hit).t().flatten().sort(stable=True).indices[: sum(rows_sent)]  # by node and token
    order = (node * tokens + torch.arange(tokens, device=keys.device).unsqueeze(1)).flatten().argsort(stable=True)
    order = order[: sum(told.slots_sent)]
    places = (is_hit.cumsum(0) - 1).gather(1, node.clamp(max=road.nodes - 1))  # among the node's rows of this rank
    named = (places * own + keys % own).flatten().index_select(0, order)
    came = road.start_across(named, told.slots_sent, told.slots_got).wait()
    onward, row = _onward(came, told.slots_got, rows_got, own)
    turns = tuple(map(sum, zip(*told.came, strict=True)))
    here = Sums.of(row, sum(rows_got), turns)
    home = Sums.of(leaving % tokens, tokens, told.spans)
    near_got = tuple(map(sum, told.received))
    hops = Hops(
        road,
        tokens=leaving % tokens,
        slots=order,
        rows_sent=rows_sent,
        slots_sent=told.slots_sent,
        rows_got=rows_got,
        slots_got=told.slots_got,
        order=onward,
        row=row,
        near_sent=told.near_sent,
        near_got=near_got,
        here=here,
        home=home,
    )
    return hops, told.received, received


def _tell(keys: Tensor, slots: Tensor, road: Road, local: int) -> tuple[_Told, Tensor]:
    """``slots [n, nodes]``: of each token, those on a node."""
    (_, choices), nodes, width = keys.shape, road.nodes, road.width
    more = torch.arange(choices, device=keys.device)
    own = (slots.unsqueeze(2) > more).sum(0)  # [nodes, choices]
    experts = keys.new_zeros(nodes * width * local + 1).scatter_add_(0, keys.flatten(), torch.ones_like(keys.flatten()))
    sent = torch.cat([own, experts[:-1].view(nodes, width * local)], 1)
    ones = (1,) * nodes
    came = road.start_across(sent, ones, ones).wait()
    near = came[:, choices:].sum(0).view(width, local)
    received = road.within(near, (1,) * width, (1,) * width)
    spans = ((slots > 0).sum(1).unsqueeze(1) > more).sum(0)
    on = sent[:, choices:].sum(1), came[:, choices:].sum(1), near.sum(1), received.flatten(), spans
    parts = own.flatten(), came[:, :choices].flatten(), *on
    flat = iter(torch.cat(parts).tolist())

    def some(count: int) -> Counts:
        return tuple(next(flat) for _ in range(count))

    mine, theirs = (tuple(some(choices) for _ in range(nodes)) for _ in range(2))
    leaving, coming, going = some(nodes), some(nodes), some(width)
    return _Told(
        mine, theirs, leaving, coming, going, tuple(some(local) for _ in range(width)), some(choices)
    ), received


def _onward(came: Tensor, slots: Counts, rows: Counts, own: int) -> tuple[Tensor, Tensor]:
    """Of slots that ``came``, each as ``row of its sender * own + expert of this node``: the order by expert, and in
    that order the rows that they are of."""
    first = [sum(rows[:node]) for node in range(len(rows))]
    origin = torch.tensor(first, dtype=came.dtype, device="cpu").to(came.device, non_blocking=True)
    start = origin.repeat_interleave(torch.tensor(slots, device="cpu").to(came.device), output_size=sum(slots))
    order = (came % own).argsort(stable=True)
    return order, (start + came // own).index_select(0, order)
