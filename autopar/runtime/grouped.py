"""Products of rows with the weights of their experts: rows sorted by expert, a weight for each.

bfloat16 on CUDA takes torch's grouped product (one kernel for all experts); elsewhere each expert that has rows is one
product, written where it belongs. They communicate nothing.
"""

from __future__ import annotations

from typing import Any, Final, cast

import torch
from torch import Tensor

from autopar.errors import ShardingError
from autopar.runtime.routing import Routing

_grouped_mm: Final = getattr(torch.nn.functional, "grouped_mm", None)  # since torch 2.10


def grouped_linear(rows: Tensor, weight: Tensor, routing: Routing, transposed: bool = False) -> Tensor:
    """``rows [r, in]`` by expert times ``weight [experts, out, in]`` of each (``transposed``: ``[experts, in, out]``).

    ``[r, out]``. Raises ShardingError where the weight is of other experts than this rank's.
    """
    _check("grouped_linear", rows, weight, routing)
    return cast(Tensor, _GroupedLinear.apply(rows, weight, routing, transposed))  # type: ignore[no-untyped-call]


def grouped_bias(rows: Tensor, bias: Tensor, routing: Routing) -> Tensor:
    """``rows [r, out]`` by expert plus ``bias [experts, out]`` of each. Raises ShardingError as above."""
    _check("grouped_bias", rows, bias, routing)
    return cast(Tensor, _GroupedBias.apply(rows, bias, routing))  # type: ignore[no-untyped-call]


def _check(name: str, rows: Tensor, weight: Tensor, routing: Routing) -> None:
    if weight.shape[0] != len(routing.counts) or rows.shape[0] != routing.rows:
        raise ShardingError(
            f"{name}: routing is of {len(routing.counts)} experts and {routing.rows} rows here, "
            f"the weight is {tuple(weight.shape)} and rows {tuple(rows.shape)}"
        )


class _GroupedLinear(torch.autograd.Function):
    """Saves of ``rows`` and ``weight`` only what the other one's gradient needs."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, routing: Routing, transposed: bool) -> Tensor:
        for_rows, for_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(rows if for_weight else None, weight if for_rows else None)
        ctx.parameter = weight if for_weight else None  # what was saved may be a copy without its identity
        ctx.routing, ctx.transposed = routing, transposed
        return product(rows, weight if transposed else weight.mT, routing)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows, weight = ctx.saved_tensors
        (grad,) = grads
        for_rows = for_weight = None
        if weight is not None:
            for_rows = product(grad, weight.mT if ctx.transposed else weight, ctx.routing)
        if rows is not None:
            left, right = (rows.detach(), grad) if ctx.transposed else (grad, rows.detach())
            later, groups = ctx.routing.later, _spans(ctx.routing)
            if later is None or not later.put_off(ctx.parameter, left, right, groups):
                for_weight = weight_gradient(left, right, ctx.routing)
        return for_rows, for_weight, None, None


class _GroupedBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor, routing: Routing) -> Tensor:
        ctx.routing = routing
        made = torch.empty_like(rows)
        for expert, first, end in _spans(routing):
            torch.add(rows[first:end], bias[expert], out=made[first:end])
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (grad,) = grads
        for_rows, for_bias = ctx.needs_input_grad[:2]
        if not for_bias:
            return grad if for_rows else None, None, None
        sums = grad.new_zeros(len(ctx.routing.counts), grad.shape[1])
        for expert, first, end in _spans(ctx.routing):
            torch.sum(grad[first:end], 0, out=sums[expert])
        return grad if for_rows else None, sums, None


def product(rows: Tensor, weight: Tensor, routing: Routing) -> Tensor:
    """``rows [r, a]`` times ``weight [experts, a, b]``: ``[r, b]``."""
    if _takes_grouped(rows, weight):
        assert _grouped_mm is not None
        return cast(Tensor, _grouped_mm(rows.contiguous(), weight, offs=routing.ends))
    made = rows.new_empty(rows.shape[0], weight.shape[2])
    for expert, first, end in _spans(routing):
        torch.mm(rows[first:end], weight[expert], out=made[first:end])
    return made


def weight_gradient(left: Tensor, right: Tensor, routing: Routing) -> Tensor:
    """``left [r, a]`` and ``right [r, b]``: ``[experts, a, b]``, of each expert the sum over its rows."""
    if _takes_grouped(left, right):
        assert _grouped_mm is not None
        made = cast(Tensor, _grouped_mm(left.contiguous().t(), right.contiguous(), offs=routing.ends))
        # sums over no rows, of which kernels don't say that they write them
        return made if all(routing.counts) else made.index_fill_(0, routing.idle, 0)
    shape = (len(routing.counts), left.shape[1], right.shape[1])
    made = left.new_empty(shape) if all(routing.counts) else left.new_zeros(shape)
    for expert, first, end in _spans(routing):
        torch.mm(left[first:end].t(), right[first:end], out=made[expert])
    return made


def _spans(routing: Routing) -> list[tuple[int, int, int]]:
    """None where there are no values: the sizes of results are all that counts."""
    return [] if routing.is_estimate else routing.spans()


def _takes_grouped(left: Tensor, right: Tensor) -> bool:
    """Whether torch's grouped product takes both: on CUDA, in bfloat16, rows of whole 16 bytes."""
    is_aligned = left.shape[-1] % 8 == 0 and right.shape[-1] % 8 == 0
    is_known = _grouped_mm is not None and left.is_cuda and left.dtype == torch.bfloat16
    return is_known and is_aligned and left.shape[0] > 0
