"""experts: what capture wrote down of expert layers becomes functions of the runtime.

Guarantees: nothing but names changes. ``autopar::grouped_linear(rows, weight, routing)`` of
:mod:`autopar.expert_capture` becomes ``autopar.runtime.grouped_linear``; the routing, in the capture the matrix that
assigns slots to experts, is from here on an object that knows where each row went (:mod:`autopar.rules.experts`).
Example: ``routing = autopar::route(index, 8)`` -> ``routing = route(index, 8)``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from torch import fx

from autopar import expert_capture
from autopar.errors import CaptureError
from autopar.graph import Block, Model, RuntimeOp, info, set_info, where
from autopar.rules.base import Op
from autopar.rules.experts import OF, routing_meta

ROUTE: Final = RuntimeOp("route")
DISPATCH: Final = RuntimeOp("dispatch")
GROUPED_LINEAR: Final = RuntimeOp("grouped_linear")
GROUPED_BIAS: Final = RuntimeOp("grouped_bias")
COMBINE: Final = RuntimeOp("combine")

_CAPTURED: Final[dict[object, RuntimeOp]] = {
    expert_capture.route: ROUTE,
    expert_capture.dispatch: DISPATCH,
    expert_capture.grouped_linear: GROUPED_LINEAR,
    expert_capture.grouped_bias: GROUPED_BIAS,
    expert_capture.combine: COMBINE,
}


def rearranges(node: fx.Node) -> bool:
    """Whether a captured op's result is rows of its first operand in another order, each maybe several times."""
    return node.target is expert_capture.dispatch


def experts(model: Model) -> Model:
    """In place. Raises CaptureError where something else than the five operations reads a routing."""
    for block in model.blocks:
        _rename(block)
    return reckon_rows(model)


def reckon_rows(model: Model) -> Model:
    """In place, set :attr:`autopar.graph.Info.likely` of the rows of experts that are routed to by themselves, of which
    each gets as many of the slots."""
    for node in (node for block in model.blocks for node in block.ops if node.target is ROUTE and OF in node.kwargs):
        op = Op.of(node)
        likely = int(op.arg(1, "experts", 1)) / int(op.kwargs[OF])
        waiting, found = [user for user in node.users if user.target is DISPATCH], set[fx.Node]()
        while waiting:
            found.add(rows := waiting.pop())
            info(rows).likely = likely
            users = (user for user in rows.users if user.op == "call_function" and user.target is not COMBINE)
            waiting += [user for user in users if user not in found]
    return model


def _rename(block: Block) -> None:
    routings: set[fx.Node] = set()
    for node in block.ops:
        made = _CAPTURED.get(node.target)
        stray = routings.intersection(node.all_input_nodes)
        if made is None and stray:
            raise CaptureError(f"{where(node)} reads the routing of experts, which is no tensor of the model")
        if made is None:
            continue
        node.target = made
        _name_options(node)
        if made is ROUTE:
            data = info(node)
            tokens = info(node.all_input_nodes[0]).meta.shape[0]
            set_info(node, replace(data, outputs=(routing_meta(tokens),), is_object=True))
            routings.add(node)


def _name_options(node: fx.Node) -> None:
    """``transposed``, and of how many experts these are, are named where they are set, and left out where they
    aren't."""
    if node.target is ROUTE and len(node.args) > 2:
        node.args, node.kwargs = node.args[:2], {OF: node.args[2]}
    if node.target is GROUPED_LINEAR and len(node.args) > 3:
        transposed = node.args[3]
        node.args, node.kwargs = node.args[:3], {"transposed": True} if transposed else {}
