"""What ops keep for their backward where running them on one CPU doesn't tell.

Functions of ``autopar.runtime`` that communicate state it here (:data:`FORMS`, one line per autograd function there);
ops that torch runs in another form on CUDA name that form (:data:`ON_CUDA`). All others are simply run
(:mod:`autopar.planner.saved`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from autopar.graph import Meta
from autopar.rules.base import Op

aten = torch.ops.aten

_SENT: Final = 3
"""The dim of a routing that says how many rows leave, where tokens travel by way of nodes."""


@dataclass(frozen=True)
class Kept:
    """Positions of the tensor operands that are kept, bytes of tensors made inside, and whether the result is kept.
    ``hidden``: those inside are an object's, so that no hook on what autograd saves meets them."""

    operands: tuple[int, ...] = ()
    extra_bytes: int = 0
    result: bool = False
    hidden: bool = False


def _lookup(op: Op) -> Kept:
    """The ids as local rows, and which of them lie here."""
    ids = op.operands[1]
    return Kept(extra_bytes=ids.bytes + ids.numel)


def _cross_entropy(op: Op) -> Kept:
    """Exponentials of all logits; per token three sums, the target's local row, and two flags."""
    logits, target = op.operands[:2]
    wide = torch.promote_types(logits.dtype, torch.float32).itemsize
    return Kept(extra_bytes=logits.bytes + 3 * wide * target.numel + target.bytes + 2 * target.numel)


def _padded_cross_entropy(op: Op) -> Kept:
    """Logarithms of probabilities, targets and their count; with smoothing which tokens count, too."""
    if "axis" in op.kwargs:
        return _cross_entropy(op)
    logits, target = op.operands[:2]
    bytes_ = logits.bytes + target.bytes + logits.dtype.itemsize
    return Kept(extra_bytes=bytes_ + (target.numel if op.kwargs.get("label_smoothing") else 0))


def _chunked_cross_entropy(op: Op) -> Kept:
    """All operands, and the logarithm of a sum per token."""
    wide = torch.promote_types(op.result.dtype, torch.float32).itemsize
    return Kept(tuple(range(len(op.operands))), wide * op.operands[2].numel)


def _product(op: Op) -> Kept:
    """Each factor for the other one's gradient."""
    x, weight = op.operands[:2]
    return Kept((*([0] if weight.needs_grad else []), *([1] if x.needs_grad else [])))


def _attention_blocks(op: Op) -> Kept:
    """All operands, the result, and a logarithm per row."""
    wide = torch.promote_types(op.result.dtype, torch.float32).itemsize
    rows = op.result.numel // op.result.shape[-1]
    return Kept(tuple(range(len(op.operands))), wide * rows, result=True)


def _dispatch(op: Op) -> Kept:
    """Which slots have rows, and the rows' places by expert; by way of nodes, which tokens leave, which rows go on,
    and how they are added up."""
    rows, sent = op.result.shape[0], op.operands[1].shape[_SENT:]
    places = 5 * rows + 3 * sent[0] + op.operands[0].shape[0] if sent else 2 * rows
    return Kept(extra_bytes=torch.int64.itemsize * places, hidden=True)


def _combine(op: Op) -> Kept:
    """The weights for the rows' gradient, and for theirs the rows as they came back, by slot; by way of nodes, both as
    they are on the rank that adds them up."""
    rows, weights, routing = op.operands[:3]
    if len(routing.shape) > _SENT:
        slots = rows.shape[0] if rows.needs_grad else 0
        return Kept((), slots * weights.dtype.itemsize + (rows.bytes if weights.needs_grad else 0))
    returned = weights.numel * op.result.shape[-1] * rows.dtype.itemsize
    return Kept((1,) if rows.needs_grad else (), returned if weights.needs_grad else 0)


def _nothing(op: Op) -> Kept:
    return Kept()


def _mask(op: Op) -> Kept:
    return Kept((1,))


