"""Dynamic loss scaling, for gradients in float16, whose small ones would vanish.

The backward begins with the scale instead of 1, and gradients are divided by it before anything reads them. Where one
of any rank isn't finite, no rank takes the step and the scale shrinks; after many steps in a row it grows
(Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2; numbers as in ``torch.amp.GradScaler``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from autopar.errors import ArgumentError
from autopar.runtime.axes import Axis
from autopar.runtime.collectives import reduce_max_

_LARGEST = torch.finfo(torch.float32).max


class LossScaler:
    """The scale, the same on all ranks. ``interval``: so many good steps in a row make it grow."""

    def __init__(
        self, *, scale: float = 2.0**16, growth: float = 2.0, backoff: float = 0.5, interval: int = 2000
    ) -> None:
        self.scale, self.growth, self.backoff, self.interval = scale, growth, backoff, interval
        self.good_steps = 0

    def root(self, loss: Tensor) -> Tensor:
        """What the backward of ``loss`` begins with."""
        return torch.full_like(loss, self.scale)

    def settle(self, gradients: Sequence[Tensor], world: Axis, device: torch.device) -> bool:
        """Unscale ``gradients``, this rank's, in place; whether those of all ranks are finite, so that they all step.

        Adapts the scale. One all-reduce of one number, on ``device``; all ranks must call it.
        """
        bad = [~torch.isfinite(torch.linalg.vector_norm(g, float("inf"))).to(device) for g in gradients if g.numel()]
        found = torch.stack(bad).any().float() if bad else torch.zeros((), device=device)
        reduce_max_(found, world.meant_for("gradients that are not finite"))
        for gradient in gradients:
            gradient.mul_(1 / self.scale)
        finite = not bool(found)
        self._adapt(finite)
        return finite

    def _adapt(self, finite: bool) -> None:
        if not finite:
            self.scale, self.good_steps = self.scale * self.backoff, 0
            return
        self.good_steps += 1
        if self.good_steps == self.interval:
            self.good_steps = 0
            self.scale = self.scale * self.growth if self.scale * self.growth <= _LARGEST else self.scale

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps, by name."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """The inverse. Raises ArgumentError where ``state`` is none that :meth:`state_dict` made."""
        if set(state) != {"scale", "good_steps"} or not 0 < state["scale"] <= _LARGEST or state["good_steps"] < 0:
            raise ArgumentError(f"{dict(state)} is no state of a loss scaler; give what its state_dict() returned")
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])
