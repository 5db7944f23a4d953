"""Products of a value with a trained matrix, as passes replace them: ``linear(x, w)``, ``x @ w`` and ``x @ w.t()``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from torch import fx

from autopar.graph import Block, Model, RuntimeOp, info, op_name, operands

LINEAR: Final = "linear"
MATMUL: Final = "matmul"
PRODUCTS: Final = {"aten.linear.default": LINEAR, "aten.matmul.default": MATMUL, "aten.mm.default": MATMUL}
"""Ops that are such products -> what they are of."""

_OF_TRANSPOSED: Final = {LINEAR: MATMUL, MATMUL: LINEAR}

Accepts = Callable[[fx.Node, fx.Node], bool]
"""``(product, weight)``: whether the pass is about this one."""


def replace_products(model: Model, names: dict[str, str], accepts: Accepts | None = None) -> Model:
    """In place: products with a trained matrix become the runtime's function ``names[LINEAR]`` (of the weight as
    ``[n, k]``) or ``names[MATMUL]`` (``[k, n]``)."""
    trained = {
        (call.block, position)
        for call in model.calls
        for position, name in enumerate(call.parameters)
        if model.parameters[name].trainable and not model.parameters[name].is_buffer
    }
    for number, block in enumerate(model.blocks):
        weights = {node for k, node in enumerate(block.parameters) if (number, k) in trained}
        _replace_in(block, {node for node in weights if _is_matrix(node)}, names, accepts)
    return model


def _is_matrix(node: fx.Node) -> bool:
    return len(info(node).meta.shape) == 2 and info(node).meta.dtype.is_floating_point


def _replace_in(block: Block, weights: set[fx.Node], names: dict[str, str], accepts: Accepts | None) -> None:
    for node in block.ops:
        function = PRODUCTS.get(op_name(node))
        if function is None or not _is_product_of_two(node):
            continue
        weight = operands(node)[1]
        transposed = is_transposition(weight) and operands(weight)[0] in weights
        matrix = operands(weight)[0] if transposed else weight
        if matrix not in weights or (accepts is not None and not accepts(node, matrix)):
            continue
        node.target = RuntimeOp(names[_OF_TRANSPOSED[function] if transposed else function])
        if transposed:
            _take_untransposed(node, weight)


def _is_product_of_two(node: fx.Node) -> bool:
    """Without a bias, which canonicalize makes an addition of its own."""
    return len(node.args) == len(operands(node)) == 2


def is_transposition(node: fx.Node) -> bool:
    """Whether ``node`` swaps the dims of its operand, if that is a matrix."""
    name = op_name(node)
    if name not in ("aten.transpose.int", "aten.permute.default"):
        return name in ("aten.t.default", "aten.numpy_T.default")
    dims = node.args[1] if name == "aten.permute.default" else node.args[1:]
    assert isinstance(dims, list | tuple)
    ends = [dim % 2 for dim in dims if isinstance(dim, int)]
    return ends == [1, 0] or (ends == [0, 1] and name == "aten.transpose.int")


def _take_untransposed(product: fx.Node, transposed: fx.Node) -> None:
    product.args = (product.args[0], transposed.args[0])
    for axis, choice in info(product).choices.items():
        taken = info(transposed).choices[axis].operands
        info(product).choices[axis] = replace(choice, operands=(choice.operands[0], *taken))
    if not transposed.users:
        transposed.graph.erase_node(transposed)
