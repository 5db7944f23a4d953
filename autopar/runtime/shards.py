"""Which part of a full tensor one rank holds, and both ways between them, without communication.

Types are read axis by axis in the mesh's order, outermost first: each splits what the axes before it left. What ZeRO
splits over the ranks that split tokens is cut last, by rows of what the types left: part i of n is rows ``i * r`` to
``(i + 1) * r - 1`` with ``r = ceil(rows / n)``, zeros behind the last. Where dim 0 is shorter than n, rows are those of
several dims (:func:`autopar.spmd.row_dims`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from autopar.errors import ShardingError
from autopar.mesh import AXES, DATA
from autopar.runtime.program import Parameter
from autopar.spmd import divides, local_shape, parse, rows_shape

Index = tuple[slice, ...]


class Position(Protocol):
    """One rank's place on one axis."""

    @property
    def size(self) -> int: ...

    @property
    def index(self) -> int: ...


class Positions(Protocol):
    """One rank's place on every axis, by name; :class:`autopar.runtime.Axes` is one."""

    def __getitem__(self, name: str, /) -> Position: ...


@dataclass(frozen=True)
class Place:
    """A Position where there is no running rank."""

    size: int
    index: int


@dataclass(frozen=True)
class Block:
    """A rectangle that lies at ``full`` in the full tensor and at ``local`` in the shard."""

    full: Index
    local: Index


def blocks(shape: Sequence[int], types: Mapping[str, str], axes: Positions) -> list[Block]:
    """The rectangles of a tensor of ``shape`` that this rank holds; several where a shard is strided.

    ``types`` is text per axis (absent: whole). Raises ShardingError where a size doesn't divide, or where a
    type is a pending sum, which can't be stored.
    """
    left = tuple(shape)
    spans = [[slice(0, extent)] for extent in left]
    for axis in _in_mesh_order(types):
        kind = parse(types[axis])
        if kind.is_whole:
            continue
        place = axes[axis]
        if not kind.is_shard or kind.dim >= len(left) or not divides(left, kind, place.size):
            raise ShardingError(
                f"a tensor of shape {list(left)} can't be stored as {kind}@{axis} on {place.size} ranks; "
                "types of weights are I, R, or a shard whose dim divides"
            )
        spans[kind.dim] = _cut(spans[kind.dim], left[kind.dim], kind.outer, place)
        left = local_shape(left, kind, place.size)
    dims = [list(zip(parts, _packed(parts), strict=True)) for parts in spans]
    return [
        Block(tuple(full for full, _ in corner), tuple(local for _, local in corner))
        for corner in itertools.product(*dims)
    ]


def stored_shape(parameter: Parameter) -> tuple[int, ...]:
    """The shape of what one rank stores of ``parameter``: its local shape, or its part of the rows of that."""
    return rows_shape(parameter.shape, parameter.zero, parameter.row_dims)


def _stored(parameter: Parameter, axes: Positions) -> tuple[list[Block], tuple[int, ...]]:
    """The rectangles of the padded tensor that this rank stores, none where it has but padding; and its shape."""
    parts = blocks(parameter.padded_shape, parameter.types, axes)
    whole, last = _shape(parts), parameter.row_dims - 1
    shape = rows_shape(whole, parameter.zero, parameter.row_dims)
    if parameter.zero == 1:
        return parts, shape
    first = _data_index(parameter, axes) % parameter.zero * shape[last]
    flat = [line for part in parts for line in _lines(part, whole, last)]
    return [cut for line in flat if (cut := _rows(line, last, first, first + shape[last])) is not None], shape


def _data_index(parameter: Parameter, axes: Positions) -> int:
    """This rank's place in the joint group of the axes that split tokens and not ``parameter``."""
    index = 0
    for name in DATA:
        if name not in parameter.types:
            index = index * axes[name].size + axes[name].index
    return index


