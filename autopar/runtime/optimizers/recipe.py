"""The forms that ``optimizer=`` may have, brought to one: a function from parameters to optimizers.

An optimizer that the user made over the unmodified model's own parameters becomes a :class:`Recipe`: its class, its
options, and for each of its groups the names of its parameters. Each rank makes the same optimizer over what it stores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from autopar.errors import ArgumentError
from autopar.runtime.optimizers.likeness import Likeness, options
from autopar.runtime.optimizers.parameters import Parameters
from autopar.runtime.stand_in import device_type

Maker = Callable[[Parameters], Optimizer | Sequence[Optimizer]]
"""What ranks are given: from the model's parameters, as the rank stores them, to the optimizer over them."""

GivenOptimizer = Optimizer | Maker | Sequence[Optimizer | Maker]
"""What a user may give as ``optimizer=``."""

SchedulerMaker = Callable[[Optimizer], LRScheduler]
"""What a user may give as ``scheduler=``."""


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """The default optimizer: AdamW, learning rate 1e-3; beside a GPU one kernel reads and writes all (``fused``)."""
    trained = list(parameters)
    return torch.optim.AdamW(trained, lr=1e-3, fused=all(map(_is_of_gpu, trained)) or None)


def _is_of_gpu(parameter: nn.Parameter) -> bool:
    """Whether it lies on a GPU, or on the host for one, or stands for one that does."""
    if (is_cuda := device_type(parameter) == "cuda") or not torch.cuda.is_available():
        return is_cuda
    return type(parameter) is nn.Parameter and parameter.is_pinned()


def maker(given: GivenOptimizer, model: nn.Module | None) -> Maker:
    """``given`` as a function of parameters. ``model`` is that whose parameters an optimizer has been made over.

    Raises ArgumentError for anything else, and for an optimizer that can't be made again (see :meth:`Recipe.of`).
    """
    if isinstance(given, Optimizer):
        if model is None:
            raise ArgumentError(
                f"optimizer is a {type(given).__name__} over parameters of a model that isn't here; "
                f"give a function, optimizer=lambda parameters: {type(given).__name__}(parameters, …)"
            )
        return Recipe.of(given, model)
    if callable(given):
        return given
    if isinstance(given, Sequence) and given and not isinstance(given, str):
        return Together(tuple(maker(one, model) for one in given))
    raise ArgumentError(
        f"optimizer={given!r}; give a torch.optim.Optimizer over the model's parameters, a function from parameters to "
        "one, or a sequence of those"
    )


@dataclass(frozen=True)
class Together:
    """Several makers as one."""

    makers: tuple[Maker, ...]

    def __call__(self, parameters: Parameters) -> list[Optimizer]:
        return [optimizer for one in self.makers for optimizer in made(one, parameters)]


def made(one: Maker, parameters: Parameters) -> list[Optimizer]:
    """The optimizers that ``one`` makes over ``parameters``. Raises ArgumentError where they are over others."""
    result = one(parameters)
    found = list(result) if isinstance(result, Sequence) else [result]
    own = set(parameters)
    for optimizer in found:
        if not isinstance(optimizer, Optimizer):
            raise ArgumentError(f"optimizer made a {type(optimizer).__name__}; it must make a torch.optim.Optimizer")
        strange = [p for group in optimizer.param_groups for p in group["params"] if p not in own]
        if strange:
            raise ArgumentError(
                f"optimizer made a {type(optimizer).__name__} over {len(strange)} tensors that it wasn't given, the "
                f"first of shape {list(strange[0].shape)}; use the parameters that the function is called with, they "
                "are what this rank stores of the model's"
            )
    return found


@dataclass(frozen=True)
class Recipe:
    """How to make an optimizer again: over other tensors of the same names.

    ``groups``: names and options of each. A rank keeps groups of which it has no parameters, so that a scheduler finds
    the same groups everywhere. Parameters in no group are not trained.
    """

    likeness: Likeness
    groups: tuple[tuple[tuple[str, ...], Mapping[str, Any]], ...]

    @classmethod
    def of(cls, optimizer: Optimizer, model: nn.Module) -> Recipe:
        """Raises ArgumentError where a parameter isn't ``model``'s, where the optimizer has been stepped or has a
        scheduler, and what :meth:`Likeness.of` raises.
        """
        names = {parameter: name for name, parameter in reversed(list(model.named_parameters()))}
        title = type(optimizer).__name__
        groups = []
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter not in names:
                    raise ArgumentError(
                        f"optimizer: group {index} of {title} has a tensor of shape {list(parameter.shape)} that is no "
                        f"parameter of {type(model).__name__}; make the optimizer over the parameters of the model "
                        "that is compiled"
                    )
            if "initial_lr" in group:
                raise ArgumentError(
                    f"optimizer: a scheduler is attached to this {title}, and would not reach the ranks; make the "
                    "optimizer without, and give scheduler=lambda optimizer: …"
                )
            groups.append((tuple(names[p] for p in group["params"]), options(group)))
        likeness = Likeness.of(optimizer)
        _check_fresh(optimizer, likeness)
        return cls(likeness, tuple(groups))

    def __call__(self, parameters: Parameters) -> list[Optimizer]:
        groups: list[dict[str, Any]] = []
        for names, chosen in self.groups:
            held = [p for p in map(parameters.get, names) if p is not None]
            groups.append({"params": held, **chosen})
        return [self.likeness.over(groups)]


def _check_fresh(optimizer: Optimizer, likeness: Likeness) -> None:
    """Some classes make their state with the optimizer: it is compared with that of a new one."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if not state:
                continue
            stand_in = nn.Parameter(parameter.detach()[:1].clone() if parameter.dim() else parameter.detach().clone())
            fresh = likeness.over([{**group, "params": [stand_in]}]).state.get(stand_in, {})
            if set(fresh) != set(state) or not all(_same_start(state[name], fresh[name]) for name in state):
                raise ArgumentError(
                    f"optimizer: this {type(optimizer).__name__} has been stepped (it keeps {sorted(state)}), and its "
                    "state is not carried to the ranks; make a new one"
                )


def _same_start(value: Any, fresh: Any) -> bool:
    """Whether ``value`` is still what a new optimizer has; ``fresh`` is that of a parameter's first row."""
    if not isinstance(value, Tensor) or not isinstance(fresh, Tensor):
        return bool(value == fresh)
    row = value[:1] if value.shape != fresh.shape and value.dim() else value
    return row.shape == fresh.shape and bool((row == fresh).all())
