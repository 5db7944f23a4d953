"""Small helpers for lines that depend on an op's arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.rules.base import Op

_NAMES = "abcdefghijklmnopqrstuvwxyz"


def names(rank: int) -> list[str]:
    """``rank`` different letters."""
    return [_NAMES[i] if i < len(_NAMES) else f"{_NAMES[i % 26]}{i // 26}" for i in range(rank)]


def dim(index: int, rank: int) -> int:
    """A dim counted from the front; that of a scalar is 0."""
    return index % rank if rank else 0


def dims(given: int | Sequence[int] | None, rank: int) -> list[int]:
    """Dims counted from the front; None or an empty list means all of them."""
    if isinstance(given, int):
        return [dim(given, rank)]
    return sorted(dim(d, rank) for d in given) if given else list(range(rank))


def line(operands: Sequence[Sequence[str]], result: Sequence[str]) -> str:
    return f"{', '.join(' '.join(o) for o in operands)} -> {' '.join(result)}"


def whole(letters: Sequence[str], marked: Sequence[int]) -> list[str]:
    """``letters`` with ``!`` at the dims that must be whole."""
    return [f"{letter}!" if d in marked else letter for d, letter in enumerate(letters)]


def along(position: int, name: str = "dim", default: int = -1) -> Callable[[Op], str]:
    """The line of an op that works along one dim (softmax, cumsum, sort): it must be whole."""

    def compute(op: Op) -> str:
        rank = len(op.operands[0].shape)
        letters = whole(names(rank), dims(op.arg(position, name, default), rank))
        return line([letters], letters)

    return compute


def permuted(order: Callable[[Op, int], Sequence[int]]) -> Callable[[Op], str]:
    """The line of an op whose result has the operand's dims in another order."""

    def compute(op: Op) -> str:
        letters = names(len(op.operands[0].shape))
        return line([letters], [letters[d] for d in order(op, len(letters))])

    return compute


def reduced(dim_position: int | None, keep_position: int | None, *, whole_dims: bool) -> Callable[[Op], str]:
    """The line of a reduction over the dims in an argument: they vanish, or stay whole (``whole_dims``).

    Positions are those of the arguments ``dim`` and ``keepdim``; None: not positional (no ``dim``: all dims).
    """

    def compute(op: Op) -> str:
        rank = len(op.operands[0].shape)
        given = None if dim_position is None else op.arg(dim_position, "dim")
        gone = dims(given, rank)
        keep = op.arg(len(op.args) if keep_position is None else keep_position, "keepdim", False)
        letters = names(rank)
        operand = whole(letters, gone) if whole_dims else letters
        result = ["1" if d in gone else letter for d, letter in enumerate(letters) if keep or d not in gone]
        return line([operand], result)

    return compute
