"""What code generation asks of an ATen op as the target of a node; RuntimeOps and others answer no."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.graph import op_name


def overload(node: fx.Node) -> Any:
    """The target if it is an overload of a torch op, else None."""
    return node.target if hasattr(node.target, "overloadpacket") else None


def packet(node: fx.Node) -> str:
    """``add`` for ``aten.add.Tensor``; the name of any other function."""
    found = overload(node)
    return str(found.overloadpacket.__name__) if found is not None else op_name(node)


def is_view(node: fx.Node) -> bool:
    """Whether the result may share its first operand's memory (reshape, transpose, slice, to, …)."""
    found = overload(node)
    return found is not None and any(r.alias_info is not None for r in found._schema.returns)


def is_pointwise(node: fx.Node) -> bool:
    found = overload(node)
    return found is not None and torch.Tag.pointwise in found.tags