def _bits(op: Op) -> Kept:
    return Kept(extra_bytes=-(-op.result.numel // 8))


def _places(op: Op) -> Kept:
    window = op.args[1]
    return Kept(extra_bytes=op.result.numel * (1 if window[0] * window[-1] <= 256 else 2))


FORMS: Final[Mapping[str, Callable[[Op], Kept]]] = {
    "embedding_sharded": _lookup,
    "embedding_rows": _lookup,
    "cross_entropy_sharded": _cross_entropy,
    "cross_entropy_padded": _padded_cross_entropy,
    "chunked_cross_entropy": _chunked_cross_entropy,
    "attention_with_offset": _attention_blocks,
    "ring_attention": _attention_blocks,
    "dispatch": _dispatch,
    "grouped_linear": _product,
    "grouped_bias": _nothing,
    "combine": _combine,
    "linear": _product,
    "matmul": _product,
    "mean_of_whole": _nothing,
    "averaged": _nothing,
    "masked_scatter_rows": _mask,
    "cumsum_sharded": _nothing,
    "dropout_replayed": _nothing,
    "relu_kept_as_bits": _bits,
    "relu6_kept_as_bits": _bits,
    "leaky_relu_kept_as_bits": _bits,
    "hardtanh_kept_as_bits": _bits,
    "threshold_kept_as_bits": _bits,
    "max_pool2d_kept_as_places": _places,
}


NUMBERED: Final = frozenset(
    {"embedding_sharded", "cross_entropy_sharded", "cross_entropy_padded", "chunked_cross_entropy"}
)
"""Forms that take a rank's part of rows or classes to be the one at its index: not for pairs of parts."""


def _dropout(x: Tensor, p: float, train: bool) -> Any:
    """CUDA keeps a mask of bools, the CPU one of factors."""
    return aten.native_dropout(x, p, train)[0]


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """CUDA's kernels for what a CPU has none for: dropout, replayed from a seed, values of another width than
    keys, masks with gradients. They read a mask as one for each head."""
    masks = [Meta(attn_mask.shape, attn_mask.dtype, attn_mask.requires_grad)] if attn_mask is not None else []
    shapes = q.shape, k.shape, v.shape
    if is_fused_on_cpu(*shapes, masks, dropout_p, enable_gqa) or not _is_fused_on_cuda(*shapes, masks, enable_gqa):
        given = q, k, v, attn_mask, dropout_p, is_causal
        return aten.scaled_dot_product_attention(*given, scale=scale, enable_gqa=enable_gqa)
    if _is_flash(q.shape, v.shape, masks, q.dtype):
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
    mask = None if attn_mask is None else attn_mask.expand(*q.shape[:-1], k.shape[-2])
    return aten._scaled_dot_product_efficient_attention(q, k, v, mask, True, dropout_p, is_causal, scale=scale)[0]


def result_of(attention: Op, device: str, query: Tensor) -> Tensor:
    """The result of an attention without values, as it lies on a ``device`` of this kind ("cpu" or "cuda"): that of one
    kernel as its ``query`` does, or, where that takes masks or values of another width, with heads behind positions;
    that of several products in the order of its dims."""
    (q, k, v), masks = (meta.shape for meta in attention.operands[:3]), attention.operands[3:]
    shape, dropout_p = attention.result.shape, attention.arg(4, "dropout_p", 0.0)
    grouped = bool(attention.kwargs.get("enable_gqa", False))
    if is_fused_on_cpu(q, k, v, masks, dropout_p, grouped):
        return torch.empty_like(query)
    if device != "cuda" or not _is_fused_on_cuda(q, k, v, masks, grouped):
        return query.new_empty(shape)
    if _is_flash(q, v, masks, query.dtype):
        return torch.empty_like(query)
    return query.new_empty((*shape[:-3], shape[-2], shape[-3], shape[-1])).transpose(-2, -3)


def is_fused_on_cpu(
    q: Sequence[int], k: Sequence[int], v: Sequence[int], masks: Sequence[Meta], dropout_p: float, grouped: bool
) -> bool:
    """Of operands of these shapes; as torch chooses (aten/src/ATen/native/transformers/sdp_utils_cpp.h). ``grouped``:
    heads of keys are for groups of queries, as the call says."""
    fits = all(len(mask.shape) in (2, 4) and not mask.needs_grad for mask in masks)
    return len(q) == 4 and q[-1] == v[-1] and not dropout_p and fits and _are_alike(q, k, v, grouped)


def _are_alike(q: Sequence[int], k: Sequence[int], v: Sequence[int], grouped: bool) -> bool:
    """Whether batches and heads are as many, or the latter are told to be ``grouped``: no kernel broadcasts them."""
    return q[0] == k[0] == v[0] and (grouped or q[1] == k[1] == v[1])


def _is_flash(q: Sequence[int], v: Sequence[int], masks: Sequence[Meta], dtype: torch.dtype) -> bool:
    """Whether the faster of CUDA's kernels takes them."""
    return not masks and dtype.itemsize == 2 and q[-1] == v[-1]


def _is_fused_on_cuda(
    q: Sequence[int], k: Sequence[int], v: Sequence[int], masks: Sequence[Meta], grouped: bool
) -> bool:
    """The kernel for masks, and for values of another width, has as many heads of keys as of queries."""
    return len(q) == 4 and _are_alike(q, k, v, grouped) and (q[1] == k[1] or (q[-1] == v[-1] and not masks))


ON_CUDA: Final[Mapping[str, Callable[..., Any]]] = {
    "aten.dropout.default": _dropout,
    "aten.scaled_dot_product_attention.default": _attention,
}
