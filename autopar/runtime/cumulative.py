"""Cumulative sums along a dim that ranks hold parts of: the sums of parts are exchanged, not what is summed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.runtime.axes import Axis
from autopar.runtime.collectives import all_gather, convert
from autopar.spmd import R, S


def cumsum_sharded(
    x: Tensor,
    dim: int,
    *,
    axes: Sequence[Axis],
    outers: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """This rank's part of the cumulative sum of the whole along ``dim``, of which ``x`` is a part; differentiable.

    ``dim`` was split on each of ``axes``, in this order, as ``S(dim, outer)`` with its ``outers`` (None: 1 each). Each
    rank sums its parts, an all-gather of those sums on each axis tells what lies before a part; the gradient goes the
    same ways back. So mixture-of-experts routers give tokens places in the experts' buffers (Lepikhin et al.,
    "GShard", ICLR 2021, algorithm 1), the same ones on any number of ranks.
    """
    dim = dim % x.dim()
    splits = list(zip(axes, outers or [1] * len(axes), strict=True))
    x = x.to(dtype or _sum_dtype(x))
    parts, totals = _parts(x, dim, splits[-1])
    before = _own(_before(totals, dim, splits[:-1]), dim, splits[-1])
    return (parts.cumsum(dim + 1) + before.unsqueeze(dim + 1)).flatten(dim, dim + 1)


_Split = tuple[Axis, int]
"""An axis, and the ``outer`` of the shard on it."""


def _sum_dtype(x: Tensor) -> torch.dtype:
    """Whole numbers add up in 64 bits, as torch's cumsum has it."""
    return x.dtype if x.is_floating_point() or x.is_complex() else torch.int64


def _parts(x: Tensor, dim: int, split: _Split) -> tuple[Tensor, Tensor]:
    """``x`` with ``dim`` as [parts, elements], and the sums of all ranks' parts on the axis, in order."""
    axis, outer = split
    parts = x.reshape(*x.shape[:dim], outer * axis.parts // axis.size, -1, *x.shape[dim + 1 :])
    return parts, all_gather(parts.sum(dim + 1), axis, src=S(dim, outer), dst=R)


def _own(whole: Tensor, dim: int, split: _Split) -> Tensor:
    axis, outer = split
    return convert(whole, axis, src=R, dst=S(dim, outer))


def _before(x: Tensor, dim: int, splits: Sequence[_Split]) -> Tensor:
    """The sum of all that lies before each element of ``x``, which is split as ``splits`` say."""
    if not splits:
        first = torch.zeros_like(x.narrow(dim, 0, 1))
        return torch.cat([first, x.narrow(dim, 0, x.shape[dim] - 1).cumsum(dim)], dim)
    parts, totals = _parts(x, dim, splits[-1])
    before = _own(_before(totals, dim, splits[:-1]), dim, splits[-1])
    return (_before(parts, dim + 1, ()) + before.unsqueeze(dim + 1)).flatten(dim, dim + 1)
