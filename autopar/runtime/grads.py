"""Gradients that are pending sums: accumulated over microbatches, summed over ranks in buckets.

Which ranks: the axes that :attr:`Parameter.reduce` names and, for a weight tied between stages, every stage
that holds a copy of it. Where that is more than one axis, the sum runs over their joint group, as one
collective: it can start without waiting for another, and it moves fewer bytes than one after the other.
:mod:`autopar.runtime.buckets` says how gradients are summed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from operator import itemgetter
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from autopar.compression import low_rank_pays
from autopar.mesh import AXES
from autopar.runtime.axes import Axes, Axis
from autopar.runtime.buckets import Bucket, MasterBucket, Route, SumBucket
from autopar.runtime.collectives import subgroups
from autopar.runtime.later import Spans, accumulate
from autopar.runtime.low_rank import LowRankMasterBucket, LowRankSumBucket
from autopar.runtime.modules import dtype_of
from autopar.runtime.powersgd import PowerSGD
from autopar.runtime.program import Parameter, Program, VocabularyProgram
from autopar.runtime.shards import stored_shape
from autopar.runtime.units import units
from autopar.schedules.gradient_messages import IN_FLIGHT, Gradient, together
from autopar.schedules.weight_moves import MESSAGES, MessageSizes

Groups = Mapping[tuple[int, ...], Axis]
Place = tuple[tuple[int, ...], str]
"""The stages that have a bucket, and its first parameter."""


def reduce_ranks(parameter: Parameter, axes: Axes, placement: Sequence[int]) -> tuple[int, ...]:
    """The global ranks whose terms make up what this rank stores of the gradient, once ZeRO's shards have summed it.

    ``placement[stage]`` is the stage's index on pp.
    """
    line = axes.line(tuple(parameter.types)) if parameter.zero > 1 else None
    data = axes.mesh.data_axes(tuple(parameter.types)) if line is not None else ()
    places = {name: [axes[name].index] for name in AXES}
    places |= {name: list(range(axes[name].size)) for name in parameter.reduce if name not in data}
    if parameter.shared_stages:
        places["pp"] = sorted({placement[stage] for stage in parameter.shared_stages})
    strides = [(axes.mesh.stride(name), at) for name, at in places.items()]
    ranks = [sum(place) for place in product(*([stride * i for i in at] for stride, at in strides))]
    if line is not None and set(data) & set(parameter.reduce):  # the same rows of other copies
        ranks = [rank + other - axes.rank for rank in ranks for other in line.replicate.ranks]
    return tuple(sorted(ranks))


def reduce_groups(
    programs: Iterable[Program | VocabularyProgram], axes: Axes, placement: Sequence[int]
) -> dict[tuple[int, ...], Axis]:
    """The groups of all sums of this rank's stages, by their ranks. All ranks of the world must call it."""
    known = [*(line.replicate for line in axes.lines.values()), *(axis for name, axis in axes.items() if name != "pp")]
    along = {axis.ranks: axis for axis in known}
    wanted: dict[tuple[int, ...], str] = {}
    for program in programs:
        for parameter in program.parameters:
            names = [*parameter.reduce, *(["pp"] if parameter.shared_stages else [])]
            wanted[reduce_ranks(parameter, axes, placement)] = "mesh_" + "_".join(
                name for name in AXES if name in names and axes[name].size > 1
            )
    return along | subgroups(axes, {ranks: name for ranks, name in wanted.items() if ranks not in along})


