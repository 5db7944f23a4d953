"""One op as Python source: an operator, an index, or a call of ``aten.<op>`` or of a runtime function.

Exactly the captured op runs: a call names the overload where the packet might pick another (it tries its
overloads in order), an operator stands only where torch maps it to that very overload. Arguments equal to
their default are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import fx

from autopar.codegen.aten import overload
from autopar.codegen.function import Atom, Code, join
from autopar.codegen.text import literal
from autopar.errors import GraphError
from autopar.graph import AxisRef, ElementOps, RuntimeOp, info, op_name, where

Atoms = Callable[[fx.Node], Atom]
"""What stands for a node in the text."""

_BINARY: Final = {
    "aten.add.Tensor": " + ",
    "aten.sub.Tensor": " - ",
    "aten.mul.Tensor": " * ",
    "aten.div.Tensor": " / ",
    "aten.matmul.default": " @ ",
    "aten.pow.Tensor_Scalar": "**",
    "aten.eq.Tensor": " == ",
    "aten.eq.Scalar": " == ",
    "aten.ne.Tensor": " != ",
    "aten.ne.Scalar": " != ",
    "aten.lt.Tensor": " < ",
    "aten.lt.Scalar": " < ",
    "aten.le.Tensor": " <= ",
    "aten.le.Scalar": " <= ",
    "aten.gt.Tensor": " > ",
    "aten.gt.Scalar": " > ",
    "aten.ge.Tensor": " >= ",
    "aten.ge.Scalar": " >= ",
}
_UNARY: Final = {"aten.neg.default": "-", "aten.bitwise_not.default": "~"}
_MEANINGLESS: Final = {"pin_memory": False, "cudnn_enable": False, "layout": torch.strided}
"""Arguments that capture writes down, and that change nothing at these values."""
_TAKES_AXES: Final = {"dropout_replayed", "linear", "matmul", "embedding_rows", "route"}
"""Functions of the runtime that are given all that the rank knows of itself, last."""


def expression(node: fx.Node, atoms: Atoms) -> Code:
    """The source that computes ``node``. Raises GraphError for a target that is no op."""
    name, arguments = op_name(node), node.args
    if isinstance(node.target, RuntimeOp):
        given = [*(("", a) for a in arguments), *node.kwargs.items()]
        axes: Code = ("axes=self.axes",) if node.kwargs else ("self.axes",)
        return _call(str(node.target), given, atoms, [axes] if name in _TAKES_AXES else [])
    if overload(node) is None:
        raise GraphError(f"{where(node)} is no op that can be written as source")
    plain = not node.kwargs and all(isinstance(a, fx.Node | int | float) for a in arguments)
    if name in _BINARY and plain and len(arguments) == 2 and isinstance(arguments[0], fx.Node):
        return (*_value(arguments[0], atoms), _BINARY[name], *_value(arguments[1], atoms))
    if name in _UNARY and plain:
        return (_UNARY[name], *_value(arguments[0], atoms))
    index = _index(node) if not node.kwargs else None
    if index is not None:
        return (*_value(arguments[0], atoms), f"[{index}]")
    return _call(_function(overload(node)), list(_given(node)), atoms)


def _function(target: Any) -> str:
    packet = target.overloadpacket
    base = f"{'aten' if target.namespace == 'aten' else f'torch.ops.{target.namespace}'}.{packet.__name__}"
    return base if packet.overloads()[0] == target._overloadname else f"{base}.{target._overloadname}"


def _given(node: fx.Node) -> Iterator[tuple[str, Any]]:
    """The arguments to write, each with the keyword it needs, or ""."""
    keyword = False
    for position, argument in enumerate(overload(node)._schema.arguments):
        if position < len(node.args):
            value = node.args[position]
        elif argument.name in node.kwargs:
            value = node.kwargs[argument.name]
        else:
            keyword = True
            continue
        if argument.has_default_value() and _is_default(argument.name, value, argument.default_value):
            keyword = True
            continue
        optional = argument.has_default_value() and not isinstance(value, fx.Node)
        yield argument.name if keyword or optional or argument.kwarg_only else "", value
        keyword = keyword or optional


def _is_default(name: str, value: Any, default: Any) -> bool:
    if isinstance(value, fx.Node):
        return False
    if name in _MEANINGLESS and value == _MEANINGLESS[name]:
        return True
    return type(value) is type(default) and bool(value == default)


def _call(function: str, given: Sequence[tuple[str, Any]], atoms: Atoms, last: Sequence[Code] = ()) -> Code:
    arguments = [(f"{key}=", *_value(value, atoms)) if key else _value(value, atoms) for key, value in given]
    return (f"{function}(", *join([*arguments, *last]), ")")


def _value(value: Any, atoms: Atoms) -> Code:
    if isinstance(value, fx.Node):
        return (atoms(value),)
    if isinstance(value, AxisRef):
        return (value.name,)
    if isinstance(value, ElementOps):
        return (_function_of_elements(value),)
    if isinstance(value, list | tuple) and any(isinstance(v, fx.Node | AxisRef) for v in value):
        return ("[", *join([_value(v, atoms) for v in value]), "]")
    return (literal(value),)


def _function_of_elements(ops: ElementOps) -> str:
    """``lambda z: 30.0 * aten.tanh(z / 30.0)``."""
    operators = _BINARY.keys() | _UNARY.keys()
    texts: dict[fx.Node, str] = {}
    for node in ops.graph.nodes:
        if node.op == "placeholder":
            texts[node] = node.name
        elif node.op == "call_function":
            inner = {n: f"({t})" if {op_name(n), op_name(node)} <= operators else t for n, t in texts.items()}
            texts[node] = "".join(map(str, expression(node, inner.__getitem__)))
    return f"lambda {next(iter(texts.values()))}: {texts[ops.result]}"


def _index(node: fx.Node) -> str | None:
    """What stands in the brackets where the op is a plain slice or index of one dim."""
    kind = op_name(node)
    if kind not in ("aten.slice.Tensor", "aten.select.int"):
        return None
    tensor, dim, *bounds = (*node.args, 0) if len(node.args) == 1 else node.args
    if (
        not isinstance(tensor, fx.Node)
        or not isinstance(dim, int)
        or not all(isinstance(b, int | None) for b in bounds)
    ):
        return None
    rank = len(info(tensor).meta.shape)
    dim %= rank
    entry = str(bounds[0]) if kind == "aten.select.int" else _slice(bounds)
    if dim == rank - 1 and rank > 2:
        return f"..., {entry}"
    return ", ".join([":"] * dim + [entry])


def _slice(bounds: list[Any]) -> str:
    start, end, step = [*bounds, None, None, None][:3]
    head = "" if start in (None, 0) else str(start)
    tail = "" if end in (None, sys.maxsize) else str(end)
    return f"{head}:{tail}" + (f":{step}" if step not in (None, 1) else "")
