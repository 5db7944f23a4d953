"""expert_loops: a Python loop over experts becomes the operations of a mixture of experts.

Guarantees: equal values and gradients, up to the order in which a token's experts are added. Each body of such a loop
takes the tokens that chose expert e, computes something for each, and adds it to what these tokens have::

    for e, expert in enumerate(experts):                     routing = route(index, 8)
        token, slot = torch.where(index == e)                rows = dispatch(x, routing)
        y = expert(x[token]) * weights[token, slot, None]    rows = grouped_linear(rows, experts.*.up, routing) …
        out.index_add_(0, token, y)                          out = combine(rows, weights, routing)

If all bodies are the same graph, the parameters of experts become one parameter ``experts.*.up`` ``[8, …]`` each
(:attr:`autopar.graph.ParameterInfo.stacked`), which can be split by experts. Experts of unequal kinds stay as they are:
each has a routing of its own, and every rank computes all for its tokens. If the loop passes over those without tokens,
which then have no gradient on one device, a remark says that here they have one of zeros. No op whose size depends on
values is left.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from autopar import expert_capture
from autopar.capture import Flat
from autopar.errors import CaptureError
from autopar.graph import arguments, info, op_name, where
from autopar.liveness import live
from autopar.passes.captured_rows import Merges, check_rows, passed_over
from autopar.passes.expert_bodies import (
    MERGES,
    Body,
    Labels,
    NotALoopError,
    Pairs,
    Picks,
    differs,
    indexed,
    labels,
    taken_at,
)
from autopar.passes.expert_rows import Rows, Writer
from autopar.passes.functionalize import functionalize
from autopar.passes.stacked_parameters import Shared, Stacks, selected_from
from autopar.passes.token_choices import Chosen, chosen, is_data_dependent, is_empty, is_zeros, places

aten = torch.ops.aten


def expert_loops(flat: Flat) -> Flat:
    """Rewrite ``flat``. Raises CaptureError naming the line of an op whose size depends on values and that is no part
    of a loop over experts."""
    if not flat.others and not any(map(is_data_dependent, flat.nodes)):
        return flat
    _drop_twins(flat)
    reasons: list[str] = []
    chains = _chains(flat)
    others = [_captured_otherwise(other) for other in flat.others]
    if others:
        check_rows(flat, _ends(chains), labels(flat.nodes), others)
    skipped = passed_over(flat, _ends(chains), others)
    shared = Shared({node for chain in chains for body in _bodies(flat, chain) for node in body.inside})
    for chain in chains:
        try:
            _rewrite(flat, chain, shared, skips=chain[-1].node in skipped)
        except NotALoopError as error:
            reasons.append(f"{where(chain[-1].node)} ends what looks like a loop over experts, but {error}")
    flat.nodes = list(live(flat.nodes, flat.loss, {}))
    shared.read_rows(flat)
    for node in flat.nodes:
        if is_data_dependent(node):
            raise CaptureError(_refusal(node, reasons))
    return flat


def _drop_twins(flat: Flat) -> None:
    """In modules with such loops, what each turn of one computes again (``weights.unsqueeze(-1)``) is computed once."""
    modules = {info(node).module for node in flat.nodes if op_name(node) in MERGES}
    first: dict[Any, fx.Node] = {}
    kept: list[fx.Node] = []
    for node in flat.nodes:
        data = info(node)
        if data.module not in modules or data.random or data.autocast:
            kept.append(node)
            continue
        key = (node.target, repr((node.args, node.kwargs)), data.module)
        twin = first.setdefault(key, node)
        if twin is node:
            kept.append(node)
        else:
            node.replace_all_uses_with(twin)
    flat.nodes = kept


def _captured_otherwise(flat: Flat) -> tuple[Flat, Merges]:
    flat = functionalize(flat)
    _drop_twins(flat)
    return flat, _ends(_chains(flat))


def _ends(chains: Sequence[Chain]) -> Merges:
    return {merge.node: (merge.base, merge.picks.chosen) for chain in chains for merge in chain}


def _refusal(node: fx.Node, reasons: Sequence[str]) -> str:
    known = f" ({reasons[0]})" if reasons else ""
    return (
        f"{where(node)} makes a tensor whose size depends on values{known}. What can be compiled is a loop over "
        "experts in which each takes its tokens (x[token], with token from torch.where or nonzero of index == e), "
        "computes something for each alone, and adds it back (out.index_add_(0, token, y)); elsewhere, use masks, "
        "whose sizes are fixed"
    )


@dataclass(frozen=True)
class Merge:
    """One body's end: ``node`` gives ``value`` to the tokens of ``picks`` in ``base``; ``adds``, or replaces."""

    node: fx.Node
    base: fx.Node
    value: fx.Node
    picks: Picks
    adds: bool


