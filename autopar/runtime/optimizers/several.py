"""Several optimizers, each over its own parameters, as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from autopar.errors import ArgumentError


class Several(Optimizer):
    """Steps all of ``optimizers``. ``param_groups`` and ``state`` are theirs, so schedulers reach all of them.

    Raises ArgumentError where two of them have a parameter in common.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = tuple(optimizers)
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        _check_disjoint(self.optimizers)
        common = set.intersection(*(set(optimizer.defaults) for optimizer in self.optimizers))
        defaults = {name: self.optimizers[0].defaults[name] for name in common}  # what schedulers may look for
        super().__init__([{"params": group["params"]} for group in groups], defaults)
        self.param_groups = groups
        self._collect()

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step()
        self._collect()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        groups = iter(self.param_groups)
        for optimizer in self.optimizers:
            optimizer.param_groups = [next(groups) for _ in optimizer.param_groups]
            own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            optimizer.state.clear()
            optimizer.state.update({p: self.state[p] for p in own if p in self.state})

    def _collect(self) -> None:
        """An optimizer makes a parameter's state in its first step."""
        for optimizer in self.optimizers:
            self.state.update(optimizer.state)


def _check_disjoint(optimizers: Sequence[Optimizer]) -> None:
    owners: dict[Any, Optimizer] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                other = owners.setdefault(parameter, optimizer)
                if other is not optimizer:
                    raise ArgumentError(
                        f"optimizer: a parameter of shape {list(parameter.shape)} is both {type(other).__name__}'s and "
                        f"{type(optimizer).__name__}'s; give each parameter to one of them"
                    )
