"""Rules written as one line of einsum-like notation, from which everything else follows.

::

    aten.mm.default      "m k, k n -> m n"           k vanishes: splitting it leaves a pending sum
    aten.layer_norm      "... h!, h!, h! -> ... h!"  ! : whole on every rank
    aten.add.Tensor      "..., ... -> ..."           ... : any dims, aligned right, broadcast where 1
    aten.amax.default    "a b! -> a 1"               1 : a dim that nothing is split over
    sdpa                 "b h* q d!, b h* k! d! …"   * : sizes may be multiples of one another (groups)

A letter on the result is a shard. A letter that vanishes is a sum, if the rule says ``sums``. A letter that
only the result has is made by the op (``expand``): each rank makes its part. Operands are the *tensor*
arguments in order; trailing ones may be absent. A dim of size 1 that stands for a larger letter is broadcast.
Where the line depends on arguments it is computed; an op that doesn't fit its line runs whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple

from autopar.graph import Choice
from autopar.rules.base import Communication, Local, Op, Splits, Whole
from autopar.spmd import I, P, R, S, Type, local_shape

Dims = tuple[str, ...]
Line = str | Callable[[Op], str | None]
Passes = Callable[[Op], Iterable[tuple[int, ...]]]
"""Groups of operands through which a pending sum passes together, the others being ``R``."""
Localizer = Callable[[Op, Choice, int, str], Local]


def nothing(op: Op) -> Iterable[tuple[int, ...]]:
    """No pending sum passes: the op is not linear."""
    return ()


def together(op: Op) -> Iterable[tuple[int, ...]]:
    """Linear in all operands at once, as a sum or a move of elements is."""
    return (tuple(range(len(op.operands))),)


def each(op: Op) -> Iterable[tuple[int, ...]]:
    """Linear in each operand alone, as a product is."""
    return ((i,) for i in range(len(op.operands)))


def through(*positions: int) -> Passes:
    """Linear in these operands together, whatever the others are."""
    return lambda op: (positions,)


def unchanged(op: Op, choice: Choice, size: int, axis: str) -> Local:
    """One rank calls the op with the arguments of the whole call."""
    return Local.same()


def shape_arg(position: int, name: str) -> Localizer:
    """The localizer of an op with an argument that spells out the result's shape."""

    def localizer(op: Op, choice: Choice, size: int, axis: str) -> Local:
        if not choice.result.is_shard:
            return Local.same()
        shape = list(local_shape(op.result.shape, choice.result, size))
        open_dims = {d for d, extent in enumerate(op.arg(position, name)) if extent == -1}  # ragged on another axis
        if choice.result.is_ragged:
            open_dims.add(choice.result.dim)
        shape = [-1 if d in open_dims else extent for d, extent in enumerate(shape)]
        return Local.replacing(op, position, name, shape)

    return localizer


@dataclass(frozen=True)
class Letters:
    """A line matched to one op: a letter per dim of each operand and of the result ("" broadcast or made)."""

    operands: tuple[Dims, ...]
    result: Dims
    whole: frozenset[str]

    def splittable(self) -> list[str]:
        return [letter for letter in self.places if letter not in self.whole]

    @cached_property
    def places(self) -> dict[str, list[tuple[int, int]]]:
        """Where each letter is: (operand, dim), and (how many operands there are, dim) for the result."""
        found: dict[str, list[tuple[int, int]]] = {}
        for number, dims in enumerate((*self.operands, self.result)):
            for dim, letter in enumerate(dims):
                if letter:
                    found.setdefault(letter, []).append((number, dim))
        return found

    def split(self, letter: str, outer: int) -> tuple[tuple[Type, ...], Type | None]:
        """Types of the operands, and of the result (None: the letter vanishes) when ``letter`` is split."""

        def kind(dims: Dims) -> Type | None:
            return S(dims.index(letter), outer) if letter in dims else None

        return tuple(kind(dims) or R for dims in self.operands), kind(self.result)

    def splits(self, letter: str, inputs: Sequence[Splits], output: Splits) -> list[set[int]]:
        """The sets of split points of every dim that the letter names."""
        return [(inputs[n] if n < len(inputs) else output)[dim] for n, dim in self.places[letter]]


