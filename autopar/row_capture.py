"""Code that runs only where some token chose an expert: captured as if some always did, and once more as if none did.

``if len(token) == 0: continue`` in a loop over experts depends on values, which no graph can. In a capture under
:class:`Somewhere` every condition holds somewhere, so that all bodies are in the graph; under ``Somewhere(False)`` none
does. Where code asks, it leaves a mark in the graph that says what it asked of. That nothing but the bodies depends on
the answer is for :mod:`autopar.passes.captured_rows` to see.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from autopar.errors import CaptureError

_NOT_THE_USERS: Final = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
_FINDERS: Final = ("nonzero", "nonzero_numpy", "argwhere", "where", "__getitem__", "masked_select")
_SIZES: Final = ("__get__", "size", "numel", "nelement")
_REDUCERS: Final = ("any", "sum", "count_nonzero", "bincount")
_ANSWERS: Final[dict[str, Callable[[int, Any], bool]]] = {
    **dict.fromkeys(("eq", "__eq__"), lambda count, other: bool(count == other)),
    **dict.fromkeys(("ne", "__ne__"), lambda count, other: bool(count != other)),
    **dict.fromkeys(("gt", "__gt__"), lambda count, other: bool(count > other)),
    **dict.fromkeys(("ge", "__ge__"), lambda count, other: bool(count >= other)),
    **dict.fromkeys(("lt", "__lt__"), lambda count, other: bool(count < other)),
    **dict.fromkeys(("le", "__le__"), lambda count, other: bool(count <= other)),
}


def _nothing_computes(*args: Any) -> Tensor:
    raise CaptureError("the marks of captured conditions have shapes only")


_asked = torch.library.custom_op(
    "autopar::asked_for_rows", _nothing_computes, mutates_args=(), schema="(Tensor of) -> Tensor"
)
_asked.register_fake(lambda of: of.new_empty(()))
ASKED: Final[Callable[..., Tensor]] = torch.ops.autopar.asked_for_rows.default
"""``asked_for_rows(of)``: code asks whether ``of``, a condition or what was taken where one holds, has any."""


def largest(size: int | torch.SymInt) -> int:
    """A size, or the largest that it can be where it depends on values. Raises CaptureError where nothing says."""
    if isinstance(size, int):
        return size
    most = size.node.shape_env.bound_sympy(size.node.expr).upper
    if not most.is_finite:
        raise CaptureError("a tensor's size depends on values, and nothing says how large it can be")
    return int(most)


@dataclass(frozen=True)
class _Count:
    """A scalar that says how many places of ``of`` there are; ``is_flag``: only whether any, or if ``negated`` none."""

    tensor: Tensor
    of: Tensor
    is_flag: bool
    negated: bool = False


class Somewhere(TorchFunctionMode):
    """Within it, conditions whose values aren't known hold somewhere (``some``), or nowhere.

    ``asked``: code has asked. ``counted``: it was told a number, of which only that it isn't zero means something;
    another ``spare`` makes another number of it.
    """

    def __init__(self, some: bool = True, *, spare: int = 0) -> None:
        super().__init__()
        self.some, self.spare = some, spare
        self.asked = self.counted = False
        self._counts: dict[int, _Count] = {}
        self._vectors: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, first = getattr(func, "__name__", ""), args[0] if args and isinstance(args[0], Tensor) else None
        if first is not None and name in ("__len__", "__bool__", "item", *_SIZES, *_ANSWERS):
            answer = self._answer(name, first, args[1:])
            if answer is not None:
                return answer
        counted = _counts_of_all(name, *args, **(kwargs or {})) if first is not None else None
        made = func(*args, **(kwargs or {})) if counted is None else counted
        if first is not None:
            self._note(name, first, args[1:], made)
        return made

    def _answer(self, name: str, tensor: Tensor, rest: Sequence[Any]) -> Any:
        """What code is told that asks of ``tensor`` what depends on values; None: nothing but what it would be."""
        if _is_dynamic(tensor):
            if name == "__len__":
                self.counted = True
                return self._told(tensor, max(1, largest(tensor.shape[0]) - self.spare), 0)
            if name in _SIZES and _is_users(sys._getframe(1)):
                self.ask(tensor)
            return None
        count = self._counts.get(id(tensor))
        if count is None:
            return None
        if name == "item" and not count.is_flag:
            self.counted = True
            return Number(self, count.of)
        if name in ("__bool__", "item"):
            return self._told(count.of, not count.negated, count.negated)
        if name in _ANSWERS and not count.is_flag and len(rest) == 1 and isinstance(rest[0], int):
            return self._compared(name, tensor, count, rest[0])
        return None

    def _compared(self, name: str, tensor: Tensor, count: _Count, other: int) -> Tensor | None:
        """A flag, where any number from 1 on gives the same answer."""
        if other not in (0, 1) or (other == 1 and name.strip("_") not in ("ge", "lt")):
            return None
        flag = torch.empty((), dtype=torch.bool, device=tensor.device)
        negated = not _ANSWERS[name](1, other)
        self._counts[id(flag)] = _Count(flag, count.of, is_flag=True, negated=negated)
        return flag

    def _note(self, name: str, tensor: Tensor, rest: Sequence[Any], made: Any) -> None:
        """Remember what ``made`` is, and how many there are of it."""
        if name in _FINDERS:
            for result in made if isinstance(made, tuple | list) else [made]:
                self._bound(result)
        if name == "unbind" and id(tensor) in self._vectors:
            self._counts |= {id(each): _Count(each, each, is_flag=False) for each in made}
        if not isinstance(made, Tensor):
            return
        count = self._counts.get(id(tensor))
        if name in _REDUCERS and tensor.is_floating_point():
            return
        if name in _REDUCERS and made.dim() == 0 and not _is_dynamic(tensor):
            self._counts[id(made)] = _Count(made, tensor, is_flag=name == "any")
        elif name in _REDUCERS and made.dim() == 1 and not made.is_floating_point():
            self._vectors[id(made)] = made
        elif name in ("logical_not", "bitwise_not", "__invert__") and count is not None and count.is_flag:
            self._counts[id(made)] = _Count(made, count.of, is_flag=True, negated=not count.negated)
        elif name in ("__getitem__", "select") and id(tensor) in self._vectors and made.dim() == 0:
            self._counts[id(made)] = _Count(made, made, is_flag=False)

    def _bound(self, made: Any) -> None:
        """Let the sizes of a tensor that depend on values be known as far as they are answered."""
        for size in made.shape if isinstance(made, Tensor) else ():
            if not isinstance(size, int):
                torch._check(size >= 1 if self.some else size == 0)

    def ask(self, of: Tensor) -> None:
        """Leave a mark."""
        self.asked = True
        ASKED(of)

    def _told(self, of: Tensor, some: Any, none: Any) -> Any:
        self.ask(of)
        return some if self.some else none


class Number(int):
    """How many places of ``of`` there are. Nobody knows but that there are any: comparing it leaves a mark."""

    mode: Somewhere
    of: Tensor

    def __new__(cls, mode: Somewhere, of: Tensor) -> Number:
        made = super().__new__(cls, 1 + mode.spare if mode.some else 0)
        made.mode, made.of = mode, of
        return made

    def _ask(self) -> int:
        self.mode.ask(self.of)
        return int(self)

    def __bool__(self) -> bool:
        return self._ask() != 0

    def __eq__(self, other: object) -> bool:
        return self._ask() == other

    def __ne__(self, other: object) -> bool:
        return self._ask() != other

    def __gt__(self, other: int) -> bool:
        return self._ask() > other

    def __ge__(self, other: int) -> bool:
        return self._ask() >= other

    def __lt__(self, other: int) -> bool:
        return self._ask() < other

    def __le__(self, other: int) -> bool:
        return self._ask() <= other

    __hash__ = int.__hash__


def _counts_of_all(name: str, *args: Any, **kwargs: Any) -> Tensor | None:
    """``bincount(x, minlength=8)`` of a router's choice has 8 numbers, though nothing but the values says so."""
    if name != "bincount" or len(args) != 1 or set(kwargs) != {"minlength"}:
        return None
    return F.one_hot(args[0], kwargs["minlength"]).sum(0)


def _is_users(frame: FrameType | None) -> bool:
    """Whether it is no code of torch's or of ours that asks: modes pass on what the user's code calls."""
    while frame is not None and frame.f_code.co_name in ("_answer", "__torch_function__"):
        frame = frame.f_back
    return frame is not None and not frame.f_code.co_filename.startswith(_NOT_THE_USERS)


def _is_dynamic(tensor: Tensor) -> bool:
    return any(not isinstance(size, int) for size in tensor.shape)
