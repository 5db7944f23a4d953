"""embedding_bags: where all bags are of one size, a bag of rows is an embedding and a sum (mean, largest) over it.

Guarantees: equal values and gradients. Bags of one size are what a table is given of ``indices [b, n]``: their numbers
lie in a row then, and each bag begins n after the one before. Example, ``nn.EmbeddingBag(v, h, mode="sum")``:
``embedding_bag(w, i.reshape(-1), arange(0, b*n, n))[0]`` -> ``embedding(w, i).sum(1)``. Per-sample weights multiply the
rows first; rows at ``padding_idx`` don't count. Others stay as they are, and so does the largest row with padding.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import fx

from autopar.capture import Flat
from autopar.graph import arguments, derive, info, is_getitem, op_name

aten = torch.ops.aten

_SUM, _MEAN, _MAX = 0, 1, 2
_BAGS: Final = ("aten.embedding_bag.default", "aten.embedding_bag.padding_idx")
_RESHAPES: Final = ("aten.reshape.default", "aten.view.default")


def embedding_bags(flat: Flat) -> Flat:
    """Changes ``flat``, and returns it."""
    order: list[fx.Node] = []
    live = set(flat.nodes)
    replaced: dict[fx.Node, fx.Node] = {}
    for node in flat.nodes:
        bag = node.args[0] if is_getitem(node) else None
        if isinstance(bag, fx.Node) and op_name(bag) in _BAGS and (size := _size(bag, live)):
            made = _rows(flat.graph, node, bag, size)
            node.replace_all_uses_with(made[-1])
            replaced[node] = made[-1]
            order += made
        else:
            order.append(node)
    flat.loss = replaced.get(flat.loss, flat.loss)
    flat.nodes = _without(flat.graph, order, replaced) if replaced else order
    return flat


def _size(bag: fx.Node, live: Collection[fx.Node]) -> int:
    """How many rows each bag has; 0 where that isn't known to be the same, or more than the rows is asked for."""
    given = arguments(bag)
    offsets, indices = given["offsets"], info(given["indices"]).meta
    if any(user.args[1] != 0 for user in bag.users if user in live) or given["scale_grad_by_freq"] or given["sparse"]:
        return 0
    if given["mode"] == _MAX and _padding(given) is not None:
        return 0
    if op_name(offsets) != "aten.arange.start_step" or given["include_last_offset"]:
        return 0
    start, end, step = (*offsets.args, 1)[:3]
    fits = start == 0 and end == indices.numel and isinstance(step, int) and indices.numel % step == 0
    return step if fits and step > 0 else 0


def _padding(given: dict[str, Any]) -> int | None:
    padding = given.get("padding_idx")
    return padding if padding is None or padding >= 0 else padding + info(given["weight"]).meta.shape[0]


def _rows(graph: fx.Graph, node: fx.Node, bag: fx.Node, size: int) -> list[fx.Node]:
    """What the bag comes down to; the last is what ``node`` is."""
    given, result = arguments(bag), info(node).meta
    made: list[fx.Node] = []

    def put(target: Any, shape: tuple[int, ...], *args: Any, **changes: Any) -> fx.Node:
        with graph.inserting_before(node):
            new = graph.call_function(target, args)
        made.append(derive(new, node, outputs=(replace(result, shape=shape, **changes),)))
        return new

    def split(value: fx.Node) -> fx.Node:
        """``[b*n]`` -> ``[b, n]``, or what this was before."""
        before = value.args[0] if op_name(value) in _RESHAPES else None
        if isinstance(before, fx.Node) and info(before).meta.shape == shape:
            return before
        meta = info(value).meta
        return put(aten.reshape.default, shape, value, list(shape), dtype=meta.dtype, needs_grad=meta.needs_grad)

    shape = (result.shape[0], size)
    numbers, padding, weights = split(given["indices"]), _padding(given), given["per_sample_weights"]
    rows = put(aten.embedding.default, (*shape, *result.shape[1:]), given["weight"], numbers)
    counts: fx.Node | None = None
    if weights is not None:
        column = put(aten.unsqueeze.default, (*shape, 1), split(weights), 2, needs_grad=info(weights).meta.needs_grad)
        rows = put(aten.mul.Tensor, info(rows).meta.shape, rows, column)
    if padding is not None:
        is_row = put(aten.ne.Scalar, shape, numbers, padding, dtype=torch.bool, needs_grad=False)
        counts = put(aten.sum.dim_IntList, (shape[0], 1), is_row, [1], True, dtype=torch.int64, needs_grad=False)
        column = put(aten.unsqueeze.default, (*shape, 1), is_row, 2, dtype=torch.bool, needs_grad=False)
        rows = put(aten.mul.Tensor, info(rows).meta.shape, rows, column)
    if given["mode"] == _MAX:
        put(aten.max.dim, result.shape, rows, 1)
        derive(made[-1], node, outputs=(result, replace(result, dtype=torch.int64, needs_grad=False)))
        with graph.inserting_before(node):
            made.append(derive(graph.call_function(operator.getitem, (made[-1], 0)), node))
    elif given["mode"] == _MEAN and counts is None:
        put(aten.mean.dim, result.shape, rows, [1])
    else:
        total = put(aten.sum.dim_IntList, result.shape, rows, [1])
        if given["mode"] == _MEAN and counts is not None:
            counts = put(aten.clamp.default, (shape[0], 1), counts, 1, dtype=torch.int64, needs_grad=False)
            put(aten.div.Tensor, result.shape, total, counts)
    return made


def _without(graph: fx.Graph, order: Sequence[fx.Node], replaced: dict[fx.Node, fx.Node]) -> list[fx.Node]:
    """Without the bags, and what was made for them alone."""
    gone = set(replaced)
    for bag in {node.args[0] for node in replaced}:
        for user in list(bag.users):  # type: ignore[union-attr]
            graph.erase_node(user)
    for node in reversed(order):
        inner = {"aten.arange.start_step", *_RESHAPES, *_BAGS}
        if not node.users and op_name(node) in inner and node not in replaced.values():
            graph.erase_node(node)
            gone.add(node)
    return [node for node in order if node not in gone]
