"""A sample or batch: what the one-device model is called with, as named tensor leaves.

A tensor is one positional argument, a tuple or list are positional arguments, a mapping keyword arguments; tensors may
lie deeper, in nested tuples, lists and mappings. A leaf's path joins keys and positions: ``input_ids``, ``1.mask``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autopar.errors import BatchError


@dataclass(frozen=True)
class Structure:
    """Everything of a batch but its tensors; :meth:`call_arguments` puts tensors back."""

    tree: Any

    def call_arguments(self, tensors: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``(args, kwargs)`` of the model's call."""
        filled = _fill(self.tree, tensors)
        if isinstance(filled, dict):
            return (), filled
        return (tuple(filled), {}) if isinstance(filled, list | tuple) else ((filled,), {})

    def argument(self, name: str) -> Any:
        """What is given for a keyword argument that is no tensor, or None."""
        return self.tree.get(name) if isinstance(self.tree, dict) else None

    def batch(self, tensors: Mapping[str, Any]) -> Any:
        """The batch as the user would write it."""
        return _fill(self.tree, tensors)


@dataclass(frozen=True)
class _Leaf:
    path: str


def flatten(batch: Any) -> tuple[dict[str, torch.Tensor], Structure]:
    """The tensors of ``batch`` by path, and the rest. Raises BatchError where there is no tensor in it, or two of them
    have one path."""
    tensors: dict[str, torch.Tensor] = {}
    tree = _strip(batch, "", tensors)
    if not tensors:
        kind = type(batch).__name__
        raise BatchError(f"the batch holds no tensor (it is a {kind}); give what the model is called with")
    return tensors, Structure(tree)


def _strip(item: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(item, torch.Tensor):
        name = path or "0"
        if name in tensors:
            raise BatchError(f"two tensors of the batch are called {name!r}; give one another key, without dots")
        tensors[name] = item
        return _Leaf(name)
    if isinstance(item, Mapping):
        return {k: _strip(v, f"{path}.{k}" if path else str(k), tensors) for k, v in item.items()}
    if isinstance(item, list | tuple) and type(item) in (list, tuple):
        return type(item)(_strip(v, f"{path}.{i}" if path else str(i), tensors) for i, v in enumerate(item))
    return item


def readable_name(path: str, taken: Collection[str]) -> str:
    """A name for the tensor at ``path`` that none of ``taken`` is: ``x_0`` for ``x.0``, ``input_0`` for ``0``."""
    base = ("input_" if path[0].isdigit() else "") + path.replace(".", "_")
    return next(
        name for name in (base, *(f"{base}_{number}" for number in range(2, len(taken) + 3))) if name not in taken
    )


def _fill(tree: Any, tensors: Mapping[str, Any]) -> Any:
    if isinstance(tree, _Leaf):
        return tensors[tree.path]
    if isinstance(tree, dict):
        return {k: _fill(v, tensors) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_fill(v, tensors) for v in tree)
    return tree


def batch_size(tensors: Mapping[str, torch.Tensor], batch_dim: int) -> int:
    """Extent of ``batch_dim`` of the first tensor that has that dim."""
    for tensor in tensors.values():
        if tensor.dim() > batch_dim:
            return int(tensor.shape[batch_dim])
    raise BatchError(f"no tensor of the batch has a dim {batch_dim} to split over microbatches and dp")
