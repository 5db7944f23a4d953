"""shifted_losses: a loss over ``logits[:, :-1]`` is computed at all positions, and what was cut off is left out after.

Guarantees: equal value and gradient. Next-token losses drop the last position of the logits and the first of the
labels. One position less doesn't divide over ranks that split the sequence, so the logits, the largest tensor of a
model, would have to be gathered. Instead the cut moves down, past every op that treats positions alone: a cross entropy
ignores the positions that were cut off, and other sums take their cut of one number per token::

    x = logits[:, :-1]                                 x = logits
    t = labels[:, 1:]                                  t = pad(labels[:, 1:], [0, 1], value=-100)
    cross_entropy(x, t, reduction=sum)                 cross_entropy(x, t, reduction=sum)

What else such an op reads is padded: by ones, or by zeros where it is of integers. A cut that doesn't get smaller by
moving, or that a random op reads, stays where it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

import torch
from torch import fx

from autopar.capture import Flat
from autopar.graph import Choice, Meta, arguments, derive, info, op_name, operands
from autopar.rules import lookup
from autopar.rules.base import Op, Splits, legal_choices
from autopar.spmd import R, S, Type

aten = torch.ops.aten

_CUTS: Final = {"aten.slice.Tensor"}
_CLASS_LOSSES: Final = {
    "aten.cross_entropy_loss.default",
    "aten.nll_loss_nd.default",
    "aten.nll_loss.default",
}
_TARGET: Final = 1  # position of a class loss's target
_SHRINKS: Final = 2  # by how much smaller what is cut must be at least, to be worth it


def shifted_losses(flat: Flat) -> Flat:
    """Move every cut of positions of a tensor with a gradient down to where it costs little.

    Positions are what the dims are long that tensors of the batch have for sequences (``InputInfo.seq_dim``).
    """
    lengths = _lengths(flat)
    for node in list(flat.nodes):
        cut = _cut_of(node, lengths)
        region = _region(flat.nodes, node, cut) if cut else None
        if cut and region:
            _Rewrite(flat, cut, region).run()
    return flat


def has_shifted_losses(flat: Flat) -> bool:
    """Whether there is any such cut."""
    lengths = _lengths(flat)
    cuts = ((node, _cut_of(node, lengths)) for node in flat.nodes)
    return any(cut is not None and _region(flat.nodes, node, cut) is not None for node, cut in cuts)


def _lengths(flat: Flat) -> set[int]:
    return {item.meta.shape[item.seq_dim] for item in flat.inputs if item.seq_dim is not None}


@dataclass(frozen=True)
class _Cut:
    """Positions ``low`` to ``high`` of ``length``; ``kind`` says of what dim."""

    length: int
    low: int
    high: int
    kind: Type

    @property
    def count(self) -> int:
        return self.high - self.low

    def parts(self, extent: int, outer: int, count: int) -> tuple[int, int, int]:
        """A dim in which ``count`` positions lie, as ``[outer, positions, numbers of each]``."""
        return outer, count, extent // (outer * count)

    def whole(self, meta: Meta, kind: Type) -> Meta:
        """``meta`` with all positions instead of the cut, where dim ``kind`` has them."""
        extent = meta.shape[kind.dim] // self.count * self.length
        return replace(meta, shape=(*meta.shape[: kind.dim], extent, *meta.shape[kind.dim + 1 :]))


@dataclass
class _Region:
    """The ops that move to all positions: where each has them, and what it takes its operands as."""

    kinds: dict[fx.Node, Type] = field(default_factory=dict)
    choices: dict[fx.Node, Choice] = field(default_factory=dict)
    losses: dict[fx.Node, Choice] = field(default_factory=dict)  # class losses, at which the cut ends


def _cut_of(node: fx.Node, lengths: Collection[int]) -> _Cut | None:
    """The cut that a slice makes, of neighbours and of less than all."""
    if op_name(node) not in _CUTS or not info(node).meta.needs_grad:
        return None
    given, shape = arguments(node), info(node.all_input_nodes[0]).meta.shape
    dim = given["dim"] % len(shape)
    low, high, step = slice(given["start"], given["end"], given["step"]).indices(shape[dim])
    if shape[dim] not in lengths or step != 1 or not 0 < high - low < shape[dim]:
        return None
    return _Cut(shape[dim], low, high, S(dim))


def _region(nodes: Sequence[fx.Node], start: fx.Node, cut: _Cut) -> _Region | None:
    """What can be computed at all positions, from the cut ``start`` on; None where that saves nothing."""
    region, alive = _Region({start: cut.kind}), set(nodes)
    for node in nodes[nodes.index(start) + 1 :]:
        if not any(operand in region.kinds for operand in operands(node)):
            continue
        choice = _followed(node, region.kinds)
        if choice is None or not _can_pad(node, choice, region.kinds):
            continue
        if choice.result.is_shard:
            region.kinds[node] = choice.result
            region.choices[node] = choice
        elif op_name(node) in _CLASS_LOSSES and not info(operands(node)[_TARGET]).meta.dtype.is_floating_point:
            region.losses[node] = choice
    inside = region.choices.keys() | region.losses.keys()
    left = {u for u in region.kinds if any(user in alive and user not in inside for user in u.users)}
    most = info(start).meta.numel // _SHRINKS
    return region if all(info(node).meta.numel <= most for node in left) else None


def _followed(node: fx.Node, kinds: Mapping[fx.Node, Type]) -> Choice | None:
    """How the op treats positions alone, or sums over them; None where it doesn't."""
    op, given = Op.of(node), [kinds.get(operand) for operand in operands(node)]
    if info(node).random or len(op.outputs) > 1:
        return None
    inputs = [_splits(meta, kind) for meta, kind in zip(op.operands, given, strict=True)]
    output = _splits(op.result, None)
    rule = lookup(op.name)
    rule.link(op, inputs, output)
    fitting = [c for c in legal_choices(rule, op, 1, inputs, output) if _fits(given, c)]
    return next((c for c in fitting if c.result.is_shard), next(iter(fitting), None))


