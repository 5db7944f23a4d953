"""The cross entropy of a product's logits, in chunks of tokens: all logits at once never exist.

Per token, the forward keeps the logarithm of the sum of exponentials, the backward computes a chunk's logits again
and from it their gradient (Dao et al., "FlashAttention", NeurIPS 2022, section 3.1, does this for attention; Wijmans et
al., "Cut Your Losses in Large-Vocabulary Language Models", ICLR 2025, for this loss). That costs one more product than
computing the gradients in the forward and scaling them in the backward (Hsu et al., "Liger Kernel", 2024, section 3.2).
But no gradient of the table's size lives from a pipeline stage's forward to its backward; and what comes after may be
anything: a weight for each token, a factor that is known later, the overflow that a scaler looks for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from autopar.errors import ArgumentError, ShardingError
from autopar.runtime.axes import Axis
from autopar.runtime.collectives import fresh, reduce_max_, reduce_sum_
from autopar.runtime.entropy import Targets, gradient_, slices, statistics_, wide_dtype

Elementwise = Callable[[Tensor], Tensor]
"""What makes logits of a product, element by element (a cap, a scale, a cast)."""


def chunked_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    chunks: int,
    axis: Axis | None = None,
    classes: int | None = None,
    weight_dim: int = 0,
    logits: Elementwise | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "sum",
) -> Tensor:
    """``cross_entropy(logits(x @ weight.T + bias), target)`` over ``chunks`` chunks of tokens, one after another.

    ``x [..., h]``, ``target [...]`` of classes, ``weight [classes, h]`` (with ``weight_dim=1``: ``[h, classes]``),
    ``bias [classes]``. The result, in the dtype of the logits, is the sum over tokens, or ``[...]`` for
    ``reduction="none"``. Of the table's rows only the first ``classes`` are some, the others padding (None: there is
    none). With an ``axis``, ``weight`` and ``bias`` are ``S`` along their classes, the others ``R``, the result ``I``:
    two all-reduces of a few values per token, once for all chunks; the gradient needs none.
    Statistics are computed in float32 at least, and so are sums of gradients over chunks. The gradient of ``weight``
    is never put off (:mod:`autopar.runtime.later`): its factor would be a gradient of all logits.
    Raises ArgumentError for less than one chunk, ShardingError where shapes don't fit, IndexError or RuntimeError for
    a target that is no class.
    """
    if chunks < 1:
        raise ArgumentError(f"chunked_cross_entropy: chunks={chunks}; it must be at least 1")
    if x.shape[:-1] != target.shape:
        raise ShardingError(
            f"chunked_cross_entropy: x {tuple(x.shape)} needs a target of shape {tuple(x.shape[:-1])}, not "
            f"{tuple(target.shape)}; class probabilities as target can't be computed in chunks"
        )
    rows = weight.shape[weight_dim]
    index, ranks = (axis.index, axis.size) if axis is not None else (0, 1)
    total = ranks * rows if classes is None else classes
    share = _Share(axis, index * rows, rows, min(max(total - index * rows, 0), rows), total, weight_dim)
    head = _Head(share, chunks, logits, ignore_index, label_smoothing, reduction == "none")
    flat = x.reshape(-1, x.shape[-1]), weight, target.reshape(-1), bias
    loss = cast(Tensor, _ChunkedCrossEntropy.apply(*flat, head))  # type: ignore[no-untyped-call]
    return loss.view(target.shape) if reduction == "none" else loss


_Operands = tuple[Tensor, Tensor, Tensor | None]
"""A chunk of ``x [c, h]``, weight, bias."""


@dataclass(frozen=True)
class _Share:
    """What of the table is here: ``rows`` from ``first`` on, of which ``valid`` are some of its ``classes``."""

    axis: Axis | None
    first: int
    rows: int
    valid: int
    classes: int
    weight_dim: int

    def table(self, weight: Tensor) -> Tensor:
        """``[rows, h]``."""
        return weight if self.weight_dim == 0 else weight.t()


@dataclass(frozen=True)
class _Head:
    """What is computed, and in how many chunks."""

    share: _Share
    chunks: int
    logits: Elementwise | None
    ignore_index: int
    smoothing: float
    per_token: bool

    def targets(self, target: Tensor) -> Targets:
        share = self.share
        return Targets.of(target, share.first, share.rows, share.classes, self.ignore_index)

    def statistics(self, operands: _Operands, targets: Targets) -> tuple[Tensor, torch.dtype]:
        """``[4, c]`` of a chunk of c tokens, and the dtype of logits."""
        y = self._product(operands)
        y = y if self.logits is None else self.logits(y)
        wide = self._masked_(y.to(wide_dtype(y.dtype)))
        return statistics_(wide, wide.amax(1), targets, smooth=bool(self.smoothing), valid=self.share.valid), y.dtype

    def gradient(self, operands: _Operands, log_sum: Tensor, targets: Targets, slope: Tensor) -> Tensor:
        """``[c, rows]``: of the loss by a chunk of the product and its bias."""
        if self.logits is None:
            z = self._product(operands)
            return self._by_logits_(z.to(wide_dtype(z.dtype)), log_sum, targets, slope).to(z.dtype)
        y, pull_back = cast(Any, torch.func.vjp)(self.logits, self._product(operands))
        # Copied: what shapes logits (a tanh) may need them for its own gradient.
        wide = y.detach().to(wide_dtype(y.dtype), copy=True)
        (grad,) = pull_back(self._by_logits_(wide, log_sum, targets, slope).to(y.dtype))
        return cast(Tensor, grad)

    def _product(self, operands: _Operands) -> Tensor:
        x, weight, bias = operands
        z = torch.mm(x, self.share.table(weight).t())
        return z if bias is None else z + bias

    def _by_logits_(self, wide: Tensor, log_sum: Tensor, targets: Targets, slope: Tensor) -> Tensor:
        """The gradient by logits, in their memory."""
        self._masked_(wide).sub_(log_sum.unsqueeze(1)).exp_().mul_(slope.unsqueeze(1))
        return gradient_(wide, targets, slope, self.smoothing, self.share.classes, self.share.valid)

    def _masked_(self, wide: Tensor) -> Tensor:
        """Logits that are padding are none."""
        if self.share.valid < self.share.rows:
            wide[:, self.share.valid :] = torch.finfo(wide.dtype).min
        return wide


class _ChunkedCrossEntropy(torch.autograd.Function):
    """From ``x [t, h]`` and ``target [t]``. Keeps these, and per token the logarithm of the sum of exponentials."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, head: _Head) -> Tensor:
        targets = head.targets(target)
        parts = [head.statistics((x[c], weight, bias), targets[c]) for c in slices(len(x), head.chunks)]
        log_sum, hit, smooth = _joined(torch.cat([found for found, _ in parts], 1), head.share.axis)
        ctx.save_for_backward(x, weight, target, bias, log_sum)
        ctx.head = head
        each = log_sum - (1 - head.smoothing) * hit - head.smoothing / head.share.classes * smooth
        each = each.masked_fill(~targets.counts, 0)
        return fresh((each if head.per_token else each.sum()).to(parts[0][1]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, target, bias, log_sum = ctx.saved_tensors
        head: _Head = ctx.head
        targets = head.targets(target)
        slope = (grads[0] * targets.counts).to(log_sum.dtype)
        for_x, for_weight, _, for_bias, _ = ctx.needs_input_grad
        found = _Gradients(
            torch.empty_like(x) if for_x else None,
            _zeros(weight) if for_weight else None,
            _zeros(bias) if for_bias else None,
        )
        for chunk in slices(len(x), head.chunks):
            operands = x[chunk], weight, bias
            # Not a variable here: it would live until the next chunk has one of its own.
            found.add_(head, operands, chunk, head.gradient(operands, log_sum[chunk], targets[chunk], slope[chunk]))
        return found.x, _as(found.weight, weight), None, _as(found.bias, bias), None


@dataclass(frozen=True)
class _Gradients:
    """Of the operands, as far as they are wanted; sums over chunks in float32 at least."""

    x: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    def add_(self, head: _Head, operands: _Operands, chunk: slice, gradient: Tensor) -> None:
        """What a chunk's gradient by the product makes of them."""
        x, weight, _ = operands
        if self.bias is not None:
            self.bias.add_(gradient.sum(0, dtype=self.bias.dtype))
        gradient = gradient.to(x.dtype)
        if self.x is not None:
            self.x[chunk] = torch.mm(gradient, head.share.table(weight))
        if self.weight is not None:
            _add_product_(head.share.table(self.weight), gradient.t(), x)


def _joined(statistics: Tensor, axis: Axis | None) -> tuple[Tensor, ...]:
    """From ``[4, t]`` of this rank's classes: over all, the logarithm of the sum, the target's logit, the sum."""
    own, sums = statistics[0], statistics[1:]
    top = own
    if axis is not None:
        top = own.clone()
        reduce_max_(top, axis)
        sums = torch.stack([sums[0] * (own - top).exp(), sums[1], sums[2]])
        reduce_sum_(sums, axis)
    total, hit, smooth = sums.unbind()
    return total.log() + top, hit, smooth


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=wide_dtype(like.dtype))


def _as(gradient: Tensor | None, parameter: Tensor) -> Tensor | None:
    return None if gradient is None else gradient.to(parameter.dtype)


def _add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right``; the product of narrow factors is added in the wider type of ``total``."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += torch.mm(left, right)
