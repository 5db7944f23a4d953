"""Values that a model's code reads while it is captured, where they depend on nothing but that code and its buffers.

``bool((mask == causal).all())``, with which torch's own transformer layers look at a mask, can't be told from a graph.
Where both are made of numbers and buffers, it is the same at every step: it is computed as it is asked for, on the
tensors that the model really has. A buffer that is read so must not be written to by the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from autopar.errors import CaptureError
from autopar.graph import info, is_mutating
from autopar.liveness import Memory, written_operands
from autopar.source_lines import calling_line

_READS: Final = frozenset({
    *("__bool__", "__int__", "__float__", "__index__", "__contains__"),
    *("item", "tolist", "is_nonzero", "equal", "allclose"),
})  # fmt: skip
_MAKES: Final = frozenset({
    *("tensor", "as_tensor", "full", "ones", "zeros", "eye", "arange", "linspace", "logspace"),
    *("tril_indices", "triu_indices", "scalar_tensor"),
})  # fmt: skip
_WRITES: Final = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__iand__", "__ior__", "__ixor__")
_RANDOM: Final = ("rand", "drop", "bernoulli", "normal", "multinomial", "poisson", "uniform", "exponential", "empty")
_STATISTICS: Final = ("running_mean", "running_var", "num_batches_tracked")
"""Of norms, which write to them where no name of an operation says so."""


class KnownValues(TorchFunctionMode):
    """Within it, reading a tensor that is made of numbers and buffers of ``model`` gives its value.

    ``read``: the buffers that answers depended on by name, with the line that asked first.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.read: dict[str, str] = {}
        self._buffers: dict[str, tuple[nn.Module, str, Tensor]] = {
            f"{path}.{name}" if path else name: (module, name, buffer)
            for path, module in model.named_modules()
            for name, buffer in module.named_buffers(recurse=False)
            if not buffer.is_meta and name not in _STATISTICS
        }
        self._calls: dict[int, tuple[_Call, int]] = {}
        """By a tensor, the call that made it, and which of its results it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in _READS and args and (known := self._known((args, kwargs))) is not None:
            return _computed(func, known)
        made = func(*args, **kwargs)
        if (name.endswith("_") and not name.endswith("__")) or name in _WRITES or "out" in kwargs:
            self._forget([kwargs["out"]] if "out" in kwargs else args[:1])
        elif (results := _tensors(made)) and self._follows(name, (args, kwargs)):
            call = _Call(results, func, (args, kwargs))
            self._calls |= {id(result): (call, number) for number, result in enumerate(results)}
        return made

    def tells(self, tensor: Tensor) -> bool:
        """Whether its value is known, and none of buffers."""
        before = dict(self.read)
        told = self._value(tensor) is not None and self.read == before
        self.read = before
        return told

    def _forget(self, written: Any) -> None:
        """What has the memory of what is written to isn't known any more."""
        places = {x.untyped_storage() for x in _tensors(list(written))}
        self._calls = {i: c for i, c in self._calls.items() if c[0].made[c[1]].untyped_storage() not in places}

    def _follows(self, name: str, given: Any) -> bool:
        """Whether what a call makes is told by what is known."""
        if any(part in name for part in _RANDOM):
            return False
        tensors = _tensors(given)
        return name in _MAKES if not tensors else all(id(x) in self._calls or self._buffer(x) for x in tensors)

    def _buffer(self, tensor: Tensor) -> str:
        """The name of the model's buffer that it is; "" if none whose value is known."""
        found = (path for path, (module, name, _) in self._buffers.items() if getattr(module, name, None) is tensor)
        return next(found, "")

    def _known(self, given: Any) -> Any:
        """``given`` with values in the place of tensors; None where one isn't known, or there is none."""
        found = {id(x): self._value(x) for x in _tensors(given)}
        if not found or any(value is None for value in found.values()):
            return None
        return _map(given, lambda x: found[id(x)])

    def _value(self, tensor: Tensor) -> Tensor | None:
        if id(tensor) not in self._calls:
            name = self._buffer(tensor)
            if not name:
                return None
            self.read.setdefault(name, calling_line())
            return self._buffers[name][2]
        call, number = self._calls[id(tensor)]
        if call.values is None:
            given = self._known(call.given) if _tensors(call.given) else call.given
            call.values = None if given is None else _tensors(_computed(call.func, given))
        return None if call.values is None else call.values[number]

    def check(self, graph: fx.Graph, memory: Memory) -> None:
        """Raise CaptureError where the model writes to a buffer that an answer depended on."""
        asked = {n: info(n).name for n in graph.nodes if n.op == "placeholder" and info(n).name in self.read}
        writes = [o for node in graph.nodes if is_mutating(node) for o in written_operands(node)]
        for node, name in asked.items():
            if any(memory[node] & memory[written] for written in writes):
                raise CaptureError(
                    f"the model's code decides by the values of buffer {name!r}\n  at {self.read[name]}\nand writes to "
                    "it, so that other steps may decide otherwise; use torch.where, or set it before compiling."
                )


@dataclass
class _Call:
    """How tensors without values were made, and their values once one has been asked for."""

    made: list[Tensor]
    func: Callable[..., Any]
    given: Any
    values: list[Tensor] | None = None


def _computed(func: Callable[..., Any], given: tuple[Any, Any]) -> Any:
    """What a call gives where nothing is traced; of what has no values (the meta device), as on the CPU."""
    args, kwargs = given
    if torch.device(kwargs.get("device") or "cpu").type == "meta":
        kwargs = {**kwargs, "device": "cpu"}
    with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
        return func(*args, **kwargs)


def _tensors(item: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _map(item, found.append)
    return found


def _map(item: Any, function: Callable[[Tensor], Any]) -> Any:
    if isinstance(item, Tensor):
        return function(item)
    if type(item) in (tuple, list):
        return type(item)(_map(each, function) for each in item)
    if type(item) is dict:
        return {key: _map(each, function) for key, each in item.items()}
    return item
