"""Products with a weight whose gradient can be put off (:mod:`autopar.runtime.later`). They communicate nothing."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from autopar.runtime.axes import Axes
from autopar.runtime.later import Later

aten = torch.ops.aten


def linear(x: Tensor, weight: Tensor, axes: Axes) -> Tensor:
    """``x [..., k]`` times ``weight [n, k]`` transposed: ``[..., n]``, as ``aten.linear``.

    In a backward within ``axes.later.putting_off``, the gradient of ``weight`` is left for later.
    """
    return cast(Tensor, _Product.apply(x, weight, axes.later, True))  # type: ignore[no-untyped-call]


def matmul(x: Tensor, weight: Tensor, axes: Axes) -> Tensor:
    """``x [..., k]`` times ``weight [k, n]``: ``[..., n]``, as ``aten.matmul``; otherwise as :func:`linear`."""
    return cast(Tensor, _Product.apply(x, weight, axes.later, False))  # type: ignore[no-untyped-call]


class _Product(torch.autograd.Function):
    """Saves of ``x`` and ``weight`` only what the other one's gradient needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, later: Later, transposed: bool) -> Tensor:
        for_x, for_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if for_weight else None, weight if for_x else None)
        # Not what was saved: recomputation in the backward saves a copy without the parameter's identity.
        ctx.parameter = weight if for_weight else None
        ctx.later, ctx.transposed = later, transposed
        product: Tensor = aten.linear(x, weight) if transposed else aten.matmul(x, weight)
        return product

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        grad_x = grad_weight = None
        if weight is not None:
            grad_x = torch.matmul(grad, weight if ctx.transposed else weight.t())
        if x is not None:
            # Detached, or x would keep the graph behind it. The gradient itself must be kept, not a view: while
            # something refers to it, autograd neither adds to it in place nor makes it another parameter's .grad.
            factors = (grad, x.detach()) if ctx.transposed else (x.detach(), grad)
            grad_weight = ctx.later.gradient(ctx.parameter, *factors)
        return grad_x, grad_weight, None, None
