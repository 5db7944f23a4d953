"""Which tensors of a split vocabulary's passes are matrices, and what kernels move of them.

Beside ops of the text, passes of a head work on numbers per token too (statistics ``[4, t]``, of all ranks
``[ranks, 4, t]``), which a plan counts as nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from torch import Tensor

from autopar.rules.base import Op
from autopar.runtime.entropy import slices
from autopar.runtime.program import VocabularyProgram

_LOOKUPS: Final = ("index_select",)
_TOUCHES: Final = ("gather", "scatter_add_", "fill_", "new_empty", "new_empty_strided")
"""Kernels that read or write a number of each token, those of the few classes that only pad the table, or nothing."""

_WRITES: Final = ("copy_", "zero_", "zeros_like")
"""Kernels that don't read what they write to."""


@dataclass(frozen=True)
class Matrices:
    """Those of a head: a row per token of all or of a chunk, as wide as the input or with a column per class of this
    rank; and its table."""

    heights: frozenset[int] = field(default_factory=frozenset)
    widths: frozenset[int] = field(default_factory=frozenset)

    @classmethod
    def of(cls, program: VocabularyProgram, table: Tensor, first: int, tokens: int) -> Matrices:
        """Of the rank whose rows of ``table`` are those from ``first`` on, of which the last may be padding."""
        chunks = {part.stop - part.start for part in slices(tokens, program.chunks)}
        widths = {*table.shape, min(program.rows, max(0, program.classes - first))}
        return cls(frozenset({tokens, *chunks, *widths}), frozenset(widths))

    def bytes(self, name: str, given: Sequence[Tensor], made: Sequence[Tensor]) -> int:
        """Of those that a kernel reads and writes; of a lookup, of what is looked up."""
        written = sum(map(self._row_bytes, made))
        if name in _LOOKUPS:
            return 2 * written
        if name in _WRITES:
            given = given[1:]
        return 0 if name in _TOUCHES else written + sum(map(self._row_bytes, given))

    def are_made(self, op: Op) -> bool:
        return any(self._is_one(meta.shape) for meta in op.outputs)

    def _row_bytes(self, tensor: Tensor) -> int:
        """With the columns that only pad its rows; 0 of anything else."""
        if not self._is_one(tensor.shape):
            return 0
        columns, row = tensor.shape[-1], tensor.stride(-2)
        return tensor.nbytes // columns * row if tensor.stride(-1) == 1 and row > columns else tensor.nbytes

    def _is_one(self, shape: Sequence[int]) -> bool:
        """Either way round."""
        if len(shape) < 2:
            return False
        rows, columns = math.prod(shape[:-1]), shape[-1]
        sides = {rows, columns}
        return sides <= self.heights and bool(sides & self.widths)
