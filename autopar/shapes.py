"""Tensors that have a shape, strides, a dtype, a device and memory to count, but no values: a fast fake tensor.

What an operation makes depends only on what it is given: on metadata, and on arguments that are no tensors. So each
distinct call runs once under torch's ``FakeTensorMode``, and what came out (new tensors, views of operands, operands
themselves) is kept as a template from which all further calls are answered. That takes about a tenth of the time of
the mode itself, with the same shapes, strides and sharing of memory (measured on Llama-3-8B in
``tests/test_shapes.py``' s manner: 11 instead of 110 microseconds per operation).

The memory of such a tensor is a :class:`Memory`, a Python object that lives as long as a tensor that lies in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from autopar.errors import PlanError

_wrap: Any = Tensor._make_wrapper_subclass
_bit: Any = torch._C.DispatchKey
_bits: Any = torch._C.DispatchKeySet
_NUMBERS: Final = frozenset({bool, int, float, complex})
_EMPTY: Final = torch.ops.aten.empty.memory_format
_VIEW: Final = torch.ops.aten._unsafe_view.default  # a view, which its schema doesn't say
_STRIDED: Final = torch.ops.aten.as_strided.default  # the only view that counts from the beginning of memory
_LAID_OUT: Final = torch.ops.aten.as_strided_.default  # pooling to one value has dims of it lie as others would

Layout = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device, bool, bool]
"""Shape, strides, dtype and device, and whether it is a conjugate or negative view: what an operation may ask of an
operand beside its values."""


class Memory:
    """Where tensors without values lie: so many bytes, and nothing in them. In the place of ``UntypedStorage``."""

    __slots__ = ("__weakref__", "_bytes", "shapes")

    def __init__(self, size: int, shapes: Shapes) -> None:
        self._bytes = size
        self.shapes = shapes

    @property
    def _cdata(self) -> int:
        return id(self)

    def nbytes(self) -> int:
        return self._bytes

    def resize_(self, size: int) -> Memory:
        """Give memory back, or take it again."""
        self._bytes = size
        self.shapes.on_resize(self)
        return self


class ShapeTensor(Tensor):
    """A tensor without values. Operations on it are answered by the :class:`Shapes` that made it."""

    memory: Memory
    layout_number: int

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Where the mode that counts is off: the data would move as on hardware."""
        own = next(item for item in _operands((args, kwargs or {})) if isinstance(item, ShapeTensor))
        return own.memory.shapes.answer(func, args, kwargs or {})

    def untyped_storage(self) -> Any:
        return self.memory


@dataclass(frozen=True, slots=True)
class _Made:
    """One result: a new tensor of ``layout`` in ``bytes`` of memory, or (``source`` from 0 on) a view of an operand,
    ``offset`` elements behind where that begins."""

    layout: Layout
    number: int  # of the layout
    offset: int
    bytes: int
    source: int


@dataclass(frozen=True, slots=True)
class _Same:
    """One result: an operand itself."""

    source: int


