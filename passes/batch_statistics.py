"""batch_statistics: a batch norm that learns from its batch is written as the two means that it computes.

Guarantees: equal values and gradients. So ranks that have parts of the batch each add up their own, and microbatches
may have statistics of their own (``statistics="microbatch"``), as accumulating gradients gives them. Example:
``batch_norm(x, weight, bias, …, True)`` ->
``mean(x)``, ``c = x - mean``, ``mean(c * c)``, ``c * rsqrt(… + eps) * weight + bias``.

Running averages are moved as torch moves them, by ops beside those (:func:`autopar.runtime.averaged`), which the loss
doesn't depend on; their operands are whole, so each rank moves its copy by the statistics of all. (So are other buffers
that the model's code writes to: :mod:`autopar.passes.functionalize`.) Averages that are
no buffers of the model, but computed, stay as they are. Those that several calls move are in the order of the program
where these are in one stage; each stage of a pipeline has a copy of its own.

A batch norm by given statistics stays: it computes element by element. An instance norm stays but for its averages,
which move by the means of its samples' statistics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any, Final

import torch
from torch import fx

from autopar.graph import AVERAGED, Block, Meta, Model, derive, info, op_name, operands

aten = torch.ops.aten
BATCH_NORM: Final = "aten.batch_norm.default"
INSTANCE_NORM: Final = "aten.instance_norm.default"
_MOVED: Final = {
    BATCH_NORM: "batch norms take statistics of the whole batch, over all ranks that share it, and move running "
    "averages by them",
    INSTANCE_NORM: "instance norms move running averages by statistics of the whole batch",
}
_LEFT: Final = "running averages of norms that are no buffers of the model stay as they are: register them as buffers"
_SHARED: Final = "several layers move {}: each stage of a pipeline that has some of them moves a copy of its own"


def batch_statistics(model: Model) -> Model:
    for block in model.blocks:
        for node in block.ops:
            if op_name(node) in (BATCH_NORM, INSTANCE_NORM) and node.args[5]:
                averages = [average for average in node.args[3:5] if isinstance(average, fx.Node)]
                moves = all(info(average).role == "buffer" for average in averages)
                spell = _spell if op_name(node) == BATCH_NORM else _move_beside
                spell(block, node, averages if moves else ())
                remark = _MOVED[op_name(node)] if moves else _LEFT
                if averages and remark not in model.remarks:
                    model.remarks.append(remark)
    if shared := _moved_by_several(model):
        model.remarks.append(_SHARED.format(", ".join(shared)))
    return model


def _moved_by_several(model: Model) -> list[str]:
    """The names of running averages that more than one call moves, or reads to move them."""
    moved, calls = set[str](), Counter[str]()
    for call in model.calls:
        block = model.block_of(call)
        names = dict(zip(block.parameters, call.parameters, strict=True))
        moved |= {names[operands(node)[1]] for node in block.ops if node.target == AVERAGED}
        if block.kind != "tables":  # which each stage computes for itself
            calls.update(name for node, name in zip(block.parameters, call.parameters, strict=True) if node.users)
    return sorted(name for name in moved if calls[name] > 1)


def _spell(block: Block, norm: fx.Node, averages: Sequence[fx.Node]) -> None:
    """``averages``: none, or the running mean and variance that move."""
    x, weight, bias = norm.args[:3]
    eps = norm.args[7]
    with block.graph.inserting_before(norm):
        spelled = _Spelled(block.graph, norm)
        wide = spelled.cast(x, torch.promote_types(spelled.result.dtype, torch.float32))
        mean = spelled.mean(wide)
        centred = spelled.op(aten.sub.Tensor, wide, mean)
        variance = spelled.mean(spelled.op(aten.mul.Tensor, centred, centred))
        if averages:
            spelled.average(mean, averages[0])
            spelled.average(variance, averages[1], count=spelled.count)
        scale = spelled.op(aten.rsqrt.default, spelled.op(aten.add.Tensor, variance, eps))
        made = spelled.op(aten.mul.Tensor, centred, scale)
        if isinstance(weight, fx.Node):
            made = spelled.op(aten.mul.Tensor, made, spelled.column(weight))
        if isinstance(bias, fx.Node):
            made = spelled.op(aten.add.Tensor, made, spelled.column(bias))
        made = spelled.cast(made, spelled.result.dtype)
    norm.replace_all_uses_with(made)
    block.graph.erase_node(norm)


def _move_beside(block: Block, norm: fx.Node, averages: Sequence[fx.Node]) -> None:
    """Take the running mean and variance, if any, out of an instance norm; they move by what samples have on average,
    the variance by that of ``n - 1`` of ``n`` elements."""
    with block.graph.inserting_before(norm):
        spelled = _Spelled(block.graph, norm)
        inner = list(range(2, len(spelled.result.shape)))
        count = prod(spelled.result.shape[2:])
        if averages:
            wide = spelled.cast(norm.args[0], torch.promote_types(spelled.result.dtype, torch.float32))
            centred = spelled.op(aten.sub.Tensor, wide, spelled.mean(wide, inner))
            variance = spelled.mean(spelled.mean(spelled.op(aten.mul.Tensor, centred, centred), inner))
            spelled.average(spelled.mean(wide), averages[0])
            spelled.average(spelled.op(aten.mul.Tensor, variance, count / max(1, count - 1)), averages[1])
    norm.args = (*norm.args[:3], None, None, *norm.args[5:])


class _Spelled:
    """Ops in the place of a norm, or beside it, of ``x [n, c, ...]``."""

    def __init__(self, graph: fx.Graph, norm: fx.Node) -> None:
        self._graph, self._norm = graph, norm
        self.result = info(norm).meta
        self._dims = [d for d in range(len(self.result.shape)) if d != 1]

    def op(self, target: Any, *operands: Any) -> fx.Node:
        """An op on each element, in the dtype and the largest shape of its operands."""
        metas = [info(o).meta for o in operands if isinstance(o, fx.Node)]
        shape = torch.broadcast_shapes(*(meta.shape for meta in metas))  # type: ignore[no-untyped-call]
        return self._made(target, operands, tuple(shape), metas)

    def mean(self, x: fx.Node, dims: Sequence[int] = ()) -> fx.Node:
        """Over ``dims``, which stay with size 1; without any, for each channel of all else: ``[1, c, 1 ...]``."""
        meta, over = info(x).meta, list(dims or self._dims)
        shape = tuple(1 if d in over else extent for d, extent in enumerate(meta.shape))
        return self._made(aten.mean.dim, (x, over, True), shape, [meta])

    @property
    def count(self) -> int:
        """Elements of each channel."""
        return prod(self.result.shape[d] for d in self._dims)

    def average(self, value: fx.Node, average: fx.Node, **count: Any) -> None:
        """Move ``average [c]`` towards ``value``, which hands no gradient on."""
        meta = replace(info(value).meta, needs_grad=False)
        given = derive(self._graph.call_function(aten.detach.default, (value,)), self._norm, outputs=(meta,))
        moved = self._graph.call_function(AVERAGED, (given, average, self._norm.args[6]), count)
        derive(moved, self._norm, outputs=(replace(meta, shape=info(average).meta.shape),))

    def column(self, vector: fx.Node) -> fx.Node:
        """``[c]`` along the channels."""
        meta = info(vector).meta
        shape = (*meta.shape, *[1] * (len(self.result.shape) - 2))
        return vector if shape == meta.shape else self._made(aten.reshape.default, (vector, list(shape)), shape, [meta])

    def cast(self, x: Any, dtype: torch.dtype) -> fx.Node:
        meta = info(x).meta
        if meta.dtype == dtype:
            return x  # type: ignore[no-any-return]
        made = Meta(meta.shape, dtype, meta.needs_grad)
        return derive(self._graph.call_function(aten.to.dtype, (x, dtype)), self._norm, outputs=(made,))

    def _made(self, target: Any, args: tuple[Any, ...], shape: tuple[int, ...], of: list[Meta]) -> fx.Node:
        dtype = of[0].dtype
        for meta in of[1:]:
            dtype = torch.promote_types(dtype, meta.dtype)
        made = Meta(shape, dtype, any(meta.needs_grad for meta in of))
        return derive(self._graph.call_function(target, args), self._norm, outputs=(made,))
