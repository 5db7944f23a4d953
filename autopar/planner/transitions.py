"""Nodes that change a type on an axis that is solved."""

from __future__ import annotations

from torch import fx

from autopar.graph import AxisRef, RuntimeOp, info, operands
from autopar.spmd import I, R


def is_transition(node: fx.Node) -> bool:
    """Whether it is one."""
    return isinstance(node.target, RuntimeOp) and "src" in node.kwargs


def changed_axis(node: fx.Node) -> str:
    """The axis on which it changes a type."""
    axis = node.args[1]
    assert isinstance(axis, AxisRef)
    return axis.name


def is_parameter(node: fx.Node) -> bool:
    """Also where its gradient is summed over other axes."""
    while is_transition(node) and node.kwargs["src"] == I and node.kwargs["dst"] == R:
        node = operands(node)[0]
    return info(node).role == "parameter"
