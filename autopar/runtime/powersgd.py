"""Gradient sums over ``dp`` in low rank, with error feedback and warm start: lossy, and few bytes.

(Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS 2019,
Algorithms 1 and 2.) Every rank adds what it could not send so far to its term of the sum, giving ``M [n, m]``. With
``Q [m, r]`` of the step before, the ranks sum ``P = M Q``, orthonormalise it, and sum ``Q = Mᵀ P``; the sum of all
``M`` is taken to be ``P Qᵀ``. What of its own ``M`` a rank finds missing, ``M - P Pᵀ M``, it keeps for the next step:
these add up over ranks to what the approximation lacks. ``r (n + m)`` numbers are sent in place of ``n m``.

Both products are linear in ``M``, so that a sum of them is that of the sum: that is why nothing but sums can be
compressed so. Means of the paper are sums here, as everywhere in a gradient; the basis ``P`` has no scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.compression import low_rank_pays, matrix_shape
from autopar.errors import ArgumentError
from autopar.options import Options
from autopar.runtime.axes import Axis
from autopar.runtime.collectives import reduce_sum_

_SEED = 2019  # of the first Q: any, but on all ranks the same


class Work(Protocol):
    """A sum under way: :meth:`advance` starts what can be started of it, :meth:`wait` ends it."""

    def advance(self) -> None:
        """Wait for the first half, start the second."""

    def wait(self) -> None:
        """Until the views hold the sum."""


def require_linear_sums(options: Options, dp: int, asynchronous: bool, tied: Sequence[str]) -> None:
    """Raise ArgumentError where ``options`` ask for PowerSGD, but gradients are more than one sum over ``dp``.

    ``tied`` are weights of several pipeline stages: their gradients are summed over stages as well.
    """
    if not options.powersgd:
        return
    reason = ""
    if dp == 1:
        reason = "dp is 1, so that no sum over dp is there to compress; give the mesh a dp of 2 or more"
    elif options.zero >= 2:
        reason = f"zero={options.zero} scatters gradients, each rank never sums but its part; use zero=0 or 1"
    elif asynchronous:
        reason = "an asynchronous schedule updates weights within the step; use a synchronous one"
    elif tied:
        reason = f"{tied[0]!r} is tied between pipeline stages, and summed over pp too; untie it, or use pp=1"
    elif options.precision == "fp16":
        reason = "under fp16's loss scale the error kept has another unit each time the scale moves; use bf16"
    if reason:
        raise ArgumentError(f"powersgd={options.powersgd}: {reason}. Without powersgd, sums are exact")


class PowerSGD:
    """The sums of one bucket, step after step: it keeps ``Q`` and the error of each of its matrices.

    Gradients that are vectors, or whose low-rank form is no smaller, are summed exactly. Computed in float32 at
    least, and sent so. The memory for the errors is that of the matrices' gradients.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._matrices: list[_Matrix] = []
        self._places: list[int] = []

    def start(self, views: Sequence[Tensor], axis: Axis, shapes: Sequence[Sequence[int]] = ()) -> Work:
        """Start to sum ``views`` over ``axis``, in place; the same in the same order each step.

        ``shapes`` are what their elements make up, where that isn't the shape that they have.
        """
        shapes = shapes or [view.shape for view in views]
        if not self._matrices:
            self._places = [k for k, shape in enumerate(shapes) if low_rank_pays(shape, self.rank)]
            self._matrices = [_Matrix.zeros(views[k], shapes[k], self.rank, _SEED + k) for k in self._places]
        low = [(self._matrices[i], views[k]) for i, k in enumerate(self._places)]
        exact = [view for k, view in enumerate(views) if k not in self._places]
        return _Work(low, exact, axis)

    def squares(self) -> tuple[Tensor, Tensor]:
        """Of this rank's terms in the last step: squared norms of what was lost of them and of all, ``[]`` each."""
        lost = [matrix.error.square().sum() for matrix in self._matrices]
        kept = [matrix.kept for matrix in self._matrices]
        nothing = torch.zeros(())
        return sum(lost, nothing), sum([*lost, *kept], nothing)


