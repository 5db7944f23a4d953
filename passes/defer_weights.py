"""defer_weights: products with a weight become ones whose weight gradient can be put off.

Guarantees: equal values and gradients; every product of a value with a trainable two-dimensional parameter calls
the runtime's ``linear`` or ``matmul``, whose backward can leave the parameter's gradient to a pass of its own. Runs
on local graphs from which ``hoist`` has removed the converts: where one is left, or the weight is gathered or cast,
its gradient has to go back through that at once. Example: ``aten.linear(x, w)`` becomes ``linear(x, w)``, and
``x @ w.t()`` too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from torch import fx

from autopar.graph import Block, Model, RuntimeOp, info, op_name, operands

_PRODUCTS: Final = {"aten.linear.default": "linear", "aten.matmul.default": "matmul", "aten.mm.default": "matmul"}
_OF_TRANSPOSED: Final = {"linear": "matmul", "matmul": "linear"}


def defer_weights(model: Model) -> Model:
    """In place, after all axes are solved. Raises nothing: what can't be put off stays as it is."""
    trained = {
        (call.block, position)
        for call in model.calls
        for position, name in enumerate(call.parameters)
        if model.parameters[name].trainable and not model.parameters[name].is_buffer
    }
    for number, block in enumerate(model.blocks):
        weights = {node for k, node in enumerate(block.parameters) if (number, k) in trained}
        _defer_block(block, {node for node in weights if _is_matrix(node)})
    return model


def _is_matrix(node: fx.Node) -> bool:
    return len(info(node).meta.shape) == 2 and info(node).meta.dtype.is_floating_point


def _defer_block(block: Block, weights: set[fx.Node]) -> None:
    for node in block.ops:
        function = _PRODUCTS.get(op_name(node))
        if function is None or not _is_product_of_two(node):
            continue
        weight = operands(node)[1]
        if _is_transposition(weight) and operands(weight)[0] in weights:
            node.target = RuntimeOp(_OF_TRANSPOSED[function])
            _take_untransposed(node, weight)
        elif weight in weights:
            node.target = RuntimeOp(function)


def _is_product_of_two(node: fx.Node) -> bool:
    """Without a bias, which canonicalize makes an addition of its own."""
    return len(node.args) == len(operands(node)) == 2


def _is_transposition(node: fx.Node) -> bool:
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
