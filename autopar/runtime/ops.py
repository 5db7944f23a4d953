"""Ops whose sharded form needs code of its own. No op here gathers what it was given in parts."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.errors import ShardingError
from autopar.runtime.axes import Axes, Axis
from autopar.runtime.collectives import fresh, reduce_max_, reduce_sum_

aten = torch.ops.aten


def _rows(ids: Tensor, first: int, rows: int, total: int) -> tuple[Tensor, Tensor]:
    """``ids`` as numbers of the local rows ``first`` to ``first + rows``, and which of them lie here; those on other
    ranks become row 0.

    Ids outside of the whole table (``total`` rows) are outside of the local one too, so that the lookup fails as it
    does on one device.
    """
    valid = (ids >= 0) & (ids < total)
    here = valid & (ids >= first) & (ids < first + rows)
    return (ids - first).masked_fill(~here, 0).masked_fill(~valid, rows), here


def _lookup(weight: Tensor, ids: Tensor, first: int, total: int, padding_idx: int) -> Tensor:
    """The rows of a table of which ``weight`` is the part from row ``first`` on; zeros for those elsewhere."""
    local, here = _rows(ids, first, weight.shape[0], total)
    found = aten.embedding(weight, local, padding_idx - first)  # elsewhere, a row that no local id is
    return cast(Tensor, found.masked_fill(~here.unsqueeze(-1), 0))


def embedding_sharded(weight: Tensor, ids: Tensor, axis: Axis, padding_idx: int = -1) -> Tensor:
    """Embedding from a table split by rows: ``weight [rows, h]`` is ``S(0)``, ``[*ids, h]`` results as ``P``.

    Rows of other ranks come out as zeros. ``padding_idx`` is a row of the whole table that gets no gradient
    (negative: none). Raises IndexError for ids outside of the table, on every rank.
    """
    rows = weight.shape[0]
    return _lookup(weight, ids, axis.index * rows, axis.size * rows, padding_idx)


def embedding_rows(weight: Tensor, ids: Tensor, total: int, padding_idx: int, axes: Axes) -> Tensor:
    """Embedding from a table of ``total`` rows, split over all ranks of pp and tp (pp outermost), padded behind.

    ``weight [rows, h]`` is ``S(0)`` and ``[*ids, h]`` results as ``P`` on both axes: zeros for rows of other ranks.
    ``padding_idx`` as in :func:`embedding_sharded`. Raises IndexError for ids outside of the table, on every rank.
    (Yeung et al., MLSys 2025, appendix C.)
    """
    pp, tp = axes["pp"], axes["tp"]
    first = (pp.index * tp.size + tp.index) * weight.shape[0]
    return _lookup(weight, ids, first, total, padding_idx)


def cross_entropy_sharded(
    logits: Tensor,
    target: Tensor,
    axis: Axis,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "sum",
) -> Tensor:
    """The cross-entropies of all tokens, or their sum, from logits split over their classes.

    ``logits [n, classes / axis.size, ...]`` (or ``[classes / axis.size]``) is ``S(1)`` (``S(0)``), ``target
    [n, ...]`` holds classes of the whole; the result is ``I``, in the dtype of the logits: a scalar, or for
    ``reduction="none"`` like ``target``. Two all-reduces of a few values per token; the gradient needs none.
    Computed in float32 at least, as torch does. Raises ShardingError where shapes don't fit, RuntimeError for a
    target that is no class.
    (Shoeybi et al., "Megatron-LM", 2019, section 3; the streaming softmax of Milakov and Gimelshein, 2018.)
    """
    dim = 1 if logits.dim() > 1 else 0
    tokens = (*logits.shape[:dim], *logits.shape[dim + 1 :])
    if tuple(target.shape) != tokens:
        raise ShardingError(
            f"cross_entropy on axis {axis.name!r}: logits {tuple(logits.shape)} need a target of shape "
            f"{tokens}, not {tuple(target.shape)}; class probabilities as target can't be split over classes"
        )
    classes = axis.size * logits.shape[dim]
    loss = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, target, axis, classes, ignore_index, label_smoothing, reduction
    )
    return cast(Tensor, loss)


def cross_entropy_padded(
    logits: Tensor,
    target: Tensor,
    *,
    classes: int,
    axis: Axis | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "sum",
) -> Tensor:
    """The cross-entropies of all tokens, or their sum, from logits of which only the first ``classes`` are some.

    ``logits [t, padded]`` are overwritten where they are padding, so nobody else may read them; ``target [t]`` holds
    classes. The result is a scalar, or ``[t]`` for ``reduction="none"``. With an ``axis``, logits are ``S(1)`` on it,
    and the result ``I``, as in :func:`cross_entropy_sharded`. Raises ShardingError where shapes don't fit, IndexError
    or RuntimeError for a target that is no class.
    """
    if logits.shape[:1] != target.shape:
        raise ShardingError(
            f"cross_entropy_padded: logits {tuple(logits.shape)} need a target of shape {tuple(logits.shape[:1])}, not "
            f"{tuple(target.shape)}"
        )
    rows, first = logits.shape[1], axis.index * logits.shape[1] if axis is not None else 0
    logits.detach()[:, max(classes - first, 0) :] = -math.inf  # what made them doesn't need its result
    if axis is not None:
        loss = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
            logits, target, axis, classes, ignore_index, label_smoothing, reduction
        )
        return cast(Tensor, loss)
    counts = target != ignore_index
    target = target.masked_fill(counts & (target >= classes), rows)  # which the entropy refuses
    logs = logits.log_softmax(1)
    loss = F.nll_loss(logs, target, ignore_index=ignore_index, reduction=reduction)
    if not label_smoothing:
        return loss
    spread = logs[:, :classes].mean(1).masked_fill(~counts, 0)
    return (1 - label_smoothing) * loss - label_smoothing * (spread if reduction == "none" else spread.sum())


class _CrossEntropy(torch.autograd.Function):
    """With x the logits minus their maximum, s = sum exp(x), C classes, smoothing e, per token that counts:

    loss = log s - (1 - e) x[target] - e/C sum x;  gradient = exp(x) / s - (1 - e) [target] - e/C.

    Logits of rows from the C-th on are minus infinity.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        axis: Axis,
        classes: int,
        ignore_index: int,
        smoothing: float,
        reduction: str,
    ) -> Tensor:
        dim = 1 if logits.dim() > 1 else 0
        own = logits.shape[dim]
        counts = target != ignore_index
        rows, here = _rows(target.masked_fill(~counts, 0), axis.index * own, own, classes)
        valid = min(max(classes - axis.index * own, 0), own)
        wide = torch.promote_types(logits.dtype, torch.float32)

        top = logits.amax(dim).to(wide)
        reduce_max_(top, axis)
        x = logits - top.unsqueeze(dim)
        hit = x.gather(dim, rows.unsqueeze(dim)).squeeze(dim).masked_fill(~here, 0)
        smooth = x.narrow(dim, 0, valid).sum(dim) if smoothing else torch.zeros_like(top)
        exp = x.exp_()  # x is ours: the one large buffer, kept for the gradient
        sums = torch.stack([exp.sum(dim), hit, smooth])
        reduce_sum_(sums, axis)
        total, hit, smooth = sums.unbind()

        ctx.save_for_backward(exp.to(logits.dtype), total, rows, here, counts)
        ctx.dim, ctx.valid, ctx.smoothing, ctx.share = dim, valid, smoothing, smoothing / classes
        loss = total.log() - (1 - smoothing) * hit - ctx.share * smooth
        each: Tensor = loss.masked_fill(~counts, 0)
        return fresh((each if reduction == "none" else each.sum()).to(logits.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None, None]:
        exp, total, rows, here, counts = ctx.saved_tensors
        dim = ctx.dim
        scale = (grads[0] * counts).to(total.dtype)
        grad = exp.mul_((scale / total).unsqueeze(dim))  # in place: autograd refuses a second backward
        at_target = (scale * here * (ctx.smoothing - 1)).to(grad.dtype)
        grad.scatter_add_(dim, rows.unsqueeze(dim), at_target.unsqueeze(dim))
        if ctx.smoothing:
            grad.narrow(dim, 0, ctx.valid).sub_((ctx.share * scale).to(grad.dtype).unsqueeze(dim))
        return grad, None, None, None, None, None, None
