"""Some gradients of one stage that travel together: accumulated over microbatches, summed over ranks.

Two kinds. Where the optimizer updates what the module computes with, a :class:`SumBucket` sums in place: the first
microbatch's gradient is copied into a flat buffer, of which ``parameter.grad`` is a view from then on; the others add
to it, and nothing is copied to be sent (Li et al., "PyTorch Distributed", VLDB 2020, section 4).

Where it updates masters (:mod:`autopar.runtime.store`), a :class:`MasterBucket` gives each rank the sum for the rows
that it stores: a reduce-scatter over the ranks that share a copy, then an all-reduce over those that hold the same
rows (Rajbhandari et al., "ZeRO", SC 2020, section 5; Zhao et al., "PyTorch FSDP", VLDB 2023, section 3.2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.runtime.axes import Axis
from autopar.runtime.collectives import reduce_sum_, scatter_sum_into
from autopar.runtime.host import host_empty
from autopar.runtime.later import Spans, accumulate


class Bucket(Protocol):
    """What a :class:`autopar.runtime.grads.Reducer` does with a bucket, and where that is.

    ``waiting``: how many gradients the current backward still makes; ``armed``: whether the bucket starts when it has
    made all; ``started``: whether it has; ``per_pass``: whether it does so in every backward, not in the last alone;
    ``sums_twice``: whether another sum follows at the end, over other ranks.
    """

    parameters: list[nn.Parameter]
    waiting: int
    armed: bool
    started: bool
    per_pass: bool

    @property
    def sums_twice(self) -> bool: ...

    def take(self, parameter: nn.Parameter) -> None:
        """Autograd is done with ``parameter``; where all of its gradient was put off, it has none yet."""

    def accumulate(self, parameter: Tensor, left: Tensor, right: Tensor, groups: Spans | None = None) -> None:
        """A put-off gradient, as :func:`autopar.runtime.later.accumulate` takes it."""

    def start(self) -> None:
        """Start to sum what is there."""

    def settle(self) -> None:
        """Wait for what was started in a pass, and add it to what was before."""

    def release(self) -> None:
        """Wait for what was started in a pass: of its terms nothing lives on."""

    def reduce(self) -> None:
        """The step's last gradients were started: start what has to follow."""

    def wait(self) -> None:
        """Until the sums are in the masters' ``grad``. On a GPU, copies to the host may still be under way."""

    def clear(self) -> None:
        """The next step begins."""


@dataclass
class SumBucket:
    """Parameters of one dtype that are summed over the same ranks, their gradients one after another.

    ``shared``: each is a weight of several stages, and gets the sum where this rank's own stage gives it no gradient.
    """

    group: Axis
    parameters: list[nn.Parameter]
    shared: bool = False
    flat: Tensor = field(init=False)
    views: dict[Tensor, Tensor] = field(init=False)
    waiting: int = 0
    armed: bool = False
    started: bool = False
    per_pass: bool = False
    sums_twice: ClassVar[bool] = False
    work: dist.Work | None = None

    def __post_init__(self) -> None:
        first = self.parameters[0]
        sizes = [p.numel() for p in self.parameters]
        self.flat = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
        parts = torch.split(self.flat, sizes)
        self.views = {p: part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)}

    def take(self, parameter: nn.Parameter) -> None:
        view = self.views[parameter]
        if parameter.grad is not None and parameter.grad is not view:  # the first of the step
            view.copy_(parameter.grad)
            parameter.grad = view

    def accumulate(self, parameter: Tensor, left: Tensor, right: Tensor, groups: Spans | None = None) -> None:
        accumulate(parameter, left, right, groups, into=self.views[parameter])

    def start(self) -> None:
        for parameter, view in self.views.items():
            if parameter.grad is None:
                view.zero_()
                parameter.grad = view if self.shared else None
        self.started = True
        self.work = reduce_sum_(self.flat, self.group, async_op=True)

    def settle(self) -> None:
        """It never starts before the last backward."""

    def release(self) -> None:
        """It never starts before the last backward."""

    def reduce(self) -> None:
        """Nothing follows its one sum."""

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        self.work, self.started = None, False

    def clear(self) -> None:
        """The flat buffer keeps its memory."""


@dataclass(frozen=True)
class Route:
    """How terms become the sum for one master: over ``shard`` (rows; ``sums``: the terms there differ, else they are
    equal and each rank takes its rows), then over ``rest``, sent as ``dtype``. ``copies``: so many ranks have the same
    term."""

    shard: Axis
    sums: bool
    rest: Axis
    dtype: torch.dtype
    copies: int = 1


@dataclass(eq=False)
class Flight:
    """This rank's rows of a sum under way; ``terms`` are kept until it is over."""

    part: Tensor
    terms: Tensor
    work: dist.Work | None


