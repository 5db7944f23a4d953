"""Another optimizer like a given one: of the same class and with the same options, over other tensors."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor
from torch.optim import Optimizer

from autopar.errors import ArgumentError

_NOT_OPTIONS: Final = ("params", "param_names")
_OWN: Final = ("state", "param_groups", "step")  # "step": a method that a scheduler has wrapped


@dataclass(frozen=True)
class Likeness:
    """An optimizer without groups and state.

    Its ``attributes`` are copied: constructors need not keep all of their arguments, nor take what they keep
    (bitsandbytes). Where the constructor also makes state (Adagrad), or an attribute refers to parameters, it is called
    again, with ``arguments``.
    """

    kind: type[Optimizer]
    attributes: Mapping[str, Any]
    arguments: Mapping[str, Any] | None

    @classmethod
    def of(cls, optimizer: Optimizer) -> Likeness:
        """Raises ArgumentError where the constructor has to be called and what with is not known."""
        attributes = {name: value for name, value in vars(optimizer).items() if name not in _OWN}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        constructs = any(optimizer.state.get(p) for p in parameters) or _refer(attributes.values(), parameters)
        return cls(type(optimizer), attributes, _arguments(optimizer) if constructs else None)

    def over(self, groups: Iterable[Mapping[str, Any]]) -> Optimizer:
        """One over ``groups``, ``params`` and options of each."""
        mine = [{"params": list(group["params"]), **options(group)} for group in groups]
        if self.arguments is not None:
            return self.kind(mine, **copy.deepcopy(dict(self.arguments)))
        made = self.kind.__new__(self.kind)
        vars(made).update({name: _own(value) for name, value in self.attributes.items()})
        made.state, made.param_groups = defaultdict(dict), []
        for group in mine:
            made.add_param_group(group)
        return made


def options(group: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of what a parameter group says beside which parameters it has."""
    return {name: copy.deepcopy(value) for name, value in group.items() if name not in _NOT_OPTIONS}


def _own(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, dict | list | set) else value


def _refer(values: Iterable[Any], parameters: list[Tensor]) -> bool:
    """Whether one of ``values``, or something in one, is one of ``parameters``."""
    wanted = {id(p) for p in parameters}
    for value in values:
        inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        members = inner if isinstance(inner, list | tuple | set) else [inner]
        if any(id(member) in wanted for member in members):
            return True
    return False


def _arguments(optimizer: Optimizer) -> dict[str, Any]:
    """What the class has to be called with beside parameters: from ``defaults``, or attributes of the same names."""
    kind = type(optimizer)
    known = {**vars(optimizer), **optimizer.defaults}
    found: dict[str, Any] = {}
    for name, parameter in list(inspect.signature(kind).parameters.items())[1:]:
        if name in known:
            found[name] = copy.deepcopy(known[name])
        elif parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ArgumentError(
                f"optimizer: a {kind.__name__} doesn't keep its argument {name!r}, so ranks can't make it again; "
                f"give a function, optimizer=lambda parameters: {kind.__name__}(parameters, …)"
            )
    return found
