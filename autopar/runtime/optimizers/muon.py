"""Muon for matrices that are split over ranks: the whole update is gathered, orthogonalised, and its own part applied.

(Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; Liu et al., "Muon is Scalable for LLM
Training", arXiv 2502.16982, section 2.3, is the same over ZeRO-1. Update rule, options and state are those of
:class:`torch.optim.Muon`.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Muon

from autopar.runtime.optimizers.layout import Layout, gather
from autopar.schedules.weight_moves import MESSAGES

COMPUTE_DTYPE: Final = torch.bfloat16
"""Of the iteration, and so of what is gathered."""


class ShardedMuon(Muon):
    """:class:`torch.optim.Muon` for parameters that are split over ranks.

    ``groups`` are parameter groups of one; ``layouts`` say how each parameter that can have a gradient is stored. All
    ranks must step together. Of whole matrices, about as much exists at a time as a bucket of gradients has at least
    (:attr:`autopar.schedules.weight_moves.MessageSizes.bucket_bytes`).
    """

    def __init__(self, groups: list[dict[str, Any]], layouts: Mapping[nn.Parameter, Layout]) -> None:
        super().__init__(groups)
        self.layouts = layouts

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for bucket in self._buckets():
            parts = [(one.momentum().to(COMPUTE_DTYPE), one.layout) for one in bucket]
            for one, whole in zip(bucket, gather(parts), strict=True):
                one.apply(whole)

    def _buckets(self) -> Iterator[list[_Update]]:
        """Steps whose matrices are gathered together.

        Of one split only: ranks that share the parts of a matrix may hold different numbers of those split otherwise.
        """
        found: dict[tuple[str, ...], list[list[_Update]]] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                update = _Update(parameter, group, self.state[parameter], self.layouts[parameter])
                buckets = found.setdefault(tuple(axis.name for axis in update.layout.axes()), [[]])
                buckets[-1].append(update)
                if sum(one.layout.elements for one in buckets[-1]) * COMPUTE_DTYPE.itemsize >= MESSAGES.bucket_bytes:
                    buckets.append([])
        for split in sorted(found):
            yield from filter(None, found[split])


@dataclass(frozen=True)
class _Update:
    """One parameter's step."""

    parameter: nn.Parameter
    group: Mapping[str, Any]
    state: dict[str, Any]
    layout: Layout

    def momentum(self) -> Tensor:
        """This rank's part of what is orthogonalised."""
        gradient, momentum = self.parameter.grad, self.group["momentum"]
        assert gradient is not None
        if "momentum_buffer" not in self.state:
            self.state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer: Tensor = self.state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        return gradient.lerp(buffer, momentum) if self.group["nesterov"] else buffer

    def apply(self, whole: Tensor) -> None:
        """``whole`` is the matrix that :meth:`momentum` is a part of."""
        group, lr = self.group, float(self.group["lr"])
        update = orthogonalized(whole, group["ns_coefficients"], group["ns_steps"], group["eps"])
        self.parameter.mul_(1 - lr * group["weight_decay"])
        self.parameter.add_(self.layout.own(update).to(self.parameter.device), alpha=-lr * self._scale())

    def _scale(self) -> float:
        """Of the learning rate, by the shape of the whole matrix."""
        rows, columns = self.layout.shape
        rule = self.group["adjust_lr_fn"]
        if rule == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1, rows / columns)) if rule in (None, "original") else 1.0


def orthogonalized(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """``matrix`` with its singular values brought near 1, by ``steps`` of a quintic Newton-Schulz iteration.

    On the smaller side of the matrix, scaled so that no singular value is above 1.
    """
    a, b, c = coefficients
    x = matrix.to(COMPUTE_DTYPE)
    x = x.mT if (is_tall := x.shape[0] > x.shape[1]) else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x
