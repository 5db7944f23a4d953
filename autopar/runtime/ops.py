"""Ops whose sharded form needs code of its own. No op here gathers what it was given in parts."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from autopar.errors import ShardingError
from autopar.runtime.axes import Axis
from autopar.runtime.collectives import fresh, reduce_max_, reduce_sum_

aten = torch.ops.aten


def _rows(ids: Tensor, axis: Axis, rows: int) -> tuple[Tensor, Tensor]:
    """``ids`` as local row numbers, and which of them lie here; those on other ranks become row 0.

    Every rank holds ``rows`` rows. Ids outside of the whole table stay outside of the local one, so that the
    lookup fails as it does on one device.
    """
    first, total = axis.index * rows, axis.size * rows
    here = (ids >= first) & (ids < first + rows)
    elsewhere = (ids >= 0) & (ids < total) & ~here
    return (ids - first).masked_fill(elsewhere, 0), here


def embedding_sharded(weight: Tensor, ids: Tensor, axis: Axis, padding_idx: int = -1) -> Tensor:
    """Embedding from a table split by rows: ``weight [rows, h]`` is ``S(0)``, ``[*ids, h]`` results as ``P``.

    Rows of other ranks come out as zeros. ``padding_idx`` is a row of the whole table that gets no gradient
    (negative: none). Raises IndexError for ids outside of the table, on every rank.
    """
    local, here = _rows(ids, axis, weight.shape[0])
    padding = padding_idx - axis.index * weight.shape[0]  # on other ranks, a row that no local id is
    found = aten.embedding(weight, local, padding)
    return cast(Tensor, found.masked_fill(~here.unsqueeze(-1), 0))


def cross_entropy_sharded(
    logits: Tensor,
    target: Tensor,
    axis: Axis,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The sum of the cross-entropies of all tokens, from logits split over their classes.

    ``logits [n, classes / axis.size, ...]`` (or ``[classes / axis.size]``) is ``S(1)`` (``S(0)``), ``target
    [n, ...]`` holds classes of the whole; the scalar result is ``I``, in the dtype of the logits. Two
    all-reduces of a few values per token; the gradient needs none. Computed in float32 at least, as torch
    does. Raises ShardingError where shapes don't fit, RuntimeError for a target that is no class.
    (Shoeybi et al., "Megatron-LM", 2019, section 3; the streaming softmax of Milakov and Gimelshein, 2018.)
    """
    dim = 1 if logits.dim() > 1 else 0
    tokens = (*logits.shape[:dim], *logits.shape[dim + 1 :])
    if tuple(target.shape) != tokens:
        raise ShardingError(
            f"cross_entropy on axis {axis.name!r}: logits {tuple(logits.shape)} need a target of shape "
            f"{tokens}, not {tuple(target.shape)}; class probabilities as target can't be split over classes"
        )
    loss = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, target, axis, ignore_index, label_smoothing
    )
    return cast(Tensor, loss)


class _CrossEntropy(torch.autograd.Function):
    """With x the logits minus their maximum, s = sum exp(x), C classes, smoothing e, per token that counts:

    loss = log s - (1 - e) x[target] - e/C sum x;  gradient = exp(x) / s - (1 - e) [target] - e/C.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, axis: Axis, ignore_index: int, smoothing: float) -> Tensor:
        dim = 1 if logits.dim() > 1 else 0
        classes = logits.shape[dim]
        counts = target != ignore_index
        rows, here = _rows(target.masked_fill(~counts, 0), axis, classes)
        wide = torch.promote_types(logits.dtype, torch.float32)

        top = logits.amax(dim).to(wide)
        reduce_max_(top, axis)
        x = logits - top.unsqueeze(dim)
        hit = x.gather(dim, rows.unsqueeze(dim)).squeeze(dim).masked_fill(~here, 0)
        smooth = x.sum(dim) if smoothing else torch.zeros_like(top)
        exp = x.exp_()  # x is ours: the one large buffer, kept for the gradient
        sums = torch.stack([exp.sum(dim), hit, smooth])
        reduce_sum_(sums, axis)
        total, hit, smooth = sums.unbind()

        ctx.save_for_backward(exp.to(logits.dtype), total, rows, here, counts)
        ctx.dim, ctx.smoothing, ctx.share = dim, smoothing, smoothing / (classes * axis.size)
        loss = total.log() - (1 - smoothing) * hit - ctx.share * smooth
        total_loss: Tensor = loss.masked_fill(~counts, 0).sum()
        return fresh(total_loss.to(logits.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        exp, total, rows, here, counts = ctx.saved_tensors
        dim = ctx.dim
        scale = (grads[0] * counts).to(total.dtype)
        grad = exp.mul_((scale / total).unsqueeze(dim))  # in place: autograd refuses a second backward
        at_target = (scale * here * (ctx.smoothing - 1)).to(grad.dtype)
        grad.scatter_add_(dim, rows.unsqueeze(dim), at_target.unsqueeze(dim))
        if ctx.smoothing:
            grad -= (ctx.share * scale).to(grad.dtype).unsqueeze(dim)
        return grad, None, None, None, None