def _merge(node: fx.Node) -> Merge | None:
    """``node`` as the end of a body; None where it is something else."""
    if node.op != "call_function" or op_name(node) not in MERGES:
        return None
    given = arguments(node)
    adding = op_name(node) == "aten.index_add.default"
    if adding and (given["dim"] != 0 or given["alpha"] != 1):
        return None
    base, value = given["self"], given["source" if adding else "values"]
    taken = taken_at(base, [given["index"]] if adding else given["indices"])
    if taken is None or taken.first or not isinstance(value, fx.Node):
        return None
    picks = Picks.of(taken.chosen, taken.dims)
    if adding or given["accumulate"]:
        return Merge(node, base, value, picks, adds=True)
    term = _added_to(value, base, taken.chosen)
    return Merge(node, base, value if term is None else term, picks, adds=term is not None)


def _added_to(value: fx.Node, base: fx.Node, picked: Chosen) -> fx.Node | None:
    """``v`` where ``value`` is ``base[token] + v``."""
    if op_name(value) != "aten.add.Tensor" or value.kwargs:
        return None
    for x, v in (value.args[:2], value.args[1::-1]):
        taken = indexed(x) if isinstance(x, fx.Node) else None
        if taken is not None and taken.source is base and taken.chosen == picked and isinstance(v, fx.Node):
            return v
    return None


Chain = list[Merge]
"""The ends of a loop's bodies, in order: each gives to what the one before has left."""


def _chains(flat: Flat) -> list[Chain]:
    found: dict[fx.Node, Chain] = {}
    for node in flat.nodes:
        merge = None
        try:
            merge = _merge(node)
        except NotALoopError:
            continue
        if merge is None:
            continue
        before = found.pop(merge.base, None)
        same = before is not None and before[-1].adds == merge.adds and _alike(before[-1].picks, merge.picks)
        if before is not None and not same:
            found[merge.base] = before
        found[node] = [*before, merge] if before is not None and same else [merge]
    return list(found.values())


def _alike(one: Picks, other: Picks) -> bool:
    """Whether they pick from one router's choice, for different experts."""
    if one.chosen.is_mask or other.chosen.is_mask:
        return one.chosen.is_mask and other.chosen.is_mask and one.token_shape == other.token_shape
    same = replace(one, chosen=replace(one.chosen, expert=None)) == replace(
        other, chosen=replace(other.chosen, expert=None)
    )
    return same and one.chosen.expert != other.chosen.expert


def _bodies(flat: Flat, chain: Chain) -> list[Body]:
    """Those of a chain; none where it is no loop over experts."""
    known, order = labels(flat.nodes), {node: i for i, node in enumerate(flat.nodes)}
    try:
        return [Body.of(merge.picks, merge.value, known, order) for merge in chain]
    except NotALoopError:
        return []


def _rewrite(flat: Flat, chain: Chain, shared: Shared, *, skips: bool) -> None:
    """Put the five operations in the place of a chain of bodies. Raises NotALoopError."""
    _check_picks(chain)
    known, order = labels(flat.nodes), {node: i for i, node in enumerate(flat.nodes)}
    bodies = [Body.of(merge.picks, merge.value, known, order) for merge in chain]
    _check_intermediate(chain, order)
    writer = Writer(flat.graph, chain[-1].node)
    loop = Loop(flat, writer, bodies, known, shared, skips)
    result = loop.summed(chain[-1].node)
    result = _based(writer, chain, result, loop)
    last = chain[-1].node
    last.replace_all_uses_with(result)
    flat.loss = result if flat.loss is last else flat.loss
    at = order[last]
    flat.nodes = [*flat.nodes[:at], *writer.order, *flat.nodes[at:]]
    flat.remarks += loop.remarks


def _check_picks(chain: Chain) -> None:
    """A token must be given each expert's rows once: where it is taken by tokens, or rows replace what was there."""
    picks = chain[0].picks
    if picks.chosen.is_mask:
        if not chain[0].adds:
            raise NotALoopError("rows replace what tokens have, and a token may have several experts")
        return
    if picks.choices > 1 and not picks.by_slot and places(picks.chosen.index) is None:
        raise NotALoopError("a token may choose an expert twice, as the router's choice isn't that of topk")
    if picks.choices > 1 and not chain[0].adds:
        raise NotALoopError("rows replace what tokens have, and a token may have several experts")


def _check_intermediate(chain: Chain, live: Container[fx.Node]) -> None:
    """What a body leaves is for the next one alone, to add to."""
    for merge, after in itertools.pairwise(chain):
        for user in _live_users(merge.node, live):
            taken = indexed(user)
            is_read = taken is not None and taken.source is merge.node and _live_users(user, live) <= _reads(after)
            if user is not after.node and not is_read:
                raise NotALoopError(f"{where(user)} reads what some of the experts have added so far")


