"""What autograd keeps of one op's tensors, found out once for ops that are called alike.

An op runs under ``FakeTensorMode`` (shapes and strides, but no memory and no arithmetic) with hooks on what its
backward saves. What comes out depends on the function, its arguments, how the tensors among these lie in memory
(:class:`Laid`), and on nothing else; so it is told in numbers of memories, and holds for every call of that kind.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, disable_fake_tensor_cache
from torch.autograd.graph import saved_tensors_hooks

from autopar.planner.call_keys import key_of


@dataclass(frozen=True, slots=True)
class Laid:
    """A tensor by where its elements lie: ``shape``, ``strides`` and ``offset`` in elements, in a numbered memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    needs_grad: bool
    memory: int

    @classmethod
    def dense(cls, shape: Sequence[int], dtype: torch.dtype, needs_grad: bool, memory: int) -> Laid:
        """One that has a memory for itself, in the order of its elements."""
        strides, step = [], 1
        for extent in reversed(shape):
            strides.append(step)
            step *= max(extent, 1)
        return cls(tuple(shape), tuple(reversed(strides)), 0, dtype, needs_grad, memory)

    def of(self, memory: int, *, needs_grad: bool) -> Laid:
        return Laid(self.shape, self.strides, self.offset, self.dtype, needs_grad, memory)


class OpCall(NamedTuple):
    """A call with :class:`Laid` in place of tensors, whose memories 0, 1, … have so many ``bytes_``; ``trains``:
    whether it has a backward."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    bytes_: Sequence[int]
    trains: bool


@dataclass(frozen=True)
class Result:
    """Of an :class:`OpCall`: what it returns, :class:`Laid` in place of tensors; bytes of the memories that it made,
    which are the numbers after those given; the memories that its backward needs, by tensor."""

    value: Any
    made: tuple[int, ...]
    kept: tuple[int, ...]


@dataclass
class SavedByOp:
    """Results of calls, each once. Whoever places several models holds one for all of them."""

    _mode: FakeTensorMode = field(default_factory=FakeTensorMode)
    _results: dict[Hashable, Result] = field(default_factory=dict)

    def of(self, call: OpCall) -> Result:
        """What it keeps, found out or known."""
        key = call._replace(args=key_of(call.args), kwargs=key_of(call.kwargs), bytes_=tuple(call.bytes_))
        try:
            found = self._results.get(key)
        except TypeError:  # an argument that can't be compared by value
            return self._run(call)
        if found is None:
            found = self._results[key] = self._run(call)
        return found

    def _run(self, call: OpCall) -> Result:
        saved: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return tensor

        memories = _Memories(self._mode, call.bytes_)
        given, named = (replaced(some, Laid, memories.tensor) for some in (call.args, call.kwargs))
        uncached = disable_fake_tensor_cache(self._mode)  # which hardly meets a call again: they are kept here
        with uncached, self._mode, saved_tensors_hooks(keep, _same), torch.set_grad_enabled(call.trains):
            value = call.function(*given, **named)
        told = replaced(value, Tensor, memories.laid)
        kept = tuple(map(memories.number, saved))
        return Result(told, tuple(memories.made), kept)


class _Memories:
    """Storages by number: those given, then others as they are met."""

    def __init__(self, mode: FakeTensorMode, bytes_: Sequence[int]) -> None:
        self._mode = mode
        self._given = [torch.empty(count, dtype=torch.uint8, device="meta") for count in bytes_]
        self._storages = [tensor.untyped_storage() for tensor in self._given]
        self._numbers = {id(storage): number for number, storage in enumerate(self._storages)}
        self.made: list[int] = []

    def number(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        if id(storage) not in self._numbers:
            self._numbers[id(storage)] = len(self._numbers)
            self._storages.append(storage)  # its id is its own as long as it is there
            self.made.append(storage.nbytes())
        return self._numbers[id(storage)]

    def tensor(self, laid: Laid) -> Tensor:
        """A tensor in one of the memories that were given, without a graph behind it."""
        memory, wide = self._given[laid.memory], laid.dtype.itemsize
        words = memory[: memory.numel() // wide * wide].view(laid.dtype)
        place = words.as_strided(laid.shape, laid.strides, laid.offset)
        return FakeTensor(self._mode, place, torch.device("cpu")).requires_grad_(laid.needs_grad)

    def laid(self, tensor: Tensor) -> Laid:
        shape, offset = tuple(tensor.shape), int(tensor.storage_offset())
        return Laid(shape, tensor.stride(), offset, tensor.dtype, tensor.requires_grad, self.number(tensor))


def _same(tensor: Tensor) -> Tensor:
    return tensor


def replaced(item: Any, kind: type, by: Callable[[Any], Any]) -> Any:
    """``item`` with everything of that ``kind`` in it, at any depth of lists, tuples and dicts, replaced."""
    if isinstance(item, kind):
        return by(item)
    if isinstance(item, list | tuple):
        return type(item)([replaced(each, kind, by) for each in item])
    if isinstance(item, dict):
        return {name: replaced(each, kind, by) for name, each in item.items()}
    return item
