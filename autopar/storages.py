"""Which storages live, from the operations that make them: their bytes now, at the peak, and what they are for.

What a storage is for is known from who holds it (:meth:`StorageTracker.own`), else from its life: what dies in the
action that made it was temporary, what outlives it was kept, for a backward or for a message.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from autopar.shapes import Memory, ShapeTensor

DispatchMode: Any = TorchDispatchMode  # it has no types

# What they are given is new: made without an operation by torch.tensor(), copy.deepcopy() and torch.load().
_TAKE_NEW = (torch.ops.aten.lift_fresh.default, torch.ops.aten.set_.source_Storage_storage_offset)

_FEW: Final = 1000

_WHERE: Final = torch.ops.prim.device.default  # fake tensors are asked this often

TEMPORARIES: Final = "temporaries"
BUFFERS: Final = "buffers"
ALLOCATED: Final = "allocated"
"""What an allocator counts, which doesn't know what it is for."""
KINDS: Final = ("parameters", "working", "gradients", "optimizer", "saved", "gathered", BUFFERS, TEMPORARIES)
"""What storages are for: parameters that an optimizer updates, and those that aren't trained; copies of them that a
module computes with; gradients; optimizer state; what is saved for a backward; weights that are gathered for a pass
(ZeRO-3); what is on its way from or to another rank; and what dies in the action that made it."""


@dataclass(frozen=True)
class Phase:
    """What a rank did between two marks: the device bytes with which it began, at most, and at its end, by kind.

    What was made in it and is of no known kind is ``temporaries`` where it died in it too. ``host_bytes`` are those on
    the host, then too.
    """

    label: str
    start: Mapping[str, int]
    peak: Mapping[str, int]
    end: Mapping[str, int]
    host_bytes: tuple[int, int, int] = (0, 0, 0)

    @property
    def peak_bytes(self) -> int:
        return sum(self.peak.values())


@dataclass(eq=False, slots=True)
class _Entry:
    """A live storage: its size when last seen, the phase and the event that made it, its kind where one is known."""

    size: int
    reference: weakref.ref[UntypedStorage | Memory]
    is_host: bool
    born: int
    serial: int
    keeps: str  # its kind where it outlives the phase
    kind: str = ""
    died: int = -1
    noted: int = -1  # the moment at which it was another size than now

    @property
    def purpose(self) -> str:
        """Its kind, as far as that is known now."""
        return self.kind or (TEMPORARIES if self.died == self.born else self.keeps)


@dataclass
class _Moment:
    """A peak: its event, and storages that lived then, with their sizes, and have died or changed since."""

    bytes: int = 0
    serial: int = -1
    gone: list[tuple[_Entry, int]] = field(default_factory=list)


