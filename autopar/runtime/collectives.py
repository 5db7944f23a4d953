"""All communication: the transitions of :mod:`autopar.spmd`, differentiable, and a few plain collectives.

Nothing else calls the collectives of torch.distributed. A transition takes this rank's part of a tensor of
type ``src`` on ``axis`` and returns its part of the same tensor with type ``dst``; its gradient goes the way
back that the table there gives. On an axis of one rank every transition is the identity.

``S(d,outer)`` sees dim ``d`` of extent ``e``, split over ``n`` ranks, as ``[outer, n, e / (outer n)]``; on a paired
axis as ``[outer, 2 n, e / (outer 2 n)]``, of which a rank holds :meth:`~autopar.runtime.axes.Axis.parts_of`.
:func:`_split` goes from there to the layout that collectives want, ``[n, *local]``, :func:`_merge` back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import ShardingError
from autopar.runtime.axes import Axes, Axis
from autopar.spmd import Type, transition

# torch 2.13 has new names for the two collectives on one tensor; the old ones warn.
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(x: Tensor, axis: Axis, *, src: Type, dst: Type) -> Tensor:
    """``S(d) -> R`` (gradient: reduce-scatter) or ``S(d) -> I`` (slice). Raises ShardingError."""
    return _change("all_gather", x, axis, src, dst)


def reduce_scatter(x: Tensor, axis: Axis, *, src: Type, dst: Type) -> Tensor:
    """``P -> S(d)`` (gradient: all-gather). Raises ShardingError where the dim doesn't divide."""
    return _change("reduce_scatter", x, axis, src, dst)


def all_reduce(x: Tensor, axis: Axis, *, src: Type, dst: Type) -> Tensor:
    """``P -> I`` (gradient: none) or ``P -> R`` (all-reduce). Raises ShardingError."""
    return _change("all_reduce", x, axis, src, dst)


def all_to_all(x: Tensor, axis: Axis, *, src: Type, dst: Type) -> Tensor:
    """``S(i) -> S(j)`` (gradient: the way back). Raises ShardingError where dim ``j`` doesn't divide."""
    return _change("all_to_all", x, axis, src, dst)


def convert(x: Tensor, axis: Axis, *, src: Type, dst: Type) -> Tensor:
    """Without communication: ``I -> R`` (gradient: all-reduce), ``I -> S(d)`` (all-gather), ``R -> S(d)``
    (zero-pad); ``I -> P`` and ``R -> P``, where each rank's term is its share of the whole. Raises ShardingError where
    the dim doesn't divide.
    """
    return _change("convert", x, axis, src, dst)


def _change(function: str, x: Tensor, axis: Axis, src: Type, dst: Type) -> Tensor:
    way = transition(src, dst)
    if way is None or way.function != function:
        hint = f"{way.function} does it" if way is not None else "no transition does it"
        raise ShardingError(f"{function} can't turn {src} into {dst} on axis {axis.name!r}; {hint}")
    if axis.size == 1:
        return x
    _check_splits(function, x, axis, src, dst)
    return cast(Tensor, _Transition.apply(x, axis, src, dst))  # type: ignore[no-untyped-call]