def _lines(part: Block, shape: Sequence[int], last: int) -> Iterator[Block]:
    """``part`` of a local tensor of ``shape``, cut into blocks of one index each in the dims before ``last``, which
    ``local`` counts as rows of that one dim."""
    for place in itertools.product(*(range(span.start, span.stop) for span in part.local[:last])):
        rows = 0
        for index, extent in zip(place, shape[1 : last + 1], strict=True):
            rows = (rows + index) * extent
        shifts = [full.start - local.start for full, local in zip(part.full[:last], part.local[:last], strict=True)]
        full = tuple(slice(index + shift, index + shift + 1) for index, shift in zip(place, shifts, strict=True))
        span = slice(part.local[last].start + rows, part.local[last].stop + rows)
        yield Block((*full, *part.full[last:]), (*(slice(0, 1),) * last, span, *part.local[last + 1 :]))


def _rows(part: Block, dim: int, first: int, end: int) -> Block | None:
    """What of ``part`` lies in local rows ``first`` to ``end`` of ``dim``, local rows counted from there."""
    local, full = part.local[dim], part.full[dim]
    start, stop = max(local.start, first), min(local.stop, end)
    if start >= stop:
        return None
    there = slice(full.start + start - local.start, full.start + stop - local.start)
    here = slice(start - first, stop - first)
    return Block((*part.full[:dim], there, *part.full[dim + 1 :]), (*part.local[:dim], here, *part.local[dim + 1 :]))


def rows_held(parameter: Parameter, axes: Positions) -> dict[int, int]:
    """Which of the model's rows of dim 0 this rank stores, padding aside, and at which row of what it stores."""
    found: dict[int, int] = {}
    for part in within(_stored(parameter, axes)[0], parameter.full_shape):
        places = range(part.full[0].start, part.full[0].stop)
        for place, row in zip(places, range(part.local[0].start, part.local[0].stop), strict=True):
            found[_row_of(parameter, place)] = row
    return found


