"""normalize_losses: a mean over tokens becomes a sum divided by a count.

Guarantees: equal value and gradient; every mean-reduced loss is ``sum / count`` where ``count`` depends on the
batch alone. A sum can be split over microbatches and ranks whatever the number of ignored tokens in each part; the
mean of parts can't. Example: ``cross_entropy(x, t)`` -> ``cross_entropy(x, t, reduction=sum) / (t != -100).sum()``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from autopar.capture import Flat
from autopar.graph import Meta, arguments, derive, info, op_name

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
    return flat


def _class_loss(graph: fx.Graph, node: fx.Node) -> list[fx.Node] | None:
    """cross_entropy and nll_loss with class indices: the count is of targets that aren't ignored."""
    given, target_op = arguments(node), node.target
    assert callable(target_op)
    target = given["target"]
    if given["reduction"] != _MEAN or given["weight"] is not None or info(target).meta.dtype.is_floating_point:
        return None
    values = [_SUM if name == "reduction" else value for name, value in given.items()]
    scalar = (Meta((), torch.int64),)
    with graph.inserting_before(node):
        total = derive(graph.call_function(target_op, tuple(values)), node)
        valid = graph.call_function(aten.ne.Scalar, (target, given["ignore_index"]))
        derive(valid, node, outputs=(Meta(info(target).meta.shape, torch.bool),))
        count = derive(graph.call_function(aten.sum.default, (valid,)), node, outputs=scalar)
        loss = derive(graph.call_function(aten.div.Tensor, (total, count)), node)
    return [valid, count, total, loss]


def _pointwise_loss(graph: fx.Graph, node: fx.Node) -> list[fx.Node] | None:
    """mse_loss and its like: the count is the number of elements."""
    given, target_op = arguments(node), node.target
    assert callable(target_op)
    if given["reduction"] != _MEAN:
        return None
    values = [_SUM if name == "reduction" else value for name, value in given.items()]
    count = info(node.all_input_nodes[0]).meta.numel
    with graph.inserting_before(node):
        total = derive(graph.call_function(target_op, tuple(values)), node)
        loss = derive(graph.call_function(aten.div.Tensor, (total, count)), node)
    return [total, loss]


_Rewrite = Callable[[fx.Graph, fx.Node], list[fx.Node] | None]
_REWRITES: dict[str, _Rewrite] = {
    "aten.cross_entropy_loss.default": _class_loss,
    "aten.nll_loss_nd.default": _class_loss,
    "aten.nll_loss.default": _class_loss,
    "aten.mse_loss.default": _pointwise_loss,
    "aten.l1_loss.default": _pointwise_loss,
    "aten.smooth_l1_loss.default": _pointwise_loss,
    "aten.huber_loss.default": _pointwise_loss,
    "aten.binary_cross_entropy_with_logits.default": _pointwise_loss,
}
