"""Recording how a model initialises itself, without memory for its weights.

A model on the meta device holds shapes only. What its constructor did to the weights is gone, so its own
initialisation is run again on a copy: first ``reset_parameters`` of every module, as constructors call it,
then what the model adds (``initialize_weights``, ``init_weights`` or ``_init_weights``). Values that a
constructor sets in another way can't be seen afterwards; :func:`construct` records the constructor itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from autopar.errors import AutoparError, CaptureError
from autopar.recipe.play import copied
from autopar.recipe.steps import Recipe, constant
from autopar.recipe.trace import Trace, UninitializedError

_SHOWN = 8  # names in one error
_WAYS_OUT = (
    "give the module's class a reset_parameters(), fill it in the model's _init_weights(module), "
    "let autopar.recipe.construct build the model, or give the model real weights"
)


def record(model: nn.Module) -> dict[str, Recipe]:
    """One recipe for every parameter and buffer of ``model``, under its first name.

    Tensors on the meta device are initialised as the model itself would do it; others keep their values.
    ``model`` is not modified. Raises CaptureError where an initialiser needs values, or where nothing
    initialises a tensor.
    """
    twin, trace = _copy(model), Trace()
    with trace.recording(), torch.no_grad():
        _reset(twin)
        _initialize(twin)
    made = _tensors(twin, remove_duplicate=False)
    owned = _tensors(model)
    known = {name: constant(tensor) for name, tensor in owned.items() if not tensor.is_meta}
    found = _recipes(model, trace, {name: made[name] for name in owned if name not in known})
    return {name: (known | found)[name] for name in owned}


def construct(factory: Callable[[], nn.Module]) -> tuple[nn.Module, dict[str, Recipe]]:
    """The model that ``factory`` builds, on the meta device, and the recipes of what its constructors do.

    Raises CaptureError where a constructor needs values, or leaves a tensor without.
    """
    trace = Trace()
    with trace.recording():
        with torch.device("meta"):
            model = _call(factory, "the model's constructor")
        with torch.no_grad():
            _initialize_skipped(model)
    return model, _recipes(model, trace, _tensors(model))


def _copy(model: nn.Module) -> nn.Module:
    try:
        twin = copied(model)
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__} can't be copied to record its initialisation: {error}; {_WAYS_OUT}"
        ) from error
    for part in (*twin.modules(), *twin.parameters(), *twin.buffers()):
        vars(part).pop("_is_hf_initialized", None)  # transformers' mark of what is done
    return twin


def _tensors(model: nn.Module, *, remove_duplicate: bool = True) -> dict[str, torch.Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=remove_duplicate)),
        **dict(model.named_buffers(remove_duplicate=remove_duplicate)),
    }


def _reset(model: nn.Module) -> None:
    """Children before their parents, as they were constructed."""
    for path, module in reversed(list(model.named_modules())):
        _run(module, "reset_parameters", path) or _run(module, "_reset_parameters", path)


def _initialize(module: nn.Module, path: str = "") -> None:
    """The initialiser of the whole model, or of each part that has one."""
    if _run(module, "initialize_weights", path) or _run(module, "init_weights", path):
        return
    for name, child in module.named_children():
        _initialize(child, f"{path}.{name}" if path else name)
    initialize: Any = getattr(module, "_init_weights", None)
    if _takes(initialize, 1):
        _call(lambda: module.apply(initialize), f"_init_weights of {_label(path, module)}")
    else:
        _run(module, "_init_weights", path)


def _initialize_skipped(module: nn.Module, path: str = "") -> None:
    """What transformers' constructors leave out where they build on the meta device."""
    if not _run(module, "initialize_weights", path):
        for name, child in module.named_children():
            _initialize_skipped(child, f"{path}.{name}" if path else name)


def _run(module: nn.Module, name: str, path: str) -> bool:
    """Call ``module.<name>()`` where there is such a method that needs no argument."""
    method = getattr(module, name, None)
    if not _takes(method, 0):
        return False
    _call(method, f"{name} of {_label(path, module)}")
    return True


def _takes(method: Any, arguments: int) -> bool:
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(*[None] * arguments)
    except TypeError:
        return False
    return True


def _call(function: Any, where: str) -> Any:
    try:
        return function()
    except AutoparError:
        raise
    except Exception as error:
        raise CaptureError(
            f"{where} can't run on the meta device: {type(error).__name__}: {error}; initialise with "
            "operators that need no values (torch.nn.init), or give the model real weights"
        ) from error


def _recipes(model: nn.Module, trace: Trace, tensors: Mapping[str, torch.Tensor]) -> dict[str, Recipe]:
    found: dict[str, Recipe] = {}
    missing: list[str] = []
    for name, tensor in tensors.items():
        try:
            found[name] = trace.recipe(tensor)
        except UninitializedError:
            missing.append(name)
    if missing:
        shown = [f"{name} ({_owner(model, name)})" for name in missing[:_SHOWN]]
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise CaptureError(f"nothing initialises {', '.join(shown)}{more} on the meta device; {_WAYS_OUT}")
    return found


def _owner(model: nn.Module, name: str) -> str:
    return type(model.get_submodule(name.rpartition(".")[0])).__name__


def _label(path: str, module: nn.Module) -> str:
    return f"{path!r} ({type(module).__name__})" if path else type(module).__name__
