"""Gradients that are pending sums: accumulated over microbatches, summed over ranks once, in buckets.

Which ranks: the axes that :attr:`Parameter.reduce` names and, for a weight tied between stages, every stage
that holds a copy of it. Where that is more than one axis, the sum runs over their joint group, as one
collective: it can start without waiting for another, and it moves fewer bytes than one after the other.

The first microbatch's gradient is copied into a flat bucket, of which ``parameter.grad`` is a view from then
on; the others add to it in place, and nothing is copied to be sent (Li et al., "PyTorch Distributed", VLDB
2020, section 4).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.mesh import AXES
from autopar.runtime.axes import Axes, Axis
from autopar.runtime.collectives import reduce_sum_, subgroups
from autopar.runtime.later import accumulate
from autopar.runtime.modules import dtype_of
from autopar.runtime.program import Parameter, Program, VocabularyProgram

BUCKET_BYTES = 25 * 2**20
_SMALL_BYTES = 2**20
_BUCKETS = 8


def reduce_ranks(parameter: Parameter, axes: Axes, placement: Sequence[int]) -> tuple[int, ...]:
    """The global ranks whose terms make up the gradient; ``placement[stage]`` is the stage's index on pp."""
    places = {name: [axes[name].index] for name in AXES}
    places |= {name: list(range(axes[name].size)) for name in parameter.reduce}
    if parameter.shared_stages:
        places["pp"] = sorted({placement[stage] for stage in parameter.shared_stages})
    return tuple(sorted(axes.mesh.rank(**dict(zip(AXES, at, strict=True))) for at in product(*places.values())))


def reduce_groups(
    programs: Iterable[Program | VocabularyProgram], axes: Axes, placement: Sequence[int]
) -> dict[tuple[int, ...], Axis]:
    """The groups of all sums of this rank's stages, by their ranks. All ranks of the world must call it."""
    along = {axis.ranks: axis for name, axis in axes.items() if name != "pp"}
    wanted: dict[tuple[int, ...], str] = {}
    for program in programs:
        for parameter in program.parameters:
            names = [*parameter.reduce, *(["pp"] if parameter.shared_stages else [])]
            wanted[reduce_ranks(parameter, axes, placement)] = "mesh_" + "_".join(
                name for name in AXES if name in names and axes[name].size > 1
            )
    return along | subgroups(axes, {ranks: name for ranks, name in wanted.items() if ranks not in along})


@dataclass
class _Bucket:
    """Some parameters of one dtype that are summed over the same ranks, their gradients one after another."""

    group: Axis
    parameters: list[nn.Parameter]
    flat: Tensor = field(init=False)
    views: list[Tensor] = field(init=False)
    waiting: int = 0
    started: bool = False
    work: dist.Work | None = None

    def __post_init__(self) -> None:
        first = self.parameters[0]
        sizes = [p.numel() for p in self.parameters]
        self.flat = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
        self.views = [
            part.view(p.shape) for part, p in zip(torch.split(self.flat, sizes), self.parameters, strict=True)
        ]

    def start(self) -> None:
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is None:
                view.zero_()
        self.started = True
        self.work = reduce_sum_(self.flat, self.group, async_op=True)

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        self.work, self.started = None, False


