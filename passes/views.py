"""Views of a tensor as values: how each is taken again, and how a write to it gets back into what it is a view of.

::

    v = base[:, 1:]          again: slice(base, 1, 1)         back: slice_scatter(base, v, 1, 1)
    v = base.transpose(0, 1) again: transpose(base, 0, 1)     back: transpose(v, 0, 1)
    v = base.flatten()       again: flatten(base)             back: reshape(v, [2, 4])
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from autopar.graph import Meta, arguments, info, is_getitem, op_name

aten = torch.ops.aten


@dataclass(frozen=True)
class Call:
    """An op, and its arguments after the first."""

    op: Any
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()

    def of(self, graph: fx.Graph, *first: fx.Node) -> fx.Node:
        """Put a call into ``graph`` with ``first`` as its first arguments; the new node has no metadata."""
        return graph.call_function(self.op, (*first, *self.args), dict(self.kwargs))


@dataclass(frozen=True)
class View:
    """``take`` makes the view of its tensor; ``name`` is the op that it came from."""

    take: Call
    name: str

    def undo(self, before: Meta, after: Meta) -> Call | None:
        """The tensor (``before``) from the view (``after``) alone; None where the view hasn't all of it.

        An op that isn't known has none either.
        """
        same = before.shape == after.shape and before.dtype == after.dtype
        if same and self.name in _MAYBE_ALL:
            return Call(aten.alias.default)
        inverse = _INVERSES.get(self.name)
        if inverse is not None:
            return inverse(self, len(before.shape))
        if self.name in _RESHAPES and before.numel == after.numel:
            return Call(aten.reshape.default, (list(before.shape),))
        return None

    def scatter(self) -> Call | None:
        """The tensor with a new view in its place, from both; None where the op isn't known."""
        op = _SCATTERS.get(self.take.op)
        return None if op is None else Call(op, self.take.args, self.take.kwargs)


def view_of(node: fx.Node) -> View:
    """The view that ``node`` takes of its first operand; that of a piece of a split is taken of what is split."""
    if is_getitem(node):
        pieces, index = node.args
        assert isinstance(pieces, fx.Node)
        return View(_piece(pieces, index), op_name(pieces))
    if op_name(node) == "aten.narrow.default":
        _, dim, start, length = node.args
        return View(Call(aten.slice.Tensor, (dim, start, start + length)), "aten.slice.Tensor")  # type: ignore[operator]
    return View(Call(node.target, node.args[1:], tuple(node.kwargs.items())), op_name(node))


def _piece(node: fx.Node, index: Any) -> Call:
    """Piece ``index`` of split, chunk or unbind, as a slice or an index."""
    dim = arguments(node)["dim"]
    if op_name(node) == "aten.unbind.int":
        return Call(aten.select.int, (dim, index))
    extents = [meta.shape[dim] for meta in info(node).outputs]
    ends = list(itertools.accumulate(extents))
    return Call(aten.slice.Tensor, (dim, ends[index] - extents[index], ends[index]))


def _itself(view: View, rank: int) -> Call:
    return view.take


def _unpermuted(view: View, rank: int) -> Call:
    order = [d % rank for d in view.take.args[0]]
    return Call(aten.permute.default, ([order.index(d) for d in range(rank)],))


def _moved_back(view: View, rank: int) -> Call:
    source, destination = view.take.args
    return Call(view.take.op, (destination, source))


def _other(op: Any) -> Callable[[View, int], Call]:
    return lambda view, rank: Call(op)


_INVERSES: Final[dict[str, Callable[[View, int], Call]]] = {
    "aten.transpose.int": _itself,
    "aten.swapaxes.default": _itself,
    "aten.t.default": _itself,
    "aten.numpy_T.default": _itself,
    "aten.mT.default": _itself,
    "aten.permute.default": _unpermuted,
    "aten.movedim.int": _moved_back,
    "aten.movedim.intlist": _moved_back,
    "aten.view_as_real.default": _other(aten.view_as_complex.default),
    "aten.view_as_complex.default": _other(aten.view_as_real.default),
}
_RESHAPES: Final = {
    *("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default"),
    *("aten.view_as.default", "aten.reshape_as.default"),
    *("aten.flatten.using_ints", "aten.unflatten.int", "aten.expand.default", "aten.expand_as.default"),
    *("aten.unsqueeze.default", "aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims"),
}
_MAYBE_ALL: Final = {
    *("aten.alias.default", "aten.contiguous.default", "aten.detach.default", "aten.dropout.default"),
    *("aten.to.dtype", "aten.to.dtype_layout", "aten.to.device", "aten.to.other", "aten.type_as.default"),
    *("aten.slice.Tensor", "aten.split.Tensor", "aten.split_with_sizes.default", "aten.chunk.default"),
    *_RESHAPES,
}
"""Ops whose view is the tensor itself where it has its shape and dtype."""

_SCATTERS: Final = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}
