"""functionalize: in-place ops become their out-of-place forms.

Guarantees: no op of the flat graph mutates a tensor. ``y = x.add_(1)`` becomes ``y = x + 1``, and later uses of
``x`` read ``y``. Mutation of a parameter, a buffer or a view of something still used is refused by line.
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.capture import Flat
from autopar.errors import CaptureError
from autopar.graph import derive, info, where


def functionalize(flat: Flat) -> Flat:
    order: list[fx.Node] = []
    for node in flat.nodes:
        order.append(_functional(flat.graph, node) if _mutates(node) else node)
        if order[-1] is not node and flat.loss is node:
            flat.loss = order[-1]
    flat.nodes = order
    return flat


def _mutates(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _functional(graph: fx.Graph, node: fx.Node) -> fx.Node:
    target = node.args[0]
    assert isinstance(target, fx.Node)
    packet, overload = str(node.target).split(".")[1:3]
    form = getattr(getattr(torch.ops.aten, packet.removesuffix("_"), None), overload, None)
    if form is None or info(target).role in ("parameter", "buffer") or _is_view(target):
        raise CaptureError(
            f"{where(node)} changes a tensor in place that is a parameter, a buffer or a view of another tensor; "
            "write it out of place (x = x + y instead of x += y)"
        )
    with graph.inserting_before(node):
        made = derive(graph.call_function(form, node.args, node.kwargs), node)
    node.replace_all_uses_with(made)
    for user in list(target.users):
        if made < user:
            user.replace_input_with(target, made)
    graph.erase_node(node)
    return made


def _is_view(node: fx.Node) -> bool:
    """Whether ``node`` aliases its operand: writing to it would write to both."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    aliased = any(r.alias_info is not None and not r.alias_info.is_write for r in target._schema.returns)
    return aliased and any(len(o.users) > 1 or o.op == "placeholder" for o in node.all_input_nodes)
