"""From a cross entropy back to the product that makes its logits, and that head written anew in its normal form.

Between the two may be ops on rows alone (reshapes of leading dims, slices, transposes) and on elements alone
(casts, soft-capping, a scale). The former commute with the product, and act on its operand instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final

import torch
from torch import fx

from autopar.errors import StageError
from autopar.graph import Meta, arguments, derive, info, is_aten, op_name, operands, where
from autopar.passes.vocabulary import CASTS

aten = torch.ops.aten
CROSS_ENTROPY: Final = "aten.cross_entropy_loss.default"
_MEAN: Final = 1
_SWAPS: Final = {"aten.t.default", "aten.transpose.int", "aten.permute.default", "aten.numpy_T.default"}


@dataclass(frozen=True)
class Logits:
    """What leads from a product to its cross entropy, in order: ``rows`` (each with the class dim of its result) and
    ``elements``. ``product`` is ``x`` times ``weight`` (``transposed``: as it is, ``[h, classes]``), a parameter that
    may be cast to the dtype of ``x`` before; so may the ``bias``, to ``bias_dtype``."""

    entropy: fx.Node
    product: fx.Node
    x: fx.Node
    weight: fx.Node
    transposed: bool
    bias: fx.Node | None
    bias_dtype: torch.dtype | None
    biased: fx.Node
    rows: tuple[tuple[fx.Node, int], ...]
    elements: tuple[fx.Node, ...]


def trace(entropy: fx.Node) -> Logits | fx.Node:
    """What leads to the cross entropy, or the placeholder at which that leaves the graph.

    Raises StageError naming the op that isn't of a head that can be split.
    """
    check_entropy(entropy)
    node = operands(entropy)[0]
    dim = min(1, len(_shape(node)) - 1)
    rows: list[tuple[fx.Node, int]] = []
    elements: list[fx.Node] = []
    bias, bias_dtype, biased = None, None, None
    user = entropy
    while node.op == "call_function":
        if set(node.users) != {user}:
            others = " and ".join(where(n) for n in node.users if n is not user)
            raise StageError(f"{where(node)}: logits are used otherwise than by the cross entropy, by {others}")
        user, factor, added = node, _factor(node), _added(node)
        if factor is not None and dim == len(_shape(node)) - 1:
            x, weight, transposed = factor
            forward = tuple(reversed(rows)), tuple(reversed(elements))
            return Logits(entropy, node, x, weight, transposed, bias, bias_dtype, biased or node, *forward)
        if added is not None and bias is None and dim == len(_shape(node)) - 1:
            node, read = added
            bias, bias_dtype, biased = parameter_of(read), info(read).meta.dtype, user
        elif bias is None and _is_pointwise(node):
            elements.append(node)
            node = operands(node)[0]
        else:
            before = _ROWS.get(op_name(node), _no_rows)(node, dim)
            if before is None:
                raise StageError(
                    f"{where(node)} is between the cross entropy and the product that makes its logits; "
                    "there may be a bias, ops on rows alone (reshape, slice), and ops on single elements with constants"
                )
            rows.append((node, dim))
            node, dim = operands(node)[0], before
    return node


def check_entropy(entropy: fx.Node) -> None:
    """Raises StageError for a cross entropy whose classes can't be split."""
    given = arguments(entropy)
    if given["weight"] is not None:
        raise StageError(f"{where(entropy)} has class weights, with which it can't be split over its classes")
    if info(given["target"]).meta.dtype.is_floating_point:
        raise StageError(f"{where(entropy)} has class probabilities as target; split over classes it takes indices")
    if given["reduction"] == _MEAN:
        raise StageError(f"{where(entropy)} takes a mean that is no sum over a count of tokens")


def entropy_options(entropy: fx.Node) -> dict[str, Any]:
    """Named arguments of the runtime's function that is such a cross entropy; what is as it is by default is left
    out."""
    given = arguments(entropy)
    named: dict[str, Any] = {}
    if given["ignore_index"] != -100:
        named["ignore_index"] = given["ignore_index"]
    if given["label_smoothing"]:
        named["label_smoothing"] = given["label_smoothing"]
    if given["reduction"] == 0:
        named["reduction"] = "none"
    return named