class Reducer:
    """The gradients of one stage.

    Once per step: backward of all microbatches but the last, :meth:`expect` the last, the last one (each bucket
    starts its sum when its gradients are complete), :meth:`launch`, :func:`launch_shared` of all the rank's reducers,
    :meth:`wait`, optimizer, :meth:`zero`.
    With ``scatters``, gradients of weights whose rows are stored on several ranks are reduce-scattered in every
    backward: :meth:`expect` before it, :meth:`scatter` after it.
    A parameter that no microbatch used has no gradient (None), as on one device; a weight of several stages on
    different ranks has one on each, zeros where no stage gave any in this step (what none can give one isn't trained:
    :mod:`autopar.passes.untrained`). Parameters in ``without`` are
    another reducer's: those that two stages of one rank share. ``masters`` by name are what the optimizer updates,
    where that isn't the module's parameter. ``reduce_dtype`` is what is sent (None: the master's). With ``powersgd``,
    matrices are summed over dp in so low a rank. ``sizes`` of messages are the same on all ranks. ``flying`` are the
    last buckets that were sent in a pass, the same ones for all reducers of a rank: so of their terms no more live than
    of a single stage's.
    """

    def __init__(
        self,
        module: nn.Module,
        program: Program | VocabularyProgram,
        groups: Groups,
        axes: Axes,
        placement: Sequence[int],
        sizes: MessageSizes = MESSAGES,
        *,
        without: Collection[nn.Parameter] = (),
        masters: Mapping[str, nn.Parameter] | None = None,
        scatters: bool = False,
        reduce_dtype: torch.dtype | None = None,
        powersgd: int = 0,
        flying: deque[Bucket] | None = None,
    ) -> None:
        trainable = [
            p
            for p in program.parameters
            if p.trainable and not p.is_buffer and module.get_parameter(p.name) not in without
        ]
        self.placement = tuple(placement)
        self.specs = {p.name: p for p in trainable}
        self.parameters = {p.name: module.get_parameter(p.name) for p in trainable}
        self.masters = {name: (masters or {}).get(name, p) for name, p in self.parameters.items()}
        self._flying = deque[Bucket]() if flying is None else flying
        made = _Buckets(self, groups, axes, reduce_dtype, scatters, sizes, powersgd)
        readers = program.readers if isinstance(program, Program) else {}
        self._buckets = list(made.all(units(module, program.parameters, readers=readers)))
        self._shared = made.shared
        self._place: dict[Tensor, Bucket] = {
            parameter: bucket for bucket in self._buckets for parameter in bucket.parameters
        }
        for parameter in self._place:
            parameter.register_post_accumulate_grad_hook(_weakly(self._accumulated))  # type: ignore[no-untyped-call]

    @property
    def shared(self) -> Sequence[tuple[Place, Bucket]]:
        """The buckets that stages on several pipeline ranks have, each with what names it on all of them."""
        return self._shared

    @property
    def buckets(self) -> Sequence[Bucket]:
        """Gradients that travel together, in the order in which a backward completes them."""
        return self._buckets

    def zero(self) -> None:
        """Drop all gradients: the next step begins."""
        for parameter in (*self.parameters.values(), *self.masters.values()):
            parameter.grad = None
        for bucket in self._buckets:
            bucket.clear()

    def expect(self, *, last: bool) -> None:
        """What the next backward completes can be summed: all where it is the ``last`` of the step."""
        for bucket in self._buckets:
            bucket.armed = self._starts_in_pass(bucket, last=last)
            bucket.waiting = len(bucket.parameters)

    def expect_products(self, parameters: Iterable[Tensor], *, last: bool) -> None:
        """Only what :meth:`accumulate` is now given is missing of the pass: ``parameters``, once per product.

        Instead of :meth:`expect` where a pass ends with put-off gradients; all else is complete.
        """
        for bucket in self._buckets:
            bucket.armed = self._starts_in_pass(bucket, last=last)
            bucket.waiting = 0
        for parameter in parameters:
            if parameter in self._place:
                self._place[parameter].waiting += 1
        self._start_complete()

    def accumulate(self, parameter: Tensor, left: Tensor, right: Tensor, groups: Spans | None = None) -> None:
        """``parameter.grad += left [m, t] @ right [t, n]``, without a temporary: a put-off gradient. ``groups`` as in
        :func:`~autopar.runtime.later.accumulate`."""
        if parameter not in self._place:
            accumulate(parameter, left, right, groups)
            return
        bucket = self._place[parameter]
        bucket.accumulate(parameter, left, right, groups)
        self._count(bucket)

    def put(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """``gradient`` is the first of the step that ``parameter`` gets, and was made elsewhere."""
        parameter.grad = gradient
        if parameter in self._place:
            self._accumulated(parameter)

    def scatter(self) -> None:
        """A backward is over: start what it has not started. The last ones may still be under way."""
        for bucket in self._buckets:
            if bucket.per_pass:
                if not bucket.started:
                    self._start(bucket)
                bucket.armed = bucket.started = False

    def launch(self) -> None:
        """Start the sums that have not been started by the last backward, but those of :attr:`shared`."""
        own = [bucket for bucket in self._buckets if not self._is_shared(bucket)]
        for bucket in own:
            _start_rest(bucket)
        for bucket in own:
            bucket.reduce()
            if bucket.sums_twice and bucket in self._flying:
                self._flying.remove(bucket)  # the terms are summed; others needn't wait for what follows

    def wait(self) -> None:
        """Until all gradients are sums. :meth:`launch` and :func:`launch_shared` come before."""
        for bucket in self._buckets:
            bucket.wait()
        if any(p.is_cuda and not self.masters[name].is_cuda for name, p in self.parameters.items()):
            torch.cuda.current_stream().synchronize()  # gradients on their way to the host

    def low_rank_sums(self) -> list[PowerSGD]:
        """What approximates sums, with the error that each step brings."""
        return [b.low for b in self._buckets if isinstance(b, LowRankSumBucket | LowRankMasterBucket)]

    def gradients(self) -> dict[str, Tensor]:
        """Name -> gradient of what this rank stores of every parameter that has one."""
        return {name: p.grad for name, p in self.masters.items() if p.grad is not None}

    def _accumulated(self, parameter: nn.Parameter) -> None:
        bucket = self._place[parameter]
        bucket.take(parameter)
        self._count(bucket)

    def _count(self, bucket: Bucket) -> None:
        if bucket.armed:
            bucket.waiting -= 1
            self._start_complete()

    def _start_complete(self) -> None:
        """In order, so that every rank of a group starts the same sums in the same order."""
        for bucket in self._buckets:
            if bucket.started or not bucket.armed:
                continue
            if bucket.waiting:
                return
            self._start(bucket)

    def _starts_in_pass(self, bucket: Bucket, *, last: bool) -> bool:
        return bucket.per_pass or (last and not self._is_shared(bucket))

    def _is_shared(self, bucket: Bucket) -> bool:
        return any(bucket is other for _, other in self._shared)

    def _start(self, bucket: Bucket) -> None:
        bucket.start()
        if bucket.per_pass:
            if bucket in self._flying:
                self._flying.remove(bucket)  # what it sent before is over: it has begun again
            self._flying.append(bucket)
            if len(self._flying) > IN_FLIGHT:
                over = self._flying.popleft()
                if over in self._buckets:
                    over.settle()
                else:
                    over.release()  # its stage adds it up in a pass of its own


def launch_shared(reducers: Iterable[Reducer]) -> None:
    """Start the sums over pipeline ranks, once all backwards of the step are over.

    In one order for all ranks: stages complete in another order on each rank (of four in a V, 3 and 0 on the first, 2
    and 1 on the second), so that sums over the same ranks would meet others.
    """
    for _, bucket in sorted((item for reducer in reducers for item in reducer.shared), key=itemgetter(0)):
        _start_rest(bucket)
        bucket.reduce()


def _start_rest(bucket: Bucket) -> None:
    bucket.armed = False
    if not bucket.started and not bucket.per_pass:
        bucket.start()


def _weakly(method: Callable[[nn.Parameter], None]) -> Callable[[nn.Parameter], None]:
    """A hook that doesn't keep the object of ``method``: Python's collector doesn't see what a tensor's hooks hold, so
    an object that holds the tensor too would never be freed."""
    kept = WeakMethod(method)

    def hook(parameter: nn.Parameter) -> None:
        if (found := kept()) is not None:
            found(parameter)

    return hook


class _Buckets:
    """The buckets of a reducer: which gradients travel together, :mod:`autopar.schedules.gradient_messages` says."""

    def __init__(
        self,
        reducer: Reducer,
        groups: Groups,
        axes: Axes,
        reduce_dtype: torch.dtype | None,
        scatters: bool,
        sizes: MessageSizes,
        powersgd: int,
    ) -> None:
        self.shared: list[tuple[Place, Bucket]] = []
        self._powersgd = powersgd
        self._reducer, self._groups, self._axes = reducer, groups, axes
        self._reduce_dtype, self._scatters, self._sizes = reduce_dtype, scatters, sizes

    def all(self, unit_of: Mapping[str, int]) -> Iterator[Bucket]:
        """In the order in which a backward completes them: a program lists its parameters in the order of their use."""
        specs = list(self._reducer.specs.values())
        gradients = [self._gradient(parameter, unit_of[parameter.name]) for parameter in specs]
        for places in together(gradients, self._sizes):
            yield self._bucket([specs[place].name for place in places])

    def _gradient(self, parameter: Parameter, unit: int) -> Gradient:
        stored = parameter.zero * math.prod(stored_shape(parameter))
        return Gradient(
            bytes_=math.prod(parameter.shape) * dtype_of(parameter.dtype).itemsize,
            ranks=parameter.zero if parameter.zero > 1 else len(self._terms_of(parameter)),
            like=self._key(parameter),
            unit=unit if self._per_pass(parameter) else None,
            fits=parameter.zero > 1 and stored == math.prod(parameter.shape),
            tied=parameter.name if parameter.shared_stages else "",
        )

    def _terms_of(self, parameter: Parameter) -> tuple[int, ...]:
        return reduce_ranks(parameter, self._axes, self._reducer.placement)

    def _per_pass(self, parameter: Parameter) -> bool:
        return self._scatters and parameter.zero > 1

    def _key(self, parameter: Parameter) -> Hashable:
        """What the members of a bucket have in common; None where there is nothing to do."""
        ranks, own = self._terms_of(parameter), self._is_own_master(parameter)
        if own and len(ranks) == 1:
            return None
        master = self._reducer.masters[parameter.name]
        kind = ranks, own, parameter.zero, parameter.reduce, self._per_pass(parameter), master.dtype, master.device
        return *kind, self._is_low_rank(parameter), parameter.shared_stages

    def _is_low_rank(self, parameter: Parameter) -> bool:
        """Whether it is summed in low rank: over ranks that split tokens alone, and fewer numbers so."""
        data = self._axes.mesh.data_axes(tuple(parameter.types))
        alone = bool(data) and parameter.reduce == data and not parameter.shared_stages
        return bool(self._powersgd) and alone and low_rank_pays(parameter.shape, self._powersgd)

    def _is_own_master(self, parameter: Parameter) -> bool:
        return self._reducer.masters[parameter.name] is self._reducer.parameters[parameter.name]

    def _is_shared(self, parameter: Parameter) -> bool:
        """Whether other pipeline ranks have a copy of it, of which this one can't know if it gets a gradient."""
        return len({self._reducer.placement[stage] for stage in parameter.shared_stages}) > 1

    def _bucket(self, names: Sequence[str]) -> Bucket:
        spec = self._reducer.specs[names[0]]
        bucket = self._of_kind(names, spec)
        if self._is_shared(spec):
            self.shared.append(((spec.shared_stages, spec.name), bucket))
        return bucket

    def _of_kind(self, names: Sequence[str], spec: Parameter) -> Bucket:
        reducer = self._reducer
        parameters, masters = ([by[n] for n in names] for by in (reducer.parameters, reducer.masters))
        rest = self._groups[self._terms_of(spec)].meant_for(_purpose(names))
        sent = self._reduce_dtype or masters[0].dtype
        if self._is_own_master(spec) and sent == masters[0].dtype:
            if self._is_low_rank(spec):
                return LowRankSumBucket(rest, parameters, self._powersgd)
            return SumBucket(rest, parameters, self._is_shared(spec))
        route = self._route(names, rest, sent)
        if self._is_low_rank(spec):
            whole = self._axes.line(tuple(spec.types)).whole.meant_for(_purpose(names))
            return LowRankMasterBucket(parameters, masters, route, whole, self._powersgd)
        per_pass, shared = self._per_pass(spec), self._is_shared(spec)
        return MasterBucket(parameters, masters, route, per_pass=per_pass, shared=shared)

    def _route(self, names: Sequence[str], rest: Axis, dtype: torch.dtype) -> Route:
        """ZeRO's sum runs over all ranks that split tokens; where some of those have equal terms, each gives a part."""
        spec = self._reducer.specs[names[0]]
        if spec.zero == 1:
            return Route(Axis.of("alone", [self._axes.rank], self._axes.rank, None), True, rest, dtype)
        data = self._axes.mesh.data_axes(tuple(spec.types))
        equal = math.prod(self._axes[name].size for name in data if name not in spec.reduce)
        sums = not set(data).isdisjoint(spec.reduce)
        shard = self._axes.line(tuple(spec.types)).shard.meant_for(_purpose(names))
        return Route(shard, sums, rest, dtype, equal if sums else 1)


def _purpose(names: Sequence[str]) -> str:
    return f"gradients of {', '.join(names)}"
