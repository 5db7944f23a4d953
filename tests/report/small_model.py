"""A model for the command line: four layers, a few numbers each."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def make() -> tuple[nn.Module, Tensor]:
    return Small(), torch.ones(8, 8)