class MasterBucket:
    """Parameters whose masters have one dtype, one device and one :class:`Route`.

    A gradient of full size lives from the backward that makes it until it is sent; between, it is of the parameter's
    own dtype, or of the master's once a second one is added. The sum is in the master's dtype. ``shared`` as in
    :class:`SumBucket`.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        masters: Sequence[nn.Parameter],
        route: Route,
        *,
        per_pass: bool,
        shared: bool = False,
    ) -> None:
        self.parameters, self._masters, self._route = list(parameters), list(masters), route
        self.per_pass, self._shared = per_pass, shared
        self.waiting, self.armed, self.started = 0, False, False
        self._sizes = [master.numel() for master in masters]
        self._dtype = masters[0].dtype
        self._device = parameters[0].device
        self._is_host = masters[0].device != self._device
        self._pending: dict[Tensor, Tensor] = {}
        self._seen: set[Tensor] = set()
        self._flight: Flight | None = None
        self._own: Tensor | None = None
        self._host: Tensor | None = None

    @property
    def sums_twice(self) -> bool:
        return self._route.shard.size > 1 and self._route.rest.size > 1

    def take(self, parameter: nn.Parameter) -> None:
        if parameter.grad is None:
            return
        self._seen.add(parameter)
        if parameter.dtype == self._dtype:
            return  # autograd adds to it in place
        before, gradient = self._pending.get(parameter), parameter.grad
        self._pending[parameter] = gradient if before is None else before.to(self._dtype).add_(gradient)
        parameter.grad = None

    def accumulate(self, parameter: Tensor, left: Tensor, right: Tensor, groups: Spans | None = None) -> None:
        accumulate(parameter, left, right, groups)
        self.take(parameter)  # type: ignore[arg-type]

    def start(self) -> None:
        self.settle()
        route, n = self._route, self._route.shard.size
        terms = self._terms()
        if route.copies > 1:
            terms = terms / route.copies
        if n == 1:
            self._flight = Flight(terms, terms, reduce_sum_(terms, route.rest, async_op=True))
        elif route.sums:
            part = terms.new_empty(terms.numel() // n)
            self._flight = Flight(part, terms, scatter_sum_into(part, terms, route.shard))
        else:
            part = terms.view(n, -1)[route.shard.index].clone()
            self._flight = Flight(part, part, None)
        self.started = True

    def settle(self) -> None:
        self.release()
        flight, self._flight = self._flight, None
        if flight is None:
            return
        if self._own is None:
            self._own = flight.part.to(self._dtype)
        else:
            self._own.add_(flight.part)

    def release(self) -> None:
        if self._flight is None or self._flight.work is None:
            return
        self._flight.work.wait()
        self._flight = Flight(self._flight.part, self._flight.part, None)

    def reduce(self) -> None:
        if self.per_pass and self._has_terms():
            self.start()
        if not self.sums_twice:
            return
        self.settle()
        if self._own is not None:
            part, self._own = self._own.to(self._route.dtype), None
            self._flight = Flight(part, part, reduce_sum_(part, self._route.rest, async_op=True))

    def wait(self) -> None:
        self.settle()
        self.started = False
        if self._own is None:
            return
        own = self._to_host(self._own) if self._is_host else self._own
        for parameter, master, part in zip(self.parameters, self._masters, torch.split(own, self._sizes), strict=True):
            if self._shared or parameter in self._seen:
                master.grad = part.view(master.shape)

    def clear(self) -> None:
        self._own = None
        self._seen.clear()

    def _has_terms(self) -> bool:
        return bool(self._pending) or any(parameter.grad is not None for parameter in self.parameters)

    def _terms(self) -> Tensor:
        """Flat ``[n, part]``: for each rank of the shard the rows it stores, parameter after parameter.

        Takes the gradients. One alone that needs neither padding nor a cast is sent as it is.
        """
        n, gradients = self._route.shard.size, [self._taken(parameter) for parameter in self.parameters]
        alone = gradients[0] if len(gradients) == 1 else None
        fits = alone is not None and alone.numel() == n * self._sizes[0] and alone.dtype == self._route.dtype
        if alone is not None and fits and alone.is_contiguous():
            return alone.view(-1)
        terms = torch.empty(n * sum(self._sizes), dtype=self._route.dtype, device=self._device)
        for part, gradient in zip(torch.split(terms.view(n, -1), self._sizes, dim=1), gradients, strict=True):
            _fill(part, gradient)
        return terms

    def _taken(self, parameter: nn.Parameter) -> Tensor | None:
        gradient = self._pending.pop(parameter, parameter.grad)
        parameter.grad = None
        return gradient

    def _to_host(self, own: Tensor) -> Tensor:
        if self._host is None:
            self._host = host_empty(own.shape, own.dtype, self._device)
        return self._host.copy_(own, non_blocking=True)


def _fill(part: Tensor, gradient: Tensor | None) -> None:
    """``part [n, elements]`` becomes ``gradient``, with zeros behind."""
    if gradient is None:
        part.zero_()
        return
    flat, width = gradient.reshape(-1), part.shape[1]
    if not width:
        return
    rows, rest = divmod(flat.numel(), width)
    part[:rows].copy_(flat[: rows * width].view(rows, width))
    if rows < part.shape[0]:
        part[rows:].zero_()
        part[rows, :rest].copy_(flat[rows * width :])
