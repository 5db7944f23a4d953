"""canonicalize: one way of writing each thing, so that rules and readers see few forms.

Guarantees: equal values and gradients. In order, on every block:

0. ``broadcast_tensors`` is one ``expand`` for each tensor;
1. no-ops go (``to`` the same dtype, ``alias``, ``contiguous``, ``x + 0`` on integers, idle dropout), and what ``cat``
   takes for nothing (a vector without elements among tensors of more dims, as caches begin);
   and what is cut into pieces and put together again as it was (``cat(x.split(n))``, ``cat(x.unbind())``);
2. ``view`` is ``reshape``, with its shape spelled out; chains of reshapes are one;
3. a matrix product on flattened rows is one on the unflattened tensor (``[b*s, k]`` -> ``[b, s, k]``);
4. the bias of a product is an addition of its own, so that a pending sum can be reduced before it;
5. ``x[mask] = value`` with one value for all places is ``where(mask, value, x)``;
6. recurrent layers take and give time first, so that samples are dim 1 of their states and their results alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import is_not
from typing import Any, cast

import torch
from torch import fx

from autopar.graph import AVERAGED, Block, Model, arguments, derive, info, is_getitem, op_name

aten = torch.ops.aten


def canonicalize(model: Model) -> Model:
    for block in model.blocks:
        for rewrite in _REWRITES:
            rewrite(block)
        block.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or node.target is AVERAGED)
    return model


def _forward(graph: fx.Graph, node: fx.Node, value: fx.Node) -> None:
    node.replace_all_uses_with(value)
    graph.erase_node(node)


_ALWAYS_NO_OP = {"aten.alias.default", "aten.contiguous.default", "aten.lift_fresh_copy.default"}
_CASTS = {"aten.to.dtype", "aten.to.dtype_layout", "aten.to.device", "aten.type_as.default", "aten.to.other"}
_ADDITIONS = {"aten.add.Tensor", "aten.add.Scalar"}
_PRODUCTS_BY_ONE = {"aten.mul.Tensor", "aten.mul.Scalar"}
_DROPOUTS = {"aten.dropout.default", "aten.feature_dropout.default", "aten.alpha_dropout.default"}
_STOPS = {"aten.detach.default"}
_RESHAPES = {
    "aten.view.default",
    "aten.reshape.default",
    "aten._unsafe_view.default",
    "aten.flatten.using_ints",
    "aten.unflatten.int",
    "aten.view_as.default",
    "aten.reshape_as.default",
    "aten.squeeze.dim",
    "aten.squeeze.default",
    "aten.expand.default",
}

UNDERSTOOD = _ALWAYS_NO_OP | _CASTS | _DROPOUTS | _STOPS | _RESHAPES | {"aten.broadcast_tensors.default"}
"""What is read here, whether it has a rule or not."""


def _spell_broadcasts(block: Block) -> None:
    """``broadcast_tensors`` is an ``expand`` of each tensor."""
    for node in block.ops:
        if not is_getitem(node) or op_name(node.args[0]) != "aten.broadcast_tensors.default":  # type: ignore[arg-type]
            continue
        operand = node.args[0].args[0][node.args[1]]  # type: ignore[union-attr,index]
        node.target = aten.expand.default
        node.args = (operand, list(info(node).meta.shape))


def _drop_no_ops(block: Block) -> None:
    for node in block.ops:
        if _is_no_op(node):
            _forward(block.graph, node, node.all_input_nodes[0])


def _drop_nothing(block: Block) -> None:
    for node in block.ops:
        if op_name(node) != "aten.cat.default":
            continue
        parts = cast(list[fx.Node], node.args[0])
        some = [part for part in parts if info(part).meta.shape != (0,)]
        if len(some) == 1 and info(some[0]).meta == info(node).meta:
            _forward(block.graph, node, some[0])
        elif some and len(some) < len(parts):
            node.args = (some, *node.args[1:])


_CUTS = ("split", "split_with_sizes", "chunk", "tensor_split", "unbind")


def _put_together(block: Block) -> None:
    """All pieces along a dim, in order, are what was cut; of ``unbind``, with that dim and the next as one."""
    for node in block.ops:
        pieces = node.args[0] if op_name(node) == "aten.cat.default" else ()
        whole = _cut_into(cast(Sequence[fx.Node], pieces))
        if whole is None:
            continue
        x = whole.all_input_nodes[0]
        shape, dim = info(x).meta.shape, arguments(whole)["dim"] % len(info(x).meta.shape)
        if arguments(node)["dim"] % len(info(node).meta.shape) != dim:
            continue
        if op_name(whole).split(".")[1] != "unbind":
            _forward(block.graph, node, x)
        elif dim + 1 < len(shape):
            node.target, node.kwargs = aten.reshape.default, {}
            node.args = (x, list(info(node).meta.shape))


def _cut_into(pieces: Sequence[fx.Node]) -> fx.Node | None:
    """The op of which ``pieces`` are all results, in order."""
    if not pieces or not all(isinstance(piece, fx.Node) and is_getitem(piece) for piece in pieces):
        return None
    whole = pieces[0].args[0]
    if not isinstance(whole, fx.Node) or op_name(whole).split(".")[1:2][0] not in _CUTS:
        return None
    wanted = [(whole, number) for number in range(len(info(whole).outputs))]
    return whole if [piece.args for piece in pieces] == wanted else None


def _is_no_op(node: fx.Node) -> bool:
    if not node.all_input_nodes:
        return False
    name, before, after = op_name(node), info(node.all_input_nodes[0]).meta, info(node).meta
    same = before.shape == after.shape and before.dtype == after.dtype
    if name in _ALWAYS_NO_OP or (name in _CASTS and same):
        return True
    if name in _ADDITIONS:
        return same and _is_number(node.args[1], 0) and len(node.args) == 2
    if name in _PRODUCTS_BY_ONE:
        return same and _is_number(node.args[1], 1)
    if name in _DROPOUTS:
        return not info(node).random
    if name in _STOPS:
        return not before.needs_grad
    return name in _RESHAPES and same


def _is_number(argument: object, value: int) -> bool:
    return isinstance(argument, int | float) and argument == value


def _name_reshapes(block: Block) -> None:
    """Reshapes whose shape is written in other words all become ``reshape`` to an explicit shape."""
    named = _RESHAPES - {"aten.squeeze.dim", "aten.squeeze.default", "aten.expand.default"}
    for node in block.ops:
        if op_name(node) in named:
            node.target = aten.reshape.default
            node.args = (node.args[0], list(info(node).meta.shape))
            node.kwargs = {}


def _is_reshape(node: fx.Node | object) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target is aten.reshape.default


def _merge_reshapes(block: Block) -> None:
    for node in block.ops:
        if _is_reshape(node) and _is_reshape(node.args[0]):
            node.args = (node.args[0].args[0], node.args[1])  # type: ignore[union-attr]
        if _is_reshape(node) and info(node.args[0]).meta.shape == info(node).meta.shape:  # type: ignore[arg-type]
            _forward(block.graph, node, node.args[0])  # type: ignore[arg-type]
    _erase_unused(block)


def _erase_unused(block: Block) -> None:
    for node in reversed(block.ops):
        if not node.users and node.target is not AVERAGED:
            block.graph.erase_node(node)


def _rows_operand(node: fx.Node) -> int | None:
    """Which argument of a 2-D matrix product is the rows."""
    return {"aten.linear.default": 0, "aten.mm.default": 0, "aten.addmm.default": 1}.get(op_name(node))


def _unflatten_rows(block: Block) -> None:
    for node in block.ops:
        position = _rows_operand(node)
        users = list(node.users)
        if position is None or len(info(node).meta.shape) != 2 or not all(map(_is_reshape, users)) or not users:
            continue
        shapes = {info(u).meta.shape for u in users}
        columns = info(node).meta.shape[1]
        lead = next(iter(shapes))[:-1]
        if len(shapes) != 1 or len(lead) < 2 or next(iter(shapes))[-1] != columns:
            continue
        _lift(block.graph, node, position, lead, users)


def _lift(graph: fx.Graph, node: fx.Node, position: int, lead: tuple[int, ...], users: list[fx.Node]) -> None:
    rows = node.args[position]
    assert isinstance(rows, fx.Node)
    data = info(rows).meta
    shape = (*lead, data.shape[-1])
    with graph.inserting_before(node):
        lifted = graph.call_function(aten.reshape.default, (rows, list(shape)))
        derive(lifted, rows, outputs=(type(data)(shape, data.dtype, data.needs_grad),))
        arguments = list(node.args)
        arguments[position] = lifted
        result = info(users[0]).outputs
        if op_name(node) == "aten.linear.default":
            made = derive(graph.call_function(aten.linear.default, tuple(arguments), node.kwargs), node, outputs=result)
        else:
            factors = tuple(arguments[position : position + 2])
            made = derive(graph.call_function(aten.matmul.default, factors), node, outputs=result)
        if op_name(node) == "aten.addmm.default":
            made = derive(graph.call_function(aten.add.Tensor, (made, arguments[0])), node, outputs=result)
    for user in users:
        _forward(graph, user, made)
    graph.erase_node(node)


def _split_bias(block: Block) -> None:
    for node in block.ops:
        split = _BIASED.get(op_name(node))
        if split is not None:
            split(block.graph, node)


def _split_linear(graph: fx.Graph, node: fx.Node) -> None:
    bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
    if bias is None:
        return
    with graph.inserting_before(node):
        product = derive(graph.call_function(aten.linear.default, node.args[:2]), node)
        made = derive(graph.call_function(aten.add.Tensor, (product, bias)), node)
    _forward(graph, node, made)


def _split_addmm(graph: fx.Graph, node: fx.Node) -> None:
    if node.kwargs:
        return  # alpha and beta: keep as it is
    with graph.inserting_before(node):
        product = derive(graph.call_function(aten.mm.default, node.args[1:3]), node)
        made = derive(graph.call_function(aten.add.Tensor, (product, node.args[0])), node)
    _forward(graph, node, made)


def _split_convolution(graph: fx.Graph, node: fx.Node) -> None:
    """Along a sequence, where it lets channels be split: parameters are used whole, but not what is made of them."""
    bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
    if not isinstance(bias, fx.Node) or node.kwargs:
        return
    data = info(bias).meta
    with graph.inserting_before(node):
        made = derive(graph.call_function(aten.conv1d.default, (*node.args[:2], None, *node.args[3:])), node)
        column = graph.call_function(aten.unsqueeze.default, (bias, 1))
        derive(column, node, outputs=(type(data)((*data.shape, 1), data.dtype, data.needs_grad),))
        made = derive(graph.call_function(aten.add.Tensor, (made, column)), node)
    _forward(graph, node, made)


def _spell_masked_writes(block: Block) -> None:
    for node in block.ops:
        if op_name(node) != "aten.index_put.default" or (len(node.args) > 3 and node.args[3]):
            continue
        x, (mask, *others), value = cast(tuple[fx.Node, list[Any], fx.Node], node.args[:3])
        if others or mask is None or info(mask).meta.dtype != torch.bool:
            continue
        marked, given = info(mask).meta, info(value).meta
        rest = len(info(x).meta.shape) - len(marked.shape)
        if len(given.shape) > rest or given.dtype != info(x).meta.dtype:
            continue  # a value for each place that the mask marks
        shape = (*marked.shape, *[1] * rest)
        with block.graph.inserting_before(node):
            if rest:
                lifted = block.graph.call_function(aten.reshape.default, (mask, list(shape)))
                mask = derive(lifted, node, outputs=(type(marked)(shape, marked.dtype),))
            made = derive(block.graph.call_function(aten.where.self, (mask, value, x)), node)
        _forward(block.graph, node, made)


_RECURRENT = {f"aten.{kind}.input" for kind in ("gru", "lstm", "rnn_tanh", "rnn_relu")}


def _put_time_first(block: Block) -> None:
    for node in block.ops:
        if op_name(node) not in _RECURRENT or not node.args[-1] or len(info(node).meta.shape) != 3:
            continue
        x = cast(fx.Node, node.args[0])
        with block.graph.inserting_before(node):
            node.args = (_transposed(block.graph, x, x), *node.args[1:-1], False)
        batch_first, *states = info(node).outputs
        time_first = replace(batch_first, shape=(batch_first.shape[1], batch_first.shape[0], batch_first.shape[2]))
        info(node).outputs = (time_first, *states)
        for made in [user for user in node.users if user.args[1] == 0]:
            info(made).outputs = (time_first,)
            with block.graph.inserting_after(made):
                back = _transposed(block.graph, made, made)
            made.replace_all_uses_with(back, delete_user_cb=partial(is_not, back))


def _transposed(graph: fx.Graph, value: fx.Node, like: fx.Node) -> fx.Node:
    meta = info(value).meta
    swapped = replace(meta, shape=(meta.shape[1], meta.shape[0], *meta.shape[2:]))
    return derive(graph.call_function(aten.transpose.int, (value, 0, 1)), like, outputs=(swapped,), random=False)


_BIASED: dict[str, Callable[[fx.Graph, fx.Node], None]] = {
    "aten.linear.default": _split_linear,
    "aten.addmm.default": _split_addmm,
    "aten.conv1d.default": _split_convolution,
}

_REWRITES: tuple[Callable[[Block], None], ...] = (
    _spell_broadcasts,
    _drop_no_ops,
    _drop_nothing,
    _put_together,
    _name_reshapes,
    _merge_reshapes,
    _unflatten_rows,
    _merge_reshapes,
    _split_bias,
    _spell_masked_writes,
    _put_time_first,
)