class StorageTracker(DispatchMode):  # type: ignore[misc]
    """Counts the bytes of the storages that operations under it made, forward and backward: live, and peak.

    A storage that an operation got from outside doesn't count, nor do meta tensors, nor what a kernel needs while it
    runs, nor what an allocator adds. Fake tensors count with ``fake``, and then nothing else does. What is made while
    ``is_host`` says so is ``host_bytes``, in no other figure. A storage that is resized between operations (as FSDP2
    does) is seen to be when it is used next, at the next mark, and before a peak is believed; from then on, before
    every operation: memory that was taken counts from there, though it is written to later.
    """

    def __init__(self, *, fake: bool = False, is_host: Callable[[], bool] = bool) -> None:
        super().__init__()
        self.live_bytes = 0
        self.host_bytes = 0
        self._host_start = self._host_peak = self._host_before = 0  # as of the device below
        self.phases: list[Phase] = []
        self._counts = is_fake if fake else is_data
        self._is_host = is_host
        self._live: dict[int, _Entry] = {}
        self._resized: dict[int, _Entry] = {}
        self._serial = 0
        self._label, self._keeps = "", BUFFERS
        self._start: dict[str, int] = {}
        self._peak = _Moment()  # of this phase
        self._kinds: Counter[str] = Counter()  # of what lives on the device
        self._since: list[_Entry] = []  # made since the peak
        self._before = 0  # the largest of those before
        self._number = 0  # of the phase
        self._operations = self._looked = 0  # in all, and when all storages were last looked at

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """torch.compile compiles under it, and runs what it compiled."""
        return True

    @property
    def peak_bytes(self) -> int:
        return max(self._before, self._peak.bytes)

    @property
    def host_peak_bytes(self) -> int:
        return max(self._host_before, self._host_peak)

    def mark(self, label: str, keeps: str = BUFFERS) -> None:
        """A new phase begins; what is made in it and outlives it is of the kind ``keeps``."""
        self._look(self._live)
        end = {kind: bytes_ for kind, bytes_ in self._kinds.items() if bytes_}
        if self._label:
            host = self._host_start, self._host_peak, self.host_bytes
            self.phases.append(Phase(self._label, self._start, self._peak_kinds(), end, host))
        self._label, self._keeps, self._start = label, keeps, end
        self._before, self._host_before = self.peak_bytes, self.host_peak_bytes
        self._host_start = self._host_peak = self.host_bytes
        self._number += 1
        self._serial += 1  # no two moments have the same
        self._top()

    def forget(self) -> None:
        """Begin anew with what lives now: peaks and phases are those from here on."""
        self.mark("")
        self.phases.clear()
        self._before = self._host_before = 0

    def own(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """The storages of ``tensors`` are of ``kind``, if they were made here and are of none yet."""
        for tensor in tensors:
            entry = self._live.get(address(tensor.untyped_storage()))
            if entry is not None and not entry.kind:
                if not entry.is_host:
                    self._kinds[entry.keeps] -= entry.size
                    self._kinds[kind] += entry.size
                entry.kind = kind

    def host_kinds(self) -> dict[str, int]:
        """Bytes on the host now, by kind."""
        found: Counter[str] = Counter()
        for entry in self._live.values():
            found[entry.purpose] += entry.size if entry.is_host else 0
        return {kind: bytes_ for kind, bytes_ in found.items() if bytes_}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if wraps_others(types):
            return NotImplemented  # a DTensor, say, first becomes operations on its local tensor
        kwargs = kwargs or {}
        if func is _WHERE:
            return func(*args, **kwargs)
        self._operations += 1
        self._look(self._resized)
        given = tensors_in([args, kwargs])
        for tensor in given:
            self._touch(tensor)
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            if not self._touch(tensor):
                self._see(tensor, func, given)
        return result

    def _touch(self, tensor: Tensor) -> bool:
        """Whether its storage is known. It may have another size by now."""
        storage = tensor.untyped_storage()
        known = self._live.get(address(storage))
        if known is not None and (size := storage.nbytes()) != known.size:
            self._resize(known, size)
        return known is not None

    def _see(self, tensor: Tensor, func: Any, given: list[Tensor]) -> None:
        storage = tensor.untyped_storage()
        key = address(storage)
        if self._counts(tensor) and (func in _TAKE_NEW or all(address(t.untyped_storage()) != key for t in given)):
            self._begin(storage)

    def _begin(self, storage: UntypedStorage | Memory) -> None:
        """A storage is new."""
        self._serial += 1
        key, size = address(storage), storage.nbytes()
        reference: weakref.ref[UntypedStorage | Memory] = weakref.ref(storage, self._releases(key))
        entry = _Entry(size, reference, self._is_host(), self._number, self._serial, self._keeps)
        self._live[key] = entry
        self._since.append(entry)
        if len(self._since) > 2 * len(self._live) + _FEW:
            self._since = [entry for entry in self._since if entry.died < 0]
        self._change(entry, size)

    def _look(self, entries: Mapping[int, _Entry]) -> None:
        """Sizes may have changed without an operation: of those that did, what was given back went first."""
        seen = [(entry.reference(), entry) for entry in list(entries.values())]
        changed = [(size, e) for s, e in seen if s is not None and (size := s.nbytes()) != e.size]
        for size, entry in sorted(changed, key=lambda pair: pair[0] > pair[1].size):
            self._count(entry, self._resized_by(entry, size))
        if changed and self.live_bytes > self._peak.bytes:
            self._top()

    def _resize(self, entry: _Entry, size: int) -> None:
        self._change(entry, self._resized_by(entry, size))

    def _resized_by(self, entry: _Entry, size: int) -> int:
        """By how much, now that ``entry`` is noted to be of another ``size``."""
        self._serial += 1
        self._note(entry)
        self._resized[id(entry)] = entry
        before, entry.size = entry.size, size
        return size - before

    def _note(self, entry: _Entry) -> None:
        """``entry`` is about to be another size than at the peak, or to go."""
        if entry.serial <= self._peak.serial != entry.noted:
            self._peak.gone.append((entry, entry.size))
            entry.noted = self._peak.serial

    def _change(self, entry: _Entry, more: int) -> None:
        self._count(entry, more)
        if not entry.is_host and self.live_bytes > self._peak.bytes:
            self._rise()

    def _count(self, entry: _Entry, more: int) -> None:
        if entry.is_host:
            self.host_bytes += more
            self._host_peak = max(self._host_peak, self.host_bytes)
        else:
            self.live_bytes += more
            self._kinds[entry.kind or entry.keeps] += more

    def _rise(self) -> None:
        """A peak, unless storages have become smaller unseen. All are looked at now and then, which costs little per
        operation; those that were resized before, every time."""
        every = self._operations - self._looked >= len(self._live) // 4
        if every:
            self._looked = self._operations
        self._look(self._live if every else self._resized)
        if self.live_bytes > self._peak.bytes:
            self._top()

    def _top(self) -> None:
        """There was never more."""
        self._peak = _Moment(self.live_bytes, self._serial)
        self._since.clear()

    def _releases(self, key: int) -> Callable[[object], None]:
        def release(_: object) -> None:
            entry = self._live.pop(key)
            self._resized.pop(id(entry), None)
            entry.died = self._number
            self._note(entry)
            self._change(entry, -entry.size)

        return release

    def _peak_kinds(self) -> dict[str, int]:
        """From what lives now, and what was made, went or changed since."""
        found = Counter(self._kinds)
        for entry in self._since:
            if entry.died < 0 and not entry.is_host:
                found[entry.purpose] -= entry.size
        for entry, size in self._peak.gone:
            if not entry.is_host:
                found[entry.purpose] += size - (entry.size if entry.died < 0 else 0)
        return {kind: bytes_ for kind, bytes_ in found.items() if bytes_}


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors with a storage in nested lists, tuples and dictionaries."""
    found: list[Tensor] = []
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, Tensor):
            if item.layout is torch.strided:
                found.append(item)
        elif isinstance(item, list | tuple):
            waiting.extend(item)
        elif isinstance(item, dict):
            waiting.extend(item.values())
    return found


@contextmanager
def unobserved() -> Iterator[None]:
    """Move data as hardware would: neither dispatch modes (fake tensors among them) nor autograd see it."""
    with _disable_current_modes(), torch.no_grad():
        yield


def is_data(tensor: Tensor) -> bool:
    """Whether the tensor holds values: fake and meta tensors don't."""
    return not isinstance(tensor, FakeTensor | ShapeTensor) and not tensor.is_meta


def is_fake(tensor: Tensor) -> bool:
    """Whether the tensor has a size on a device, but no memory there."""
    return isinstance(tensor, FakeTensor)


def wraps_others(types: Iterable[type]) -> bool:
    """Whether the types that a dispatch mode gets include tensors that are made of other tensors."""
    plain = torch._C._disabled_torch_dispatch_impl
    return any(
        kind.__torch_dispatch__ is not plain and not issubclass(kind, FakeTensor | ShapeTensor)  # type: ignore[attr-defined]
        for kind in types
    )


def address(storage: UntypedStorage | Memory) -> int:
    """What tells live storages apart."""
    return int(storage._cdata)
