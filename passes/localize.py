"""localize: once an axis is solved, the graph becomes what one rank of it runs.

Guarantees: shapes in metadata and sizes in arguments are those of one rank; ops whose sharded form needs code of
its own call that. Example, two ranks: ``reshape(q S(2), [4, 16, 8, 8])`` becomes ``reshape(q, [4, 16, 4, 8])``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx
from torch.fx.node import map_aggregate

from autopar.graph import AxisRef, Block, Model, RuntimeOp, aten_overload, info, is_aten
from autopar.rules import lookup
from autopar.rules.base import Local, Op
from autopar.spmd import local_shape


def localize(model: Model, axis: str, size: int, paired: bool = False) -> Model:
    for block in model.blocks:
        _localize_block(block, AxisRef(axis, size, paired))
    return model


def _localize_block(block: Block, ref: AxisRef) -> None:
    axis, size = ref.name, ref.size
    changes: list[tuple[fx.Node, Local]] = []
    for node in block.ops:
        op = Op.of(node)
        changes.append((node, lookup(op.name).localize(op, info(node).choices[axis], size, axis)))
    for node, local in changes:
        _apply(node, local, ref)
    for node in block.graph.nodes:
        if node.op != "output":
            data = info(node)
            kind = data.choices[axis].result
            data.outputs = tuple(replace(m, shape=local_shape(m.shape, kind, size)) for m in data.outputs)


def _apply(node: fx.Node, local: Local, ref: AxisRef) -> None:
    """What names the axis in the call, a transition's too, says what it is like."""
    if local == Local.same() and is_aten(node):
        return  # no op of ATen names an axis
    told: Any = lambda argument: ref if argument == AxisRef(ref.name) else argument  # noqa: E731
    called: Any = local.call(node.args, dict(node.kwargs))
    node.args, node.kwargs = map_aggregate(called, told)
    if local.target:
        node.target = aten_overload(local.target) or RuntimeOp(local.target)
