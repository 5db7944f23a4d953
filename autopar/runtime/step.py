"""What lives within one training step of one rank. All is taken out once it is used: memory follows the schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autopar.runtime.pipe import Message

Place = tuple[int, int]
"""(stage, microbatch)."""


@dataclass
class Step:
    """``totals`` by stage: scalars of the whole batch; ``loss`` is this rank's share of it so far.

    ``accumulate``: gradients are added to those that are there, and wait for another step's to be reduced and used.
    ``updates``: False once a step was found not finite, and changes nothing.
    """

    batch: Mapping[str, Tensor]
    totals: dict[int, tuple[Tensor, ...]]
    loss: Tensor
    accumulate: bool = False
    updates: bool = True
    arriving: dict[Place, Message] = field(default_factory=dict)  # what a stage receives
    outputs: dict[Place, tuple[Tensor, ...]] = field(default_factory=dict)  # what it makes, until sent
    leaves: dict[Place, list[Tensor]] = field(default_factory=dict)  # received, waiting for gradients
    shared: dict[Place, list[Tensor]] = field(default_factory=dict)  # of what arrives, what the stage before keeps too
    roots: dict[Place, list[GradientEdge | None]] = field(default_factory=dict)  # where its backward begins
    returning: dict[Place, Message] = field(default_factory=dict)  # the gradients it begins with
    gradients: dict[Place, tuple[Tensor, ...]] = field(default_factory=dict)  # of received, until sent

    @classmethod
    def begin(
        cls,
        batch: Mapping[str, Tensor],
        totals: dict[int, tuple[Tensor, ...]],
        device: torch.device,
        *,
        accumulate: bool = False,
    ) -> Step:
        return cls(batch, totals, torch.zeros((), dtype=torch.float64, device=device), accumulate)


def root_of(tensor: Tensor) -> GradientEdge | None:
    """Where the backward of ``tensor`` begins, without keeping its memory; None where it has no gradient."""
    return get_gradient_edge(tensor) if tensor.requires_grad else None
