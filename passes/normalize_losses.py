"""normalize_losses: a mean over tokens becomes a sum divided by a count.

Guarantees: equal value and gradient; every mean-reduced loss is ``sum / count`` where ``count`` depends on the
batch and buffers alone. A sum can be split over microbatches and ranks whatever the number of ignored tokens in each
part; the mean of parts can't. Example: ``cross_entropy(x, t)`` becomes
``cross_entropy(x, t, reduction=sum) / (t != -100).sum()``. Where two numbers are added, or one is taken from the other,
the one that all parts have (a penalty on weights) comes last, as rules of sums take it: ``p - x`` is ``x * -1 + p``.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, cast

import torch
from torch import fx

from autopar.capture import Flat
from autopar.graph import Meta, arguments, derive, info, op_name, operands

aten = torch.ops.aten
_MEAN, _SUM = 1, 2


def normalize_losses(flat: Flat) -> Flat:
    order: list[fx.Node] = []
    for node in flat.nodes:
        rewrite = _REWRITES.get(op_name(node))
        made = rewrite(flat.graph, node) if rewrite else None
        if made is None:
            order.append(node)
            continue
        node.replace_all_uses_with(made[-1])
        flat.loss = made[-1] if flat.loss is node else flat.loss
        flat.graph.erase_node(node)
        order += made
    flat.nodes = order
    _put_penalties_last(flat)
    return flat


_SIGNS: dict[str, int] = {"aten.add.Tensor": 1, "aten.sub.Tensor": -1}


def _put_penalties_last(flat: Flat) -> None:
    order: list[fx.Node] = []
    of_batch = {node for node in flat.graph.nodes if node.op == "placeholder" and info(node).role == "input"}
    for node in flat.nodes:
        if any(operand in of_batch for operand in node.all_input_nodes):
            of_batch.add(node)
        if op_name(node) in _SIGNS and info(node).meta.shape == ():
            a, b = node.args
            if isinstance(a, fx.Node) and a not in of_batch and b in of_batch:
                order += _turned(flat.graph, node, a, b)
        order.append(node)
    flat.nodes = order


def _turned(graph: fx.Graph, node: fx.Node, a: fx.Node, b: Any) -> list[fx.Node]:
    """``a ± b`` becomes ``± b + a``; what it takes for that."""
    factor = _SIGNS[op_name(node)] * cast(float, node.kwargs.get("alpha", 1))
    made: list[fx.Node] = []
    if factor != 1:
        meta = info(b).meta
        if not meta.dtype.is_floating_point:
            return made
        with graph.inserting_before(node):
            b = graph.call_function(aten.mul.Scalar, (b, factor))
        made.append(derive(b, node, outputs=(meta,)))
    node.target, node.args, node.kwargs = aten.add.Tensor, (b, a), {}
    return made


def _class_loss(graph: fx.Graph, node: fx.Node) -> list[fx.Node] | None:
    """cross_entropy and nll_loss: the count is of targets that aren't ignored, or with class weights the sum of theirs;
    where targets are probabilities, of all rows."""
    given = arguments(node)
    if given["reduction"] != _MEAN:
        return None
    if info(given["target"]).meta.dtype.is_floating_point:
        shape = info(given["target"]).meta.shape
        return _mean(graph, node, prod(shape) // shape[1 if len(shape) > 1 else 0])
    count = _valid if given["weight"] is None else _weights
    with graph.inserting_before(node):
        counted = count(graph, node)
        total = _summed(graph, node)
        loss = derive(graph.call_function(aten.div.Tensor, (total, counted[-1])), node)
    return [*counted, total, loss]


def _valid(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    """What leads to the number of targets that count."""
    given = arguments(node)
    shape = info(given["target"]).meta.shape
    valid = graph.call_function(aten.ne.Scalar, (given["target"], given["ignore_index"]))
    derive(valid, node, outputs=(Meta(shape, torch.bool),))
    count = graph.call_function(aten.sum.default, (valid,))
    return [valid, derive(count, node, outputs=(Meta((), torch.int64),))]


def _weights(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    """What leads to the sum of the weights of the targets that count."""
    given = arguments(node)
    target, weight = info(given["target"]).meta, info(given["weight"]).meta
    ignored = graph.call_function(aten.eq.Scalar, (given["target"], given["ignore_index"]))
    derive(ignored, node, outputs=(Meta(target.shape, torch.bool),))
    known = graph.call_function(aten.masked_fill.Scalar, (given["target"], ignored, 0))
    derive(known, node, outputs=(target,))
    each = graph.call_function(aten.index.Tensor, (given["weight"], [known]))
    derive(each, node, outputs=(Meta(target.shape, weight.dtype),))
    counted = graph.call_function(aten.masked_fill.Scalar, (each, ignored, 0.0))
    derive(counted, node, outputs=(Meta(target.shape, weight.dtype),))
    count = graph.call_function(aten.sum.default, (counted,))
    return [ignored, known, each, counted, derive(count, node, outputs=(Meta((), weight.dtype),))]


def _pointwise_loss(graph: fx.Graph, node: fx.Node) -> list[fx.Node] | None:
    """mse_loss and its like: the count is the number of elements."""
    shapes = (info(n).meta.shape for n in operands(node))
    return _mean(graph, node, prod(torch.broadcast_shapes(*shapes)))  # type: ignore[no-untyped-call]


def _row_loss(graph: fx.Graph, node: fx.Node) -> list[fx.Node] | None:
    """triplet_margin_loss and its like: the count is the number of rows, along which losses are made."""
    metas = [info(n).meta for n in operands(node)]
    alike = [meta.shape for meta in metas if len(meta.shape) == len(metas[0].shape)]
    rows = torch.broadcast_shapes(*alike)[:-1]  # type: ignore[no-untyped-call]
    return _mean(graph, node, prod(rows))


def _mean(graph: fx.Graph, node: fx.Node, count: int) -> list[fx.Node] | None:
    """The sum over ``count`` elements, divided by it."""
    if arguments(node)["reduction"] != _MEAN:
        return None
    with graph.inserting_before(node):
        total = _summed(graph, node)
        loss = derive(graph.call_function(aten.div.Tensor, (total, count)), node)
    return [total, loss]


def _summed(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The loss as a sum."""
    target: Any = node.target
    given = arguments(node) | {"reduction": _SUM}
    schema = target._schema.arguments
    args = tuple(given[a.name] for a in schema if not a.kwarg_only)
    named = {a.name: given[a.name] for a in schema if a.kwarg_only}
    return derive(graph.call_function(target, args, named), node)


_Rewrite = Callable[[fx.Graph, fx.Node], list[fx.Node] | None]
_REWRITES: dict[str, _Rewrite] = {
    "aten.cross_entropy_loss.default": _class_loss,
    "aten.nll_loss_nd.default": _class_loss,
    "aten.nll_loss.default": _class_loss,
    "aten.mse_loss.default": _pointwise_loss,
    "aten.l1_loss.default": _pointwise_loss,
    "aten.smooth_l1_loss.default": _pointwise_loss,
    "aten.huber_loss.default": _pointwise_loss,
    "aten.kl_div.default": _pointwise_loss,
    "aten.soft_margin_loss.default": _pointwise_loss,
    "aten.poisson_nll_loss.default": _pointwise_loss,
    "aten.hinge_embedding_loss.default": _pointwise_loss,
    "aten.margin_ranking_loss.default": _pointwise_loss,
    "aten.cosine_embedding_loss.default": _row_loss,
    "aten.triplet_margin_loss.default": _row_loss,
    "aten.multi_margin_loss.default": _row_loss,
    "aten.multilabel_margin_loss.default": _row_loss,
    "aten.binary_cross_entropy.default": _pointwise_loss,
    "aten.binary_cross_entropy_with_logits.default": _pointwise_loss,
}