def _splits(meta: Meta, kind: Type | None) -> Splits:
    found: Splits = [set() for _ in meta.shape]
    if kind is not None:
        found[kind.dim].add(kind.outer)
    return found


def _fits(given: Sequence[Type | None], choice: Choice) -> bool:
    taken = zip(given, choice.operands, strict=True)
    return choice.result.kind in ("S", "P") and all(
        kind == have if have else kind == R or kind.is_shard for have, kind in taken
    )


def _can_pad(node: fx.Node, choice: Choice, kinds: Mapping[fx.Node, Type]) -> bool:
    """What comes from elsewhere has no gradient where it is padded."""
    pairs = zip(operands(node), choice.operands, strict=True)
    return not any(kind.is_shard and o not in kinds and info(o).meta.needs_grad for o, kind in pairs)


class _Rewrite:
    """One cut, moved."""

    def __init__(self, flat: Flat, cut: _Cut, region: _Region) -> None:
        self._flat, self._cut, self._region = flat, cut, region
        self._made: dict[fx.Node, fx.Node] = {}  # of an op in the region: the one at all positions
        self._padded: dict[tuple[fx.Node, Type, int], fx.Node] = {}
        self._cuts: dict[fx.Node, fx.Node] = {}
        self._order: list[fx.Node] = []

    def run(self) -> None:
        flat, region = self._flat, self._region
        start = next(iter(region.kinds))
        self._made[start] = start.all_input_nodes[0]
        if not all(self._suits(node) for node in region.choices):
            return
        for node in flat.nodes:
            if node in region.kinds:
                if node is not start:
                    self._made[node] = self._at_all_positions(node)
                continue
            self._read_cuts(node)
            if node in region.losses:
                self._pad_targets(node)
            self._order.append(node)
        for node in reversed(region.kinds):
            if not node.users:  # dead ops may still read it
                flat.graph.erase_node(node)
        flat.nodes = self._order

    def _suits(self, node: fx.Node) -> bool:
        """Whether the op computes what is expected of it at all positions, with its shape arguments rewritten."""
        args, kwargs = cast(Any, fx.map_arg)((self._shapes(node, node.args), node.kwargs), self._whole_example(node))
        try:
            result = node.target(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, ValueError, IndexError):
            return False
        return tuple(result.shape) == self._cut.whole(info(node).meta, self._region.kinds[node]).shape

    def _whole_example(self, node: fx.Node) -> Any:
        """From an operand of ``node`` to a tensor without values, of the shape that it will have."""
        taken = iter(self._region.choices[node].operands)

        def example(operand: fx.Node) -> torch.Tensor:
            kind, meta = next(taken), info(operand).meta
            shape = self._cut.whole(meta, kind).shape if kind.is_shard else meta.shape
            return torch.empty(shape, dtype=meta.dtype, device="meta")

        return example

    def _shapes(self, node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """``args`` with an argument that spells the result's shape out as it is at all positions."""
        meta = info(node).meta
        whole = self._cut.whole(meta, self._region.kinds[node]).shape
        return tuple(list(whole) if isinstance(a, list) and tuple(a) == meta.shape else a for a in args)

    def _at_all_positions(self, node: fx.Node) -> fx.Node:
        taken = iter(self._region.choices[node].operands)

        def whole(operand: fx.Node) -> fx.Node:
            kind = next(taken)
            if operand in self._made:
                return self._made[operand]
            return self._pad(node, operand, kind) if kind.is_shard else operand

        args, kwargs = cast(Any, fx.map_arg)((self._shapes(node, node.args), node.kwargs), whole)
        meta = self._cut.whole(info(node).meta, self._region.kinds[node])
        return self._call(node, node, meta, node.target, args, kwargs)

    def _pad_targets(self, loss: fx.Node) -> None:
        """A class loss at all positions ignores those that were cut off."""
        taken, given = iter(self._region.losses[loss].operands), arguments(loss)
        ignored = given["ignore_index"]

        def padded(operand: fx.Node) -> fx.Node:
            kind = next(taken)
            is_target = operand is given["target"]
            return self._pad(loss, operand, kind, ignored) if is_target and kind.is_shard else operand

        loss.args, loss.kwargs = cast(Any, fx.map_arg)((loss.args, loss.kwargs), padded)

    def _read_cuts(self, node: fx.Node) -> None:
        """An op outside of the region reads the cut of what it read, a class loss all of it."""
        if node in self._region.losses:
            node.args, node.kwargs = cast(Any, fx.map_arg)(
                (node.args, node.kwargs), lambda operand: self._made.get(operand, operand)
            )
            return
        for operand in dict.fromkeys(operands(node)):
            if operand in self._made:
                if operand not in self._cuts:
                    self._cuts[operand] = self._cut_again(node, operand)
                node.replace_input_with(operand, self._cuts[operand])

    def _cut_again(self, before: fx.Node, old: fx.Node) -> fx.Node:
        """The value of ``old``, from the one at all positions."""
        kind, cut = self._region.kinds[old], self._cut

        def sliced(value: fx.Node, meta: Meta, dim: int) -> fx.Node:
            shape = (*meta.shape[:dim], cut.count, *meta.shape[dim + 1 :])
            return self._call(
                before, old, replace(meta, shape=shape), aten.slice.Tensor, (value, dim, cut.low, cut.high)
            )

        return self._along_positions(before, self._made[old], kind, cut.length, info(old).meta, sliced)

    def _pad(self, before: fx.Node, operand: fx.Node, kind: Type, value: int | None = None) -> fx.Node:
        """``operand`` at all positions, those that were cut off filled with ``value``."""
        before_low, after_high = self._cut.low, self._cut.length - self._cut.high
        dtype = info(operand).meta.dtype
        fill = value if value is not None else int(dtype.is_floating_point or dtype.is_complex)
        if (operand, kind, fill) in self._padded:
            return self._padded[operand, kind, fill]

        def padded(given: fx.Node, meta: Meta, dim: int) -> fx.Node:
            shape = (*meta.shape[:dim], self._cut.length, *meta.shape[dim + 1 :])
            amounts = [0, 0] * (len(shape) - 1 - dim) + [before_low, after_high]
            called = (given, amounts, fill)
            return self._call(before, operand, replace(meta, shape=shape), aten.constant_pad_nd.default, called)

        whole = self._cut.whole(info(operand).meta, kind)
        made = self._along_positions(before, operand, kind, self._cut.count, whole, padded)
        self._padded[operand, kind, fill] = made
        return made

    def _along_positions(
        self, before: fx.Node, value: fx.Node, kind: Type, count: int, result: Meta, change: Any
    ) -> fx.Node:
        """``change`` a value along its ``count`` positions, which get a dim of their own if they have none."""
        meta, dim = info(value).meta, kind.dim
        outer, _, inner = self._cut.parts(meta.shape[dim], kind.outer, count)
        if outer == inner == 1:
            return change(value, meta, dim)  # type: ignore[no-any-return]
        apart = (*meta.shape[:dim], outer, count, inner, *meta.shape[dim + 1 :])
        opened = self._call(before, value, replace(meta, shape=apart), aten.reshape.default, (value, list(apart)))
        changed = change(opened, info(opened).meta, dim + 1)
        return self._call(before, value, result, aten.reshape.default, (changed, list(result.shape)))

    def _call(
        self, before: fx.Node, like: fx.Node, meta: Meta, target: Any, args: tuple[Any, ...], kwargs: Any = None
    ) -> fx.Node:
        with self._flat.graph.inserting_before(before):
            node = self._flat.graph.call_function(target, args, kwargs or {})
        source = like if like.op == "call_function" else before
        derive(node, source, outputs=(meta,), random=False)
        self._order.append(node)
        return node
