"""Strided shards for a checker that has none.

``S(2,3)``, one weight for q, k and v, is no type of ``spmd_types``. Each ``(axis, outer)`` therefore gets a
checker axis of its own: on it, such tensors are plain shards; on the axis itself they are R. The checker so
refuses to mix two orders of one dim, and :class:`OneOrder` that a tensor is split over one axis in two.

The ways from one order to another are declared, all of them here: ``relabel``, ``innermost`` and
``outermost`` around collectives; ``flatten``, ``unflatten``, ``split`` and ``cat`` where dims are joined or
divided; and ``settle`` for pending sums, which have no order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import spmd_types as spmd
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from autopar.errors import ShardingError
from autopar.runtime import Axis, R
from autopar.spmd import Type

ORDERS = 3  # strides that one axis may have in one program


@dataclass
class Strides:
    """The axes of the checker: each mesh axis, and one for each other order of a dim that is split over it.

    ``axes`` are those of several ranks. ``outers``, by axis name, says which ``outer`` each of its checker
    axes stands for; the first, 1, is the axis itself.
    """

    axes: tuple[Axis, ...]
    mesh: dict[str, spmd.MeshAxis] = field(init=False)
    outers: dict[str, list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.outers = {axis.name: [1] for axis in self.axes}
        self.mesh = {axis.name: spmd.MeshAxis.of(axis.group) for axis in self.axes}
        ranks = math.prod(axis.size for axis in self.axes)
        for axis in self.axes:
            for order in range(1, ORDERS + 1):
                self.mesh[f"{axis.name}/{order}"] = spmd.MeshAxis.of(axis.size, ranks)
                ranks *= axis.size

    def axis(self, name: str, outer: int) -> spmd.MeshAxis:
        known = self.outers[name]
        if outer not in known:
            assert len(known) <= ORDERS, f"{name} splits dims in more than {ORDERS} orders; raise ORDERS"
            known.append(outer)
        order = known.index(outer)
        return self.mesh[f"{name}/{order}" if order else name]

    def named(self, axis: spmd.MeshAxis) -> tuple[str, int]:
        """The inverse of :meth:`axis`."""
        label = next(label for label, found in self.mesh.items() if found == axis)
        name, _, order = label.partition("/")
        return name, self.outers[name][int(order or 0)]

    def declare(self, tensor: Tensor, types: dict[str, Type]) -> None:
        """Give a tensor its types; absent: R. Where two axes split one dim, the mesh's first is outside."""
        known: dict[spmd.MeshAxis, Any] = dict.fromkeys(self.mesh.values(), spmd.R)
        entries: list[tuple[spmd.MeshAxis, ...]] = [()] * tensor.dim()
        for axis in self.axes:
            kind = types.get(axis.name, R)
            place = self.axis(axis.name, kind.outer)
            known[place] = _plain(kind)
            if kind.is_shard:
                known[place] = spmd.V
                entries[kind.dim] += (place,)
        spmd.assert_type(tensor, known, _spec(entries))

    def collective(self, function: str, x: Tensor, axis: Axis, *, src: Type, dst: Type) -> Tensor:
        """The function of ``spmd_types``, which sees every order as that of the ranks.

        Its own rule comes first: the collective itself would sum what is split instead of pending.
        """
        if axis.size == 1:
            return x
        x = self.innermost(self.relabel(self.settle(x), axis.name, src, outer=1), axis)
        types = {"src": _plain(src), "dst": _plain(dst)}
        getattr(spmd.rules, function)(x, axis.group, **types)
        y = self.outermost(getattr(spmd, function)(x, axis.group, **types), axis)
        return self.relabel(y, axis.name, replace(dst, outer=1), outer=dst.outer)

    def innermost(self, x: Tensor, axis: Axis) -> Tensor:
        """``x`` as the checker wants it for ``axis``: no other axis splits what this one left.

        A dim split by dp of 2 ranks, then by tp, has the parts of one split by tp in 2 blocks, then by dp.
        """
        own = self.mesh[axis.name]
        for dim, entry in enumerate(_entries(x)):
            if own in entry[:-1]:
                at = entry.index(own)
                later = [self.axis(n, outer * axis.size) for n, outer in map(self.named, entry[at + 1 :])]
                return self.resplit(x, dim, [*entry[:at], *later, own])
        return x

    def outermost(self, x: Tensor, axis: Axis) -> Tensor:
        """The inverse of :meth:`innermost`, as far as the blocks of the others allow."""
        own = self.mesh[axis.name]
        for dim, entry in enumerate(_entries(x)):
            if own in entry[1:]:
                *before, _ = entry
                later: list[spmd.MeshAxis] = []
                while before and not (found := self.named(before[-1]))[1] % axis.size:
                    later.insert(0, self.axis(found[0], found[1] // axis.size))
                    before.pop()
                return self.resplit(x, dim, [*before, own, *later])
        return x

    def relabel(self, x: Tensor, name: str, kind: Type, *, outer: int) -> Tensor:
        """``x``, which must be of type ``kind``, with the same shard under another order."""
        if not kind.is_shard or kind.outer == outer:
            return x
        before, after = self.axis(name, kind.outer), self.axis(name, outer)
        spmd.assert_type(x, {before: spmd.V, after: spmd.R})
        if places(x)[before] != kind.dim:
            raise spmd.SpmdTypeError(f"{name}: expected {kind}, but dim {places(x)[before]} is split")
        entry = _entries(x)[kind.dim]
        return self.resplit(x, kind.dim, [after if a == before else a for a in entry])

    def resplit(self, x: Tensor, dim: int, axes: Sequence[spmd.MeshAxis]) -> Tensor:
        entries = _entries(x)
        return stamped(_alias(x), x, [*entries[:dim], axes, *entries[dim + 1 :]])

    def settle(self, x: Tensor) -> Tensor:
        """A sum pending on another order is pending on the axis itself."""
        local = dict(spmd.get_local_type(x))
        for axis, kind in spmd.get_local_type(x).items():
            if kind is spmd.P and axis != (own := self.mesh[self.named(axis)[0]]):
                spmd.assert_type(x, {own: spmd.R})
                local |= {axis: spmd.R, own: spmd.P}
        if local == spmd.get_local_type(x):
            return x
        y = _alias(x)
        spmd.assert_type(y, local, spmd.get_partition_spec(x))
        return y

    def result(self, x: Tensor) -> Tensor:
        """``x`` on the mesh axes alone; in another order it must not be split."""
        x = self.settle(x)
        spmd.assert_type(x, {a: spmd.R for label, a in self.mesh.items() if "/" in label})
        y = _alias(x)
        own = [self.mesh[axis.name] for axis in self.axes]
        spmd.assert_type(y, {a: spmd.get_local_type(x)[a] for a in own}, spmd.get_partition_spec(x))
        return y

    def expect(self, loss: Tensor, summed: Collection[str]) -> None:
        """It is a pending sum over the axes ``summed``, I on the others."""
        spmd.assert_type(loss, {a.name: spmd.P if a.name in summed else spmd.I for a in self.axes})

    def verify(self, x: Tensor) -> None:
        """Raises SpmdTypeError for a tensor that is other than R in two orders of one axis."""
        used = [self.named(a)[0] for a, kind in spmd.get_local_type(x).items() if kind is not spmd.R]
        if len(used) != len(set(used)):
            raise spmd.SpmdTypeError(f"{spmd.get_local_type(x)} are several types on one of {sorted(set(used))}")


@dataclass
class OneOrder(TorchFunctionMode):
    """Verifies every result. To be entered inside of the checker, so that it sees what that has found."""

    strides: Strides

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and spmd.has_local_type(x):
                self.strides.verify(x)
        return result


def _plain(kind: Type) -> Any:
    return spmd.S(kind.dim) if kind.is_shard else getattr(spmd, kind.kind)


def _entries(x: Tensor) -> list[tuple[spmd.MeshAxis, ...]]:
    """Of each dim, the axes that split it, the outer ones first."""
    spec = spmd.get_partition_spec(x) or (None,) * x.dim()
    return [entry if isinstance(entry, tuple) else (entry,) if entry else () for entry in spec]


def places(x: Tensor) -> dict[spmd.MeshAxis, int]:
    """The dim that each axis splits, where one does."""
    return {axis: dim for dim, entry in enumerate(_entries(x)) for axis in entry}


def _spec(entries: Sequence[Sequence[spmd.MeshAxis]]) -> spmd.PartitionSpec:
    return spmd.PartitionSpec(*(tuple(entry) or None for entry in entries))


def _alias(x: Tensor) -> Tensor:
    with spmd.no_typecheck():
        return x.view_as(x)


def stamped(y: Tensor, x: Tensor, entries: Sequence[Sequence[spmd.MeshAxis]]) -> Tensor:
    """``y`` with the types of ``x``, but split as ``entries`` say."""
    split = {axis for entry in entries for axis in entry}
    was = places(x)
    local = {a: spmd.V if a in split else spmd.R if a in was else k for a, k in spmd.get_local_type(x).items()}
    spmd.assert_type(y, local, _spec(entries))
    return y


def reshape(strides: Strides, x: Tensor, shape: Sequence[int]) -> Tensor:
    """Dims that belong together are joined, then divided: the checker divides no split dim in a view."""
    rest = -math.prod(shape)
    whole = [x.numel() // rest if size == -1 else size for size in shape]
    at = 0
    for before, after in _groups(x.shape, whole):
        if not after:
            x = x.squeeze(at)
            continue
        x = flatten(strides, x, at, len(before)) if before else x.unsqueeze(at)
        x = unflatten(strides, x, at, after)
        at += len(after)
    return x


def _groups(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """The shortest runs of dims with as many elements before as after."""
    i = j = 0
    while i < len(before) or j < len(after):
        m, n = i, j
        i, j = min(i + 1, len(before)), min(j + 1, len(after))
        while (a := math.prod(before[m:i])) != (b := math.prod(after[n:j])):
            i, j = (i + 1, j) if a < b else (i, j + 1)
        yield before[m:i], after[n:j]


def flatten(strides: Strides, x: Tensor, at: int, count: int) -> Tensor:
    """``[b, s S(1)] -> [b s]`` is split ``S(0, b)``."""
    entries = _entries(x)
    if count == 1 or not any(entries[at + 1 : at + count]):
        return x.flatten(at, at + count - 1)
    joined = []
    for dim in range(at, at + count):
        before = math.prod(x.shape[at:dim])
        joined += [strides.axis(name, outer * before) for name, outer in map(strides.named, entries[dim])]
    with spmd.no_typecheck():
        y = x.flatten(at, at + count - 1)
    return stamped(y, x, [*entries[:at], joined, *entries[at + count :]])


def unflatten(strides: Strides, x: Tensor, at: int, sizes: Sequence[int]) -> Tensor:
    """``[b s S(0, b)] -> [b, s]`` is split ``S(1)``."""
    entries = _entries(x)
    if len(sizes) == 1:
        return x
    if all(strides.named(axis)[1] == 1 for axis in entries[at]):
        return x.unflatten(at, (-1, *sizes[1:]))
    divided: list[list[spmd.MeshAxis]] = [[] for _ in sizes]
    for name, outer in map(strides.named, entries[at]):
        dim, inner = _place(sizes, outer)
        divided[dim].append(strides.axis(name, inner))
    with spmd.no_typecheck():
        y = x.unflatten(at, tuple(sizes))
    return stamped(y, x, [*entries[:at], *divided, *entries[at + 1 :]])


def _place(sizes: Sequence[int], outer: int) -> tuple[int, int]:
    """Where a shard of a dim lies once the dim is divided: the dim, and its own ``outer``."""
    before = 1
    for dim, size in enumerate(sizes):
        if before <= outer < before * size and outer % before == 0:
            return dim, outer // before
        before *= size
    raise ShardingError(f"a dim of {outer} blocks, each of them split, can't become {tuple(sizes)}")


def split(strides: Strides, x: Tensor, sizes: int | Sequence[int], dim: int) -> Sequence[Tensor]:
    """``split(x S(2, 3), 3 parts)`` gives three ``S(2)``."""
    dim %= x.dim()
    entries = _entries(x)
    if all(strides.named(axis)[1] == 1 for axis in entries[dim]):
        return torch.split(x, sizes, dim)
    with spmd.no_typecheck():
        parts = torch.split(x, sizes, dim)
    return [stamped(y, x, [*entries[:dim], _cut(strides, x, y, dim), *entries[dim + 1 :]]) for y in parts]


def _cut(strides: Strides, x: Tensor, part: Tensor, dim: int) -> list[spmd.MeshAxis]:
    """A part holds some of the blocks, whole."""
    axes = []
    for name, outer in map(strides.named, _entries(x)[dim]):
        blocks, cut = divmod(part.shape[dim] * outer, x.shape[dim])
        if cut:
            raise ShardingError(f"a part of {part.shape[dim]} of {x.shape[dim]} cuts through {outer} blocks")
        axes.append(strides.axis(name, blocks))
    return axes


def cat(strides: Strides, tensors: Sequence[Tensor], dim: int) -> Tensor:
    """The inverse of :func:`split`: the parts' blocks, which are of one size, one after another."""
    dim %= tensors[0].dim()
    split_over = [[strides.named(axis) for axis in _entries(x)[dim]] for x in tensors]
    if not any(split_over):
        return torch.cat(list(tensors), dim)
    if len({tuple(name for name, _ in parts) for parts in split_over}) > 1:
        raise spmd.SpmdTypeError(f"cat of parts that are split over {split_over}")
    joined = []
    for parts in zip(*split_over, strict=True):
        sizes = {x.shape[dim] // outer for x, (_, outer) in zip(tensors, parts, strict=True)}
        if len(sizes) > 1:
            raise ShardingError(f"parts in blocks of {sizes} don't join to one dim that is split")
        joined.append(strides.axis(parts[0][0], sum(outer for _, outer in parts)))
    alike = [strides.resplit(x, dim, joined) for x in tensors]
    types = [(spmd.get_local_type(x), _entries(x)) for x in alike]
    if any(other != types[0] for other in types):
        raise spmd.SpmdTypeError(f"cat of {types}")
    with spmd.no_typecheck():
        y = torch.cat(list(tensors), dim)
    return stamped(y, alike[0], _entries(alike[0]))