@dataclass(frozen=True)
class Spec(Whole):
    """A rule from one line.

    ``sum_form`` names the runtime op to call where a vanishing letter is split, if it isn't the op itself;
    ``forms`` yields choices that no letter gives; ``inside`` is what forms communicate; ``allows`` refuses
    choices; ``tables`` are the operands that are only looked up, ``terms`` those that are added to products.
    """

    line: Line
    linear: Passes = nothing
    sums: bool = False
    local: Localizer = unchanged
    sum_form: str = ""
    forms: Callable[[Op], Iterable[Choice]] = lambda op: ()
    allows: Callable[[Op, Choice, int], bool] = lambda op, choice, size: True
    inside: Callable[[Op, Choice], Communication] = lambda op, choice: []
    flop_count: Callable[[Op, Letters], int] = lambda op, letters: 0
    tables: tuple[int, ...] = ()
    terms: tuple[int, ...] = ()

    def match(self, op: Op) -> Letters | None:
        """Assign letters to the dims of ``op``; None where it doesn't fit the line."""
        if self.line not in op.found:
            line = self.line if isinstance(self.line, str) else self.line(op)
            op.found[self.line] = None if line is None else match(line, op)
        letters: Letters | None = op.found[self.line]
        return letters

    def link(self, op: Op, inputs: Sequence[Splits], output: Splits) -> None:
        letters = self.match(op)
        if letters is None:
            return
        for letter in letters.splittable():
            first, *others = letters.splits(letter, inputs, output)
            if any(other != first for other in others):
                union = first.union(*others)
                for one in (first, *others):
                    one |= union

    def choices(self, op: Op, size: int, inputs: Sequence[Splits], output: Splits) -> Iterator[Choice]:
        letters = self.match(op)
        if letters is not None:
            candidates = self._candidates(op, letters, inputs, output)
            yield from (choice for choice in candidates if self.allows(op, choice, size))

    def _candidates(self, op: Op, letters: Letters, inputs: Sequence[Splits], output: Splits) -> Iterator[Choice]:
        for letter in letters.splittable():
            for outer in sorted(set().union(*letters.splits(letter, inputs, output))):
                operands, result = letters.split(letter, outer)
                if result is not None:
                    yield Choice(operands, result)
                elif self.sums:
                    yield Choice(operands, P, self.sum_form)
        yield from self.forms(op)
        for group in self.linear(op):
            yield Choice(tuple(P if i in group else R for i in range(len(op.operands))), P)

    def localize(self, op: Op, choice: Choice, size: int, axis: str) -> Local:
        return self.local(op, choice, size, axis)

    def is_linear(self, op: Op) -> bool:
        return tuple(range(len(op.operands))) in self.linear(op)

    def looked_up(self, op: Op) -> tuple[int, ...]:
        return self.tables

    def flops(self, op: Op) -> int:
        key = self.line, self.flop_count
        if key not in op.found:
            letters = self.match(op)
            op.found[key] = self.flop_count(op, letters) if letters else 0
        count: int = op.found[key]
        return count

    def factors(self, op: Op) -> tuple[int, ...]:
        return tuple(position for position in super().factors(op) if position not in self.terms)

    def communication(self, op: Op, choice: Choice, size: int) -> Communication:
        return self.inside(op, choice)


