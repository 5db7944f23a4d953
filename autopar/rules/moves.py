"""Rules of ops that move elements along a dim: where a split of the operand lies in the result, and back.

A split ``S(d, outer)`` over n ranks sees the whole tensor, read in order, as ``[A, n, B]`` with ``A`` the
sizes of the dims before ``d`` times ``outer``, and each rank holds one part of the middle. A reshape keeps
the order, so the same ``A`` names the split of the result: flattening ``[batch, seq]`` keeps a split of seq
as ``S(0, batch)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from autopar.graph import Choice, Meta
from autopar.rules.base import Local, Op, Splits, Whole
from autopar.rules.spec import Localizer, unchanged
from autopar.spmd import RAGGED, P, S, Type

Forward = Callable[[Op, int, Type], Type | None]
"""The result's shard from that of one operand; None: it has none."""
Backward = Callable[[Op, Type], tuple[Type, ...] | None]
"""The operands' types for a shard of the result; None: it can't be made in parts."""


def always(op: Op) -> bool:
    return True


@dataclass(frozen=True)
class Moves(Whole):
    """A rule from the two directions of one correspondence. ``passes_sums``: elements are only moved."""

    forward: Forward
    backward: Backward
    local: Localizer = unchanged
    passes_sums: Callable[[Op], bool] = always
    allows: Callable[[Op, Choice, int], bool] = lambda op, choice, size: True

    def link(self, op: Op, inputs: Sequence[Splits], output: Splits) -> None:
        for position, splits in enumerate(inputs):
            for shard in shards(splits):
                _add(output, op.result, self._forward(op, position, shard))
        for shard in shards(output):
            sources = self._backward(op, shard) or ()
            for splits, meta, kind in zip(inputs, op.operands, sources, strict=False):
                _add(splits, meta, kind)

    def choices(self, op: Op, size: int, inputs: Sequence[Splits], output: Splits) -> Iterator[Choice]:
        for shard in shards(output):
            operands = self._backward(op, shard)
            if operands is not None and self.allows(op, Choice(operands, shard), size):
                yield Choice(operands, shard)
        if self.passes_sums(op):
            yield Choice((P,) * len(op.operands), P)

    def localize(self, op: Op, choice: Choice, size: int, axis: str) -> Local:
        return self.local(op, choice, size, axis)

    def _forward(self, op: Op, position: int, shard: Type) -> Type | None:
        """A ragged dim goes where all of it goes as it is."""
        if not shard.is_ragged:
            return self.forward(op, position, shard)
        extent = op.operands[position].shape[shard.dim]
        plain = self.forward(op, position, S(shard.dim))
        is_kept = plain is not None and plain.outer == 1 and op.result.shape[plain.dim] == extent
        return S(plain.dim, RAGGED) if plain is not None and is_kept else None

    def _backward(self, op: Op, shard: Type) -> tuple[Type, ...] | None:
        if not shard.is_ragged:
            return self.backward(op, shard)
        sources = self.backward(op, S(shard.dim))
        extent = op.result.shape[shard.dim]
        if sources is None or any(
            k.outer != 1 or m.shape[k.dim] != extent for k, m in zip(sources, op.operands, strict=True)
        ):
            return None
        return tuple(S(kind.dim, RAGGED) for kind in sources)


def shards(splits: Splits) -> list[Type]:
    return [S(d, outer) for d, outers in enumerate(splits) for outer in sorted(outers)]


def _add(splits: Splits, meta: Meta, kind: Type | None) -> None:
    """Only what can be split at all, so that the fixpoint over links ends."""
    if kind is not None and kind.is_shard:
        extent = meta.shape[kind.dim]
        if kind.is_ragged or (extent % kind.outer == 0 and extent > kind.outer):
            splits[kind.dim].add(kind.outer)


def reshaped(before: Sequence[int], after: Sequence[int], shard: Type) -> Type | None:
    """Where a shard of a tensor of shape ``before`` lies once it has shape ``after``; None: in no one dim."""
    if shard.dim >= len(before) or before[shard.dim] % shard.outer or before[shard.dim] <= shard.outer:
        return None
    first = prod(before[: shard.dim]) * shard.outer
    count = 1
    for d, extent in enumerate(after):
        if count <= first < count * extent:
            outer = first // count
            return S(d, outer) if first % count == 0 and extent % outer == 0 else None
        count *= extent
    return None


def sliced(extent: int, low: int, high: int, outer: int) -> int | None:
    """``outer`` of the slice [low, high) of a dim split with ``outer``: whole chunks only."""
    if extent % outer:
        return None
    chunk = extent // outer
    return (high - low) // chunk if low % chunk == 0 and high % chunk == 0 and high > low else None


def unsliced(extent: int, low: int, high: int, outer: int) -> int | None:
    """Inverse of :func:`sliced`: how the whole dim is split when its slice is split with ``outer``."""
    if high <= low or (high - low) % outer:
        return None
    chunk = (high - low) // outer
    return extent // chunk if extent % chunk == 0 and low % chunk == 0 else None
