"""How much memory a simulated rank's tensors take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import UntypedStorage

from autopar.runtime.host import is_host_memory
from autopar.shapes import Memory, Shapes, ShapeTensor, uncounted
from autopar.storages import StorageTracker, address, tensors_in

Instead = Callable[[UntypedStorage | Memory], None]
"""Is told of memory that is new, or has another size than before."""


class MemoryTracker(StorageTracker):
    """Counts device and host apart: what is made within :func:`autopar.runtime.host.host_memory` lies on the host."""

    def __init__(self, *, fake: bool = False) -> None:
        super().__init__(fake=fake, is_host=is_host_memory)


class ShapeTracker(MemoryTracker):
    """Within, operations make tensors without values, which ``shapes`` answers. Their bytes count, and those of small
    constants that do have values. No storage is resized unseen."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.shapes = shapes
        self._instead: Instead | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch wraps modes for its compiler, which never runs here: a wrapper takes as long as an answer."""
        return False

    def __enter__(self) -> Self:
        self.shapes.on_memory, self.shapes.on_resize = super()._begin, self._changed
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.shapes.on_memory = self.shapes.on_resize = uncounted

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (types[0] is ShapeTensor and len(types) == 1) if types else _makes_tensors(func, args, kwargs):
            return self.shapes.answer(func, args, kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)

    @contextmanager
    def diverted(self, instead: Instead) -> Iterator[None]:
        """Within, nothing counts: ``instead`` is told what is made."""
        shapes, before = self.shapes, (self.shapes.on_memory, self.shapes.on_resize)
        self._instead, shapes.on_memory, shapes.on_resize = instead, instead, instead
        try:
            yield
        finally:
            self._instead = None
            shapes.on_memory, shapes.on_resize = before

    def _begin(self, storage: UntypedStorage | Memory) -> None:
        if self._instead is not None:
            self._instead(storage)
        else:
            super()._begin(storage)

    def _changed(self, memory: Memory) -> None:
        entry = self._live.get(address(memory))
        if entry is not None:
            self._resize(entry, memory.nbytes())

    def _look(self, entries: Mapping[int, Any]) -> None:
        """There is nothing that wasn't seen."""

    def _rise(self) -> None:
        self._top()


def _makes_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the operation makes tensors of nothing but numbers, on a device."""
    on_meta = torch.device(kwargs.get("device") or "cpu").type == "meta"
    return func.namespace == "aten" and not on_meta and not tensors_in([args, kwargs])
