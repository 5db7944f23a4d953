"""row_lookups: an index that counts all rows is none, so that rows can be split.

Guarantees: equal values and gradients, and the same complaint about an index that lies outside. Where the other
indices are the same for all rows, ``x[arange(b)[:, None], i]`` is ``x[:, i]``; one that isn't is a ``gather``. Example,
one position of each sequence: ``x[arange(b), last]`` with ``x [b, s, h]`` and ``last [b]`` ->
``x.gather(1, where(last < 0, last + s, last).view(b, 1, 1).expand(b, 1, h)).view(b, h)``.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any, Final, cast

import torch
from torch import fx

from autopar.capture import Flat
from autopar.graph import derive, info, op_name

aten = torch.ops.aten

_FROM_ZERO: Final = {"aten.argmax.default", "aten.argmin.default"}
"""Ops that make indices of which none counts from the end, as those of ``gather`` must not."""
_ONLY_SHAPES: Final = {"aten.reshape.default", "aten.view.default", "aten.unsqueeze.default"}
_CASTS: Final = {"aten.to.dtype", "aten.to.dtype_layout", "aten.to.device", "aten.alias.default"}
_SUMS: Final = {"aten.add.Tensor", "aten.add.Scalar"}


def row_lookups(flat: Flat) -> Flat:
    """Changes ``flat``, and returns it."""
    order: list[fx.Node] = []
    for node in flat.nodes:
        indices = cast(list[Any], node.args[1]) if op_name(node) == "aten.index.Tensor" else []
        rows, *others = indices or [None]
        if not others or None in others or not _counts_rows(rows, info(node.args[0]).meta.shape[0], others):  # type: ignore[arg-type]
            order.append(node)
        elif not any(_has_rows(other, rows) for other in others):
            order += [*_drop(flat.graph, node, rows, others), node]
        elif len(others) == 1:
            made = _gather(flat.graph, node, others[0])
            node.replace_all_uses_with(made[-1])
            flat.loss = made[-1] if flat.loss is node else flat.loss
            flat.graph.erase_node(node)
            order += made
        else:
            order.append(node)
    flat.nodes = order
    return flat


def _counts_rows(index: fx.Node | None, rows: int, others: list[fx.Node]) -> bool:
    """Whether ``index`` is 0 … rows - 1 along the first dim of all indices."""
    if index is None or info(index).meta.shape != (rows, *[1] * (len(info(index).meta.shape) - 1)):
        return False
    for other in others:
        rank, shape = len(info(index).meta.shape), info(other).meta.shape
        if len(shape) > rank or (len(shape) == rank and shape[0] not in (1, rows)):
            return False
    index = _origin(index)
    return (op_name(index), index.args) in (("aten.arange.default", (rows,)), ("aten.arange.start", (0, rows)))


def _origin(index: fx.Node) -> fx.Node:
    """Where its numbers come from, in the same order."""
    while op_name(index) in _ONLY_SHAPES | _CASTS or (op_name(index) in _SUMS and index.args[1:] == (0,)):
        index = index.all_input_nodes[0]
    return index


def _has_rows(index: fx.Node, rows: fx.Node) -> bool:
    """Whether ``index`` says something else for each row."""
    shape = info(index).meta.shape
    return len(shape) == len(info(rows).meta.shape) and shape[0] != 1


def _drop(graph: fx.Graph, node: fx.Node, rows: fx.Node, others: list[fx.Node]) -> list[fx.Node]:
    """``x[rows, i]`` becomes ``x[:, i]``, with the dims of all indices but the first; what it takes for that."""
    rank = len(info(rows).meta.shape) - 1
    made: list[fx.Node] = []
    left: list[fx.Node | None] = [None]
    for index in others:
        meta = info(index).meta
        shape = ((1,) * rank + meta.shape)[-rank:] if rank else ()
        if shape != meta.shape:
            with graph.inserting_before(node):
                index = graph.call_function(aten.reshape.default, (index, list(shape)))
            made.append(derive(index, node, outputs=(replace(meta, shape=shape),)))
        left.append(index)
    node.args = (node.args[0], left)
    return made


def _gather(graph: fx.Graph, node: fx.Node, index: fx.Node) -> list[fx.Node]:
    """``x[rows, index]`` for ``x [b, s, …]`` and ``index [b, …]``; the last is what ``node`` is."""
    source = cast(fx.Node, node.args[0])
    rows, positions, *rest = info(source).meta.shape
    column = (rows, prod(info(index).meta.shape[1:]), *[1] * len(rest))
    made: list[fx.Node] = []

    def put(target: Any, *args: Any, **changes: Any) -> fx.Node:
        like = next(arg for arg in args if isinstance(arg, fx.Node))
        with graph.inserting_before(node):
            new = graph.call_function(target, args)
        made.append(derive(new, node, outputs=(replace(info(like).meta, **changes),)))
        return new

    if info(index).meta.dtype != torch.int64:
        index = put(aten.to.dtype, index, torch.int64, dtype=torch.int64)
    if op_name(_origin(index)) not in _FROM_ZERO:
        below = put(aten.lt.Scalar, index, 0, dtype=torch.bool)
        index = put(aten.where.self, below, put(aten.add.Tensor, index, positions), index, dtype=torch.int64)
    index = put(aten.reshape.default, index, list(column), shape=column)
    shape = (*column[:2], *rest)
    index = put(aten.expand.default, index, list(shape), shape=shape)
    found = put(aten.gather.default, source, 1, index, shape=shape)
    put(aten.reshape.default, found, list(info(node).meta.shape), shape=info(node).meta.shape)
    return made
