"""What code generation asks of an op's name and kind."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.graph import is_aten, op_name


def overload(node: fx.Node) -> Any:
    """The target if it is an overload of a registered op, else None."""
    return node.target if is_aten(node) else None


def packet(node: fx.Node) -> str:
    """``add`` for ``aten.add.Tensor``; the name of any other function."""
    return op_name(node).split(".")[1] if is_aten(node) else op_name(node)


def is_pointwise(node: fx.Node) -> bool:
    return is_aten(node) and torch.Tag.pointwise in overload(node).tags
