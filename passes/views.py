"""Views of a tensor as values: how each is taken again, and how a write to it gets back into what it is a view of.

::

    v = base[:, 1:]           again: slice(base, 1, 1)          back: slice_scatter(base, v, 1, 1)
    v = base.transpose(0, 1)  again: transpose(base, 0, 1)      back: transpose(v, 0, 1)
    v = base.flatten()        again: flatten(base)              back: reshape(v, [2, 4])
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

    def on(self, graph: fx.Graph, *first: fx.Node) -> fx.Node:
        """Put the call into ``graph``, with ``first`` in front of its arguments. The new node has no metadata."""
        return graph.call_function(self.op, (*first, *self.args), dict(self.kwargs))


@dataclass(frozen=True)
class View:
    """``take`` makes the view from its tensor (None: not known how); ``name`` is the op that it came from."""

    take: Call | None
    name: str

    def undo(self, before: Meta, after: Meta) -> Call | None:
        """The tensor (``before``) from the view (``after``) alone; None where the view hasn't all of it.

        A view by an op that isn't known can't be undone either.
        """
        if self.name in _INVERSES and self.take is not None:
            return _INVERSES[self.name](self.take, len(before.shape))
        if self.name in _SAME_ORDER and before.numel == after.numel and before.dtype == after.dtype:
            same = before.shape == after.shape
            return Call(aten.alias.default) if same else Call(aten.reshape.default, (list(before.shape),))
        return None

    def scatter(self) -> Call | None:
        """The tensor once its view has changed, from the tensor and the view; None where the op isn't known."""
        op = None if self.take is None else _SCATTERS.get(self.take.op)
        return None if op is None or self.take is None else Call(op, self.take.args, self.take.kwargs)


def view_of(node: fx.Node) -> View:
    """The view that ``node`` is of its first operand; an element of a list of views, of that of the list."""
    if is_getitem(node):
        made, index = node.args
        assert isinstance(made, fx.Node)
        return View(_element(made, index), op_name(made))
    if op_name(node) == "aten.narrow.default":
        given = arguments(node)
        cut = (given["dim"], given["start"], given["start"] + given["length"])
        return View(Call(aten.slice.Tensor, cut), "aten.slice.Tensor")
    return View(Call(node.target, node.args[1:], tuple(node.kwargs.items())), op_name(node))


def _element(node: fx.Node, index: Any) -> Call | None:
    """View ``index`` of several that ``node`` makes, by an op that makes one."""
    name = op_name(node)
    if name == "aten.broadcast_tensors.default":
        return Call(aten.expand.default, (list(info(node).outputs[index].shape),))
    if name == "aten.unbind.int":
        return Call(aten.select.int, (arguments(node)["dim"], index))
    if name not in _PIECES:
        return None
    dim = arguments(node)["dim"]
    extents = [meta.shape[dim] for meta in info(node).outputs]
    end = list(itertools.accumulate(extents))[index]
    return Call(aten.slice.Tensor, (dim, end - extents[index], end))


def _itself(take: Call, rank: int) -> Call:
    return take


def _unpermuted(take: Call, rank: int) -> Call:
    order = [d % rank for d in take.args[0]]
    return Call(aten.permute.default, ([order.index(d) for d in range(rank)],))


def _moved_back(take: Call, rank: int) -> Call:
    source, destination = take.args
    return Call(take.op, (destination, source))


def _by(op: Any) -> Callable[[Call, int], Call]:
    return lambda take, rank: Call(op)


_INVERSES: Final[dict[str, Callable[[Call, int], Call]]] = {
    "aten.transpose.int": _itself,
    "aten.swapaxes.default": _itself,
    "aten.t.default": _itself,
    "aten.numpy_T.default": _itself,
    "aten.mT.default": _itself,
    "aten.permute.default": _unpermuted,
    "aten.movedim.int": _moved_back,
    "aten.movedim.intlist": _moved_back,
    "aten.view_as_real.default": _by(aten.view_as_complex.default),
    "aten.view_as_complex.default": _by(aten.view_as_real.default),
}
_PIECES: Final = {"aten.split.Tensor", "aten.split_with_sizes.default", "aten.chunk.default"}
_SAME_ORDER: Final = {
    *("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default"),
    *("aten.view_as.default", "aten.reshape_as.default"),
    *("aten.flatten.using_ints", "aten.unflatten.int", "aten.expand.default", "aten.expand_as.default"),
    *("aten.unsqueeze.default", "aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims"),
    *("aten.alias.default", "aten.contiguous.default", "aten.detach.default", "aten.dropout.default"),
    *("aten.to.dtype", "aten.to.dtype_layout", "aten.to.device", "aten.to.other", "aten.type_as.default"),
    *_PIECES,
}
"""Ops whose views, where they have all elements, have them in the tensor's order."""

_SCATTERS: Final = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}
