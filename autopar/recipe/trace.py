"""The operators that run while a model initialises itself, and which of them one tensor needs.

The one place that uses ``torch.utils._python_dispatch.TorchDispatchMode``, torch's hook below autograd, which
has no public name.

Tensors are told apart by their storage, so that ``weight[0].zero_()`` and ``weight.data.normal_()`` write
``weight``.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.recipe.steps import CONSTANT, Constant, Recipe, Step, Value

# In-place operators that give every element of their tensor a value, whatever it held; of these, the ones that draw it.
_DRAWS: Final = {
    *("normal_", "uniform_", "log_normal_", "exponential_", "cauchy_", "geometric_", "random_", "bernoulli_"),
}
_FILLS: Final = {"zero_", "fill_", "copy_", *_DRAWS}
_PARTLY: Final = ("index_", "scatter", "masked_")  # those that write the elements they are told
_BLANK: Final = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_PLACEMENT: Final = {"device", "layout", "pin_memory"}  # of no concern to a recipe
_IS_META: Final[Any] = inspect.getattr_static(torch.Tensor, "is_meta").__get__


class UninitializedError(Exception):
    """A tensor has elements that no recorded step gives a value."""


@dataclass(frozen=True)
class _Call:
    """One recorded step, and what it does to storages, by number.

    ``reads``: those whose values it takes; ``covers``: of those it writes, how many elements get a new value;
    ``replaces``: those whose former values can't matter any more.
    """

    step: Step
    reads: frozenset[int]
    covers: Mapping[int, int]
    replaces: frozenset[int]


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every operator that ran inside :meth:`recording`, and the recipes that follow from them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[_Call] = []
        self._writers: dict[int, list[int]] = defaultdict(list)
        self._values: dict[tuple[int, int], Value] = {}  # of a tensor on a storage
        self._owners: dict[int, tuple[torch.Tensor, Value]] = {}  # the tensor first seen on a storage
        self._alive: dict[int, object] = {}  # tensors and storages, so that no number is used twice

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record what runs inside; random numbers that it draws leave the default generator as it was."""
        with torch.random.fork_rng(devices=[]), _Hidden(self), self:
            torch.default_generator.manual_seed(0)
            yield

    def recipe(self, tensor: torch.Tensor) -> Recipe:
        """How ``tensor`` came to its present values. Raises UninitializedError."""
        result = self._value(tensor)
        calls = self._needed(self._contents(self._key(tensor)) | {result.step})
        numbers = {call: number for number, call in enumerate(calls)}
        steps = tuple(_renumber(self._calls[call].step, numbers) for call in calls)
        return Recipe(tuple(tensor.shape), tensor.dtype, steps, _renumber(result, numbers))

    def whole_init(self, name: str, tensor: torch.Tensor, options: Mapping[str, Any]) -> None:
        """Record ``torch.nn.init.<name>(tensor, **options)``, which fills ``tensor``, as one step."""
        step = Step(f"init.{name}", (self._value(tensor),), dict(options), stream=len(self._calls))
        self._write(step, [], [tensor], fills=True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        plain_args = self._plain(args)  # now: the call may change the values of a constant
        plain_kwargs = {key: self._plain(item) for key, item in kwargs.items() if key not in _PLACEMENT}
        stream = len(self._calls) if torch.Tag.nondeterministic_seeded in func.tags else None
        step = Step(str(func), plain_args, plain_kwargs, stream)
        base, overload = step.op.split(".")[1:]
        # What draws values has none to draw without memory, which torch takes long to find out.
        result = args[0] if base in _DRAWS and args[0].is_meta else func(*args, **kwargs)
        inputs, outputs = list(_tensors((args, kwargs))), list(_tensors(result))
        if written := _written(base, overload, args, kwargs):
            fills = base in _FILLS or overload.endswith("out")
            reads = [t for t in inputs if all(t is not other for other in written)]
            self._write(step, reads, written, fills=fills, partly=base.startswith(_PARTLY))
        elif outputs and not inputs:  # a factory; what the default dtype is must not matter later
            step = replace(step, kwargs={**plain_kwargs, "dtype": outputs[0].dtype})
            self._make(step, [], outputs, blank=base in _BLANK)
        else:
            self._make(step, inputs, outputs, blank=base in _BLANK)
        return result

    def _write(
        self,
        step: Step,
        reads: list[torch.Tensor],
        written: list[torch.Tensor],
        *,
        fills: bool,
        partly: bool = False,
    ) -> None:
        covers = {self._key(t): t.numel() if fills or partly else 0 for t in written}
        replaces = {self._key(t) for t in written if fills and t.numel() == _capacity(t)}
        self._append(step, reads, covers, replaces)

    def _make(self, step: Step, reads: list[torch.Tensor], made: list[torch.Tensor], *, blank: bool = False) -> None:
        """A step that returns tensors: on new storages, or further views of known ones."""
        new = {self._key(t): 0 if blank else _capacity(t) for t in made if self._key(t) not in self._owners}
        call = self._append(step, reads, new, set(new))
        for output, tensor in enumerate(made):
            self._name(tensor, Value(call, output))

    def _append(self, step: Step, reads: list[torch.Tensor], covers: Mapping[int, int], replaces: set[int]) -> int:
        index = len(self._calls)
        self._calls.append(_Call(step, frozenset(map(self._key, reads)), covers, frozenset(replaces)))
        for storage in covers:
            self._writers[storage].append(index)
        return index

    def _key(self, tensor: torch.Tensor) -> int:
        """The number of the storage of ``tensor``."""
        storage = tensor.untyped_storage()
        self._alive[id(storage)] = storage
        return id(storage)

    def _name(self, tensor: torch.Tensor, value: Value) -> None:
        self._alive[id(tensor)] = tensor
        self._values.setdefault((id(tensor), self._key(tensor)), value)
        self._owners.setdefault(self._key(tensor), (tensor, value))

    def _value(self, tensor: torch.Tensor) -> Value:
        """The name of ``tensor``; one that no recorded step made gets one: blank, its values, or a view."""
        storage = self._key(tensor)
        if (id(tensor), storage) not in self._values:
            if owner := self._owners.get(storage):
                self._add_view(tensor, *owner)
            elif tensor.is_meta:
                empty = Step("aten.empty.memory_format", (tuple(tensor.shape),), {"dtype": tensor.dtype})
                self._make(empty, [], [tensor], blank=True)
            else:
                self._make(Step(CONSTANT, (Constant.of(tensor),)), [], [tensor])
        return self._values[id(tensor), storage]

    def _add_view(self, tensor: torch.Tensor, owner: torch.Tensor, value: Value) -> None:
        if _place(tensor) == _place(owner):
            self._name(tensor, value)
        elif self._calls[value.step].step.op == CONSTANT:  # of which the recipe holds no more than ``owner``
            self._make(Step(CONSTANT, (Constant.of(tensor),)), [], [tensor])
        else:
            self._make(Step("aten.as_strided.default", (value, *_place(tensor))), [owner], [tensor])

    def _plain(self, item: Any) -> Any:
        """An argument as a recipe holds it; generators are left out, since every step has its own stream."""
        if isinstance(item, torch.Tensor):
            return self._value(item)
        if isinstance(item, list | tuple):
            return tuple(self._plain(entry) for entry in item)
        return None if isinstance(item, torch.Generator) else item

    def _contents(self, storage: int) -> set[int]:
        """The calls that give ``storage`` its present values, back to those that need no other."""
        kept: set[int] = set()
        visited: set[tuple[int, int]] = set()
        whole = _capacity(self._owners[storage][0])
        waiting = [(storage, len(self._calls), whole)]  # up to which call, and how many elements need a value
        while waiting:
            current, end, missing = waiting.pop()
            for index in reversed([i for i in self._writers[current] if i < end]):
                if (current, index) in visited:
                    missing = 0  # checked on that visit
                    break
                visited.add((current, index))
                kept.add(index)
                call = self._calls[index]
                waiting += [(read, index, 1) for read in call.reads]
                missing -= call.covers[current]
                if current in call.replaces:
                    break
            if missing > 0:
                raise UninitializedError
        return kept

    def _needed(self, calls: set[int]) -> list[int]:
        """``calls`` and those that make the tensors which they name, in order."""
        waiting = list(calls)
        while waiting:
            step = self._calls[waiting.pop()].step
            new = {value.step for value in _values((step.args, *step.kwargs.values()))} - calls
            calls |= new
            waiting += new
        return sorted(calls)


class _Hidden(TorchFunctionMode):
    """Sees two things that never reach an operator on the meta device.

    Some functions of torch.nn.init (rejection sampling, for one) leave a meta tensor alone. Each asks
    ``tensor.is_meta`` before it returns; the question is answered, and the call recorded as a whole. And
    ``torch.tensor(values)`` drops the values, so it is made on the CPU first.
    """

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and _on_meta(kwargs):
            return func(*args, **{**kwargs, "device": "cpu"}).to("meta")
        result = func(*args, **kwargs)
        if func == _IS_META and result and (init := _calling_init(inspect.currentframe())):
            self._trace.whole_init(init[0], args[0], init[1])
        return result


def _on_meta(kwargs: Mapping[str, Any]) -> bool:
    device = kwargs.get("device")
    return torch.device(torch.get_default_device() if device is None else device).type == "meta"


def _calling_init(frame: FrameType | None) -> tuple[str, dict[str, Any]] | None:
    """Name and options of the torch.nn.init function that the modes around ``frame`` were called from."""
    while frame and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    if frame is None or frame.f_globals.get("__name__") != nn.init.__name__:
        return None
    names = frame.f_code.co_varnames[1 : frame.f_code.co_argcount]
    options = {name: frame.f_locals[name] for name in names if name != "generator"}
    return frame.f_code.co_name.removeprefix("_no_grad_"), options


def _written(base: str, overload: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    if base.endswith("_") and not base.startswith("__"):
        return list(_tensors(args[:1]))
    return list(_tensors(kwargs)) if overload.endswith("out") else []


def _capacity(tensor: torch.Tensor) -> int:
    """Elements of the whole storage."""
    return tensor.untyped_storage().nbytes() // tensor.itemsize


def _place(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    return tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())


def _tensors(item: Any) -> Iterator[torch.Tensor]:
    if isinstance(item, torch.Tensor):
        yield item
    elif isinstance(item, list | tuple):
        for entry in item:
            yield from _tensors(entry)
    elif isinstance(item, dict):
        yield from _tensors(tuple(item.values()))


def _values(item: Any) -> Iterator[Value]:
    if isinstance(item, Value):
        yield item
    elif isinstance(item, tuple):
        for entry in item:
            yield from _values(entry)


def _renumber(item: Any, numbers: Mapping[int, int]) -> Any:
    """``item`` with the steps that its Values name counted anew."""
    if isinstance(item, Value):
        return Value(numbers[item.step], item.output)
    if isinstance(item, tuple):
        return tuple(_renumber(entry, numbers) for entry in item)
    if isinstance(item, Step):
        kwargs = {key: _renumber(entry, numbers) for key, entry in item.kwargs.items()}
        return replace(item, args=_renumber(item.args, numbers), kwargs=kwargs)
    return item
