"""batch_statistics: a batch norm that learns from its batch is written as the two means that it computes.

Guarantees: equal values and gradients. So ranks that have parts of the batch each add up their own, and microbatches
may have statistics of their own (``statistics="microbatch"``), as accumulating gradients gives them. Example:
``batch_norm(x, weight, bias, …, True)`` ->
``mean(x)``, ``c = x - mean``, ``mean(c * c)``, ``c * rsqrt(… + eps) * weight + bias``.

Running averages are moved as torch moves them, by ops beside those (:func:`autopar.runtime.averaged`), which the loss
doesn't depend on; their operands are whole, so each rank moves its copy by the statistics of all. Averages that are
no buffers of the model, but computed, stay as they are. Those that several calls move are in the order of the program
where these are in one stage; each stage of a pipeline has a copy of its own.

A batch norm by given statistics stays: it computes element by element.
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
_MOVED: Final = (
    "batch norms take statistics of the whole batch, over all ranks that share it, and move running averages by them"
)
_LEFT: Final = (
    "running averages of batch norms that are no buffers of the model stay as they are: register them as buffers"
)
_SHARED: Final = "several layers move {}: each stage of a pipeline that has some of them moves a copy of its own"


def batch_statistics(model: Model) -> Model:
    for block in model.blocks:
        for node in block.ops:
            if op_name(node) == BATCH_NORM and node.args[5]:
                averages = [average for average in node.args[3:5] if isinstance(average, fx.Node)]
                moves = all(info(average).role == "buffer" for average in averages)
                _spell(block, node, averages if moves else ())
                remark = _MOVED if moves else _LEFT
                if averages and remark not in model.remarks:
                    model.remarks.append(remark)
    if shared := _moved_by_several(model):
        model.remarks.append(_SHARED.format(", ".join(shared)))
    return model


def _moved_by_several(model: Model) -> list[str]:
    """The names of running averages that more than one call moves."""
    calls: Counter[str] = Counter()
    for call in model.calls:
        block = model.block_of(call)
        names = dict(zip(block.parameters, call.parameters, strict=True))
        calls.update({names[operands(node)[1]] for node in block.ops if node.target == AVERAGED})
    return sorted(name for name, count in calls.items() if count > 1)


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


class _Spelled:
    """Ops in the place of a batch norm of ``x [n, c, ...]``."""

    def __init__(self, graph: fx.Graph, norm: fx.Node) -> None:
        self._graph, self._norm = graph, norm
        self.result = info(norm).meta
        self._dims = [d for d in range(len(self.result.shape)) if d != 1]

    def op(self, target: Any, *operands: Any) -> fx.Node:
        """An op on each element, in the dtype and the largest shape of its operands."""
        metas = [info(o).meta for o in operands if isinstance(o, fx.Node)]
        shape = torch.broadcast_shapes(*(meta.shape for meta in metas))  # type: ignore[no-untyped-call]
        return self._made(target, operands, tuple(shape), metas)

    def mean(self, x: fx.Node) -> fx.Node:
        """For each channel, of all else: ``[1, c, 1 ...]``."""
        meta = info(x).meta
        shape = tuple(1 if d in self._dims else extent for d, extent in enumerate(meta.shape))
        return self._made(aten.mean.dim, (x, self._dims, True), shape, [meta])

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
