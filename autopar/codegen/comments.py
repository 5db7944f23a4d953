"""What comments of emitted code say: shapes and types, the user's source line, what a collective moves."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from autopar.codegen.aten import is_pointwise
from autopar.codegen.names import source
from autopar.codegen.text import human_bytes
from autopar.graph import AxisRef, Meta, RuntimeOp, info, is_view, operands
from autopar.passes.edges import MICROBATCHES
from autopar.rules import lookup
from autopar.rules.base import Op
from autopar.rules.chunked import whole_logits
from autopar.spmd import Type, transition


def typed(meta: Meta, types: Mapping[str, Type]) -> str:
    """``bf16[1, 4096, 512] S(2)@tp``; whole values have no type written."""
    kinds = [f"{kind}@{axis}" for axis, kind in types.items() if axis != MICROBATCHES and not kind.is_whole]
    return " ".join([str(meta), *kinds])


def of_node(node: fx.Node) -> str:
    """The comment of one op, "" where it would tell nothing new."""
    data = info(node)
    move = _collective(node)
    if move is not None:
        return of_change(info(operands(node)[0]).meta, data.meta, *move, _size(node))
    if data.is_object:
        return "   ".join(part for part in (_inside(node), data.source) if part)
    if not _informs(node):
        return ""
    never = whole_logits(node)
    parts = (typed(data.meta, data.types()), f"{never} never exists" if never else "", _inside(node), data.source)
    return "   ".join(part for part in parts if part)


def of_change(before: Meta, after: Meta, src: Type, dst: Type, size: int) -> str:
    """``28.0 MiB · backward: reduce-scatter``: the larger side of the transition on an axis of ``size`` ranks, and its
    way back."""
    way = transition(src, dst)
    parts = []
    if way is not None and way.forward:
        parts.append(human_bytes(way.sent_bytes(before.bytes, after.bytes, size)))
    if way is not None and way.backward and before.needs_grad:
        parts.append(f"backward: {way.backward.replace('_', '-')}")
    return " · ".join(parts)


def _inside(node: fx.Node) -> str:
    """What a form communicates: ``all-to-all of 28.0 MiB · backward: all-to-all``, several axes as one."""
    op, forms = Op.of(node), [choice for choice in info(node).choices.values() if choice.form]
    rule = lookup(op.name)
    there = {kind: bytes_ for choice in forms for kind, bytes_ in rule.communication(op, choice, 1)}
    back = {kind: None for choice in forms for kind, _ in rule.communication_back(op, choice, 1)}
    parts = [f"{kind.replace('_', '-')} of {human_bytes(bytes_)}" for kind, bytes_ in there.items()]
    if back and info(node).meta.needs_grad:
        parts.append(f"backward: {', '.join(kind.replace('_', '-') for kind in back)}")
    return " · ".join(parts)


def _collective(node: fx.Node) -> tuple[Type, Type] | None:
    src, dst = node.kwargs.get("src"), node.kwargs.get("dst")
    return (src, dst) if isinstance(src, Type) and isinstance(dst, Type) else None


def _size(node: fx.Node) -> int:
    """Of the axis that a transition is on."""
    axis = node.args[1]
    assert isinstance(axis, AxisRef)
    return axis.size


def _informs(node: fx.Node) -> bool:
    """Ops that read a parameter, join tensors otherwise than elementwise, or have a sharded form."""
    if is_view(node):
        return False
    found = operands(node)
    if any(info(source(o)).role in ("parameter", "buffer") for o in found):
        return True
    if isinstance(node.target, RuntimeOp):
        return any(isinstance(a, AxisRef) for a in node.args) or any(info(o).is_object for o in found)
    return len(set(found)) > 1 and not is_pointwise(node)
