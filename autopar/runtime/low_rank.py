"""Buckets (:mod:`autopar.runtime.buckets`) whose gradients are summed over ``dp`` in low rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from autopar.runtime.axes import Axis
from autopar.runtime.buckets import Flight, MasterBucket, Route, SumBucket
from autopar.runtime.powersgd import PowerSGD, Work


class LowRankSumBucket(SumBucket):
    """One that sums in place."""

    def __init__(self, group: Axis, parameters: list[nn.Parameter], rank: int) -> None:
        super().__init__(group, parameters)
        self.low = PowerSGD(rank)
        self._sum: Work | None = None

    def start(self) -> None:
        for parameter, view in self.views.items():
            if parameter.grad is None:
                view.zero_()
        self.started = True
        self._sum = self.low.start(list(self.views.values()), self.group)

    def reduce(self) -> None:
        if self._sum is not None:
            self._sum.advance()

    def wait(self) -> None:
        if self._sum is not None:
            self._sum.wait()
        self._sum, self.started = None, False


class LowRankMasterBucket(MasterBucket):
    """One whose sums go into masters, or each rank's rows of them (ZeRO-1): every rank has the whole sum for a moment.

    ``dp``: all ranks whose terms are summed.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], masters: Sequence[nn.Parameter], route: Route, dp: Axis, rank: int
    ) -> None:
        super().__init__(parameters, masters, route, per_pass=False)
        self.low = PowerSGD(rank)
        self._dp = dp
        self._sum: Work | None = None

    def start(self) -> None:
        self.settle()
        shard, terms = self._route.shard, self._terms()
        rows = terms.view(shard.size, -1)
        padded = [(shard.size * m.shape[0], *m.shape[1:]) if m.dim() else (shard.size,) for m in self._masters]
        self._sum = self.low.start(torch.split(rows, self._sizes, dim=1), self._dp, padded)
        self._flight = Flight(rows[shard.index], terms, cast(dist.Work, self._sum))
        self.started = True

    def settle(self) -> None:
        flight = self._flight
        super().settle()
        if flight is not None and self._own is not None and flight.part.numel() < flight.terms.numel():
            self._own = self._own.clone()  # not a part of all terms

    def reduce(self) -> None:
        if self._sum is not None:
            self._sum.advance()
