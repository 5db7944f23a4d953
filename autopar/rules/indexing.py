"""Lookups and writes by index: the indexed dim is whole, all others and those of the index may be split.

An embedding may also be split by rows: each rank looks up its own, and the result is a pending sum. What is added by
index may be split along the index: each rank adds its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from autopar.graph import AxisRef, Choice, Meta
from autopar.rules.base import Local, Op, Rule
from autopar.rules.lines import dim, line, names, whole
from autopar.rules.spec import Spec, through
from autopar.spmd import P, R, S

SCATTER_ROWS: Final = "masked_scatter_rows"


def _embedding(op: Op) -> str | None:
    counts_ids = op.arg(3, "scale_grad_by_freq", False) or op.arg(4, "sparse", False)
    return None if counts_ids else "v! n, ... -> ... n"


def _rows(op: Op) -> Iterable[Choice]:
    yield Choice((S(0), R), P, "embedding_sharded")


def _local_embedding(op: Op, choice: Choice, size: int, axis: str) -> Local:
    if choice.form != "embedding_sharded":
        return Local.same()
    padding = op.arg(2, "padding_idx", -1)
    named = {"padding_idx": padding} if padding >= 0 else {}
    return Local({2: AxisRef(axis)}, named, target="embedding_sharded", keep=2)


def _index_select(op: Op) -> str:
    letters = names(len(op.operands[0].shape))
    d = dim(op.arg(1, "dim"), len(letters))
    index, made = (["i"], ["i"]) if op.operands[1].shape else ([], ["1"])
    return line([_whole_at(letters, d), index], letters[:d] + made + letters[d + 1 :])


def _whole_at(letters: list[str], d: int) -> list[str]:
    return whole(letters, [d])


def _gather(op: Op) -> str:
    """Dims other than ``dim`` are shared with the index where they have its size; else they are whole."""
    d = dim(op.arg(1, "dim"), len(op.operands[0].shape))
    source, index = _aligned([op.operands[0], op.operands[1]], d)
    index = [f"{t.rstrip('!')}" if i == d else t for i, t in enumerate(index)]
    return line([source, index], index)


def _scatter(op: Op) -> str:
    """``self, index`` and, if it is a tensor, ``src``; nothing that is written along ``dim`` can be split."""
    d = dim(op.arg(1, "dim"), len(op.operands[0].shape))
    rows = _aligned(op.operands, d)
    return line(rows, rows[0])


def _aligned(tensors: Sequence[Meta], d: int) -> list[list[str]]:
    """Shared letters where all tensors have the same size, own and whole ones elsewhere and at ``d``."""
    rows: list[list[str]] = [[] for _ in tensors]
    for i, letter in enumerate(names(len(tensors[0].shape))):
        shared = i != d and len({meta.shape[i] for meta in tensors}) == 1
        for number, row in enumerate(rows):
            row.append(letter if shared else f"{letter}{number}!")
    return rows


@dataclass(frozen=True)
class _Index:
    """``x[indices]`` in letters: rows of the indices, of ``x``, of the result."""

    source: list[str]
    indices: list[list[str]]
    result: list[str]


def _indexed(op: Op) -> _Index | None:
    """Index dims stand where the indexed dims were if those are neighbours, else in front, as in numpy."""
    given = list(op.args[1])
    tensors = {d: index for d, index in enumerate(given) if index is not None}
    if any(index.dtype in (torch.bool, torch.uint8) for index in tensors.values()):
        return None  # as many results as there are true values
    letters = names(len(op.operands[0].shape))
    made = [f"i{n}" for n in range(max(len(index.shape) for index in tensors.values()))]
    first, last = min(tensors), max(tensors)
    rest = [letter for d, letter in enumerate(letters) if d not in tensors]
    place = first if last - first + 1 == len(tensors) else 0
    rows = [made[len(made) - len(index.shape) :] for index in tensors.values()]
    return _Index(whole(letters, list(tensors)), rows, rest[:place] + made + rest[place:])


def _index(op: Op) -> str | None:
    found = _indexed(op)
    return None if found is None else line([found.source, *found.indices], found.result)


def _index_put(op: Op) -> str | None:
    """What is not indexed may be split, in the values too; the indices are whole."""
    found = _indexed(op)
    if found is None:
        return _masked_put(op)
    rank = len(op.operands[-1].shape)
    values = found.result[len(found.result) - rank :] if rank else []
    indices = [[f"{letter}!" for letter in row] for row in found.indices]
    return line([found.source, *indices, values], found.source)


def _masked_put(op: Op) -> str | None:
    """One value where a mask is true: each element alone."""
    given = {d: index for d, index in enumerate(op.args[1]) if index is not None}
    if len(given) != 1 or op.operands[-1].numel != 1:
        return None
    (d, mask), *_ = given.items()
    letters = names(len(op.operands[0].shape))
    return line([letters, letters[d : d + len(mask.shape)], ["1"] * len(op.operands[-1].shape)], letters)


def _masked_scatter(op: Op) -> str:
    """What is written where a mask is true comes in the order of all elements."""
    letters = names(len(op.operands[0].shape))
    rows = [
        [f"{name}{letter}!" for letter in names(len(meta.shape))]
        for name, meta in zip("ms", op.operands[1:], strict=True)
    ]
    return line([_all(letters), *rows], _all(letters))


def _all(letters: list[str]) -> list[str]:
    return whole(letters, range(len(letters)))


def _rows_have_their_own(op: Op) -> Iterable[Choice]:
    """A part of the rows takes the same part of what is written (:mod:`autopar.passes.paired_rows`)."""
    yield Choice((S(0), S(0), S(0)), S(0))


def pairs_samples(op: Op, choice: Choice) -> bool:
    """Whether it is right only on an axis that splits the batch, which says whose values are whose."""
    return op.name == SCATTER_ROWS and choice.result.is_shard


def _index_fill(op: Op) -> str:
    """The value may be a tensor, of no dims."""
    letters = names(len(op.operands[0].shape))
    d = dim(op.arg(1, "dim"), len(letters))
    index = [f"{letters[d]}'!"] if op.operands[1].shape else []
    return line([_whole_at(letters, d), index, []], _whole_at(letters, d))


def _index_add(op: Op) -> str:
    """Along ``dim``, tensor and source are whole, and of other size (``index_copy`` too)."""
    letters = names(len(op.operands[0].shape))
    d = dim(op.arg(1, "dim"), len(letters))
    source = [f"{letter}_!" if i == d else letter for i, letter in enumerate(letters)]
    return line([_whole_at(letters, d), [source[d]], source], _whole_at(letters, d))


def _added_in_parts(op: Op) -> Iterable[Choice]:
    """What is added along ``dim`` may come in parts: each rank adds its own to a term of the sum."""
    d = dim(op.arg(1, "dim"), len(op.operands[0].shape))
    if op.operands[1].shape:
        yield Choice((P, S(0), S(d)), P)


def _scattered_in_parts(op: Op) -> Iterable[Choice]:
    """The same by an index that is as large as what is added; along other dims both stand where they add."""
    d = dim(op.arg(1, "dim"), len(op.operands[0].shape))
    index, source = op.operands[1:]
    if index.shape[d : d + 1] == source.shape[d : d + 1] != ():
        yield Choice((P, S(d), S(d)), P)


def _put_in_parts(op: Op) -> Iterable[Choice]:
    """The same by several indices, where values are added and not written."""
    found = _indexed(op)
    if found is None or not op.arg(3, "accumulate", False) or len(op.operands[-1].shape) != len(found.result):
        return
    for letter in {letter: None for row in found.indices for letter in row}:
        indices = (S(row.index(letter)) if letter in row else R for row in found.indices)
        yield Choice((P, *indices, S(found.result.index(letter))), P)


def _one_hot(op: Op) -> str | None:
    """The number of classes must be given: it is read off the values otherwise."""
    return "... -> ... v!" if op.arg(1, "num_classes", -1) >= 0 else None


def _value_is_zero(op: Op) -> Iterable[tuple[int, ...]]:
    return ((0,),) if op.arg(3, "value") == 0 else ()


RULES: dict[str, Rule] = {
    "aten.embedding.default": Spec(_embedding, linear=through(0), forms=_rows, local=_local_embedding, tables=(0,)),
    "embedding_sharded": Spec("v! n, ... -> ... n", linear=through(0), tables=(0,)),
    "aten.index_select.default": Spec(_index_select, linear=through(0), tables=(0,)),
    "aten.gather.default": Spec(_gather, linear=through(0), tables=(0,)),
    "aten.index.Tensor": Spec(_index, linear=through(0), tables=(0,)),
    "aten.index_put.default": Spec(_index_put, forms=_put_in_parts),
    "aten.index_add.default": Spec(_index_add, linear=through(0, 2), forms=_added_in_parts),
    "aten.index_copy.default": Spec(_index_add, linear=through(0, 2)),
    "aten.index_fill.int_Scalar": Spec(_index_fill),
    "aten.index_fill.int_Tensor": Spec(_index_fill, linear=through(0, 2)),
    "aten.masked_scatter.default": Spec(_masked_scatter, linear=through(0, 2)),
    SCATTER_ROWS: Spec(_masked_scatter, forms=_rows_have_their_own, linear=through(0, 2)),
    "aten.scatter.value": Spec(_scatter, linear=_value_is_zero),
    "aten.scatter.src": Spec(_scatter, linear=through(0, 2)),
    "aten.scatter_add.default": Spec(_scatter, linear=through(0, 2), forms=_scattered_in_parts),
    "aten.scatter_reduce.two": Spec(_scatter),
    "aten.index_reduce.default": Spec(_index_add),
    "aten.one_hot.default": Spec(_one_hot),
}
