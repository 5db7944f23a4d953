"""How emitted modules rebuild the model's tree: parameters and layers under their own dotted names."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autopar.errors import PlanError
from autopar.runtime.axes import Axes


class Container(nn.Module):
    """A module that only holds others, or parameters (as an ``nn.ParameterList``); ``container[3]`` is what it holds as
    ``"3"``, ``container["*"]`` holds what all such children have in the model, stacked."""

    def __getitem__(self, index: int | str) -> Any:
        return getattr(self, str(index))


def declare(
    module: nn.Module,
    path: str,
    what: tuple[int, ...] | nn.Module,
    dtype: torch.dtype | None = None,
    *,
    buffer: bool = False,
    trainable: bool = True,
) -> None:
    """Attach a parameter or buffer of shape ``what``, or the module ``what``, at a dotted ``path``.

    Containers on the way are made as needed. Parameters and buffers hold no memory (meta device) until they
    are given their weights. A module that keeps ``axes`` gets them scoped to its path, so that the random ops
    of two layers of one class differ. Raises PlanError where the path is taken.
    """
    *parents, name = path.split(".")
    for parent in parents:
        module = _child(module, parent, path)
    if hasattr(module, name):
        raise PlanError(f"{path!r} is declared twice; parameters and modules have one place each")
    if isinstance(what, nn.Module):
        _scope(what, path)
        module.add_module(name, what)
        return
    tensor = torch.empty(what, dtype=dtype, device="meta")
    if buffer:
        module.register_buffer(name, tensor)
    else:
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=trainable))


def dtype_of(name: str) -> torch.dtype:
    """The dtype that a program names: ``"float32"`` -> ``torch.float32``. Raises PlanError."""
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise PlanError(f"{name!r} is not a dtype of torch")
    return dtype


def _scope(layer: Any, path: str) -> None:
    if isinstance(axes := getattr(layer, "axes", None), Axes):
        layer.axes = axes.within(path)


def _child(module: nn.Module, name: str, path: str) -> nn.Module:
    if not hasattr(module, name):
        module.add_module(name, Container())
    child = getattr(module, name)
    if not isinstance(child, nn.Module):
        raise PlanError(f"{path!r} can't be declared: {name!r} on the way is a {type(child).__name__}, not a module")
    return child
