"""Ops that cut a dim into pieces or put pieces together: slice, split, chunk, cat, stack, repeat, slice_scatter.

A dim of n seen in chunks of n / outer can be split inside each chunk, and so can every piece made of whole
chunks. That is how one weight that holds q, k and v is split by heads: ``S(0,3)`` before ``split``, ``S(0)``
after it.
"""

from __future__ import annotations

from collections.abc import Callable

from autopar.graph import Choice
from autopar.rules.base import Local, Op, Rule, joined, put_in_place
from autopar.rules.lines import dim, line, names, whole
from autopar.rules.moves import Moves, sliced, unsliced
from autopar.rules.spec import Spec, together
from autopar.spmd import R, S, Type, local_shape

Bounds = Callable[[Op], tuple[int, int, int, int]]
"""dim, start, end and step of a slice, counted from the front."""


def _shard(d: int, outer: int | None) -> Type | None:
    return None if outer is None else S(d, outer)


# --- slice, narrow --------------------------------------------------------------------------------


def _slice_bounds(op: Op) -> tuple[int, int, int, int]:
    d = dim(op.arg(1, "dim", 0), len(op.operands[0].shape))
    given = slice(op.arg(2, "start"), op.arg(3, "end"), op.arg(4, "step", 1))
    return d, *given.indices(op.operands[0].shape[d])


def _narrow_bounds(op: Op) -> tuple[int, int, int, int]:
    d = dim(op.arg(1, "dim"), len(op.operands[0].shape))
    low = op.arg(2, "start") % op.operands[0].shape[d]
    return d, low, low + op.arg(3, "length"), 1


def _cut(bounds: Bounds, local: Callable[[Op, int], Local]) -> Moves:
    """``local`` rewrites the bounds of a dim whose local size is 1/size of the whole."""

    def through(op: Op, shard: Type, chunks: Callable[[int, int, int, int], int | None]) -> Type | None:
        d, low, high, step = bounds(op)
        if shard.dim != d:
            return shard
        extent = op.operands[0].shape[d]
        return _shard(d, chunks(extent, low, high, shard.outer)) if step == 1 else None

    def forward(op: Op, position: int, shard: Type) -> Type | None:
        return through(op, shard, sliced)

    def backward(op: Op, shard: Type) -> tuple[Type, ...] | None:
        source = through(op, shard, unsliced)
        return None if source is None else (source,)

    def localize(op: Op, choice: Choice, size: int, axis: str) -> Local:
        split_here = choice.result.is_shard and choice.result.dim == bounds(op)[0]
        return local(op, size) if split_here else Local.same()

    return Moves(forward, backward, localize, of_view=put_in_place)


