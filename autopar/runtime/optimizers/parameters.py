"""What an optimizer is made over: the model's parameters under its own names, in the part that one rank stores."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import overload

import torch
from torch import nn

from autopar.runtime.modules import dtype_of
from autopar.runtime.program import Parameter


class Parameters(Sequence[nn.Parameter]):
    """All trainable parameters of the model, in the same order on every rank; what ``optimizer=`` is called with.

    Each is what this rank stores: whole, some of its rows or columns, or, where it lies on other ranks alone, none of
    its rows (shape ``[0, …]``). So groups by name or ``ndim`` are the same everywhere, groups by other figures of a
    shape need not be.
    """

    def __init__(self, named: Mapping[str, nn.Parameter], aliases: Mapping[str, str] | None = None) -> None:
        self._named = dict(named)
        self._aliases = dict(aliases or {})

    @classmethod
    def of(cls, model: nn.Module) -> Parameters:
        """Those of a model on one device. Frozen ones have no gradient and are left out."""
        first: dict[nn.Parameter, str] = {}
        aliases: dict[str, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            aliases[name] = first.setdefault(parameter, name)
        named = {name: parameter for parameter, name in first.items() if parameter.requires_grad}
        return cls(named, {alias: name for alias, name in aliases.items() if name in named})

    @classmethod
    def stored(
        cls, specs: Iterable[Parameter], masters: Mapping[str, nn.Parameter], device: torch.device
    ) -> Parameters:
        """Those of one rank: ``specs`` are of all programs of the job, ``masters`` what the rank holds, by name."""
        named: dict[str, nn.Parameter] = {}
        aliases: dict[str, str] = {}
        for spec in specs:
            if spec.is_buffer or not spec.trainable or spec.name in named:
                continue
            named[spec.name] = masters[spec.name] if spec.name in masters else _elsewhere(spec, device)
            aliases |= dict.fromkeys((spec.name, *spec.aliases), spec.name)
        return cls(named, aliases)

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """``(name, parameter)``, a tied one once."""
        return iter(self._named.items())

    def get(self, name: str) -> nn.Parameter | None:
        """The parameter of that name, any of them if it has several; None where the model trains none."""
        return self._named.get(self._aliases.get(name, name))

    @overload
    def __getitem__(self, index: int) -> nn.Parameter: ...

    @overload
    def __getitem__(self, index: slice) -> list[nn.Parameter]: ...

    def __getitem__(self, index: int | slice) -> nn.Parameter | list[nn.Parameter]:
        return list(self._named.values())[index]

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self._named.values())

    def __len__(self) -> int:
        return len(self._named)


def _elsewhere(spec: Parameter, device: torch.device) -> nn.Parameter:
    """Stands for a parameter of which this rank stores nothing; it has no gradient, so no optimizer touches it."""
    shape = (0, *spec.full_shape[1:])
    return nn.Parameter(torch.empty(shape, dtype=dtype_of(spec.master or spec.dtype), device=device))
