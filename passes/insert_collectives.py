"""insert_collectives: where an op takes an operand in another type than it was made, the transition becomes a node.

Guarantees: after it, on ``axis``, every operand of every op has the type that the op's choice asks for; consumers of
one value that want the same type share one transition. Example: ``linear(h S(1), w S(0))`` becomes
``h = all_gather(h, tp, src=S(1), dst=R); linear(h, w)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from autopar.errors import GraphError
from autopar.graph import AxisRef, Block, Choice, Info, Model, RuntimeOp, info, is_getitem, operands, set_info, where
from autopar.spmd import Type, transition


def insert_collectives(model: Model, axis: str) -> Model:
    for block in model.blocks:
        _insert(block, axis)
    return model


def _insert(block: Block, axis: str) -> None:
    made: dict[tuple[fx.Node, Type], fx.Node] = {}
    for node in block.ops:
        kinds = info(node).choices[axis].operands
        if is_getitem(node) or all(
            info(operand).choices[axis].result == kind for operand, kind in zip(operands(node), kinds, strict=True)
        ):
            continue
        wanted = iter(kinds)

        def replacement(operand: fx.Node, node: fx.Node = node, wanted: Iterator[Type] = wanted) -> fx.Node:
            kind = next(wanted)
            given = info(operand).choices[axis].result
            if kind == given:
                return operand
            if (operand, kind) not in made:
                with block.graph.inserting_before(node):
                    made[operand, kind] = _transition(block.graph, operand, given, kind, axis)
            return made[operand, kind]

        arguments: Any = fx.map_arg((node.args, node.kwargs), replacement)
        node.args, node.kwargs = arguments


def _transition(graph: fx.Graph, operand: fx.Node, given: Type, kind: Type, axis: str) -> fx.Node:
    change = transition(given, kind)
    if change is None:
        raise GraphError(f"{where(operand)}: no transition from {given} to {kind} on {axis}")
    arguments: Any = (operand, AxisRef(axis))
    types: Any = {"src": given, "dst": kind}
    node = graph.call_function(RuntimeOp(change.function), arguments, types)
    data = info(operand)
    choices = {a: Choice((c.result,), c.result) for a, c in data.choices.items() if a != axis}
    choices[axis] = Choice((given,), kind)
    return set_info(node, Info(data.outputs, data.module, data.source, choices=choices))
