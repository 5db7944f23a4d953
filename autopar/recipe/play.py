"""Playing init recipes: the same values on every mesh, and on one device."""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn

from autopar.errors import PlanError
from autopar.recipe.steps import CONSTANT, Constant, Recipe, Step, Value


def play(recipe: Recipe, seed: int) -> torch.Tensor:
    """The full tensor, on the CPU, contiguous and in memory of its own.

    Every random step draws from a generator seeded by ``seed`` and the step's stream, so that the values
    depend on neither mesh nor order; torch's generators are left as they were. Raises PlanError where this
    version of torch doesn't know a step, or makes something else of it.
    """
    outputs: list[Any] = []
    with torch.no_grad(), torch.device("cpu"), _own_random_numbers():
        for step in recipe.steps:
            if step.stream is not None:
                torch.default_generator.manual_seed(_seed(seed, step.stream))
            outputs.append(_run(step, outputs))
        result: torch.Tensor = _resolve(recipe.result, outputs)
        tensor = result.clone(memory_format=torch.contiguous_format)
    if (tuple(tensor.shape), tensor.dtype) != (recipe.shape, recipe.dtype):
        raise PlanError(
            f"an init recipe for {recipe.dtype}{list(recipe.shape)} makes {tensor.dtype}{list(tensor.shape)} "
            f"under torch {torch.__version__}; write the job again with this version"
        )
    return tensor


def initialize(model: nn.Module, recipes: Mapping[str, Recipe], seed: int) -> dict[str, torch.Tensor]:
    """Every parameter and buffer of ``model`` under its first name, in full: what the ranks hold together.

    ``model`` may be on the meta device and is not modified. Raises PlanError where a recipe is missing or
    makes a tensor of another shape or dtype.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in tensors.items():
        recipe = recipes.get(name)
        if recipe is None:
            raise PlanError(f"no recipe initialises {name!r}; record the recipes of this model")
        if (recipe.shape, recipe.dtype) != (tuple(tensor.shape), tensor.dtype):
            raise PlanError(
                f"the recipe of {name!r} makes {recipe.dtype}{list(recipe.shape)}, the model has "
                f"{tensor.dtype}{list(tensor.shape)}; record the recipes of this model"
            )
    return {name: play(recipes[name], seed) for name in tensors}


def replica(model: nn.Module, state: Mapping[str, torch.Tensor]) -> nn.Module:
    """A copy of ``model`` that holds ``state`` (first names); ties and buffers outside state_dict included.

    The tensors of ``state`` are taken as they are, not copied. Raises PlanError where one is missing.
    """
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        memo[id(parameter)] = nn.Parameter(_given(state, name), requires_grad=parameter.requires_grad)
    for name, buffer in model.named_buffers():
        memo[id(buffer)] = _given(state, name)
    return copied(model, memo)


def copied(model: nn.Module, memo: Mapping[int, Any] | None = None) -> nn.Module:
    """A deep copy, with ``memo`` as :func:`copy.deepcopy` takes it. What modules keep that they computed, which torch
    doesn't copy (``torch.nn.utils.weight_norm`` leaves the weight that its last forward made), is copied as a value,
    and hooks that know parts of the model know those of the copy."""
    computed = [v for m in model.modules() for v in vars(m).values() if isinstance(v, torch.Tensor) and not v.is_leaf]
    known = {**{id(value): value.detach().clone() for value in computed}, **(memo or {})}
    found = copy.deepcopy(model, known)
    for module in found.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for number, hook in hooks.items():
                hooks[number] = _rebound(hook, known)
    return found


def _rebound(function: Callable[..., Any], copies: Mapping[int, Any]) -> Callable[..., Any]:
    """A function of Python that means what ``copies`` have of what it means, by their numbers."""
    if not isinstance(function, FunctionType):
        return function

    def meant(value: Any) -> Any:
        return copies.get(id(value), value)

    cells = [_mapped(cell, meant) for cell in function.__closure__ or ()]
    defaults = tuple(map(meant, function.__defaults__ or ()))
    made = FunctionType(function.__code__, function.__globals__, function.__name__, defaults, tuple(cells))
    made.__kwdefaults__ = {name: meant(value) for name, value in (function.__kwdefaults__ or {}).items()}
    made.__dict__.update(function.__dict__)
    return made


def _mapped(cell: CellType, meant: Callable[[Any], Any]) -> CellType:
    try:
        return CellType(meant(cell.cell_contents))
    except ValueError:  # nothing is in it yet
        return CellType()


def _given(state: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    if name not in state:
        raise PlanError(f"the state holds no {name!r}; it needs every parameter and buffer of the model")
    return state[name]


@contextlib.contextmanager
def _own_random_numbers() -> Iterator[None]:
    before = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(before)


def _seed(seed: int, stream: int) -> int:
    digest = hashlib.blake2b(f"init {seed} {stream}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _run(step: Step, outputs: list[Any]) -> Any:
    args = _resolve(step.args, outputs)
    if step.op == CONSTANT:
        return args[0]
    kwargs = {key: _resolve(item, outputs) for key, item in step.kwargs.items()}
    return _operator(step.op)(*args, **kwargs)


def _operator(op: str) -> Callable[..., Any]:
    family, _, name = op.partition(".")
    try:
        if family == "init":
            found = getattr(nn.init, name)
        else:
            base, _, overload = name.partition(".")
            found = getattr(getattr(torch.ops.aten, base), overload)
    except AttributeError as error:
        raise PlanError(
            f"an init recipe uses {op}, which torch {torch.__version__} doesn't have; "
            "write the job again with this version"
        ) from error
    return found  # type: ignore[no-any-return]


def _resolve(item: Any, outputs: list[Any]) -> Any:
    """``item`` with tensors in place of Values and Constants."""
    if isinstance(item, Value):
        made = outputs[item.step]
        return made[item.output] if isinstance(made, list | tuple) else made
    if isinstance(item, Constant):
        return item.tensor()
    if isinstance(item, tuple):
        return [_resolve(entry, outputs) for entry in item]
    return item