class Shapes:
    """Answers operations on tensors without values.

    It keeps one template per distinct call, so it may serve any number of ranks; ``on_memory`` is told of each
    :class:`Memory` that is made, ``on_resize`` of each that changed.
    """

    def __init__(self) -> None:
        self.on_memory: Callable[[Memory], None] = uncounted
        self.on_resize: Callable[[Memory], None] = uncounted
        self._fake = FakeTensorMode()
        self._templates: dict[tuple[Any, ...], Any] = {}
        self._written: dict[Any, Any] = {}
        self._layouts: dict[Layout, int] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> ShapeTensor:
        """A tensor on the CPU."""
        made: ShapeTensor = self.answer(_EMPTY, (list(shape),), {"dtype": dtype, "device": torch.device("cpu")})
        return made

    def tensor(self, layout: Layout, offset: int, memory: Any) -> ShapeTensor:
        """A tensor that lies in ``memory``, so many elements behind its beginning."""
        return self._wrapped(layout, self.number(layout), offset, memory)

    def answer(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What ``func(*args, **kwargs)`` gives. Raises what ``FakeTensorMode`` does where that depends on values."""
        if func is _LAID_OUT and _lies_so(*args, **kwargs):
            return args[0]
        written = self._written.get(func, _UNSEEN)
        if written is _UNSEEN:
            written = self._written[func] = _written(func)
        if written is not None:
            return _returned(written, func, args, kwargs)
        key: list[Any] = [func]
        operands: list[Tensor] = []
        self._describe(args, key, operands)
        for name, value in kwargs.items():
            key.append(name)
            self._describe((value,), key, operands)
        if func is _STRIDED:
            key += [operands[0].storage_offset(), operands[0].untyped_storage().nbytes()]
        try:
            template = self._templates.get(place := tuple(key), _UNSEEN)
        except TypeError:  # an argument that can't be hashed
            return self._filled(self._run(func, args, kwargs), operands)
        if template is _UNSEEN:
            template = self._templates[place] = self._run(func, args, kwargs)
        return self._filled(template, operands)

    def _describe(self, values: Sequence[Any], key: list[Any], operands: list[Tensor]) -> None:
        """Add to ``key`` what results depend on, and tensors to ``operands``."""
        for value in values:
            kind = type(value)
            if kind is ShapeTensor:
                key.append(value.layout_number)
                operands.append(value)
            elif kind in _NUMBERS:
                key += (kind, value)
            elif kind is list or kind is tuple:
                if value and not isinstance(value[0], int | float):
                    key.append(len(value))
                    self._describe(value, key, operands)
                else:
                    key.append(tuple(value))
            elif isinstance(value, Tensor):
                key.append(self.number(layout_of(value)))
                operands.append(value)
            elif kind is not torch.Generator:
                key.append(value)

    def number(self, layout: Layout) -> int:
        """What tells layouts apart."""
        return self._layouts.setdefault(layout, len(self._layouts))

    def _filled(self, template: Any, operands: Sequence[Tensor]) -> Any:
        kind = type(template)
        if kind is _Made:
            return self._tensor(template, operands)
        if kind is _Same:
            return operands[template.source]
        if kind is list or kind is tuple:
            return kind(self._filled(item, operands) for item in template)
        return template

    def _tensor(self, made: _Made, operands: Sequence[Tensor]) -> ShapeTensor:
        if made.source < 0:
            offset, memory = made.offset, Memory(made.bytes, self)
            self.on_memory(memory)
        else:
            source = operands[made.source]
            offset, memory = made.offset + source.storage_offset(), source.untyped_storage()  # type: ignore[assignment]
        return self._wrapped(made.layout, made.number, offset, memory)

    def _wrapped(self, layout: Layout, number: int, offset: int, memory: Any) -> ShapeTensor:
        shape, strides, dtype, device, conjugate, negative = layout
        tensor: ShapeTensor = _wrap(ShapeTensor, shape, strides, offset, None, dtype, torch.strided, device)
        if conjugate or negative:
            bits = _bits(_bit.Conjugate) if conjugate else _bits(_bit.Negative)
            options = {"dtype": dtype, "device": device, "_extra_dispatch_keys": bits}
            tensor = _wrap(ShapeTensor, shape, strides, offset, **options)
        tensor.memory, tensor.layout_number = memory, number
        return tensor

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The template of a call, from tensors of the same layout each of which has memory of its own: fake ones, or
        where all results are views, whose making asks nothing of devices, those of the meta device."""
        given: list[Tensor] = []
        copies: list[Tensor] = []
        on_meta = _makes_views(func)

        def replaced(tensor: Tensor) -> Tensor:
            given.append(tensor)
            copy = self._copy(tensor, whole=func is _STRIDED)
            copies.append(copy if on_meta else FakeTensor(self._fake, copy, tensor.device))
            return copies[-1]

        copied_args, copied_kwargs = _replaced((args, dict(kwargs)), replaced)
        if on_meta:
            return self._template(func(*copied_args, **copied_kwargs), copies, given[0].device)
        with self._fake:
            return self._template(func(*copied_args, **copied_kwargs), copies, None)

    def _copy(self, tensor: Tensor, *, whole: bool) -> Tensor:
        """On the meta device, from the beginning of its memory or at the same place of as much (``whole``)."""
        shape, strides, dtype = tensor.shape, tensor.stride(), tensor.dtype
        if whole:
            elements = tensor.untyped_storage().nbytes() // tensor.itemsize
            copy = torch.empty(elements, dtype=dtype, device="meta").as_strided(shape, strides, tensor.storage_offset())
        else:
            copy = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        copy = copy.conj() if tensor.is_conj() else copy
        return torch._neg_view(copy) if tensor.is_neg() else copy

    def _template(self, result: Any, fakes: Sequence[Tensor], device: torch.device | None) -> Any:
        """``device``: of the results, where that is another than they say."""
        if isinstance(result, list | tuple):
            return type(result)(self._template(item, fakes, device) for item in result)
        if not isinstance(result, Tensor):
            return result
        for number, fake in enumerate(fakes):
            if result is fake:
                return _Same(number)
        layout, storage = layout_of(result, device), result.untyped_storage()
        source, offset = -1, int(result.storage_offset())
        for number, fake in enumerate(fakes):
            if fake.untyped_storage()._cdata == storage._cdata:
                source, offset = number, offset - int(fake.storage_offset())
                break
        return _Made(layout, self.number(layout), offset, int(storage.nbytes()), source)


_UNSEEN: Final = object()


def uncounted(_: Memory) -> None:
    """Nobody counts."""


def layout_of(tensor: Tensor, device: torch.device | None = None) -> Layout:
    conjugate, negative = tensor.is_conj(), tensor.is_neg()
    return tensor.shape, tensor.stride(), tensor.dtype, device or tensor.device, conjugate, negative


def _lies_so(tensor: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> bool:
    """Whether it lies so already, but for dims with one value."""
    own = zip(tensor.shape, tensor.stride(), strict=True)
    wanted = zip(size, stride, strict=True)
    offset = tensor.storage_offset() if storage_offset is None else storage_offset
    return offset == tensor.storage_offset() and [e for e in own if e[0] > 1] == [e for e in wanted if e[0] > 1]


def _makes_views(func: Any) -> bool:
    """Whether all that the op gives are views of what it gets."""
    returns = func._schema.returns
    return func is _VIEW or all(one.alias_info is not None and not one.alias_info.is_write for one in returns)


def _operands(value: Any) -> Iterator[Tensor]:
    """Tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _operands(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _operands(item)


def _replaced(value: Any, by: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with each tensor in it replaced, in order."""
    if isinstance(value, Tensor):
        return by(value)
    if isinstance(value, list | tuple):
        return type(value)(_replaced(item, by) for item in value)
    if isinstance(value, dict):
        return {name: _replaced(item, by) for name, item in value.items()}
    return value


def _written(func: Any) -> tuple[int, ...] | None:
    """Of an op that writes in place, and makes nothing else, the arguments that it returns; None of another."""
    schema = func._schema
    if not schema.is_mutable:
        return None
    if torch.Tag.inplace_view in func.tags:
        raise PlanError(f"{func} changes the shape of a tensor in place, which tensors without values can't")
    numbers: list[int] = []
    for result in schema.returns:
        if result.alias_info is None or not result.alias_info.is_write:
            return None
        names = result.alias_info.before_set
        given = [n for n, a in enumerate(schema.arguments) if a.alias_info is not None]
        numbers += [n for n in given if schema.arguments[n].alias_info.before_set == names][:1]
    return tuple(numbers)


def _returned(written: tuple[int, ...], func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if not written:
        return None
    found = [args[n] if n < len(args) else kwargs[func._schema.arguments[n].name] for n in written]
    return found[0] if len(found) == 1 else tuple(found)