def _check_splits(function: str, x: Tensor, axis: Axis, src: Type, dst: Type) -> None:
    """A shard must divide into its ``outer`` blocks, a tensor to be split into those times the ranks' parts."""
    for kind, parts in ((src, axis.parts // axis.size), (dst, axis.parts)):
        if not kind.is_shard:
            continue
        if kind.dim >= x.dim():
            raise ShardingError(
                f"{function} {src} -> {dst} on axis {axis.name!r}: "
                f"a tensor of shape {tuple(x.shape)} has no dim {kind.dim}"
            )
        extent = x.shape[kind.dim] * (axis.size if kind.dim == src.dim and kind is dst else 1)
        if extent % (kind.outer * parts):
            ranks = f"{axis.size} ranks" + (" with a pair of parts each" if axis.paired else "")
            over = ranks if kind.outer == 1 else f"{kind.outer} blocks of {ranks} each"
            raise ShardingError(
                f"{function} {src} -> {dst} on axis {axis.name!r}: dim {kind.dim} of shape {tuple(x.shape)} "
                f"doesn't divide over {over}; choose sizes that do, or another axis size"
            )


class _Transition(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, src: Type, dst: Type) -> Tensor:
        ctx.axis, ctx.src, ctx.dst = axis, src, dst
        return fresh(_WAYS[src.kind, dst.kind][0](x, axis, src, dst))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        back = _WAYS[ctx.src.kind, ctx.dst.kind][1]
        return back(grads[0], ctx.axis, ctx.src, ctx.dst), None, None, None


def fresh(x: Tensor) -> Tensor:
    """``x`` as a tensor of its own, without a copy, to be returned by the forward of an autograd function.

    Under torch.compile, torch 2.11 gives the gradient to only one of the names that a tensor had in
    the forward (``x.add_(1)`` and ``x.contiguous()`` can be names of ``x``), maybe not to the returned one.
    """
    return x.detach()


def _split(x: Tensor, shard: Type, axis: Axis) -> Tensor:
    """``[n, *local]``: the part of every rank. A view where the shard is neither strided nor paired."""
    dim, blocks = shard.dim, _blocks(x, shard, axis)
    if not axis.paired:
        return blocks.movedim(dim + 1, 0).flatten(dim + 1, dim + 2)
    low, high = blocks.chunk(2, dim + 1)
    return torch.stack([low, high.flip(dim + 1)], dim + 2).movedim(dim + 1, 0).flatten(dim + 1, dim + 3)


def _blocks(x: Tensor, shard: Type, axis: Axis) -> Tensor:
    """Dim ``dim`` as ``[outer, parts, inner]``."""
    dim, outer = shard.dim, shard.outer
    inner = x.shape[dim] // (outer * axis.parts)
    return x.reshape(*x.shape[:dim], outer, axis.parts, inner, *x.shape[dim + 1 :])


def _merge(parts: Tensor, shard: Type, paired: bool = False) -> Tensor:
    """The inverse of :func:`_split`, contiguous. A view where nothing lies before the split, else one copy."""
    dim, outer = shard.dim, shard.outer
    n, *local = parts.shape
    if not paired:
        blocks = parts.reshape(n, *local[:dim], outer, local[dim] // outer, *local[dim + 1 :])
        return blocks.movedim(0, dim + 1).flatten(dim, dim + 2).contiguous()
    pairs = parts.reshape(n, *local[:dim], outer, 2, local[dim] // outer // 2, *local[dim + 1 :])
    low, high = pairs.movedim(0, dim + 1).unbind(dim + 2)
    return torch.cat([low, high.flip(dim + 1)], dim + 1).flatten(dim, dim + 2).contiguous()


def _sum(x: Tensor, axis: Axis) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=axis.group)
    return total


def _gather(x: Tensor, axis: Axis, shard: Type) -> Tensor:
    parts = x.new_empty((axis.size * x.shape[0], *x.shape[1:]))
    _gather_single(parts, x.contiguous(), group=axis.group)
    return _merge(parts.view(axis.size, *x.shape), shard, axis.paired)


def _scatter_sum(x: Tensor, axis: Axis, shard: Type) -> Tensor:
    parts = _split(x, shard, axis).contiguous()
    own = x.new_empty(parts.shape[1:])
    _scatter_single(own, parts.flatten(0, 1), group=axis.group)
    return own


def _slice(x: Tensor, axis: Axis, shard: Type) -> Tensor:
    if not axis.paired:
        return _split(x, shard, axis)[axis.index].contiguous()
    dim, blocks = shard.dim, _blocks(x, shard, axis)
    own = [blocks.select(dim + 1, part) for part in axis.parts_of(axis.index)]
    return torch.stack(own, dim + 1).flatten(dim, dim + 2)


def _pad(x: Tensor, axis: Axis, shard: Type) -> Tensor:
    parts = x.new_zeros((axis.size, *x.shape))
    parts[axis.index] = x
    return _merge(parts, shard, axis.paired)


def _share(x: Tensor, axis: Axis) -> Tensor:
    """One of ``axis.size`` equal terms whose sum is ``x``. Raises ShardingError for a dtype without fractions."""
    if not (x.dtype.is_floating_point or x.dtype.is_complex):
        raise ShardingError(f"convert to P on axis {axis.name!r}: {x.dtype} has no equal terms; use a float")
    return x / axis.size


def _exchange(x: Tensor, axis: Axis, src: Type, dst: Type) -> Tensor:
    if src.dim == dst.dim:  # another order of the same dim: every rank may need something of every other
        return _slice(_gather(x, axis, src), axis, dst)
    parts = _split(x, dst, axis).contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received.flatten(0, 1), parts.flatten(0, 1), group=axis.group)
    return _merge(received, src, axis.paired)


_Way = Callable[[Tensor, Axis, Type, Type], Tensor]

_WAYS: Final[Mapping[tuple[str, str], tuple[_Way, _Way]]] = {
    ("I", "R"): (lambda x, a, s, d: x, lambda g, a, s, d: _sum(g, a)),
    ("S", "R"): (lambda x, a, s, d: _gather(x, a, s), lambda g, a, s, d: _scatter_sum(g, a, s)),
    ("S", "I"): (lambda x, a, s, d: _gather(x, a, s), lambda g, a, s, d: _slice(g, a, s)),
    ("P", "I"): (lambda x, a, s, d: _sum(x, a), lambda g, a, s, d: g),
    ("P", "R"): (lambda x, a, s, d: _sum(x, a), lambda g, a, s, d: _sum(g, a)),
    ("P", "S"): (lambda x, a, s, d: _scatter_sum(x, a, d), lambda g, a, s, d: _gather(g, a, d)),
    ("S", "S"): (_exchange, lambda g, a, s, d: _exchange(g, a, d, s)),
    ("I", "S"): (lambda x, a, s, d: _slice(x, a, d), lambda g, a, s, d: _gather(g, a, d)),
    ("R", "S"): (lambda x, a, s, d: _slice(x, a, d), lambda g, a, s, d: _pad(g, a, d)),
    ("I", "P"): (lambda x, a, s, d: _share(x, a), lambda g, a, s, d: g),
    ("R", "P"): (lambda x, a, s, d: _share(x, a), lambda g, a, s, d: _share(g, a)),
}
"""(forward, backward) of every transition; the table of :mod:`autopar.spmd`, in code."""


def exchange_uneven(x: Tensor, sent: Sequence[int], received: Sequence[int], axis: Axis) -> Tensor:
    """``x [sum(sent), ...]``, of which each rank gets so many rows, in order; ``[sum(received), ...]`` of theirs."""
    rows, work = start_exchange_uneven(x, sent, received, axis)
    if work is not None:
        work.wait()
    return rows


def start_exchange_uneven(
    x: Tensor, sent: Sequence[int], received: Sequence[int], axis: Axis
) -> tuple[Tensor, dist.Work | None]:
    """The same, there after ``wait()``. Keep ``x``, which must be contiguous, unchanged until then."""
    if axis.size == 1:
        return x, None
    rows = x.new_empty((sum(received), *x.shape[1:]))
    work = dist.all_to_all_single(rows, x, list(received), list(sent), group=axis.group, async_op=True)
    return rows, _started(work)


def reduce_sum_(x: Tensor, axis: Axis, *, async_op: bool = False) -> dist.Work | None:
    """Sum ``x`` over the axis, in place. With ``async_op``, ``x`` is ready after the result's ``wait()``."""
    return None if axis.size == 1 else dist.all_reduce(x, group=axis.group, async_op=async_op)


def reduce_max_(x: Tensor, axis: Axis, *, async_op: bool = False) -> dist.Work | None:
    """The elementwise maximum of ``x`` over the axis, in place. ``async_op`` as in :func:`reduce_sum_`."""
    return None if axis.size == 1 else dist.all_reduce(x, op=dist.ReduceOp.MAX, group=axis.group, async_op=async_op)


def reduce_to_(x: Tensor, axis: Axis, destination: int) -> dist.Work | None:
    """Start to sum contiguous ``x`` over the axis, in place, for index ``destination``; elsewhere it is used up."""
    return None if axis.size == 1 else _started(dist.reduce(x, group=axis.group, group_dst=destination, async_op=True))


def gather_stack(x: Tensor, axis: Axis) -> tuple[Tensor, dist.Work | None]:
    """Start to gather ``x`` of every rank: ``[axis.size, *x.shape]``, there after ``wait()``."""
    if axis.size == 1:
        return x.unsqueeze(0), None
    parts = x.new_empty((axis.size * x.shape[0], *x.shape[1:]))
    work = _started(_gather_single(parts, x.contiguous(), group=axis.group, async_op=True))
    return parts.view(axis.size, *x.shape), work


def gather_parts(parts: Sequence[tuple[Tensor, Type]], axis: Axis) -> list[Tensor]:
    """Tensors of one dtype, each split over the axis as its type says, made whole on it by one all-gather.

    Without gradients. The tensors of all ranks of the axis have the same shapes and types.
    """
    stacked, work = gather_stack(torch.cat([x.reshape(-1) for x, _ in parts]), axis)
    if work is not None:
        work.wait()
    pieces = torch.split(stacked, [x.numel() for x, _ in parts], dim=1)
    return [_merge(piece.reshape(axis.size, *x.shape), kind) for piece, (x, kind) in zip(pieces, parts, strict=True)]


def gather_into(whole: Tensor, part: Tensor, axis: Axis) -> dist.Work | None:
    """Start to fill flat ``whole`` with flat ``part`` of every rank, in order; it is there after ``wait()``."""
    if axis.size == 1:
        whole.copy_(part)
        return None
    return _started(_gather_single(whole, part, group=axis.group, async_op=True))


def scatter_sum_into(part: Tensor, terms: Tensor, axis: Axis) -> dist.Work | None:
    """Start to sum flat ``terms`` over the axis, of which flat ``part`` becomes this rank's; after ``wait()``."""
    if axis.size == 1:
        part.copy_(terms)
        return None
    return _started(_scatter_single(part, terms, group=axis.group, async_op=True))


def broadcast_(x: Tensor, axis: Axis, source: int) -> None:
    """Overwrite ``x`` by that of the rank with index ``source`` on the axis."""
    if axis.size > 1:
        dist.broadcast(x, group=axis.group, group_src=source)


def start_broadcast_(x: Tensor, axis: Axis, source: int) -> dist.Work | None:
    """Start to overwrite contiguous ``x`` by that of index ``source``; it is there after ``wait()``."""
    return None if axis.size == 1 else _started(dist.broadcast(x, group=axis.group, group_src=source, async_op=True))


def send(x: Tensor, axis: Axis, to: int) -> dist.Work:
    """Start to send contiguous ``x`` to index ``to`` of the axis. Keep it unchanged until that is done."""
    return _started(dist.isend(x, group=axis.group, group_dst=to))


def receive_(x: Tensor, axis: Axis, source: int) -> dist.Work:
    """Start to fill contiguous ``x`` from index ``source`` of the axis; it is there after ``wait()``."""
    return _started(dist.irecv(x, group=axis.group, group_src=source))


def start_shift(x: Tensor, axis: Axis) -> tuple[Tensor, list[dist.Work]]:
    """Start to send contiguous ``x`` to the next rank of the axis, from the last to the first, and to receive that of
    the one before: there once all works are done, until when ``x`` must stay unchanged."""
    received = torch.empty_like(x)
    there, back = (axis.index + 1) % axis.size, (axis.index - 1) % axis.size
    # as one batch: NCCL would run a send and a receive between the same two ranks one after the other
    pair = [
        dist.P2POp(dist.isend, x, group=axis.group, group_peer=there),
        dist.P2POp(dist.irecv, received, group=axis.group, group_peer=back),
    ]
    return received, dist.batch_isend_irecv(pair)


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "a rank outside of the group"
    return work


def subgroups(axes: Axes, wanted: Mapping[tuple[int, ...], str]) -> dict[tuple[int, ...], Axis]:
    """Join further groups: global ranks, in order, this one among them -> name. All ranks must call it.

    Ranks need not want the same: they first tell each other, then all make all groups in the same order.
    """
    everyone: list[Mapping[tuple[int, ...], str]] = [wanted] * axes.world.size
    if axes.world.size > 1:
        dist.all_gather_object(everyone, dict(wanted))
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for ranks, name in sorted({item for wants in everyone for item in wants.items()}):
        if len(ranks) > 1:
            groups[ranks] = dist.new_group(list(ranks), group_desc=name)
    return {ranks: Axis.of(name, ranks, axes.rank, groups.get(ranks)) for ranks, name in wanted.items()}


def broadcast_object(item: object) -> object:
    """``item`` of rank 0, on every rank of the world."""
    box = [item]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def lost_peer(error: RuntimeError) -> bool:
    """Whether ``error`` comes from a communication whose other end has died or doesn't answer."""
    backend = isinstance(error, getattr(dist, "DistError", ()))
    return backend or "gloo" in str(error).lower() or "connection closed" in str(error).lower()