@dataclass(frozen=True)
class Unread(Whole):
    """A rule of an op that reads only dtype or device of operand ``position``, which may have any type."""

    rule: Spec
    position: int

    def link(self, op: Op, inputs: Sequence[Splits], output: Splits) -> None:
        self.rule.link(op.without_operand(self.position), self._others(inputs), output)

    def choices(self, op: Op, size: int, inputs: Sequence[Splits], output: Splits) -> Iterator[Choice]:
        rest = op.without_operand(self.position)
        count = len(rest.operands)
        read = [Choice((R,) * count, R), Choice((I,) * count, I)]
        read += self.rule.choices(rest, size, self._others(inputs), output)
        shards = [S(d, outer) for d, outers in enumerate(inputs[self.position]) for outer in sorted(outers)]
        for choice in read:
            for kind in (R, I, P, *shards):
                taken = (*choice.operands[: self.position], kind, *choice.operands[self.position :])
                yield Choice(taken, choice.result)

    def localize(self, op: Op, choice: Choice, size: int, axis: str) -> Local:
        taken = choice.operands[: self.position] + choice.operands[self.position + 1 :]
        return self.rule.localize(op.without_operand(self.position), Choice(taken, choice.result), size, axis)

    def _others(self, inputs: Sequence[Splits]) -> list[Splits]:
        return [splits for i, splits in enumerate(inputs) if i != self.position]


def product_flops(op: Op, letters: Letters) -> int:
    """Two operations for every point of the product of all letters: a matrix product."""
    return 2 * prod(extents(op, letters).values())


def extents(op: Op, letters: Letters) -> dict[str, int]:
    """Size of every letter (the largest where grouped sizes differ)."""
    sizes: dict[str, int] = {}
    tensors = [*zip(letters.operands, op.operands, strict=True), (letters.result, op.result)]
    for dims, meta in tensors:
        for letter, extent in zip(dims, meta.shape, strict=True):
            if letter:
                sizes[letter] = max(sizes.get(letter, 1), extent)
    return sizes


def match(line: str, op: Op) -> Letters | None:
    """Assign the letters of a line to the dims of an op; None where ranks or sizes don't fit."""
    metas = [*op.operands, op.result]
    rows = _rows(line, tuple(len(meta.shape) for meta in metas))
    if rows is None:
        return None
    sizes: dict[str, set[int]] = {"1": set()}
    for row, meta in zip(rows, metas, strict=True):
        for token, extent in zip(row, meta.shape, strict=True):
            known = sizes.setdefault(token.letter, set())
            if extent != 1:
                known.add(extent)
    grouped = {token.letter for row in rows for token in row if token.grouped} | {"1"}
    if any(len(found) > 1 and letter not in grouped for letter, found in sizes.items()):
        return None
    *dims, result = (
        tuple(token.dim(extent, sizes) for token, extent in zip(row, meta.shape, strict=True))
        for row, meta in zip(rows, metas, strict=True)
    )
    return Letters(tuple(dims), result, frozenset(token.letter for row in rows for token in row if token.whole))


class _Token(NamedTuple):
    """What stands for one dim of one tensor."""

    letter: str
    whole: bool
    grouped: bool

    @classmethod
    def of(cls, text: str) -> _Token:
        return cls(text.rstrip("!*"), "!" in text, "*" in text)

    def dim(self, extent: int, sizes: dict[str, set[int]]) -> str:
        """The letter, or "" where the dim is broadcast or can't be split by notation."""
        return "" if self.letter == "1" or (extent == 1 and sizes[self.letter]) else self.letter


@lru_cache(maxsize=4096)  # models have some hundred
def _rows(line: str, ranks: tuple[int, ...]) -> tuple[tuple[_Token, ...], ...] | None:
    """Tokens of tensors with so many dims, the result last; None where the line doesn't fit them."""
    left, right = line.split("->")
    specs = left.split(",") if left.strip() else []
    if len(specs) < len(ranks) - 1:
        return None
    rows = [_row(spec, rank) for spec, rank in zip([*specs[: len(ranks) - 1], right], ranks, strict=True)]
    found = tuple(row for row in rows if row is not None)
    return found if len(found) == len(rows) else None


def _row(spec: str, rank: int) -> tuple[_Token, ...] | None:
    """Tokens of one tensor; ``...`` becomes ``.1`` (last), ``.2`` … so that it aligns right. None: no fit."""
    texts: list[str] = []
    words = spec.split()
    spare = rank - sum(not word.startswith("...") for word in words)
    for word in words:
        if word.startswith("..."):
            texts += [f".{spare - i}{word[3:]}" for i in range(spare)]
        else:
            texts.append(word)
    return tuple(map(_Token.of, texts)) if len(texts) == rank else None
