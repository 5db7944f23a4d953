"""functionalize: in-place ops become their out-of-place forms.

Guarantees: no op of the flat graph mutates a tensor. ``y = x.add_(1)`` becomes ``y = x + 1``, and later uses of
``x`` read ``y``. Mutation of a parameter, a buffer or a view of something still used is refused by line.
"""

from __future__ import annotations

from torch import fx

from autopar.capture import Flat
from autopar.errors import CaptureError
from autopar.graph import aten_overload, derive, info, is_mutating, is_view, op_name, where


def functionalize(flat: Flat) -> Flat:
    order: list[fx.Node] = []
    for node in flat.nodes:
        order.append(_functional(flat.graph, node) if is_mutating(node) else node)
        if order[-1] is not node and flat.loss is node:
            flat.loss = order[-1]
    flat.nodes = order
    return flat


def _functional(graph: fx.Graph, node: fx.Node) -> fx.Node:
    target = node.args[0]
    assert isinstance(target, fx.Node)
    namespace, packet, overload = op_name(node).split(".")
    form = aten_overload(f"{namespace}.{packet.removesuffix('_')}.{overload}")
    if form is None or info(target).role in ("parameter", "buffer") or _is_shared_view(target):
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


def _is_shared_view(node: fx.Node) -> bool:
    """Whether ``node`` aliases an operand that is still used: writing to it would write to both."""
    return is_view(node) and any(len(o.users) > 1 or o.op == "placeholder" for o in node.all_input_nodes)