class Reducer:
    """The gradients of one stage.

    Once per step: backward of all microbatches but the last, :meth:`expect_last`, the last one (each bucket
    starts its sum when its gradients are complete), :meth:`launch`, :meth:`wait`, optimizer, :meth:`zero`.
    A parameter that no microbatch used has no gradient (None), as on one device. Parameters in ``without`` are
    another reducer's: those that two stages of one rank share.
    """

    def __init__(
        self,
        module: nn.Module,
        program: Program | VocabularyProgram,
        groups: Mapping[tuple[int, ...], Axis],
        axes: Axes,
        placement: Sequence[int],
        bucket_bytes: int = BUCKET_BYTES,
        *,
        without: Collection[nn.Parameter] = (),
    ) -> None:
        trainable = [
            p
            for p in program.parameters
            if p.trainable and not p.is_buffer and module.get_parameter(p.name) not in without
        ]
        self.placement = tuple(placement)
        self.specs = {p.name: p for p in trainable}
        self.parameters = {p.name: module.get_parameter(p.name) for p in trainable}
        self._armed = False
        summed = {p.name: reduce_ranks(p, axes, placement) for p in trainable}
        self._buckets = [
            _Bucket(groups[ranks], [self.parameters[name] for name in names])
            for ranks, names in _fill_buckets(trainable, summed, bucket_bytes)
        ]
        self._place: dict[Tensor, tuple[_Bucket, Tensor]] = {
            parameter: (bucket, view)
            for bucket in self._buckets
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True)
        }
        for parameter in self._place:
            parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]

    def zero(self) -> None:
        """Drop all gradients: the next step begins. The buckets keep their memory."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def expect_last(self) -> None:
        """The next backward is the last of the step: what it completes can be summed."""
        self._armed = True
        for bucket in self._buckets:
            bucket.waiting = len(bucket.parameters)

    def expect_last_products(self, parameters: Iterable[Tensor]) -> None:
        """Only what :meth:`accumulate` is now given is missing of the step: ``parameters``, once per product.

        Instead of :meth:`expect_last` where the step ends with put-off gradients; all else is complete.
        """
        self._armed = True
        for bucket in self._buckets:
            bucket.waiting = 0
        for parameter in parameters:
            if parameter in self._place:
                self._place[parameter][0].waiting += 1
        self._start_complete()

    def accumulate(self, parameter: Tensor, left: Tensor, right: Tensor) -> None:
        """``parameter.grad += left [m, t] @ right [t, n]``, without a temporary: a put-off gradient."""
        if parameter not in self._place:
            accumulate(parameter, left, right)
            return
        bucket, view = self._place[parameter]
        accumulate(parameter, left, right, into=view)
        self._count(bucket)

    def put(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """``gradient`` is the first of the step that ``parameter`` gets, and was made elsewhere."""
        parameter.grad = gradient
        if parameter in self._place:
            self._accumulated(parameter)

    def launch(self) -> None:
        """Start the sums that have not been started by the last backward."""
        self._armed = False
        for bucket in self._buckets:
            if not bucket.started:
                bucket.start()

    def wait(self) -> None:
        """Until all gradients are sums. :meth:`launch` comes before."""
        for bucket in self._buckets:
            bucket.wait()

    def gradients(self) -> dict[str, Tensor]:
        """Name -> local gradient of every parameter that has one."""
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

    def _accumulated(self, parameter: nn.Parameter) -> None:
        """Autograd is done with the parameter; where all of its gradient was put off, it has none yet."""
        bucket, view = self._place[parameter]
        if parameter.grad is not None and parameter.grad is not view:  # the first of the step
            view.copy_(parameter.grad)
            parameter.grad = view
        self._count(bucket)

    def _count(self, bucket: _Bucket) -> None:
        if self._armed:
            bucket.waiting -= 1
            self._start_complete()

    def _start_complete(self) -> None:
        """In order, so that every rank of a group starts the same sums in the same order."""
        for bucket in self._buckets:
            if bucket.started:
                continue
            if bucket.waiting:
                return
            bucket.start()


def _fill_buckets(
    parameters: Sequence[Parameter], summed: Mapping[str, tuple[int, ...]], bucket_bytes: int
) -> Iterator[tuple[tuple[int, ...], list[str]]]:
    """``(ranks, names)`` of each bucket, in the order in which a backward completes them.

    A program lists its parameters in the order of their use; the backward goes the other way. Copies of tied
    weights lie at different places of stages that differ otherwise: they go in the order of their names.
    Where everything would fit into a few buckets, they are smaller, or no sum could begin before the end.
    """
    size = {p.name: math.prod(p.shape) * dtype_of(p.dtype).itemsize for p in parameters}
    small = min(bucket_bytes, max(sum(size.values()) // _BUCKETS, _SMALL_BYTES))
    backward = [p for p in reversed(parameters) if not p.shared_stages]
    tied = sorted((p for p in parameters if p.shared_stages), key=lambda p: p.name)
    open_buckets: dict[tuple[tuple[int, ...], str], list[str]] = {}
    for parameter in [*backward, *tied]:
        key = (summed[parameter.name], parameter.dtype)
        if len(key[0]) == 1:
            continue
        open_buckets.setdefault(key, []).append(parameter.name)
        if sum(size[name] for name in open_buckets[key]) >= (bucket_bytes if parameter.shared_stages else small):
            yield key[0], open_buckets.pop(key)
    for key, names in open_buckets.items():
        yield key[0], names
