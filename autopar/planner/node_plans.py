"""What a plan says of the nodes of a block: what a rank holds of each, of which type, and what it sends there."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from autopar.graph import AxisRef, Block, RuntimeOp, info, op_name, operands
from autopar.passes.expert_roads import exchange_axes, hops_of
from autopar.plan import MessagePlan, NodePlan
from autopar.planner.block_costs import Machine, hops_by_way
from autopar.planner.local_ops import before_split
from autopar.planner.op_costs import dtype_name
from autopar.planner.transitions import is_parameter
from autopar.rules import lookup
from autopar.rules.base import Op
from autopar.rules.experts import EXCHANGE
from autopar.spmd import Type, transition


def node_plans(block: Block, machine: Machine) -> list[NodePlan]:
    """Of a block that is local on all axes; shapes and bytes are those of one rank and microbatch."""
    return [_node_plan(node, machine) for node in block.graph.nodes if node.op != "output"]


def _node_plan(node: fx.Node, machine: Machine) -> NodePlan:
    data = info(node)
    return NodePlan(
        name=node.name,
        op=op_name(node) if node.op == "call_function" else data.role,
        source=data.name if data.role in ("parameter", "buffer") else data.source,
        shape=list(data.meta.shape),
        dtype=dtype_name(data.meta.dtype),
        choices={axis: str(choice) for axis, choice in data.choices.items()},
        messages=list(messages(node, machine)) if node.op == "call_function" else [],
    )


def messages(node: fx.Node, machine: Machine) -> Iterator[MessagePlan]:
    """What a local op sends in a microbatch, forward, then backward; equal ones as one.

    Gradients of parameters aren't among it: they are summed once a step.
    """
    found = [message for message in _sent(node, machine) if message[2]]
    for message in dict.fromkeys(found):
        axis, kind, bytes_, backward = message
        yield MessagePlan(axis=axis, kind=kind, bytes=bytes_, backward=backward, times=found.count(message))


_Message = tuple[str, str, int, bool]
"""Axis, kind of collective, bytes of a rank's larger tensor, and whether the backward sends it."""


def _sent(node: fx.Node, machine: Machine) -> Iterator[_Message]:
    if isinstance(node.target, RuntimeOp) and "src" in node.kwargs:
        yield from _of_transition(node)
        return
    op, rule, data = Op.of(node), lookup(op_name(node)), info(node)
    journeys = [choice for choice in data.choices.values() if choice.form == EXCHANGE]
    routing = next((operand for operand in operands(node) if info(operand).is_object), None)
    travels = routing or node
    if journeys and (nodes := hops_of(travels)) > 1:
        hops = tuple(list(hop.messages) for hop in hops_by_way(node, nodes))
        yield from _both_ways("+".join(exchange_axes(travels)), hops, data.meta.needs_grad)
        return
    if journeys and routing is not None:  # rows travel over all axes at once
        axes = "+".join(exchange_axes(routing))
        ways = (rule.communication(op, journeys[0], 1), rule.communication_back(op, journeys[0], 1))
        yield from _both_ways(axes, ways, data.meta.needs_grad)
        return
    for axis, taken in data.choices.items():
        if axis in machine.sizes and taken.form:
            size, before = machine.sizes[axis], before_split(op, taken, machine.sizes[axis])
            ways = (rule.communication(before, taken, size), rule.communication_back(before, taken, size))
            yield from _both_ways(axis, ways, data.meta.needs_grad)


def _both_ways(axis: str, ways: tuple[list[tuple[str, int]], ...], needs_grad: bool) -> Iterator[_Message]:
    for backward, way in enumerate(ways[: 1 + needs_grad]):
        yield from ((axis, kind, bytes_, bool(backward)) for kind, bytes_ in way)


def _of_transition(node: fx.Node) -> Iterator[_Message]:
    axis, src, dst = node.args[1], node.kwargs["src"], node.kwargs["dst"]
    assert isinstance(axis, AxisRef)
    assert isinstance(src, Type)
    assert isinstance(dst, Type)
    step, operand = transition(src, dst), operands(node)[0]
    if step is None or is_parameter(operand):
        return
    data = info(node)
    full = step.sent_bytes(info(operand).meta.bytes, data.meta.bytes, axis.size)
    if step.forward:
        yield axis.name, step.forward, full, False
    if step.backward and data.meta.needs_grad:
        yield axis.name, step.backward, full, True
