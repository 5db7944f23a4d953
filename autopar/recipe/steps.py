"""Recipes as values: the operators that make one tensor, in order, and their JSON.

A recipe for ``torch.empty(4, 8).normal_(0.0, 0.02)`` is two steps::

    {"shape": [4, 8], "dtype": "float32", "result": {"value": [0, 0]}, "steps": [
        {"op": "aten.empty.memory_format", "args": [[4, 8]], "kwargs": {"dtype": {"torch": "float32"}}},
        {"op": "aten.normal_.default", "args": [{"value": [0, 0]}, 0.0, 0.02], "stream": 5}]}
"""

from __future__ import annotations

import base64
import math
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from autopar.errors import CaptureError, PlanError

CONSTANT: Final = "constant"
_OP: Final = re.compile(r"aten\.\w+\.\w+|init\.[a-z]\w*_|constant")
_NAMED: Final = (torch.dtype, torch.layout, torch.memory_format)  # what torch spells "torch.<name>"
_LISTED: Final = 1024  # elements; a larger constant is packed


@dataclass(frozen=True)
class Value:
    """Output number ``output`` of step number ``step`` of the same recipe."""

    step: int
    output: int = 0


@dataclass(frozen=True)
class Constant:
    """The values of a tensor, as the bytes of its contiguous elements."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    data: bytes

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Constant:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        return cls(tuple(tensor.shape), tensor.dtype, bytes(flat.view(torch.uint8).numpy()))

    def tensor(self) -> torch.Tensor:
        if not self.data:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(bytearray(self.data), dtype=self.dtype).reshape(self.shape)


@dataclass(frozen=True)
class Step:
    """One operator call.

    ``op`` is an ATen overload (``aten.normal_.default``), a function of torch.nn.init that is a step as a
    whole (``init.trunc_normal_``), or ``constant``. Tensors among the arguments are Values. ``stream`` names
    the random numbers that it draws: recipes that share a step share its values. None: it draws none.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    stream: int | None = None


@dataclass(frozen=True)
class Recipe:
    """The steps that make one full parameter or buffer: the value ``result`` after the last of them."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    steps: tuple[Step, ...]
    result: Value


def constant(tensor: torch.Tensor) -> Recipe:
    """The recipe of a tensor whose values are known."""
    step = Step(CONSTANT, (Constant.of(tensor),))
    return Recipe(tuple(tensor.shape), tensor.dtype, (step,), Value(0))


def to_json(recipes: Mapping[str, Recipe]) -> dict[str, Any]:
    """Plain data, strict JSON (no NaN literals). Inverse: :func:`from_json`."""
    return {name: _recipe_to_json(recipe) for name, recipe in recipes.items()}


def from_json(data: Any) -> dict[str, Recipe]:
    """Raises PlanError where ``data`` is not what :func:`to_json` makes."""
    if not isinstance(data, dict):
        raise PlanError(f"recipes are a mapping of names, not a {type(data).__name__}; write the job again")
    return {name: _recipe_from_json(name, entry) for name, entry in data.items()}


def _recipe_to_json(recipe: Recipe) -> dict[str, Any]:
    return {
        "shape": list(recipe.shape),
        "dtype": _short(recipe.dtype),
        "result": _encode(recipe.result),
        "steps": [_step_to_json(step) for step in recipe.steps],
    }


def _step_to_json(step: Step) -> dict[str, Any]:
    entry: dict[str, Any] = {"op": step.op, "args": _encode(step.args)}
    if step.kwargs:
        entry["kwargs"] = {key: _encode(item) for key, item in step.kwargs.items()}
    if step.stream is not None:
        entry["stream"] = step.stream
    return entry


def _recipe_from_json(name: str, entry: Any) -> Recipe:
    try:
        steps = tuple(_step_from_json(step) for step in entry["steps"])
        return Recipe(tuple(entry["shape"]), _torch(entry["dtype"]), steps, _decode(entry["result"]))
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, zlib.error) as error:
        raise PlanError(f"the init recipe of {name!r} can't be read: {error!r}; write the job again") from error


def _step_from_json(entry: Any) -> Step:
    if not _OP.fullmatch(entry["op"]):
        raise ValueError(f"{entry['op']!r} is not an operator of a recipe")
    kwargs = {key: _decode(item) for key, item in entry.get("kwargs", {}).items()}
    return Step(entry["op"], _decode(entry["args"]), kwargs, entry.get("stream"))


def _encode(item: Any) -> Any:
    """Plain data for one argument; whatever JSON has no word for is a mapping of one key, its kind."""
    if item is None or isinstance(item, bool | int | str):
        return item
    if isinstance(item, float):
        return item if math.isfinite(item) else {"float": repr(item)}
    if isinstance(item, list | tuple):
        return [_encode(entry) for entry in item]
    if isinstance(item, Value):
        return {"value": [item.step, item.output]}
    if isinstance(item, Constant):
        return {"tensor": _constant_to_json(item)}
    if isinstance(item, _NAMED):
        return {"torch": _short(item)}
    raise CaptureError(f"an initialiser passes a {type(item).__name__}, which an init recipe can't hold")


def _decode(item: Any) -> Any:
    if isinstance(item, list):
        return tuple(_decode(entry) for entry in item)
    if isinstance(item, dict):
        ((kind, content),) = item.items()
        return _DECODERS[kind](content)
    return item


def _constant_to_json(item: Constant) -> dict[str, Any]:
    values = item.tensor()
    plain = {"shape": list(item.shape), "dtype": _short(item.dtype)}
    if values.numel() <= _LISTED and not values.is_complex() and bool(values.isfinite().all()):
        return {**plain, "values": values.flatten().tolist()}
    return {**plain, "packed": base64.b64encode(zlib.compress(item.data)).decode("ascii")}


def _constant_from_json(entry: Any) -> Constant:
    shape, dtype = tuple(entry["shape"]), _torch(entry["dtype"])
    if "values" in entry:
        return Constant.of(torch.tensor(entry["values"], dtype=dtype).reshape(shape))
    data = zlib.decompress(base64.b64decode(entry["packed"], validate=True))
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes are not {list(shape)} elements of {_short(dtype)}")
    return Constant(shape, dtype, data)


def _short(item: Any) -> str:
    return str(item).removeprefix("torch.")


def _torch(name: str) -> Any:
    found = getattr(torch, name)
    if not isinstance(found, _NAMED):
        raise ValueError(f"torch.{name} is not a dtype, layout or memory format")
    return found


_DECODERS: Final[dict[str, Callable[[Any], Any]]] = {
    "float": float,
    "value": lambda content: Value(int(content[0]), int(content[1])),
    "tensor": _constant_from_json,
    "torch": _torch,
}
