"""A sample or batch: what the one-device model is called with, as named tensor leaves.

A tensor is one positional argument, a tuple or list are positional arguments, a mapping keyword arguments; with a loss
of the user's, what the model doesn't take is for that alone (labels). Tensors may lie deeper, in nested tuples, lists
and mappings. A leaf's path joins keys and positions: ``input_ids``, ``1.mask``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from autopar.errors import ArgumentError, BatchError


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
    """The tensors of ``batch`` by path, and the rest. Raises BatchError where there is no tensor in it, two of them
    have one path, or something is an array of numpy's."""
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
    if type(item).__module__ == "numpy" and type(item).__name__ == "ndarray":
        raise BatchError(f"{path or '0'!r} of the batch is an array of numpy's; give torch.as_tensor of it")
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
    """Extent of ``batch_dim`` of the first tensor that has it. Raises BatchError where none has, or that has no row."""
    for path, tensor in tensors.items():
        if tensor.dim() > batch_dim and not tensor.shape[batch_dim]:
            raise BatchError(
                f"the batch has no rows: tensor {path!r} has shape {list(tensor.shape)}; give at least one"
            )
        if tensor.dim() > batch_dim:
            return int(tensor.shape[batch_dim])
    raise BatchError(f"no tensor of the batch has a dim {batch_dim} to split over microbatches and dp")


_POSITIONAL: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_SHOWN: Final = 8
"""Names of arguments in an error."""


def check_call(
    model: nn.Module, structure: Structure, tensors: Mapping[str, Any], loss: Callable[[Any, Any], Any] | None
) -> None:
    """Raise BatchError where ``model`` can't be called with the sample, ArgumentError where ``loss`` can't with two."""
    args, kwargs = call_arguments(model, structure, tensors, loss)
    called, taken = f"{type(model).__name__}.forward", _arguments(model.forward)
    if taken is not None and (why := _misfit(taken, *args, **kwargs)):
        names = list(taken.parameters)
        shown = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
        without = "" if loss is not None else "; with loss=lambda output, batch: ... it may have labels for that alone"
        raise BatchError(
            f"the sample doesn't suit {called}({shown}): {why}; a tuple is given as positional arguments, a mapping as "
            f"keyword arguments{without}"
        )
    taken = _arguments(loss) if loss is not None else None
    if taken is not None and (why := _misfit(taken, None, None)):
        raise ArgumentError(f"loss={loss!r} is called with the model's output and the batch: {why}")


def call_arguments(
    model: nn.Module, structure: Structure, tensors: Mapping[str, Any], loss: Callable[[Any, Any], Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``(args, kwargs)`` of the model's call: what ``forward`` doesn't take is for ``loss`` alone, if there is one."""
    args, kwargs = structure.call_arguments(tensors)
    taken = _arguments(model.forward)
    if loss is None or taken is None:
        return args, kwargs
    kinds = [parameter.kind for parameter in taken.parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL not in kinds:
        args = args[: sum(kind in _POSITIONAL for kind in kinds)]
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        kwargs = {name: value for name, value in kwargs.items() if name in taken.parameters}
    return args, kwargs


def check_read(
    model: nn.Module,
    structure: Structure,
    tensors: Mapping[str, Any],
    loss: Callable[[Any, Any], Any] | None,
    read: Collection[str],
) -> None:
    """Raise BatchError where a tensor of the batch is no argument of ``forward``, and not ``read`` (paths) either."""
    given = {id(x) for x in flatten(call_arguments(model, structure, tensors, loss))[0].values()}
    for path in [path for path, x in tensors.items() if id(x) not in given and path not in read]:
        raise BatchError(
            f"{path!r} of the sample is read by nothing: {type(model).__name__}.forward doesn't take it, and "
            "loss=... doesn't read it"
        )


def _arguments(function: Callable[..., Any]) -> inspect.Signature | None:
    """None where nothing says what it takes."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def _misfit(taken: inspect.Signature, *args: Any, **kwargs: Any) -> str:
    """Why a function can't be called so; "" if it can."""
    try:
        taken.bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return ""
