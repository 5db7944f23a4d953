"""What hooks on saved tensors share: memory is told apart by storage, so that what several ops save is kept once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final, Generic, Self, TypeVar

import torch
from torch import Tensor, UntypedStorage, nn

T = TypeVar("T")
_PARTS: Final = 8  # pieces down to this part of a storage are kept as views of all of it


@dataclass(frozen=True)
class Piece(Generic[T]):
    """A saved tensor as a view of ``whole``, what is kept of its memory."""

    whole: T
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, flat: Tensor) -> Tensor:
        """The tensor again, from the memory ``[n]``."""
        return flat.as_strided(self.shape, self.stride, self.offset)


@dataclass
class Once(Generic[T]):
    """Storage -> what is kept of it, while it is entered. It holds no storage alive.

    Values must not change once they are saved; in emitted programs they never do.
    """

    _known: dict[tuple[int, torch.dtype], tuple[weakref.ref[UntypedStorage], T]] = field(default_factory=dict)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._known.clear()  # autograd may hold on to the hook, and with it to this

    def piece(self, tensor: Tensor, keep: Callable[[Tensor], T]) -> Piece[T]:
        """``tensor`` as a piece of what ``keep(memory [n])`` made of its memory.

        Of a storage of which the tensor is but a small part, only that is taken, as a copy.
        """
        if _PARTS * tensor.nbytes < tensor.untyped_storage().nbytes():
            tensor = tensor.contiguous() if not tensor.is_contiguous() else tensor.clone()
        storage = tensor.untyped_storage()
        reference, whole = self._known.get((id(storage), tensor.dtype), (None, None))
        if whole is None or reference is None or reference() is not storage:
            whole = keep(tensor.detach().as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0))
            self._known[id(storage), tensor.dtype] = weakref.ref(storage), whole
        return Piece(whole, tensor.shape, tensor.stride(), int(tensor.storage_offset()))


def as_it_is(x: Tensor) -> Tensor:
    """What a hook gives back of a tensor that it leaves alone: another object, or an op's result would keep the graph
    that keeps it."""
    return x.detach()


def storages(tensors: Collection[Tensor]) -> set[int]:
    """What tells the memory of ``tensors`` apart from other memory, as long as they live."""
    return {id(tensor.untyped_storage()) for tensor in tensors}


def held_storages(module: nn.Module) -> set[int]:
    """The memory of a module's parameters and buffers: saving it costs nothing."""
    return storages([*module.parameters(), *module.buffers()])
