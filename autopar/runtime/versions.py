"""Weight versions of an asynchronous pipeline: a backward uses the weights that its forward used.

PipeDream's weight stashing (Narayanan et al., "PipeDream", SOSP 2019, section 3.3): weights are updated while other
microbatches are under way, so the version that a microbatch has seen is kept until its backward has run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Version = dict[str, Tensor]


class WeightVersions:
    """The versions of one stage's weights; at most one more than microbatches are under way."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._current: Version | None = None
        self._used: dict[int, Version] = {}

    def forward(self, microbatch: int, arguments: Sequence[Tensor]) -> Any:
        """The stage's forward under the newest weights, which are kept for the backward of ``microbatch``."""
        if self._current is None:
            self._current = {
                name: parameter.detach().clone().requires_grad_(parameter.requires_grad)
                for name, parameter in self._module.named_parameters()
            }
        self._used[microbatch] = self._current
        return torch.func.functional_call(self._module, self._current, tuple(arguments))

    def take_gradients(self, microbatch: int, put: Callable[[nn.Parameter, Tensor], None]) -> None:
        """After the backward of ``microbatch``: ``put`` its gradients to the stage's own parameters."""
        version = self._used.pop(microbatch)
        for name, parameter in self._module.named_parameters():
            gradient, version[name].grad = version[name].grad, None
            if gradient is not None:
                put(parameter, gradient)

    def updated(self) -> None:
        """The stage's weights have changed: the next forward makes a new version."""
        self._current = None
