"""Parameters that a rank stores stacked, as optimizers see them: one by one, under the model's own names.

So groups by name, shapes and whole-matrix updates (Muon, Adafactor) are those of the model. Each is a view of what is
stored; its gradient is lent to it for the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from autopar.runtime.program import Parameter, Router
from autopar.runtime.routers import Routers
from autopar.runtime.shards import Positions, rows_held


@dataclass(frozen=True, eq=False)
class Part:
    """``parameter`` is row ``row`` of ``master``, in its memory; in the model, number ``number`` of ``stacked``."""

    parameter: nn.Parameter
    master: nn.Parameter
    row: int
    stacked: str
    number: int


@dataclass
class Apart:
    """``specs`` and ``masters`` by the model's own names, ``parts`` those that lie in a stacked master."""

    specs: dict[str, Parameter] = field(default_factory=dict)
    masters: dict[str, nn.Parameter] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)

    @classmethod
    def of(
        cls, specs: Mapping[str, Parameter], masters: Mapping[str, nn.Parameter], axes: Positions | None = None
    ) -> Apart:
        """Of a rank that holds ``masters``; without ``axes``, there are none."""
        found = cls()
        for name, spec in specs.items():
            parts = spec.parts
            found.specs |= {part.name: part for part in parts} if parts else {name: spec}
            if name in masters and axes is not None:
                held = rows_held(spec, axes) if parts else {}
                found.masters |= {name: masters[name]} if not parts else {}
                for number, row in held.items():
                    view = nn.Parameter(masters[name].detach()[row], requires_grad=masters[name].requires_grad)
                    found.masters[parts[number].name] = view
                    found.parts.append(Part(view, masters[name], row, name, number))
        return found


@dataclass(frozen=True)
class Idle:
    """Which experts got no token in a step, of those that a model's code then passes over; ``layers`` by parameter:
    all that give tokens to its experts."""

    layers: Mapping[str, frozenset[str]]
    routers: Routers

    @classmethod
    def of(cls, routers: Iterable[Router], counts: Routers) -> Idle:
        layers: dict[str, frozenset[str]] = {}
        for router in routers:
            for name in router.skips:
                layers[name] = layers.get(name, frozenset()) | {router.layer}
        return cls(layers, counts)

    def now(self) -> dict[str, list[int]]:
        """Stacked parameter -> how many tokens the expert of each of its parts got."""
        total = self.routers.total
        return {
            name: [sum(counts) for counts in zip(*(total[layer].tolist() for layer in sorted(layers)), strict=True)]
            for name, layers in self.layers.items()
            if layers <= total.keys()
        }


def lend_gradients(optimizer: Optimizer, parts: Sequence[Part], idle: Idle) -> None:
    """For each step of ``optimizer``, parts of stacked parameters have their part of the gradient, but for those of
    ``idle`` experts, which have none: one device's wouldn't have one either."""

    def lend(*_: Any) -> None:
        loads = idle.now()
        for part in parts:
            gradient = part.master.grad
            has_none = gradient is None or (part.stacked in loads and loads[part.stacked][part.number] == 0)
            part.parameter.grad = None if has_none or gradient is None else gradient[part.row]

    def take_back(*_: Any) -> None:
        for part in parts:
            part.parameter.grad = None

    if parts:
        optimizer.register_step_pre_hook(lend)
        optimizer.register_step_post_hook(take_back)