def _local_slice(op: Op, size: int) -> Local:
    d, low, high, _ = _slice_bounds(op)
    to_end = high == op.operands[0].shape[d]
    start, end = (Local.replacing(op, 2, "start", low // size), Local.replacing(op, 3, "end", high // size))
    start = start if low else Local.same()
    end = Local.same() if to_end else end
    return Local(start.args | end.args, start.kwargs | end.kwargs)


def _local_narrow(op: Op, size: int) -> Local:
    _, low, high, _ = _narrow_bounds(op)
    start, length = Local.replacing(op, 2, "start", low // size), Local.replacing(op, 3, "length", (high - low) // size)
    return Local(start.args | length.args, start.kwargs | length.kwargs)


# --- split, chunk ---------------------------------------------------------------------------------


def _pieces(dim_position: int, local: Callable[[Op, int], Local]) -> Moves:
    """All pieces have one type, so the dim that is cut can be split only where they are equal."""

    def cut_dim(op: Op) -> int:
        return dim(op.arg(dim_position, "dim", 0), len(op.operands[0].shape))

    def equal(op: Op) -> bool:
        return len({meta.shape for meta in op.outputs}) == 1

    def forward(op: Op, position: int, shard: Type) -> Type | None:
        if shard.dim != cut_dim(op):
            return shard
        count = len(op.outputs)
        return S(shard.dim, shard.outer // count) if equal(op) and shard.outer % count == 0 else None

    def backward(op: Op, shard: Type) -> tuple[Type, ...] | None:
        if shard.dim != cut_dim(op):
            return (shard,)
        return (S(shard.dim, shard.outer * len(op.outputs)),) if equal(op) else None

    def localize(op: Op, choice: Choice, size: int, axis: str) -> Local:
        split_here = choice.result.is_shard and choice.result.dim == cut_dim(op)
        return local(op, size) if split_here else Local.same()

    return Moves(forward, backward, localize, of_view=joined)


def _local_split(op: Op, size: int) -> Local:
    return Local.replacing(op, 1, "split_size", op.arg(1, "split_size") // size)


def _local_sizes(op: Op, size: int) -> Local:
    return Local.replacing(op, 1, "split_sizes", [piece // size for piece in op.arg(1, "split_sizes")])


def _local_chunk(op: Op, size: int) -> Local:
    return Local.same()


# --- cat, stack -----------------------------------------------------------------------------------


def _cat_dim(op: Op) -> int:
    return dim(op.arg(1, "dim", 0), len(op.result.shape))


def _cat_forward(op: Op, position: int, shard: Type) -> Type | None:
    """Seen in chunks of the operand's size, the result is split in all of them."""
    if shard.dim != _cat_dim(op):
        return shard
    extent, total = op.operands[position].shape[shard.dim], op.result.shape[shard.dim]
    chunk, rest = divmod(extent, shard.outer)
    return None if rest or not chunk or total % chunk else S(shard.dim, total // chunk)


def _cat_backward(op: Op, shard: Type) -> tuple[Type, ...] | None:
    d = _cat_dim(op)
    if any(len(meta.shape) != len(op.result.shape) for meta in op.operands):
        return None  # cat skips empty tensors of shape [0]
    if shard.dim != d:
        return (shard,) * len(op.operands)
    chunk, rest = divmod(op.result.shape[d], shard.outer)
    extents = [meta.shape[d] for meta in op.operands]
    if rest or any(not extent or extent % chunk for extent in extents):
        return None
    return tuple(S(d, extent // chunk) for extent in extents)


def _stack_forward(op: Op, position: int, shard: Type) -> Type | None:
    return S(shard.dim + (shard.dim >= _cat_dim(op)), shard.outer)


def _stack_backward(op: Op, shard: Type) -> tuple[Type, ...] | None:
    made = _cat_dim(op)
    if shard.dim == made:
        return None
    return (S(shard.dim - (shard.dim > made), shard.outer),) * len(op.operands)


# --- repeat ---------------------------------------------------------------------------------------


def _repeats(op: Op, d: int) -> tuple[int, int, int]:
    """For a dim of the result: how often it repeats, the operand's dim (negative: made) and its size."""
    given = op.arg(1, "repeats")
    source = d - len(given) + len(op.operands[0].shape)
    return given[d], source, op.operands[0].shape[source] if source >= 0 else 1


def _repeat_forward(op: Op, position: int, shard: Type) -> Type | None:
    d = shard.dim + len(op.result.shape) - len(op.operands[0].shape)
    return S(d, _repeats(op, d)[0] * shard.outer)


def _repeat_backward(op: Op, shard: Type) -> tuple[Type, ...] | None:
    """The operand is split in each copy; or, where whole copies follow one another, each rank makes some of them."""
    times, source, extent = _repeats(op, shard.dim)
    if extent == 1 or (shard.outer == 1 and times > 1):
        return (R,)
    return (S(source, shard.outer // times),) if shard.outer % times == 0 else None


def _copies_divide(op: Op, choice: Choice, size: int) -> bool:
    kind = choice.result
    return choice.operands[0].is_shard or not kind.is_shard or _repeats(op, kind.dim)[0] % size == 0


def _local_repeat(op: Op, choice: Choice, size: int, axis: str) -> Local:
    if choice.operands[0].is_shard or not choice.result.is_shard:
        return Local.same()
    given = list(op.arg(1, "repeats"))
    given[choice.result.dim] //= size
    return Local.replacing(op, 1, "repeats", given)


def _interleaved_dim(op: Op) -> int | None:
    d = op.arg(2, "dim")
    rank = len(op.operands[0].shape)
    return 0 if d is None and rank == 1 else None if d is None else dim(d, rank)


def _interleave_forward(op: Op, position: int, shard: Type) -> Type | None:
    return shard if _interleaved_dim(op) is not None else None


def _interleave_backward(op: Op, shard: Type) -> tuple[Type, ...] | None:
    return (shard,) if _interleaved_dim(op) is not None else None


def _local_interleave(op: Op, choice: Choice, size: int, axis: str) -> Local:
    made = op.kwargs.get("output_size")
    if made is None or not choice.result.is_shard or choice.result.dim != _interleaved_dim(op):
        return Local.same()
    return Local({}, {"output_size": local_shape(op.result.shape, choice.result, size)[choice.result.dim]})


# --- a piece put in the place of another ----------------------------------------------------------


def _slice_scatter(op: Op) -> str:
    """The dim that is written to is whole; tensor and piece are of other size there."""
    letters = names(len(op.result.shape))
    d = dim(op.arg(2, "dim", 0), len(letters))
    tensor, piece = whole(letters, [d]), [f"{x}'!" if i == d else x for i, x in enumerate(letters)]
    return line([tensor, piece], tensor)


def _select_scatter(op: Op) -> str:
    letters = names(len(op.result.shape))
    d = dim(op.arg(2, "dim"), len(letters))
    tensor = whole(letters, [d])
    return line([tensor, letters[:d] + letters[d + 1 :]], tensor)


def _diagonal_scatter(op: Op) -> str:
    """Both dims are whole; the piece has the diagonal last."""
    letters = names(len(op.result.shape))
    marked = [dim(op.arg(3, "dim1", 0), len(letters)), dim(op.arg(4, "dim2", 1), len(letters))]
    tensor, rest = whole(letters, marked), [x for i, x in enumerate(letters) if i not in marked]
    return line([tensor, [*rest, "diagonal!"]], tensor)


def _scattered(text: Callable[[Op], str]) -> Spec:
    return Spec(text, linear=together)


_CAT = Moves(_cat_forward, _cat_backward)

RULES: dict[str, Rule] = {
    "aten.slice.Tensor": _cut(_slice_bounds, _local_slice),
    "aten.narrow.default": _cut(_narrow_bounds, _local_narrow),
    "aten.split.Tensor": _pieces(2, _local_split),
    "aten.split_with_sizes.default": _pieces(2, _local_sizes),
    "aten.chunk.default": _pieces(2, _local_chunk),
    "aten.cat.default": _CAT,
    "aten.concat.default": _CAT,
    "aten.concatenate.default": _CAT,
    "aten.stack.default": Moves(_stack_forward, _stack_backward),
    "aten.slice_scatter.default": _scattered(_slice_scatter),
    "aten.select_scatter.default": _scattered(_select_scatter),
    "aten.diagonal_scatter.default": _scattered(_diagonal_scatter),
    "aten.repeat.default": Moves(_repeat_forward, _repeat_backward, _local_repeat, allows=_copies_divide),
    "aten.repeat_interleave.self_int": Moves(_interleave_forward, _interleave_backward, _local_interleave),
}
