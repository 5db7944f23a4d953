"""Activations on the host between a forward and its backward: what OFFLOAD, FREE and FETCH of an action list do.

What a stage saves for the backward of one microbatch is taken in by hooks during the forward, each memory once. OFFLOAD
starts to copy it to the host, FREE lets go of the device's memory, FETCH starts to bring it back. On CUDA both copies
run in streams of their own, between pinned and device memory. What waits does so in the device's own order of events,
not on the host: from FREE on the compute stream goes on once the copy to the host is over, so that what follows on it
may have the memory, and a backward that uses a tensor waits for its copy back. On CPU ranks they are plain copies.

(Rhu et al., "vDNN", MICRO 2016, section III; Ren et al., "ZeRO-Offload", USENIX ATC 2021, for the pinned buffers.)
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from autopar.runtime.host import to_host
from autopar.runtime.saved_memory import Once, Piece, as_it_is, held_storages, storages
from autopar.schedules.offloads import LEAST_BYTES

Place = tuple[int, int]
"""(stage, microbatch)."""


class Copies:
    """Copies between device and host; on CUDA in a stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        cuda = device.type == "cuda"
        self._to_host = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        self._from_host = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]

    def to_host(self, x: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """``x`` on the host, there after the event."""
        if self._to_host is None:
            return to_host(x), None
        self._to_host.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._to_host):
            return to_host(x), self._to_host.record_event()

    def from_host(self, x: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """``x`` on the device, there after the event."""
        made = torch.empty_like(x, device=self.device)  # of the compute's own memory pool, where it goes back to
        if self._from_host is None:
            return made.copy_(x), None
        self._from_host.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._from_host):
            made.copy_(x, non_blocking=True)
            made.record_stream(self._from_host)
            return made, self._from_host.record_event()


@dataclass(eq=False)
class _Memory:
    """One memory that a backward needs, ``[n]``: on the device, on the host, or on the way."""

    copies: Copies
    device: Tensor | None
    host: Tensor | None = None
    moved: torch.cuda.Event | None = None

    def offload(self) -> None:
        if self.device is not None:
            self.host, self.moved = self.copies.to_host(self.device)

    def free(self) -> None:
        if self.host is not None:
            if self.moved is not None and self.device is not None:
                torch.cuda.current_stream(self.device.device).wait_event(self.moved)
            self.device = self.moved = None

    def fetch(self) -> None:
        if self.host is not None and self.device is None:
            self.device, self.moved = self.copies.from_host(self.host)
        self.host = None

    def use(self) -> Tensor:
        """On the device; the compute that follows waits for it there."""
        self.fetch()
        assert self.device is not None
        if self.moved is not None:
            torch.cuda.current_stream(self.device.device).wait_event(self.moved)
        return self.device


@dataclass
class _Place:
    """What is kept of one pass: autograd's to hold and to free. ``exact`` is memory that can't be let go of: of which
    small parts stay as they are, or that others hold as well."""

    memories: weakref.WeakSet[_Memory] = field(default_factory=weakref.WeakSet)
    taken: set[int] = field(default_factory=set)
    exact: set[int] = field(default_factory=set)


Kept = Tensor | Piece[_Memory]
"""What autograd gets in the place of a tensor that it saves."""


class ActivationOffload:
    """What a rank's stages keep of the microbatches in ``places``, whose lists have OFFLOAD, FREE and FETCH for them.

    ``keep`` is what autograd asks for each tensor that it saves, where the forward that runs is of such a place, or of
    the stage before it: what that keeps too stays.
    """

    def __init__(self, places: Collection[Place], device: torch.device) -> None:
        self.keep: Callable[[Tensor], Kept] | None = None
        self._places = frozenset(places)
        self._copies = Copies(device)
        self._kept: dict[Place, _Place] = {}
        self._noted: set[int] = set()  # of the last forward, what it keeps on the device

    @contextmanager
    def keeping(self, place: Place, module: nn.Module, batch: Iterable[Tensor] = ()) -> Iterator[None]:
        """Within, the forward of ``place`` runs, of which the step holds parts of the ``batch`` anyway; nothing happens
        for a place that stays on the device, as the next stage's does."""
        self._noted.clear()
        if place not in self._places:
            following = (place[0] + 1, place[1]) in self._places
            with self._hooked(self._note) if following else nullcontext():
                yield
            return
        kept = self._kept[place] = _Place()
        held = held_storages(module) | storages(list(batch))
        with Once[_Memory]() as once, self._hooked(functools.partial(self._keep, once, kept, held)):
            yield

    @contextmanager
    def _hooked(self, keep: Callable[[Tensor], Kept]) -> Iterator[None]:
        self.keep = keep
        try:
            with saved_tensors_hooks(keep, restored):
                yield
        finally:
            self.keep = None

    def kept_of(self, place: Place, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Those of ``tensors`` whose memory the forward of ``place``, which was the last, keeps."""
        kept = self._kept.get(place)
        there = self._noted if kept is None else kept.taken | kept.exact
        return [tensor for tensor in tensors if id(tensor.untyped_storage()) in there]

    def leave(self, place: Place, held: Iterable[Tensor]) -> None:
        """What ``place`` keeps of the memory of ``held`` stays on the device: others hold it as well."""
        if (kept := self._kept.get(place)) is None:
            return
        there = storages(list(held))
        kept.exact |= there
        for memory in list(kept.memories):
            if memory.device is not None and id(memory.device.untyped_storage()) in there:
                kept.memories.discard(memory)

    def offload(self, place: Place) -> None:
        """Start to copy what ``place`` keeps to the host."""
        for memory in list(self._kept[place].memories):
            memory.offload()

    def free(self, place: Place, received: Iterable[Tensor] = ()) -> None:
        """Let go of the device's memory, for what follows once the copy is over; of that which was ``received``, too,
        though the executor holds such a tensor until its gradient is made."""
        kept = self._kept[place]
        for memory in list(kept.memories):
            memory.free()
        for tensor in received:
            storage = tensor.untyped_storage()
            if id(storage) in kept.taken - kept.exact:
                storage.resize_(0)

    def fetch(self, place: Place) -> None:
        """Start to copy it back."""
        for memory in list(self._kept.pop(place).memories):
            memory.fetch()

    def _keep(self, once: Once[_Memory], kept: _Place, held: Collection[int], x: Tensor) -> Kept:
        storage = id(x.untyped_storage())
        if storage in held:
            return as_it_is(x)
        if x.nbytes < LEAST_BYTES:
            kept.exact.add(storage)
            return as_it_is(x)
        piece = once.piece(x, self._taken)
        kept.taken.add(storage)
        kept.memories.add(piece.whole)
        return piece

    def _note(self, x: Tensor) -> Kept:
        self._noted.add(id(x.untyped_storage()))
        return as_it_is(x)

    def _taken(self, flat: Tensor) -> _Memory:
        return _Memory(self._copies, flat)


def restored(kept: Kept) -> Tensor:
    """The tensor that autograd saved."""
    return kept if isinstance(kept, Tensor) else kept.of(kept.whole.use())
