"""Experts for a checker that has no rows of them: every expert of a rank computes all tokens, and most count nothing.

Written out so, in products, sums and collectives that the checker knows, rows are ``[experts, slots, width]``, of which
a routing says which count: those of the experts that a slot chose. Tokens that travel are gathered, and what comes back
is reduce-scattered; where tokens are whole, each rank's experts make a term of the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.runtime import Axis, P, R, S
from autopar.spmd import Type
from tests.spmd_strides import Strides, places

FUNCTIONS = ("dispatch", "dispatch_start", "dispatch_end", "grouped_linear", "grouped_bias", "combine")
"""What stands for the functions of these names; for ``route``, :meth:`Routing.of`."""


@dataclass
class Routing:
    """``counts [experts, slots]``: 1 where a slot chose the expert. ``exchange``: axes that rows travel over, and how
    tokens are split on each."""

    strides: Strides
    exchange: Sequence[tuple[Axis, Type]]
    choices: int
    counts: Tensor

    @classmethod
    def of(
        cls,
        strides: Strides,
        index: Tensor,
        experts: int,
        *,
        exchange: Sequence[Axis] = (),
        filter: Sequence[Axis] = (),
        **_: Any,
    ) -> Routing:
        own = torch.arange(experts)
        for axis in sorted((*exchange, *filter), key=lambda axis: list(strides.mesh).index(axis.name)):
            own = strides.collective("convert", own, axis, src=R, dst=S(0))
        outers = dict(map(strides.named, places(index)))
        made = cls(strides, [(axis, S(0, outers[axis.name])) for axis in exchange], index.shape[1], own)
        made.counts = (made.slots(index.unsqueeze(2)).squeeze(1).unsqueeze(0) == own.unsqueeze(1)).to(torch.float32)
        return made

    def whole(self, x: Tensor) -> Tensor:
        """Of all ranks that tokens travel between."""
        for axis, kind in reversed(self.exchange):
            x = self.strides.collective("all_gather", x, axis, src=kind, dst=R)
        return x

    def slots(self, x: Tensor) -> Tensor:
        """``[tokens, choices, ...]`` of all as ``[slots, ...]``."""
        return self.whole(x).flatten(0, 1)


def dispatch(x: Tensor, routing: Routing) -> Tensor:
    slots = routing.slots(x.unsqueeze(1).expand(-1, routing.choices, -1))
    return routing.counts.unsqueeze(2).to(x.dtype) * slots.unsqueeze(0)


def dispatch_start(x: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
    return x, routing


def dispatch_end(started: tuple[Tensor, Routing]) -> Tensor:
    return dispatch(*started)


def grouped_linear(rows: Tensor, weight: Tensor, routing: Routing, transposed: bool = False) -> Tensor:
    return rows @ (weight if transposed else weight.transpose(1, 2))


def grouped_bias(rows: Tensor, bias: Tensor, routing: Routing) -> Tensor:
    return rows + bias.unsqueeze(1)


def combine(rows: Tensor, weights: Tensor, routing: Routing) -> Tensor:
    counted = routing.counts.unsqueeze(2).to(rows.dtype) * rows
    y = (counted * routing.slots(weights).unsqueeze(0).unsqueeze(2)).sum(0)
    y = y.unflatten(0, (-1, routing.choices)).sum(1)
    for axis, kind in routing.exchange:
        y = routing.strides.collective("reduce_scatter", y, axis, src=P, dst=kind)
    return y
