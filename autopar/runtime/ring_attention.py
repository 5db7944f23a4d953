"""Attention where a rank has some positions of queries, keys and values alike: blocks of keys and values go round.

Each rank computes with the block it has while the next one is on its way (H. Liu, M. Zaharia, P. Abbeel, "Ring
Attention with Blockwise Transformers for Near-Infinite Context", ICLR 2024); in the backward the gradients of a block
travel with it, summed in its dtype. What causal queries can't see is not computed; on a paired axis that is half of
every block but the rank's own, for each rank (the "zigzag" order).

Of n ranks each sends, with B the bytes of its keys and values: (n - 1) B forward, (2 n - 1) B backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.attention_blocks import (
    Block,
    Call,
    Gradients,
    Rows,
    Sum,
    default_scale,
    dense,
    heads_apart,
    visible,
)
from autopar.runtime.axes import Axis
from autopar.runtime.collectives import fresh, start_shift


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: Axis,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """``scaled_dot_product_attention`` with ``q``, ``k``, ``v`` and the result split by positions on ``axis``.

    ``[b, h, s, d]``, ``[b, g, t, d]``, ``[b, g, t, e]`` -> ``[b, h, s, e]``, or all without heads; heads may be grouped
    (``enable_gqa``). ``mask``, broadcast to ``[b, h, s, all t]``, has this rank's rows and all columns: truth values,
    or what scores get added. ``scale`` None: 1 / sqrt(d).
    """
    if mask is not None and q.dim() == mask.dim() == 3:
        mask = mask.unsqueeze(1)
    run: Callable[..., Tensor] = _Ring.apply
    if torch.compiler.is_compiling():  # no compiler traces messages between two ranks
        run = torch.compiler.disable(run)  # type: ignore[no-untyped-call]
    out = run(*map(heads_apart, (q, k, v)), mask, axis, causal, default_scale(q, scale))
    return out if q.dim() == 4 else out.squeeze(1)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, axis: Axis, causal: bool, scale: float
    ) -> Tensor:
        ctx.axis, ctx.causal = axis, causal
        ctx.call = Call(scale, mask_trains=mask is not None and mask.requires_grad)
        total = Sum(q, v.shape[-1])
        for source, keys, values in _round(k, v, axis):
            columns = _columns(mask, axis, source, keys.shape[2])
            for block in _blocks(axis, source, q.shape[2], causal):
                mine, seen = q[:, :, block.queries], block.keys
                rows = ctx.call.forward(mine, keys[:, :, seen], values[:, :, seen], columns, block.causal)
                total.add(rows, block.queries)
        rows = total.rows()
        ctx.state = rows.state
        ctx.save_for_backward(q, k, v, mask, rows.out, rows.sums)
        return fresh(rows.out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, out, sums = ctx.saved_tensors
        axis, grad, dq = ctx.axis, dense(grads[0]), torch.zeros_like(q, dtype=sums.dtype)
        dmask = torch.zeros_like(mask) if ctx.call.mask_trains else None
        travelling: tuple[Tensor, Sequence[dist.Work]] | None = None
        for source, keys, values in _round(k, v, axis):
            flat, dk, dv = _zeros(keys, values)
            columns, seen_of_mask = _columns(mask, axis, source, keys.shape[2]), []
            for block in _blocks(axis, source, q.shape[2], ctx.causal):
                mine, seen = block.queries, block.keys
                rows = Rows(out[:, :, mine], sums[:, :, mine].contiguous(), ctx.state)
                tensors = (grad[:, :, mine], q[:, :, mine], keys[:, :, seen], values[:, :, seen])
                found: Gradients = ctx.call.backward(*tensors, columns, block.causal, rows)
                dq[:, :, mine] += found.q
                dk[:, :, seen] += found.k
                dv[:, :, seen] += found.v
                seen_of_mask.append(found.mask)
            if dmask is not None:
                _add_columns(dmask, seen_of_mask, axis, source, keys.shape[2])
            if travelling is not None:
                flat += _arrived(*travelling)
            travelling = start_shift(flat, axis)
        assert travelling is not None
        dk, dv = _unpacked(_arrived(*travelling), k, v)
        return dq.to(q.dtype), dk, dv, dmask, None, None, None


def _round(k: Tensor, v: Tensor, axis: Axis) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Whose keys and values, and those, of this rank and then of each before it; the next ones are on their way."""
    packed = torch.cat([k.reshape(-1), v.reshape(-1)])
    for step in range(axis.size):
        following = start_shift(packed, axis) if step + 1 < axis.size else None
        yield ((axis.index - step) % axis.size, *_unpacked(packed, k, v))
        if following is not None:
            packed = _arrived(*following)


def _unpacked(packed: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = torch.split(packed, [k.numel(), v.numel()])
    return keys.view(k.shape), values.view(v.shape)


def _zeros(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of both as one message, and each."""
    flat = k.new_zeros(k.numel() + v.numel())
    return (flat, *_unpacked(flat, k, v))


def _arrived(received: Tensor, works: Sequence[dist.Work]) -> Tensor:
    for work in works:
        work.wait()
    return received


def _blocks(axis: Axis, source: int, rows: int, causal: bool) -> list[Block]:
    """What this rank's queries see of the keys of ``source``."""
    if not causal:
        return [Block(slice(None), slice(None))]
    mine, theirs = axis.parts_of(axis.index), axis.parts_of(source)
    return visible(mine, theirs, rows // len(mine))


def _places(mask: Tensor, axis: Axis, source: int, keys: int) -> list[slice]:
    """The columns of a mask that the keys of ``source`` are; one that is alike for all keys has but one."""
    if mask.shape[-1] == 1:
        return [slice(None)]
    parts = axis.parts_of(source)
    length = keys // len(parts)
    return [slice(part * length, (part + 1) * length) for part in parts]


def _columns(mask: Tensor | None, axis: Axis, source: int, keys: int) -> Tensor | None:
    if mask is None:
        return None
    pieces = [mask[..., place] for place in _places(mask, axis, source, keys)]
    columns = pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)
    return columns.expand(*columns.shape[:-1], keys)


def _add_columns(dmask: Tensor, found: Sequence[Tensor | None], axis: Axis, source: int, keys: int) -> None:
    """Add the gradient of the columns of ``source``, summed where the mask is broadcast."""
    for grad in found:
        assert grad is not None
        places = _places(dmask, axis, source, keys)
        for place, piece in zip(places, grad.chunk(len(places), -1), strict=True):
            column = dmask[..., place]
            column += piece.sum_to_size(column.shape)
