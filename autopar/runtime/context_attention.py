"""Causal attention where a rank has some positions of the queries, and all keys and values: all-gather context
parallelism (A. Dubey et al., "The Llama 3 Herd of Models", 2024, section 3.3.2).

A rank's queries are one part of the sequence, or two on a paired axis. Each part sees all keys before it, as one block
without a mask, and itself causally; keys after it are never computed with.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from autopar.runtime.attention_blocks import Block, Call, Rows, Sum, default_scale, dense, heads_apart
from autopar.runtime.axes import Axis
from autopar.runtime.collectives import fresh


def attention_with_offset(q: Tensor, k: Tensor, v: Tensor, axis: Axis, *, scale: float | None = None) -> Tensor:
    """``scaled_dot_product_attention(..., is_causal=True)`` of this rank's queries: ``q`` and the result are split by
    positions on ``axis``, ``k`` and ``v`` are R. Heads of keys may be fewer than those of queries (``enable_gqa``).

    ``[b, h, s, d]``, ``[b, g, t, d]``, ``[b, g, t, e]`` -> ``[b, h, s, e]``, or all without heads; ``scale`` None:
    1 / sqrt(d).
    """
    operands = map(heads_apart, (q, k, v))
    out = _Attention.apply(*operands, axis, default_scale(q, scale))  # type: ignore[no-untyped-call]
    return cast(Tensor, out if q.dim() == 4 else out.squeeze(1))


def blocks(axis: Axis, rows: int, keys: int) -> Iterator[Block]:
    """What ``rows`` queries of this rank see of all ``keys``."""
    parts = axis.parts_of(axis.index)
    length = rows // len(parts)
    for place, part in enumerate(parts):
        mine, first = slice(place * length, (place + 1) * length), min(part * length, keys)
        if first:
            yield Block(mine, slice(0, first))
        if first < keys:
            yield Block(mine, slice(first, min(first + length, keys)), causal=True)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, axis: Axis, scale: float) -> Tensor:
        ctx.axis, ctx.call = axis, Call(scale)
        total = Sum(q, v.shape[-1])
        for block in blocks(axis, q.shape[2], k.shape[2]):
            mine, seen = q[:, :, block.queries], block.keys
            total.add(ctx.call.forward(mine, k[:, :, seen], v[:, :, seen], None, block.causal), block.queries)
        rows = total.rows()
        ctx.state = rows.state
        ctx.save_for_backward(q, k, v, rows.out, rows.sums)
        return fresh(rows.out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums = ctx.saved_tensors
        grad, (dq, dk, dv) = dense(grads[0]), (torch.zeros_like(x) for x in (q, k, v))
        for block in blocks(ctx.axis, q.shape[2], k.shape[2]):
            mine, seen = block.queries, block.keys
            rows = Rows(out[:, :, mine], sums[:, :, mine].contiguous(), ctx.state)
            found = ctx.call.backward(
                grad[:, :, mine], q[:, :, mine], k[:, :, seen], v[:, :, seen], None, block.causal, rows
            )
            dq[:, :, mine] += found.q
            dk[:, :, seen] += found.k
            dv[:, :, seen] += found.v
        return dq, dk, dv, None, None