def rewrite(found: Logits) -> fx.Node:
    """The head in its normal form, before the cross entropy: ``[t, h] -> [t, classes] -> entropy``.

    Returns the new cross entropy; the old one's users take it (reshaped). What is no longer used stays in the graph.
    """
    graph, entropy = found.entropy.graph, found.entropy
    given = arguments(entropy)
    with graph.inserting_before(entropy):
        z = _product(graph, found, tokens(graph, found))
        for node in found.elements:
            z = _again(graph, node, z, _shape(z), info(node).meta.dtype)
        target = reshaped(graph, given["target"], (_shape(z)[0],))
        reduction, ignored, smoothing = given["reduction"], given["ignore_index"], given["label_smoothing"]
        made = graph.call_function(aten.cross_entropy_loss.default, (z, target, None, reduction, ignored, smoothing))
        each = (_shape(z)[0],) if len(_shape(entropy)) or reduction == 0 else ()
        derive(made, entropy, outputs=(replace(info(entropy).meta, shape=each),))
        result = reshaped(graph, made, _shape(entropy))
    entropy.replace_all_uses_with(result)
    return made


def tokens(graph: fx.Graph, found: Logits) -> fx.Node:
    """``x`` as ``[t, h]``, after all that was done to rows of logits."""
    x, width = found.x, _shape(found.x)[-1]
    dim = len(_shape(x)) - 1
    for node, dim in found.rows:
        shape = list(_shape(node))
        shape[dim] = width
        x = _again(graph, node, x, tuple(shape), info(x).meta.dtype)
    order = [d for d in range(len(_shape(x))) if d != dim] + [dim]
    if op_name(x) in _SWAPS and x is not found.x:
        x, order = operands(x)[0], [_order(x)[d] for d in order]
    if order != sorted(order):
        moved = graph.call_function(aten.permute.default, (x, order))
        x = derive(moved, x, outputs=(_meta(x, tuple(_shape(x)[d] for d in order)),))
    return reshaped(graph, x, (prod(_shape(x)[:-1]), width))


def _product(graph: fx.Graph, found: Logits, x: fx.Node) -> fx.Node:
    classes = _shape(found.product)[-1]
    meta = replace(info(found.product).meta, shape=(_shape(x)[0], classes))
    op = aten.mm.default if found.transposed else aten.linear.default
    weight, bias = table(graph, found)
    z = derive(graph.call_function(op, (x, weight)), found.product, outputs=(meta,))
    if bias is None:
        return z
    meta = replace(meta, dtype=info(found.biased).meta.dtype)
    return derive(graph.call_function(aten.add.Tensor, (z, bias)), found.biased, outputs=(meta,))


def table(graph: fx.Graph, found: Logits) -> tuple[fx.Node, fx.Node | None]:
    """Weight and bias as the product takes them, cast if it is so."""
    weight = _cast(graph, found.weight, info(found.x).meta.dtype)
    if found.bias is None or found.bias_dtype is None:
        return weight, None
    return weight, _cast(graph, found.bias, found.bias_dtype)


