"""What adding up gradients over microbatches takes on a rank: memory traffic, by how the runtime keeps the sum.

As :mod:`autopar.runtime.buckets` does it. A parameter that is its own master: autograd adds to its gradient in place;
where ranks sum it, the first one of a step is copied into the bucket. Of a master in another dtype, the first gradient
becomes one of that dtype when a second one is added to it. Where gradients are scattered in every backward (ZeRO 2 and
3), each is sent in the master's dtype, and a rank adds up its own rows alone. Products that are put off add to a sum of
their own dtype by themselves. A copy that only packs small gradients to be sent isn't counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import fx

from autopar.cluster import Device
from autopar.cost_models import step
from autopar.graph import info
from autopar.options import Options
from autopar.planner.block_costs import put_off_weights
from autopar.planner.zero import MoveCosts


class Summed(NamedTuple):
    """How gradients are kept: the dtypes of the parameter as it is computed with, of its master, and of what is sent;
    over how many ranks its rows are stored; whether it is its own master; whether several ranks have terms; whether it
    is scattered in every backward."""

    dtype: torch.dtype
    master: torch.dtype
    travels: torch.dtype
    shards: int
    is_own: bool
    is_summed: bool
    is_scattered: bool

    def added(self, elements: float, microbatches: int, device: Device, *, put_off: bool = False) -> float:
        """Seconds of an update, for so many elements of parameters on a rank, as gradients are made. ``put_off``: by
        products that are."""
        if self.is_scattered or (put_off and self.dtype == self.master):
            return 0.0
        more, made, own = microbatches - 1, self.dtype.itemsize, self.master.itemsize
        added = more * step.add_seconds(elements, made, own, device)
        if self._is_in_place:
            return added + (step.copy_seconds(elements, own, own, device) if self.is_summed else 0.0)
        return added + (self._cast(elements, self.dtype, self.master, device) if more else 0.0)

    def sent(self, elements: float, microbatches: int, device: Device, part: float | None = None) -> float:
        """The same, as gradients are sent; ``part`` is the rank's of them, with padding (None: there is none)."""
        if self._is_in_place:
            return 0.0
        part = elements / self.shards if part is None else part
        arrived = self._cast(part, self.travels, self.master, device)
        if self.is_scattered:
            added = (microbatches - 1) * step.add_seconds(part, self.travels.itemsize, self.master.itemsize, device)
            return microbatches * self._cast(elements, self.dtype, self.travels, device) + arrived + added
        held = self.master if microbatches > 1 else self.dtype
        return self._cast(elements, held, self.travels, device) + arrived

    @property
    def _is_in_place(self) -> bool:
        return self.is_own and (not self.is_summed or self.travels == self.master)

    @staticmethod
    def _cast(elements: float, old: torch.dtype, new: torch.dtype, device: Device) -> float:
        return step.copy_seconds(elements, old.itemsize, new.itemsize, device) if old != new else 0.0


class Accumulation(NamedTuple):
    """Seconds per microbatch: all, and those of the pass that completes gradients, where there is one for that."""

    seconds: float
    put_off: float


@dataclass(frozen=True)
class GradientCosts:
    """Of stages whose weights move as ``moves`` says, for ``microbatches`` that make up one update; ``split``: their
    backwards are two passes."""

    moves: MoveCosts
    microbatches: int
    split: bool

    def accumulation(self, calls: Sequence[int]) -> Accumulation:
        """What the backward of a microbatch through ``calls`` takes for it, on the average of an update."""
        elements: Counter[tuple[Summed, bool]] = Counter()
        stored: Counter[tuple[Summed, bool]] = Counter()
        for name, node in self.moves.trained(calls):
            key = self._summed(name, node), node in self._put_off
            elements[key] += info(node).meta.numel
            stored[key] += self.moves.whole_elements(name, node) // key[0].shards
        device = self.moves.machine.device
        made: list[float] = []
        later: list[float] = []
        for (summed, put_off), count in elements.items():
            added = summed.added(count, self.microbatches, device, put_off=put_off) / self.microbatches
            (later if put_off else made).append(added)
            sent = summed.sent(count, self.microbatches, device, stored[summed, put_off])
            later.append(sent / self.microbatches)
        return Accumulation(math.fsum((*made, *later)), math.fsum(later))

    def _summed(self, name: str, node: fx.Node) -> Summed:
        moves, dtype = self.moves, info(node).meta.dtype
        master = moves.model.parameters[name].master or dtype
        return summed_as(
            dtype, master, moves.shards_of(name, node), moves.options, is_summed=moves.is_summed(name, node)
        )

    @cached_property
    def _put_off(self) -> frozenset[fx.Node]:
        blocks = self.moves.model.blocks if self.split else ()
        return frozenset(node for block in blocks for node in put_off_weights(block))


def summed_as(dtype: torch.dtype, master: torch.dtype, shards: int, options: Options, *, is_summed: bool) -> Summed:
    """How gradients are kept of a parameter that is computed with in ``dtype``."""
    sent = getattr(torch, options.reduce_dtype) if options.reduce_dtype else master
    away = not {"optimizer", "parameters"}.isdisjoint(options.offload)
    is_own = shards == 1 and dtype == master and not away
    return Summed(dtype, master, sent, shards, is_own, is_summed, options.zero >= 2 and shards > 1)