def _row_of(parameter: Parameter, place: int) -> int:
    """The model's row of dim 0 that is stored at ``place``."""
    if not parameter.order:
        return place
    rows = parameter.full_shape[0] // len(parameter.order)
    return parameter.order[place // rows] * rows + place % rows


def take(
    read: Callable[[Index], torch.Tensor], parts: Sequence[Block], full: Sequence[int], shape: Sequence[int]
) -> torch.Tensor:
    """A contiguous shard of ``shape`` in memory of its own, from ``read(index)`` of the full tensor's blocks.

    ``full`` is the shape of the full tensor; what no part fills, or lies behind that, is padding, and becomes zeros.
    """
    real = within(parts, full)
    pieces = [read(part.full) for part in real]
    like = pieces[0] if pieces else read(tuple(slice(0, 0) for _ in full))
    is_whole = sum(piece.numel() for piece in pieces) == math.prod(shape)
    shard = (torch.empty if is_whole else torch.zeros)(tuple(shape), dtype=like.dtype, device=like.device)
    for part, piece in zip(real, pieces, strict=True):
        shard[part.local].copy_(piece)
    return shard


def within(parts: Sequence[Block], shape: Sequence[int]) -> list[Block]:
    """Of ``parts``, what lies inside of ``shape``."""
    kept: list[Block] = []
    for part in parts:
        excess = [max(0, span.stop - extent) for span, extent in zip(part.full, shape, strict=True)]
        full = _shortened(part.full, excess)
        if all(span.start < span.stop for span in full):
            kept.append(Block(full, _shortened(part.local, excess)))
    return kept


def _shortened(index: Index, by: Sequence[int]) -> Index:
    return tuple(slice(span.start, span.stop - rows) for span, rows in zip(index, by, strict=True))


def slice_shard(full: torch.Tensor, types: Mapping[str, str], axes: Positions) -> torch.Tensor:
    """This rank's shard of ``full``, contiguous and in memory of its own. Raises ShardingError."""
    parts = blocks(full.shape, types, axes)
    return take(full.detach().__getitem__, parts, full.shape, _shape(parts))


def read_shard(read: Callable[[Index], torch.Tensor], parameter: Parameter, axes: Positions) -> torch.Tensor:
    """What this rank stores of ``parameter``, padding included, of whose full tensor ``read`` gives parts.

    Raises ShardingError.
    """
    parts, shape = _stored(parameter, axes)
    return take(_in_order(read, parameter), parts, parameter.full_shape, shape)


def _in_order(read: Callable[[Index], torch.Tensor], parameter: Parameter) -> Callable[[Index], torch.Tensor]:
    """``read`` as if rows of dim 0 were those of the expert that is stored there."""
    if not (order := parameter.order):
        return read
    rows = parameter.full_shape[0] // len(order)

    def read_rows(index: Index) -> torch.Tensor:
        found = []
        for place in range(index[0].start // rows, -(-index[0].stop // rows)):
            start, stop = max(index[0].start, place * rows), min(index[0].stop, (place + 1) * rows)
            moved = (order[place] - place) * rows
            found.append(read((slice(start + moved, stop + moved), *index[1:])))
        return torch.cat(found) if found else read(index)

    return read_rows


def unshard(parameter: Parameter, shards: Sequence[tuple[Mapping[str, int], torch.Tensor]]) -> torch.Tensor:
    """The full tensor from what all ranks hold of ``parameter``: ``(index on every axis, local tensor)``.

    Of replicated copies the first is taken; padding is dropped. Raises ShardingError where a part is missing, or a
    local tensor has not the shape that the types give it.
    """
    if not shards:
        raise ShardingError(f"no shard of {parameter.name!r} is given; give those of every rank that holds it")
    axes = {*parameter.types, *(DATA if parameter.zero > 1 else ())}
    sizes = {axis: 1 + max(at[axis] for at, _ in shards) for axis in axes}
    first = shards[0][1]
    full = torch.empty(parameter.full_shape, dtype=first.dtype, device=first.device)
    filled: dict[tuple[int, ...], int] = {}  # corner -> elements
    for at, local in shards:
        places = {axis: Place(size, at[axis]) for axis, size in sizes.items()}
        parts, expected = _stored(parameter, places)
        if tuple(local.shape) != expected:
            raise ShardingError(
                f"rank at {dict(at)} holds {parameter.name!r} as {list(local.shape)}, but its part of "
                f"{list(parameter.padded_shape)} is {list(expected)}; give the shards of every rank"
            )
        for part in parts:
            corner = tuple(span.start for span in part.full)
            if corner not in filled:
                filled[corner] = math.prod(span.stop - span.start for span in part.full)
                for real in within([part], parameter.full_shape):
                    full[real.full].copy_(local[real.local])
    if sum(filled.values()) != math.prod(parameter.padded_shape):
        raise ShardingError(f"parts of {parameter.name!r} are missing; give the shards of every rank that holds it")
    if not parameter.order:
        return full
    experts = full.view(len(parameter.order), -1, *full.shape[1:])
    return experts[torch.tensor(parameter.order).argsort()].view(full.shape)


def _shape(parts: Sequence[Block]) -> tuple[int, ...]:
    """Of a shard, from its blocks."""
    return tuple(span.stop for span in parts[-1].local)


def _in_mesh_order(types: Mapping[str, str]) -> list[str]:
    unknown = sorted(set(types) - set(AXES))
    if unknown:
        raise ShardingError(f"types name unknown mesh axes {unknown}; known axes are {list(AXES)}")
    return [axis for axis in AXES if axis in types]


def _cut(spans: list[slice], extent: int, outer: int, place: Position) -> list[slice]:
    """Of ``spans``, laid end to end and ``extent`` long, what ``place`` keeps of each of ``outer`` runs."""
    run, width = extent // outer, extent // outer // place.size
    starts = [turn * run + place.index * width for turn in range(outer)]
    kept: list[slice] = []
    for start in starts:
        offset = 0
        for span in spans:
            length = span.stop - span.start
            first, last = max(start, offset), min(start + width, offset + length)
            if first < last:
                _extend(kept, span.start + first - offset, span.start + last - offset)
            offset += length
    return kept


def _extend(spans: list[slice], start: int, stop: int) -> None:
    if spans and spans[-1].stop == start:
        start = spans.pop().start
    spans.append(slice(start, stop))


def _packed(spans: list[slice]) -> list[slice]:
    """Where ``spans`` lie when laid end to end."""
    ends = list(itertools.accumulate(span.stop - span.start for span in spans))
    return [slice(end - (span.stop - span.start), end) for span, end in zip(spans, ends, strict=True)]