def relative_error(sums: Iterable[PowerSGD]) -> float:
    """``|M - P Pᵀ M| / |M|`` over all compressed matrices of this rank in the last step; 0 where there are none."""
    squares = [each.squares() for each in sums]
    lost, all_ = (float(sum(column)) for column in zip(*squares, strict=True)) if squares else (0.0, 0.0)
    return math.sqrt(lost / all_) if all_ else 0.0


@dataclass
class _Matrix:
    """``error [n, m]``: what of this rank's terms was never sent; ``q [m, r]``; ``kept``: squared norm of what was.

    During a step, ``error`` is ``M``: the error and the new term.
    """

    error: Tensor
    q: Tensor
    kept: Tensor

    @classmethod
    def zeros(cls, like: Tensor, shape: Sequence[int], rank: int, seed: int) -> _Matrix:
        rows, columns = matrix_shape(shape)
        wide = torch.promote_types(like.dtype, torch.float32)
        first = torch.randn(columns, rank, generator=torch.Generator().manual_seed(seed), dtype=wide)
        error = torch.zeros(rows, columns, dtype=wide, device=like.device)
        return cls(error, first.to(like.device), torch.zeros((), dtype=wide, device=like.device))


@dataclass
class _Work:
    """The two sums of a bucket, each of all its matrices in one."""

    low: list[tuple[_Matrix, Tensor]]
    exact: list[Tensor]
    axis: Axis
    _p: list[Tensor] = field(init=False)
    _q: list[Tensor] = field(default_factory=list)
    _flat: Tensor | None = field(init=False)
    _work: dist.Work | None = None
    _rest: Tensor | None = None
    _rest_work: dist.Work | None = None

    def __post_init__(self) -> None:
        if self.exact:
            self._rest = torch.cat([view.flatten() for view in self.exact])
            self._rest_work = reduce_sum_(self._rest, self.axis, async_op=True)
        for matrix, view in self.low:
            matrix.error.add_(view.reshape(matrix.error.shape))
        self._flat, self._p = _in_one([(m.error.shape[0], m.q.shape[1]) for m, _ in self.low], self.low)
        for (matrix, _), p in zip(self.low, self._p, strict=True):
            torch.mm(matrix.error, matrix.q, out=p)
        self._work = self._sum()

    def advance(self) -> None:
        if self._q or not self.low:
            return
        self._wait()
        self._flat, self._q = _in_one([tuple(matrix.q.shape) for matrix, _ in self.low], self.low)
        for i, ((matrix, _), q) in enumerate(zip(self.low, self._q, strict=True)):
            self._p[i], _ = torch.linalg.qr(self._p[i])
            torch.mm(matrix.error.t(), self._p[i], out=q)
        own = [q.clone() for q in self._q]
        self._work = self._sum()
        for (matrix, _), p, q in zip(self.low, self._p, own, strict=True):  # while the sum is on its way
            matrix.error.addmm_(p, q.t(), alpha=-1)
            matrix.kept = q.square().sum()

    def wait(self) -> None:
        self.advance()
        self._wait()
        for (matrix, view), p, q in zip(self.low, self._p, self._q, strict=True):
            view.copy_((p @ q.t()).view(view.shape))
            matrix.q = q.clone()
        if self._rest_work is not None:
            self._rest_work.wait()
        if self._rest is not None:
            parts = torch.split(self._rest, [view.numel() for view in self.exact])
            for view, part in zip(self.exact, parts, strict=True):
                view.copy_(part.view(view.shape))

    def _sum(self) -> dist.Work | None:
        return None if self._flat is None else reduce_sum_(self._flat, self.axis, async_op=True)

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        self._work = None


def _in_one(
    shapes: Sequence[tuple[int, ...]], low: Sequence[tuple[_Matrix, Tensor]]
) -> tuple[Tensor | None, list[Tensor]]:
    """One buffer, and matrices of these shapes one after another in it."""
    if not low:
        return None, []
    sizes = [math.prod(shape) for shape in shapes]
    flat = torch.empty(sum(sizes), dtype=low[0][0].error.dtype, device=low[0][0].error.device)
    return flat, [part.view(shape) for part, shape in zip(torch.split(flat, sizes), shapes, strict=True)]