def _live_users(node: fx.Node, live: Container[fx.Node]) -> set[fx.Node]:
    return {user for user in node.users if user in live}


def _reads(merge: Merge) -> set[fx.Node]:
    """The sum by which a merge in place adds."""
    return set(merge.node.all_input_nodes) if merge.adds else set()


def _based(writer: Writer, chain: Chain, y: fx.Node, loop: Loop) -> fx.Node:
    """``y [n, h]`` in the shape and dtype of what it is added to, and added to that."""
    base, last = chain[0].base, chain[-1].node
    meta = info(last).meta
    y = writer.reshape(y, meta.shape)
    if info(y).meta.dtype != meta.dtype:
        y = writer.call(aten.to.dtype, (y, meta.dtype), meta.shape, last)
    if is_zeros(base):
        return y
    if chain[0].adds:
        return writer.call(aten.add.Tensor, (base, y), meta.shape, last)
    reaches_all = loop.reaches_all()
    if is_empty(base) or reaches_all:
        return y
    raise NotALoopError("rows replace those of tokens that have an expert, and others may have none")


@dataclass
class Loop:
    """The bodies of one loop, and what is written for them; ``skips``: experts without tokens are passed
    over; ``shared`` is of all loops; ``remarks`` say what stays whole, and why."""

    flat: Flat
    writer: Writer
    bodies: Sequence[Body]
    known: Labels
    shared: Shared
    skips: bool
    remarks: list[str] = field(default_factory=list)

    @property
    def picks(self) -> Picks:
        return self.bodies[0].picks

    @property
    def numbers(self) -> list[int]:
        if self.picks.chosen.is_mask:
            return list(range(len(self.bodies)))
        return [body.picks.chosen.expert or 0 for body in self.bodies]

    def reaches_all(self) -> bool:
        """Whether each token has an expert."""
        count = None if self.picks.chosen.is_mask else places(self.picks.chosen.index)
        return count is not None and set(range(count)) <= set(self.numbers)

    def summed(self, like: fx.Node) -> fx.Node:
        """For each token the sum of what its experts compute. Raises NotALoopError."""
        index = self._index(like)
        try:
            pairs = self._pairs()
            stacks = Stacks(self.flat, self.shared, skips=self.skips)
            made = self._rows(index, self.bodies, pairs, self.numbers, stacks)
            stacks.keep()
            return made
        except NotALoopError as error:
            self.remarks.append(self._remark(str(error)))
        terms = [self._rows(index, [b], [], [e], None) for b, e in zip(self.bodies, self.numbers, strict=True)]
        total = terms[0]
        for term in terms[1:]:
            total = self.writer.call(aten.add.Tensor, (total, term), info(total).meta.shape, like)
        return total

    def _remark(self, why: str) -> str:
        home = self.writer.home or "the model"
        idle = (
            "; one that no token of a step chooses has a gradient of zeros, by which optimizers may move it, where the "
            "model's own code passes over it"
        )
        return f"the {len(self.bodies)} experts of {home} stay whole on every rank: {why}{idle if self.skips else ''}"

    def _pairs(self) -> list[Pairs]:
        found: list[Pairs] = []
        for body in self.bodies[1:]:
            pairs = differs(self.bodies[0], body)
            if isinstance(pairs, str):
                raise NotALoopError(f"they aren't equal, {pairs}")
            found.append(pairs)
        return found

    def _rows(
        self, index: fx.Node, bodies: Sequence[Body], pairs: list[Pairs], numbers: list[int], stacks: Stacks | None
    ) -> fx.Node:
        index = self._numbered(index, numbers)
        count = info(index).meta.numel
        experts = len(numbers)
        others = () if experts == len(self.bodies) else (len(self.bodies),)
        routing = self.writer.call(expert_capture.route, (index, experts, *others), (count, experts), index)
        choice = Choice(self.writer, index, [body.picks for body in bodies])

        def stack(nodes: Sequence[fx.Node]) -> fx.Node | None:
            return None if stacks is None else stacks.of(nodes, numbers)

        def by_slot(nodes: Sequence[fx.Node]) -> fx.Node:
            return choice.by_slot(nodes, numbers)

        return Rows(self.writer, bodies, pairs, index, routing, stack, by_slot).combined()

    def _index(self, like: fx.Node) -> fx.Node:
        """``[n, k]``: the experts of each token."""
        if self.picks.chosen.is_mask:
            return self._index_of_masks(like)
        index, picks = self.picks.chosen.index, self.picks
        if picks.slot_dim is not None and picks.slot_dim < len(picks.token_dims):
            order = [*picks.token_dims, picks.slot_dim]
            shape = [info(index).meta.shape[d] for d in order]
            index = self.writer.call(aten.permute.default, (index, order), shape, index)
        return self.writer.reshape(index, (picks.tokens, picks.choices))

    def _index_of_masks(self, like: fx.Node) -> fx.Node:
        """Slot e of a token is for expert e, and has no row where its mask is false."""
        call, tokens, experts = self.writer.call, self.picks.tokens, len(self.bodies)
        shape = (tokens, experts)
        masks = [self._mask(body.picks.chosen.index) for body in self.bodies]
        stacked = call(aten.stack.default, (masks, 1), shape, like, dtype=torch.bool)
        absent = call(aten.logical_not.default, (stacked,), shape, like, dtype=torch.bool)
        numbers = call(aten.arange.default, (experts,), (experts,), like, dtype=torch.int64)
        expanded = call(aten.expand.default, (numbers, list(shape)), shape, like, dtype=torch.int64)
        return call(aten.masked_fill.Scalar, (expanded, absent, experts), shape, like, dtype=torch.int64)

    def _mask(self, condition: fx.Node) -> fx.Node:
        shape = info(condition).meta.shape
        if info(condition).meta.dtype != torch.bool:
            condition = self.writer.call(aten.ne.Scalar, (condition, 0), shape, condition, dtype=torch.bool)
        return self.writer.reshape(condition, (self.picks.tokens,))

    def _numbered(self, index: fx.Node, numbers: list[int]) -> fx.Node:
        """The index into ``numbers``; others are no expert."""
        shape, first = info(index).meta.shape, numbers[0]
        if numbers == list(range(first, first + len(numbers))):
            return index if first == 0 else self.writer.call(aten.sub.Scalar, (index, first), shape, index)
        made = self.writer.call(aten.full_like.default, (index, len(numbers)), shape, index)
        for position, number in enumerate(numbers):
            mask = self.writer.call(aten.eq.Scalar, (index, number), shape, index, dtype=torch.bool)
            made = self.writer.call(aten.masked_fill.Scalar, (made, mask, position), shape, index)
        return made


