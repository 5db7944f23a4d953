"""Masters and working copies: what the optimizer updates, and what a stage computes with.

A *master* is a parameter's part that this rank stores: maybe only some of its rows (ZeRO: Rajbhandari et al., "ZeRO",
SC 2020), maybe in another dtype than is computed in, maybe on the host. A *working copy* is the parameter of the
emitted module: whole on the rank, in the dtype of the program. Where nothing differs they are one object.

A :class:`Unit` makes some working copies of their masters: cast first, then gathered, so that the narrow type
travels. Those of a step are made once: ``GATHER@k`` starts them, and each layer of the stage's first forward waits for
the unit that it is in alone (as ``--overlap-param-gather`` of Megatron-Core); a unit may have small weights of several
layers, by the rule of :mod:`autopar.schedules.weight_moves`. Else :mod:`autopar.runtime.streaming` makes and frees
them layer by layer. What holds them on the way: memory is freed by giving back the storage of a tensor that stays (as
FSDP2 does), because autograd remembers the tensor between the forward and the backward.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.errors import ScheduleError
from autopar.runtime.axes import Axes, Axis
from autopar.runtime.collectives import gather_into
from autopar.runtime.host import host_empty
from autopar.runtime.modules import dtype_of
from autopar.runtime.pipe import wait_all
from autopar.runtime.program import Parameter, Program, VocabularyProgram
from autopar.runtime.shards import stored_shape
from autopar.runtime.units import SPANNING, layers, reader, units
from autopar.runtime.weights import Source, materialize
from autopar.schedules.weight_moves import MESSAGES, MessageSizes, Travels, joined_units

_IN_FLIGHT = 2
_TWICE_BYTES = 2**25  # of what is under way and needs as much memory again until it is there, if it is several units


@dataclass(frozen=True, eq=False)
class Copy:
    """One weight twice. ``whole`` is the flat memory of ``working``, and of rows of padding behind it."""

    spec: Parameter
    master: nn.Parameter
    working: nn.Parameter
    whole: Tensor
    shard: Axis

    @classmethod
    def of(cls, spec: Parameter, stored: Tensor, axes: Axes, *, host: bool, resident: bool) -> Copy:
        """``stored`` is what the rank stores, in the master's dtype, on any device.

        The copy has no values yet; if it isn't ``resident``, it has no memory either.
        """
        line = axes.line(tuple(spec.types)).shard if spec.zero > 1 else Axis.of("alone", [axes.rank], axes.rank, None)
        shard = line.meant_for(f"the weight {spec.name}")
        whole = torch.empty(shard.size * math.prod(stored_shape(spec)), dtype=dtype_of(spec.dtype), device=axes.device)
        # .data: autograd, which keeps the parameter for the backward, doesn't count writes to ``whole`` as its changes
        value = whole[: math.prod(spec.shape)].view(spec.shape).data
        working = nn.Parameter(value, requires_grad=spec.trainable)
        if not resident:
            whole.untyped_storage().resize_(0)
        on_host = host_empty(stored.shape, stored.dtype, axes.device).copy_(stored) if host else None
        master = stored.to(axes.device) if on_host is None else on_host
        return cls(spec, nn.Parameter(master, requires_grad=spec.trainable), working, whole, shard)

    @property
    def nbytes(self) -> int:
        return self.whole.numel() * self.whole.dtype.itemsize

    def part(self) -> Tensor:
        """The master as it travels: flat, on the device, in the dtype of the copy."""
        return self.narrow().to(self.whole.device, non_blocking=True)

    def narrow(self) -> Tensor:
        """The master, flat, where it lies; cast there where that makes fewer bytes to copy from the host."""
        flat, dtype = self.master.detach().reshape(-1), self.whole.dtype
        if flat.device == self.whole.device:
            return flat.to(dtype)
        return flat if flat.dtype == dtype else host_empty(flat.shape, dtype, self.whole.device).copy_(flat)


@dataclass
class _Flight:
    """Gathers under way: copies that travel together arrive in ``packed [n, elements]``, as bytes where their dtypes
    differ."""

    works: list[dist.Work | None]
    kept: list[Tensor]
    packed: list[tuple[Tensor, Sequence[Copy]]]


class Unit:
    """Working copies that are made, and maybe freed, together; small ones of a ring travel in one message.

    Of a unit that isn't resident, the memory is there from :meth:`hold` until all that hold it have released it; that
    of what travels with others from when it is there, since until then it is where it arrives.
    """

    def __init__(
        self,
        copies: Iterable[Copy],
        *,
        resident: bool,
        host: bool = False,
        aside: torch.cuda.Stream | None = None,
        sizes: MessageSizes = MESSAGES,
    ) -> None:
        self.copies = list(copies)
        self._resident, self._host, self._aside = resident, host, aside
        small: dict[tuple[int, ...], list[Copy]] = {}
        for copy in self.copies:
            if copy.shard.size > 1 and copy.nbytes < sizes.large(copy.shard.size):
                small.setdefault(copy.shard.ranks, []).append(copy)
        self._packs = [together for together in small.values() if len(together) > 1]
        packed = {copy for together in self._packs for copy in together}
        self._alone = [copy for copy in self.copies if copy not in packed]
        self._flight: _Flight | None = None
        self._holders: set[object] = set()

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for copy in self.copies)

    @property
    def twice_bytes(self) -> int:
        """Of copies that are somewhere else too until they are there: packed, or cast on the host."""
        twice = self.copies if self._host else [copy for together in self._packs for copy in together]
        return sum(copy.nbytes for copy in twice)

    @property
    def is_under_way(self) -> bool:
        """Whether the copies were started, and nothing waited for them yet."""
        return self._flight is not None

    def hold(self, holder: object) -> None:
        """``holder`` is going to need the copies: start to make them, unless they are there."""
        if not self._holders:
            self.start()
        self._holders.add(holder)

    def release(self, holder: object) -> None:
        """``holder`` is done with them; the last one frees them."""
        if holder in self._holders:
            self._holders.discard(holder)
            if not self._holders:
                self.wait()
                self._resize(self.copies, there=False)

    def start(self) -> None:
        """Start to make the copies of the masters."""
        if not self._resident:
            self._resize(self._alone, there=True)
        with torch.no_grad(), self._beside():
            self._flight = self._gather()

    def wait(self) -> None:
        """Until the copies are there."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        wait_all(flight.works)
        if self._aside is not None:
            torch.cuda.current_stream().wait_stream(self._aside)
        with torch.no_grad():
            while flight.packed:
                self._unpack(*flight.packed.pop())

    def _unpack(self, packed: Tensor, copies: Sequence[Copy]) -> None:
        if not self._resident:
            self._resize(copies, there=True)
        wholes = [copy.whole.view(packed.dtype).view(copy.shard.size, -1) for copy in copies]
        pieces = torch.split(packed, [whole.shape[1] for whole in wholes], dim=1)
        for whole, piece in zip(wholes, pieces, strict=True):
            whole.copy_(piece)

    def _gather(self) -> _Flight:
        flight = _Flight([], [], [])
        for copy in self._alone:
            if copy.shard.size == 1 and copy.master.device == copy.whole.device:
                copy.whole.copy_(copy.master.detach().reshape(-1))
            elif copy.shard.size == 1:
                flight.kept.append(part := copy.narrow())
                copy.whole.copy_(part, non_blocking=True)
            else:
                flight.kept.append(part := copy.part())
                flight.works.append(gather_into(copy.whole, part, copy.shard))
        for copies in self._packs:
            names = ", ".join(copy.spec.name for copy in copies)
            axis, dtypes = copies[0].shard.meant_for(f"the weights {names}"), {copy.whole.dtype for copy in copies}
            travels = dtypes.pop() if len(dtypes) == 1 else torch.uint8  # one message of bytes (as FSDP2)
            part = torch.cat([copy.part().view(travels) for copy in copies])
            packed = part.new_empty(axis.size * part.numel())
            flight.kept.append(part)
            flight.works.append(gather_into(packed, part, axis))
            flight.packed.append((packed.view(axis.size, -1), copies))
        return flight

    def _resize(self, copies: Iterable[Copy], *, there: bool) -> None:
        for copy in copies:
            copy.whole.untyped_storage().resize_(copy.nbytes if there else 0)

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Copies from the host run beside the compute stream, after what is on it so far."""
        if self._aside is None:
            yield
            return
        self._aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._aside):
            yield


class Departures:
    """Units of a rank that are made once a step, in the order of its GATHERs: in that order they start.

    Of those that need as much memory again until they are there, a few are under way; the next one starts when one has
    arrived.
    """

    def __init__(self, twice_bytes: int = _TWICE_BYTES) -> None:
        self._twice_bytes = twice_bytes  # of more than two
        self._waiting: deque[Unit] = deque()
        self._under_way: list[Unit] = []

    def add(self, units: Iterable[Unit]) -> None:
        """Start these after all that were added before, as soon as there is room."""
        self._waiting.extend(units)
        self._go_on()

    def is_coming(self, unit: Unit) -> bool:
        """Whether nothing waited for ``unit`` since it was added."""
        return unit.is_under_way or unit in self._waiting

    def wait(self, unit: Unit) -> None:
        """Until ``unit`` is there; and what has to be before it can start."""
        while unit in self._waiting:
            self._under_way[0].wait()
            self._go_on()
        unit.wait()
        self._go_on()

    def _go_on(self) -> None:
        self._under_way = [unit for unit in self._under_way if unit.is_under_way]
        while self._waiting and self._has_room(self._waiting[0]):
            unit = self._waiting.popleft()
            unit.start()
            self._under_way.append(unit)

    def _has_room(self, unit: Unit) -> bool:
        twice = [each.twice_bytes for each in (*self._under_way, unit) if each.twice_bytes]
        return not unit.twice_bytes or len(twice) <= _IN_FLIGHT or sum(twice) <= self._twice_bytes


class Store:
    """The weights of one program on this rank; :meth:`load` makes one.

    ``masters``: what is trained, by name. ``copies``: the weights that are there twice, but for those of ``others``,
    stores of this rank that hold weights of this program too. ``sequence``: units in the order of their use, each with
    the layer that uses it first, or None for the stage's own code between layers; ``roots``: units that a whole pass
    needs. ``departures`` are those of the rank, ``sizes`` of messages the same on all ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        program: Program | VocabularyProgram | None = None,
        copies: Mapping[str, Copy] | None = None,
        others: Mapping[str, Store] | None = None,
        *,
        host: bool = False,
        aside: torch.cuda.Stream | None = None,
        resident: bool = True,
        departures: Departures | None = None,
        sizes: MessageSizes = MESSAGES,
    ) -> None:
        self.module, self.copies, self.others = module, dict(copies or {}), dict(others or {})
        self.resident, self._departures = resident, departures or Departures()
        self.masters: dict[str, nn.Parameter] = {
            name: self._master(name, parameter)
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        tied = {name: copy for name, copy in self.copies.items() if copy.spec.shared_stages}
        make = partial(Unit, resident=resident, host=host, aside=aside, sizes=sizes)
        self.tied = {name: make([copy]) for name, copy in tied.items()}
        groups: dict[int, list[Copy]] = {}
        readers: Mapping[str, str] = {}
        if program is not None and self.copies:
            spanning, readers = (program.spanning, program.readers) if isinstance(program, Program) else ((), {})
            for name, number in units(module, program.parameters, spanning, readers).items():
                if name in self.copies and name not in tied:
                    groups.setdefault(number, []).append(self.copies[name])
        shared = [other.tied[name] for name, other in self.others.items() if name in other.tied]
        own_roots = [make(groups.pop(SPANNING))] if SPANNING in groups else []
        self.roots = [*own_roots, *self.tied.values(), *shared]
        layer_of = _layer_of(module, groups, readers)
        groups = _joined(groups, sizes) if resident else groups
        self.sequence = [(make(groups[number]), layer_of.get(number)) for number in sorted(groups)]
        self._own = [*own_roots, *self.tied.values(), *(unit for unit, _ in self.sequence)]
        self._is_fresh = not self.copies

    @classmethod
    def load(
        cls,
        module: nn.Module,
        program: Program | VocabularyProgram,
        axes: Axes,
        source: Source,
        *,
        host: bool = False,
        resident: bool = True,
        others: Mapping[str, Store] | None = None,
        departures: Departures | None = None,
        sizes: MessageSizes = MESSAGES,
    ) -> Store:
        """Fill ``module`` (on the meta device) from ``source``, of which only what is stored is read.

        ``host``: masters lie there. ``resident``: copies stay from step to step, else they have no memory yet.
        ``others``: by name, the stores of this rank that hold weights of this program. ``departures`` and ``sizes`` as
        in the class. Raises what :func:`autopar.runtime.weights.materialize` does.
        """
        others, copies = others or {}, dict[str, Copy]()

        def make(spec: Parameter) -> Tensor:
            if spec.name in others:
                return others[spec.name].module.get_parameter(spec.name)
            stored = source.local(spec, axes)
            if not _is_twice(spec, host=host):
                value = stored.to(axes.device, dtype_of(spec.dtype))
                return value if spec.is_buffer else nn.Parameter(value, requires_grad=spec.trainable)
            copies[spec.name] = Copy.of(spec, stored, axes, host=host, resident=resident)
            return copies[spec.name].working

        materialize(module, program, make)
        aside = torch.cuda.Stream(axes.device) if host and axes.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        further: dict[str, Any] = {"departures": departures, "sizes": sizes}
        return cls(module, program, copies, others, host=host, aside=aside, resident=resident, **further)

    def gather(self) -> None:
        """Start to make all copies of the masters: ``GATHER@k``."""
        self._departures.add(self._own)
        self._is_fresh = True

    def ready(self) -> None:
        """Until the copies of the step are there. Raises ScheduleError where nothing gathers them."""
        self._require_gathered()
        self._wait_for((*self.roots, *self._own))

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """Within, a forward runs: where copies are still on their way, each layer waits for its own and those of the
        code behind it. Raises ScheduleError as :meth:`ready`."""
        if not any(self._departures.is_coming(unit) for unit, _ in self.sequence):
            self.ready()
            yield
            return
        self._require_gathered()
        (_, first), *by_layer = _by_layer(self.sequence)
        self._wait_for((*self.roots, *first))
        eager: Callable[..., Any] = torch.compiler.disable  # it has no types
        hooks = [
            layer.register_forward_pre_hook(eager(partial(self._wait_for, needed)))
            for layer, needed in by_layer
            if layer is not None
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self.ready()

    def _wait_for(self, units: Iterable[Unit], *_: object) -> None:
        for unit in units:
            self._departures.wait(unit)

    def _require_gathered(self) -> None:
        if not self._is_fresh and self.resident:
            raise ScheduleError(
                "weights are computed with that were never made of their masters; the action list needs its GATHER "
                "actions: lower the schedule for this storage"
            )

    def expire(self) -> None:
        """The masters change: the copies are old."""
        self._is_fresh = not self.copies

    def _master(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        if name in self.others:
            return self.others[name].masters[name]
        return self.copies[name].master if name in self.copies else parameter


def _is_twice(spec: Parameter, *, host: bool) -> bool:
    trained = spec.trainable and (host or spec.master not in ("", spec.dtype))
    return not spec.is_buffer and (spec.zero > 1 or trained)


def _joined(groups: Mapping[int, Sequence[Copy]], sizes: MessageSizes) -> dict[int, list[Copy]]:
    """The copies by the unit with which they are made, where small ones of several layers travel together."""
    order = [(number, copy) for number in sorted(groups) for copy in groups[number]]
    sent = [(number, copy) for number, copy in order if copy.shard.size > 1]
    travels = [Travels(number, copy.shard.ranks, copy.shard.size, copy.nbytes) for number, copy in sent]
    joined = dict(zip((copy for _, copy in sent), joined_units(travels, sizes), strict=True))
    found: dict[int, list[Copy]] = {}
    for number, copy in order:
        found.setdefault(joined.get(copy, number), []).append(copy)
    return found


def _by_layer(sequence: Iterable[tuple[Unit, nn.Module | None]]) -> Iterator[tuple[nn.Module | None, list[Unit]]]:
    """Units that are needed from when a layer is reached; those from the start first, with None."""
    layer: nn.Module | None = None
    needed: list[Unit] = []
    for unit, of in sequence:
        if of is not None:
            yield layer, needed
            layer, needed = of, []
        needed.append(unit)
    yield layer, needed


def _layer_of(
    module: nn.Module, groups: Mapping[int, Sequence[Copy]], readers: Mapping[str, str]
) -> dict[int, nn.Module]:
    """The layer of each unit that is one."""
    found = dict(layers(module))
    path_of = {number: reader(first.spec.name, found, readers) for number, (first, *_) in groups.items()}
    return {number: found[path] for number, path in path_of.items() if path in found}
