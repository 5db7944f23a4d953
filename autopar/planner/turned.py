"""Which gradients of weights lie otherwise than their weights, so that autograd copies the first one of a sum.

It keeps a gradient that it is given where dims follow each other as they do in the weight. That of a transposed factor
of a batched product doesn't: the product makes it in the order of its own dims, and turning it back is a view; nor
does that of a convolution whose input's channels are last.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from autopar.graph import Meta, RuntimeOp, info, is_aten, is_view, op_name, operands
from autopar.passes.vocabulary import CASTS
from autopar.rules.shape import laid_out

_MATRIX = 2  # dims


def is_turned(weight: fx.Node, device: str) -> bool:
    """Whether all that reads ``weight``, a trained parameter of a block, makes such a gradient on a ``device`` of this
    kind ("cpu" or "cuda")."""
    return bool(weight.users) and all(_turns(weight, user, device) for user in weight.users)


def _turns(weight: fx.Node, user: fx.Node, device: str) -> bool:
    meta = info(weight).meta
    leaf = _without_values(meta).requires_grad_()
    known: dict[fx.Node, Tensor] = {weight: leaf}
    while _leads_on(user) and len(user.users) == 1:
        known[user] = known[operands(user)[0]] if isinstance(user.target, RuntimeOp) else _called(user, known, device)
        user = next(iter(user.users))
    if all(made is leaf for made in known.values()) and len(meta.shape) <= _MATRIX:
        return False  # products of a matrix that is read as it is make its gradient so
    *_, last = known.values()
    made = _called(user, known, device) if is_aten(user) and len(info(user).outputs) == 1 else last
    if not made.requires_grad:
        return False  # it is detached
    (gradient,) = torch.autograd.grad(made, leaf, torch.empty(made.shape, dtype=made.dtype, device="meta"))
    pairs = zip(gradient.shape, gradient.stride(), leaf.stride(), strict=True)
    return any(own != wanted for extent, own, wanted in pairs if extent > 1)


def _leads_on(node: fx.Node) -> bool:
    """A view of one tensor, another dtype of it, or another type on an axis, which moves nothing here."""
    if isinstance(node.target, RuntimeOp):
        return "src" in node.kwargs and info(node).meta.shape == info(operands(node)[0]).meta.shape
    return is_aten(node) and len(operands(node)) == 1 and (is_view(node) or op_name(node) in CASTS)


def _called(node: fx.Node, known: dict[fx.Node, Tensor], device: str) -> Tensor:
    given = {n: known[n] if n in known else laid_out(n, device) for n in node.all_input_nodes}
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: given[n])
    made: Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
    return made


def _without_values(meta: Meta) -> Tensor:
    return torch.empty(meta.shape, dtype=meta.dtype, device="meta")
