"""Loops over the experts that some token chose: captured as loops over all experts.

``for expert in hit`` where ``hit = (count > 0).nonzero()`` runs as often as the data say, which no graph can. Captured
it runs for every number that ``nonzero`` could have found, since a body whose expert got no token should add nothing.
Whether that is so is for :mod:`autopar.passes.captured_loops` to see: a mark in the graph stands before each body.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.errors import CaptureError

_FINDERS: Final = ("nonzero", "nonzero_numpy", "argwhere", "where")
_FLATTENERS: Final = ("squeeze", "flatten", "ravel", "view", "reshape")
"""Ways of writing that the numbers, found as ``[n, 1]``, are wanted as ``[n]``."""
_MARKERS: Final = ("permute", "transpose", "sum", "any", "to", "bool", "gt", "greater", "ne", "__gt__")
"""Ops between the one-hot form of an index and the vector of which experts any token chose."""


def _nothing_computes(*args: Any) -> Tensor:
    raise CaptureError("the marks of captured loops have shapes only")


_body = torch.library.custom_op(
    "autopar::loop_body", _nothing_computes, mutates_args=(), schema="(Tensor found, int number) -> Tensor"
)
_body.register_fake(lambda found, number: found.new_empty(()))
MARK: Final[Callable[..., Tensor]] = torch.ops.autopar.loop_body.default
"""``loop_body(found, number)`` stands before the body for ``number``; -1: the loop has ended."""


class EveryExpert(TorchFunctionMode):
    """Within it, loops over what ``nonzero`` finds in a vector run over all of the vector's indices.

    But for those that can't be: of ``one_hot(topk(scores, k).indices, n + 1)`` for n scores the last class is empty.
    """

    def __init__(self) -> None:
        super().__init__()
        self._found = _Notes()  # what nonzero found -> of how many
        self._numbers = _Notes()  # where a loop is, [] or [1] -> its value
        self._index = _Notes()  # an index that topk made -> the number it is below
        self._mask = _Notes()  # what marks such an index -> the same number

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, first = getattr(func, "__name__", ""), args[0] if args and isinstance(args[0], Tensor) else None
        if first is None:
            return func(*args, **(kwargs or {}))
        count, number = self._found.of(first), self._numbers.of(first)
        if count is not None and name == "unbind" and _is_loop():
            return self._bodies(first, count)
        if number is not None and name == "__format__":
            return format(number, *args[1:])
        at = self._numbers.of(args[1]) if name == "__getitem__" else None
        if at is not None:
            return first[at].unsqueeze(0) if args[1].dim() else first[at]
        made = func(*args, **(kwargs or {}))
        self._limit(name, args, kwargs or {}, made)
        if name in _FINDERS and len(args) == 1 and first.dim() == 1:
            below = self._mask.of(first)
            extent = first.shape[0]
            found = made if isinstance(made, Tensor) else made[0]
            self._found.note(found, extent if below is None else min(extent, below))
        elif name in _FLATTENERS or name == "__getitem__":
            self._carry(name, args, made, count, number)
        return made

    def _carry(self, name: str, args: Any, made: Tensor, count: int | None, number: int | None) -> None:
        if number is not None:
            self._numbers.note(made, number)
        elif count is not None and made.dim() == 1 and (name in _FLATTENERS or _is_column(name, args)):
            self._found.note(made, count)

    def _limit(self, name: str, args: Any, kwargs: dict[str, Any], made: Any) -> None:
        """Carry along how large an index can be."""
        if name == "topk":
            dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
            self._index.note(made[1], args[0].shape[dim])
        elif name == "one_hot":
            self._mask.note(made, self._index.of(args[0]))
        elif name in _MARKERS:
            self._mask.note(made, self._mask.of(args[0]))

    def _bodies(self, found: Tensor, count: int) -> Iterator[Tensor]:
        for e in range(count):
            MARK(found, e)
            number = torch.tensor(e if found.dim() == 1 else [e], device=found.device)
            self._numbers.note(number, e)
            yield number
        MARK(found, -1)


class _Notes:
    """Numbers that are known of tensors, as long as nothing writes to these."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Tensor, int, int]] = {}

    def note(self, tensor: Any, number: int | None) -> None:
        if isinstance(tensor, Tensor) and number is not None:
            self._of[id(tensor)] = tensor, tensor._version, number

    def of(self, tensor: Any) -> int | None:
        noted = self._of.get(id(tensor))
        return noted[2] if noted is not None and noted[0]._version == noted[1] else None


def _is_column(name: str, args: Any) -> bool:
    """Whether it is ``found[:, 0]``."""
    return name == "__getitem__" and repr(args[1]) == "(slice(None, None, None), 0)"


def _is_loop() -> bool:
    """Whether ``for`` asks for the elements, which it takes one after another (``tolist`` takes all at once)."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    asks = frame is not None and frame.f_code.co_name == "__iter__"
    return asks and frame is not None and frame.f_back is not None and frame.f_back.f_code.co_name != "tolist"