@dataclass
class Choice:
    """What belongs to a token and an expert, brought to the token's slots ``[n, k]``: each has the value of its
    expert. ``index`` is into ``picks``."""

    writer: Writer
    index: fx.Node
    picks: Sequence[Picks]

    def by_slot(self, nodes: Sequence[fx.Node], numbers: Sequence[int]) -> fx.Node:
        shape = info(self.index).meta.shape
        weights = self._masked_weights(nodes)
        if weights is not None:
            return self.writer.reshape(weights, shape)
        table = self._table(nodes, numbers)
        if info(table).meta.shape == shape and self.picks[0].chosen.is_mask:
            return table
        experts = info(table).meta.shape[1]
        inside = self.writer.call(aten.clamp.default, (self.index, 0, experts - 1), shape, self.index)
        return self.writer.call(aten.gather.default, (table, 1, inside), shape, table)

    def _masked_weights(self, nodes: Sequence[fx.Node]) -> fx.Node | None:
        """``w`` where each is ``(w * (index == e)).sum(-1)``: a token has at most one slot for an expert."""
        found: set[fx.Node] = set()
        for node, picks in zip(nodes, self.picks, strict=True):
            weight = _weight_of(node, picks)
            if weight is None:
                return None
            found.add(weight)
        return found.pop() if len(found) == 1 and not self.picks[0].chosen.is_mask else None

    def _table(self, nodes: Sequence[fx.Node], numbers: Sequence[int]) -> fx.Node:
        """``[n, experts]``."""
        tokens = info(self.index).meta.shape[0]
        whole = selected_from(nodes, numbers, dim=-1)
        if whole is not None:
            return self.writer.reshape(whole, (tokens, len(nodes)))
        columns = [self.writer.reshape(node, (tokens,)) for node in nodes]
        return self.writer.call(aten.stack.default, (columns, 1), (tokens, len(nodes)), nodes[0])


def _weight_of(node: fx.Node, picks: Picks) -> fx.Node | None:
    if op_name(node) not in ("aten.sum.dim_IntList",) or picks.slot_dim is None:
        return None
    product: Any = node.args[0]
    if op_name(product) != "aten.mul.Tensor" or arguments(node)["dim"] not in ([picks.slot_dim], [-1]):
        return None
    if picks.slot_dim != len(picks.token_dims):
        return None
    for weight, mask in (product.args, product.args[::-1]):
        said = chosen(mask) if isinstance(mask, fx.Node) else None
        full = tuple(range(len(picks.token_dims) + 1))
        if said == replace(picks.chosen, dims=full) and isinstance(weight, fx.Node):
            return weight
    return None
