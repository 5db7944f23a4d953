"""pad_head: the vocabulary's table gets rows of zeros, so that products with it are fast and tp divides it.

Guarantees: equal loss and gradients, which are zero for these rows. Kernels of 16 bits load 16 bytes at once where
rows begin at multiples of that: rows of GPT-2's 50,257 logits don't, and no tp divides them. Elsewhere that is done by
hand, and changes the model: its vocabulary is 50,304 then. Here the program's table alone is longer
(:class:`~autopar.graph.ParameterInfo` keeps the model's shape), and its cross entropy leaves out the logits of what was
added. A head that is split over the pipeline is padded by :mod:`autopar.passes.split_vocabulary`. Example, for tp 1:
``cross_entropy(linear(x [t, 768], w [50257, 768]), y)`` becomes ``cross_entropy_padded(linear(x, w [50264, 768]), y,
classes=50257)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import fx

from autopar.errors import StageError
from autopar.graph import Model, RuntimeOp, derive, info, op_name, operands, verify
from autopar.passes.find_head import drop_dead, find_head
from autopar.passes.logits import entropy_options, rewrite
from autopar.passes.vocabulary import ALIGNED_BYTES, CASTS, PRODUCTS, conversions, lengthen, stored_in
from autopar.rules.chunked import CHUNKED
from autopar.rules.loss import PADDED

_LOOKUP = "aten.embedding.default"


class Table(NamedTuple):
    """What products of a head with its table are: of so many ``classes``, in ``dtype``."""

    classes: int
    dtype: torch.dtype

    def multiple(self, tp: int) -> int:
        """Of how many rows it should have as many; kernels for more than 16 bits don't mind where rows begin."""
        return tp * (ALIGNED_BYTES // self.dtype.itemsize if self.dtype.itemsize == 2 else 1)

    def padded(self, tp: int) -> int:
        """How many rows it then has."""
        return -(-self.classes // self.multiple(tp)) * self.multiple(tp)


@dataclass(frozen=True)
class _Head:
    """Of call number ``call``: the op that makes its logits and, last in it, their loss: the same op in chunks."""

    call: int
    product: fx.Node
    entropy: fx.Node

    def path(self) -> list[fx.Node]:
        """From the logits back to their product; nothing in chunks."""
        found = [] if self.product is self.entropy else [operands(self.entropy)[0]]
        while found and found[-1] is not self.product:
            found.append(operands(found[-1])[0])
        return found

    def weights(self) -> Iterator[tuple[fx.Node, int]]:
        """Placeholders of the table and its bias, each with its dim of classes."""
        if self.product is self.entropy:
            _, weight, _, *biases = operands(self.product)
        else:
            weight, biases = operands(self.product)[1], [o for node in self.path() for o in operands(node)[1:]]
        for node in (weight, *biases):
            stored = stored_in(node)
            if stored is not None:
                yield stored, self.dim if node is weight else 0

    @property
    def dim(self) -> int:
        """Of the table, that of classes."""
        name, named = op_name(self.product), self.product.kwargs
        return int(str(named.get("weight_dim", 0))) if name == CHUNKED else PRODUCTS[name]


def pad_head(model: Model, tp: int) -> Model:
    """A canonical model with its head, whole or in chunks, padded for ``tp`` ranks that may split its classes; the
    given one stays as it is. It is returned itself where there is nothing to pad, or its table can't be: where it has
    no head that could be split over a pipeline, or others read the table than the head and lookups."""
    try:
        made, head = _found(model.copy())
    except StageError:
        return model
    table = _table_of(head)
    dims = _names(made, head, dict(head.weights()))
    if table.padded(tp) == table.classes or not all(_suits(made, head, name) for name in dims):
        return model
    multiple = table.multiple(tp)
    for name, dim in dims.items():
        for node in {node for _, node in _readers(made, name)}:
            for same in conversions(node):
                lengthen(same, dim, multiple)
    for node in head.path():
        lengthen(node, 1, multiple)
    _leave_out(head, table.classes)
    verify(made, "pad_head")
    return made


def table_of(model: Model) -> Table | None:
    """That of a canonical model's head; None where it has none that could be split."""
    try:
        return _table_of(_found(model)[1])
    except StageError:
        return None


def _table_of(head: _Head) -> Table:
    meta = info(operands(head.product)[1]).meta
    return Table(meta.shape[head.dim], meta.dtype)


def _found(model: Model) -> tuple[Model, _Head]:
    """The head in its normal form. Raises StageError where there is none that could be split."""
    for index, call in enumerate(model.calls):
        for node in model.block_of(call).ops:
            if op_name(node) == CHUNKED:
                return model, _Head(index, node, node)
    merged, index, logits = find_head(model)
    entropy = rewrite(logits)
    drop_dead(merged.block_of(merged.calls[index]))
    product = operands(entropy)[0]
    while op_name(product) not in PRODUCTS:
        product = operands(product)[0]
    return merged, _Head(index, product, entropy)


def _names(model: Model, head: _Head, dims: dict[fx.Node, int]) -> dict[str, int]:
    """The parameters behind the placeholders ``dims``, each with its dim of classes."""
    call = model.calls[head.call]
    places = zip(model.block_of(call).parameters, call.parameters, strict=True)
    return {name: dims[node] for node, name in places if node in dims}


def _readers(model: Model, name: str) -> Iterator[tuple[int, fx.Node]]:
    """Blocks that read the parameter, and what stands for it there."""
    for call in model.calls:
        for position, given in enumerate(call.parameters):
            if given == name:
                yield call.block, model.block_of(call).parameters[position]


def _suits(model: Model, head: _Head, name: str) -> bool:
    """Whether all but the head look rows of the parameter up, in blocks that no other is computed by."""
    own = model.calls[head.call].block
    for block, placeholder in _readers(model, name):
        position = model.blocks[block].parameters.index(placeholder)
        if {call.parameters[position] for call in model.calls if call.block == block} != {name}:
            return False
        users = [user for same in conversions(placeholder) for user in same.users if stored_in(user) is None]
        taken = [user for user in users if user not in (head.product, *head.path())] if block == own else users
        if any(op_name(user) != _LOOKUP or stored_in(operands(user)[0]) is not placeholder for user in taken):
            return False
    return True


def _leave_out(head: _Head, classes: int) -> None:
    """Tell the cross entropy how many classes there are."""
    entropy = head.entropy
    if head.product is entropy:
        entropy.kwargs = {**entropy.kwargs, "classes": classes}
        return
    graph, (logits, target) = entropy.graph, operands(entropy)
    named = {"classes": classes, **entropy_options(entropy)}
    with graph.inserting_before(entropy):
        if any(op_name(node) not in (*CASTS, *PRODUCTS, "aten.add.Tensor") for node in head.path()):
            # What shapes logits (a tanh) may need them as they are for its own gradient.
            logits = derive(graph.call_function(torch.ops.aten.clone.default, (logits,)), logits)
        made = derive(graph.call_function(RuntimeOp(PADDED), (logits, target), named), entropy)
    entropy.replace_all_uses_with(made)
    graph.erase_node(entropy)
