"""Which values are pieces of larger ones that don't lie together: each row of half the columns is apart from the next.

Kernels load several neighbouring elements at once where all that they read lies together, and else one at a time.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, fx

from autopar.graph import info, is_getitem, is_view, op_name, operands

_CUTS: Final = ("chunk", "split", "split_with_sizes", "unbind", "slice", "narrow", "select")


def lies_apart(node: fx.Node) -> bool:
    """Whether it is a view of some elements of a value, between which others lie. What views are of is taken to lie
    together."""
    views: list[fx.Node] = []
    while is_view(node):
        views.append(node)
        node = operands(node)[0]
    if not any(_cuts(view) for view in views):
        return False
    made: Any = torch.empty(info(node).meta.shape, dtype=info(node).meta.dtype, device="meta")
    for view in reversed(views):
        made = _viewed(view, made)
    return is_apart(made)


def is_apart(x: Tensor) -> bool:
    """Whether its first and its last element are further apart than it has elements."""
    if x.numel() == 0:
        return False
    return sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) >= x.numel()


def _cuts(view: fx.Node) -> bool:
    return not is_getitem(view) and op_name(view).split(".")[1] in _CUTS


def _viewed(view: fx.Node, of: Any) -> Any:
    args, kwargs = fx.map_arg((view.args, dict(view.kwargs)), lambda _: of)
    return view.target(*args, **kwargs)  # type: ignore[operator]