def _cast(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    meta = replace(info(node).meta, dtype=dtype)
    if meta == info(node).meta:
        return node
    made = graph.call_function(aten.to.dtype, (node, dtype))
    return derive(made, node, outputs=(meta,), role="", name="")


def _again(graph: fx.Graph, node: fx.Node, x: fx.Node, shape: tuple[int, ...], dtype: torch.dtype) -> fx.Node:
    """``node`` done to ``x``, with a result of this shape, which has a gradient if ``x`` has."""
    args: Any = fx.map_arg(node.args, lambda n: x)
    if op_name(node) == "aten.reshape.default":
        args = (x, list(shape))
    made = graph.call_function(node.target, args, node.kwargs)  # type: ignore[arg-type]
    return derive(made, node, outputs=(Meta(shape, dtype, info(x).meta.needs_grad),))


def reshaped(graph: fx.Graph, x: fx.Node, shape: tuple[int, ...]) -> fx.Node:
    """``x`` in another shape; itself where it has that already."""
    if _shape(x) == shape:
        return x
    return derive(graph.call_function(aten.reshape.default, (x, list(shape))), x, outputs=(_meta(x, shape),))


def _meta(node: fx.Node, shape: tuple[int, ...]) -> Meta:
    return replace(info(node).meta, shape=shape)


def _shape(node: fx.Node) -> tuple[int, ...]:
    return info(node).meta.shape


# --- which op is what -------------------------------------------------------------------------------


def _factor(node: fx.Node) -> tuple[fx.Node, fx.Node, bool] | None:
    """Of a product with a parameter: the other operand, the parameter, and whether its classes are in dim 1."""
    if op_name(node) not in ("aten.linear.default", "aten.mm.default", "aten.matmul.default") or len(node.args) != 2:
        return None
    x, weight = operands(node)
    swapped = op_name(node) != "aten.linear.default"
    if info(x).meta.dtype != info(weight).meta.dtype:
        return None
    casts = 0
    while _is_swap(weight) or (op_name(weight) in CASTS and not casts):
        swapped, casts = swapped != _is_swap(weight), casts + (op_name(weight) in CASTS)
        weight = operands(weight)[0]
    return (x, weight, swapped) if _is_parameter(weight) and len(_shape(weight)) == 2 and _shape(x) else None


def _is_swap(node: fx.Node) -> bool:
    return op_name(node) in _SWAPS and len(_shape(node)) == 2 and _swaps(node)


def parameter_of(node: fx.Node) -> fx.Node | None:
    """The parameter that ``node`` is, or that it casts."""
    node = operands(node)[0] if op_name(node) in CASTS else node
    return node if _is_parameter(node) else None


def _swaps(node: fx.Node) -> bool:
    """Whether it exchanges the two dims of a matrix."""
    return _order(node) == [1, 0]


def _order(node: fx.Node) -> list[int]:
    """The operand's dims in the order of the result's."""
    rank = len(_shape(node))
    order = list(range(rank))
    if op_name(node) == "aten.permute.default":
        return [d % rank for d in arguments(node)["dims"]]
    if op_name(node) == "aten.transpose.int":
        a, b = (arguments(node)[name] % rank for name in ("dim0", "dim1"))
        order[a], order[b] = order[b], order[a]
        return order
    return order[::-1]


def _added(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Of the sum with a bias: the other operand, and the bias."""
    if op_name(node) != "aten.add.Tensor" or node.kwargs or len(operands(node)) != 2:
        return None
    for x, bias in (operands(node), operands(node)[::-1]):
        if parameter_of(bias) and _shape(bias) == _shape(node)[-1:] and not parameter_of(x):
            return x, bias
    return None


def _is_parameter(node: fx.Node) -> bool:
    return node.op == "placeholder" and info(node).role == "parameter"


def _is_pointwise(node: fx.Node) -> bool:
    """Whether it changes each element alone, by constants."""
    if not is_aten(node) or info(node).random or len(set(operands(node))) != 1:
        return False
    pointwise = torch.Tag.pointwise in node.target.tags  # type: ignore[union-attr]
    return (pointwise or op_name(node) in CASTS) and _shape(node) == _shape(operands(node)[0])


def _no_rows(node: fx.Node, dim: int) -> None:
    return None


def _reshape_rows(node: fx.Node, dim: int) -> int | None:
    before, after = _shape(operands(node)[0]), _shape(node)
    return len(before) - 1 if dim == len(after) - 1 and before[-1:] == after[-1:] else None


def _slice_rows(node: fx.Node, dim: int) -> int | None:
    return dim if arguments(node)["dim"] % len(_shape(node)) != dim else None


def _select_rows(node: fx.Node, dim: int) -> int | None:
    at: int = arguments(node)["dim"] % (len(_shape(node)) + 1)
    return dim + (at <= dim)


def _unsqueeze_rows(node: fx.Node, dim: int) -> int | None:
    at = arguments(node)["dim"] % len(_shape(node))
    return dim - (at < dim) if at != dim else None


def _squeeze_rows(node: fx.Node, dim: int) -> int | None:
    before = _shape(operands(node)[0])
    at = arguments(node)["dim"] % len(before)
    return dim + (at <= dim) if before[at] == 1 else dim


def _swap_rows(node: fx.Node, dim: int) -> int | None:
    return _order(node)[dim]


_ROWS: Final[dict[str, Callable[[fx.Node, int], int | None]]] = {
    "aten.reshape.default": _reshape_rows,
    "aten.slice.Tensor": _slice_rows,
    "aten.select.int": _select_rows,
    "aten.unsqueeze.default": _unsqueeze_rows,
    "aten.squeeze.dim": _squeeze_rows,
    **dict.fromkeys(_SWAPS, _swap_rows),
}
"""Op on rows alone -> from the class dim of its result, that of its operand; None: it is about classes too."""
