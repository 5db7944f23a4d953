"""Moments kept in a narrower dtype than the parameters they belong to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_CHUNKS = 8  # so many times less memory for wide moments than if all were wide at once


class NarrowState(Optimizer):
    """Steps ``optimizer``, whose state of parameters' shapes (moments) is in ``dtype`` between steps.

    Lossy: a moment is rounded to nearest after each step. bfloat16 keeps 8 bits of it: a second moment with a decay
    rate of 0.999 no longer follows changes of less than a 250th of itself. For a step, moments are made as wide as
    their parameters, those of some parameters at a time where the optimizer is ``separable``.
    """

    def __init__(self, optimizer: Optimizer, dtype: torch.dtype, *, separable: bool) -> None:
        super().__init__([{"params": group["params"]} for group in optimizer.param_groups], optimizer.defaults)
        self.optimizer, self.dtype, self.separable = optimizer, dtype, separable
        self.param_groups, self.state = optimizer.param_groups, optimizer.state

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        gradients = {p: p.grad for p in parameters}
        for chunk in self._chunks(parameters):
            for parameter in parameters:
                parameter.grad = gradients[parameter] if parameter in chunk else None
            self._cast(chunk, None)
            self.optimizer.step()
            self._cast(chunk, self.dtype)
        for parameter in parameters:
            parameter.grad = gradients[parameter]
        self.state = self.optimizer.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)  # makes moments as wide as their parameters
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state
        self._cast({p for group in self.param_groups for p in group["params"]}, self.dtype)

    def _chunks(self, parameters: list[nn.Parameter]) -> Iterator[set[nn.Parameter]]:
        most = sum(p.numel() for p in parameters) / (_CHUNKS if self.separable else 1)
        chunk: set[nn.Parameter] = set()
        for parameter in parameters:
            chunk.add(parameter)
            if self.separable and sum(p.numel() for p in chunk) >= most:
                yield chunk
                chunk = set()
        if chunk:
            yield chunk

    def _cast(self, parameters: set[nn.Parameter], dtype: torch.dtype | None) -> None:
        """Moments of ``parameters`` to ``dtype``; None: to that of the parameter."""
        for parameter in parameters:
            state = self.optimizer.state.get(parameter, {})
            for name, value in state.items():
                if is_moment(value, parameter):
                    state[name] = value.to(dtype or parameter.dtype)


def is_moment(value: object, parameter: Tensor) -> bool:
    """Whether a state entry is a floating tensor of the parameter's shape; step counters are scalars."""
    return (
        isinstance(value, Tensor)
        and value.dim() > 0
        and value.shape == parameter.shape
        and value.is_floating_point()
        and value.dtype.itemsize > 1
    )
