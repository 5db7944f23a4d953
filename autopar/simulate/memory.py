"""How much memory a rank's tensors take, from the operations that make them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from autopar.simulate.torch_private import DispatchMode, address, is_data, wraps_others

# What they are given is new: made without an operation by torch.tensor(), copy.deepcopy() and torch.load().
_TAKE_NEW = (torch.ops.aten.lift_fresh.default, torch.ops.aten.set_.source_Storage_storage_offset)


class MemoryTracker(DispatchMode):  # type: ignore[misc]
    """Counts the bytes of the storages that operations under it made, forward and backward: live, and peak.

    A storage that an operation got from outside doesn't count, nor do fake and meta tensors, nor what a
    kernel needs while it runs, nor what an allocator adds. A storage that is resized between operations (as
    FSDP2 does) counts at the size that it had when an operation last returned it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._live: dict[int, tuple[int, weakref.ref[UntypedStorage]]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """torch.compile compiles under it, and runs what it compiled."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if wraps_others(types):
            return NotImplemented  # a DTensor, say, first becomes operations on its local tensor
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            self._see(tensor, func, [args, kwargs])
        return result

    def _see(self, tensor: Tensor, func: Any, arguments: list[Any]) -> None:
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key, size = address(storage), storage.nbytes()
        known = self._live.get(key)
        if known is not None:
            before, reference = known
        elif is_data(tensor) and (func in _TAKE_NEW or not _given(key, arguments)):
            before, reference = 0, weakref.ref(storage, self._releases(key))
        else:
            return
        self._live[key] = size, reference
        self.live_bytes += size - before
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _releases(self, key: int) -> Callable[[object], None]:
        def release(_: object) -> None:
            self.live_bytes -= self._live.pop(key)[0]

        return release


def _given(key: int, arguments: Any) -> bool:
    return any(
        tensor.layout is torch.strided and address(tensor.untyped_storage()) == key for tensor in _tensors(arguments)
    )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
