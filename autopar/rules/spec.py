"""Rules written as one line of einsum-like notation, from which everything else follows.

::

    aten.mm.default      "m k, k n -> m n"           k vanishes: splitting it leaves a pending sum
    aten.layer_norm      "... h!, h!, h! -> ... h"   ! : whole on every rank
    aten.add.Tensor      "..., ... -> ..."           ... : any dims, aligned right, broadcast where 1

A letter on the result is a shard. A letter that vanishes is a sum, if the rule says ``sums``. A letter that only
the result has is made by the op (``expand``): each rank makes its part. ``?`` after an operand: it may be absent.
Operands are the *tensor* arguments in order. A dim of size 1 that stands for a larger letter is broadcast.
``linear`` says through which operands a pending sum passes: "each" (one at a time, as in a product), "all"
(together, as in a sum), or "" (none).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.graph import Choice
from autopar.rules.base import Local, Op, P, R, S, Splits
from autopar.spmd import Type, divides, local_shape

Dims = tuple[str, ...]


@dataclass(frozen=True)
class Letters:
    """A spec matched to one op: a letter per dim of each operand and of the result ("" broadcast or made)."""

    operands: tuple[Dims, ...]
    result: Dims
    whole: frozenset[str]

    def splittable(self) -> list[str]:
        letters: dict[str, None] = {}
        for dims in (*self.operands, self.result):
            letters |= {letter: None for letter in dims if letter and letter not in self.whole}
        return list(letters)


@dataclass(frozen=True)
class Spec:
    """A rule from one line. ``shape_args`` are positions (or names) of arguments that repeat the result's shape."""

    text: str
    linear: str = ""
    sums: bool = False
    shape_args: tuple[int | str, ...] = ()
    flop_count: Callable[[Op, Letters], int] | None = None
    linear_operands: tuple[int, ...] | None = None  # which operands "each" may mean; None: all

    def match(self, op: Op) -> Letters:
        """Assign letters to the dims of ``op``. Raises ValueError where the op doesn't fit the line."""
        return _match(self.text, op)

    def link(self, op: Op, inputs: Sequence[Splits], output: Splits) -> None:
        letters = self.match(op)
        places = [*zip(letters.operands, inputs, strict=True), (letters.result, output)]
        for letter in letters.splittable():
            sets = [splits[d] for dims, splits in places for d, name in enumerate(dims) if name == letter]
            union = set().union(*sets)
            for one in sets:
                one |= union

    def choices(self, op: Op, size: int, inputs: Sequence[Splits], output: Splits) -> Iterable[Choice]:
        letters = self.match(op)
        for letter in letters.splittable():
            if letter not in letters.result and not self.sums:
                continue
            for outer in sorted(_outers(letters, letter, inputs, output)):
                yield _split(letters, letter, outer)
        yield from self._pending(op)

    def _pending(self, op: Op) -> Iterable[Choice]:
        count = len(op.operands)
        if self.linear == "all":
            yield Choice((P,) * count, P)
        elif self.linear == "each":
            for i in self.linear_operands if self.linear_operands is not None else range(count):
                if i < count:
                    yield Choice(tuple(P if j == i else R for j in range(count)), P)

    def localize(self, op: Op, choice: Choice, size: int, axis: str) -> Local:
        if not self.shape_args or not choice.result.is_shard:
            return Local.same()
        shape = list(local_shape(op.result.shape, choice.result, size))
        args: dict[int, Any] = {a: shape for a in self.shape_args if isinstance(a, int) and a < len(op.args)}
        kwargs: dict[str, Any] = {a: shape for a in self.shape_args if isinstance(a, str) and a in op.kwargs}
        return Local(args, kwargs)

    def flops(self, op: Op) -> int:
        return self.flop_count(op, self.match(op)) if self.flop_count else 0

    def communication(self, op: Op, choice: Choice, size: int) -> list[tuple[str, int]]:
        return []


def extents(op: Op, letters: Letters) -> dict[str, int]:
    """Size of every letter (the largest where broadcast or grouped sizes differ)."""
    sizes: dict[str, int] = {}
    tensors = [*zip(letters.operands, op.operands, strict=True), (letters.result, op.result)]
    for dims, meta in tensors:
        for letter, extent in zip(dims, meta.shape, strict=True):
            if letter:
                sizes[letter] = max(sizes.get(letter, 1), extent)
    return sizes


def product_flops(op: Op, letters: Letters) -> int:
    """Two operations for every point of the product of all letters: a matrix product."""
    count = 2
    for extent in extents(op, letters).values():
        count *= extent
    return count


def _outers(letters: Letters, letter: str, inputs: Sequence[Splits], output: Splits) -> set[int]:
    found: set[int] = set()
    for dims, splits in [*zip(letters.operands, inputs, strict=True), (letters.result, output)]:
        for d, name in enumerate(dims):
            if name == letter:
                found |= splits[d]
    return found


def _split(letters: Letters, letter: str, outer: int) -> Choice:
    def kind(dims: Dims, absent: Type) -> Type:
        return S(dims.index(letter), outer) if letter in dims else absent

    return Choice(tuple(kind(dims, R) for dims in letters.operands), kind(letters.result, P))


def _match(text: str, op: Op) -> Letters:
    left, right = text.split("->")
    specs = [part.strip() for part in left.split(",")] if left.strip() else []
    specs = specs[: len(op.operands)] if len(specs) >= len(op.operands) else _repeat_last(specs, op)
    whole: set[str] = set()
    sizes: dict[str, int] = {}
    rows = [_assign(s, m.shape, whole) for s, m in zip(specs, op.operands, strict=True)]
    rows.append(_assign(right.strip(), op.result.shape, whole))
    metas = [*op.operands, op.result]
    for row, meta in zip(rows, metas, strict=True):
        for letter, extent in zip(row, meta.shape, strict=True):
            sizes[letter] = max(sizes.get(letter, 1), extent)
    rows = [
        tuple("" if e == 1 and sizes[n] > 1 else n for n, e in zip(row, meta.shape, strict=True))
        for row, meta in zip(rows, metas, strict=True)
    ]
    return Letters(tuple(rows[:-1]), rows[-1], frozenset(whole))


def _repeat_last(specs: list[str], op: Op) -> list[str]:
    """``"..., ... -> ..."`` also serves ops of any number of operands (cat, stack, where)."""
    if not specs:
        raise ValueError(f"{op.name}: the rule names no operand, the op has {len(op.operands)}")
    return specs + [specs[-1]] * (len(op.operands) - len(specs))


def _assign(spec: str, shape: tuple[int, ...], whole: set[str]) -> Dims:
    """Letters of one tensor; ``...`` becomes ``.1`` (last), ``.2`` …, so that it aligns right."""
    tokens = spec.rstrip("?").split()
    named = [t for t in tokens if not t.startswith("...")]
    spare = len(shape) - len(named)
    if spare < 0 or (spare > 0 and len(named) == len(tokens)):
        raise ValueError(f"a tensor of shape {list(shape)} doesn't fit {spec!r}")
    dims: list[str] = []
    for token in tokens:
        names = [f".{spare - i}" for i in range(spare)] if token.startswith("...") else [token.rstrip("!")]
        if token.endswith("!"):
            whole.update(names)
        dims += names
    return tuple(dims)


__all__ = ["Letters", "Spec", "divides", "extents", "product_flops"]
