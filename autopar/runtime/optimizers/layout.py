"""Where the elements of a stored parameter lie, and sums and gathers over the ranks that hold the others.

For optimizers whose update of one element depends on others of the same tensor: statistics of rows and columns, norms,
the whole matrix. Rows that only pad a parameter to equal parts are zeros and have no gradient: they add nothing to
sums; means divide by the sizes of the parameter itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from autopar.mesh import AXES, Mesh
from autopar.runtime.axes import Axes, Axis
from autopar.runtime.collectives import gather_parts, reduce_sum_
from autopar.runtime.program import Parameter
from autopar.spmd import S, Type, parse


@dataclass(frozen=True)
class Split:
    """One cut of what the cuts before it left: ``kind`` is the shard, ``extent`` the size of its dim before.

    Parts are equal; where ``extent`` doesn't divide, the last ones end with padding. ``merged``: the sizes of the dims
    up to that of ``kind`` which are one, the last, before it is cut.
    """

    axis: Axis
    kind: Type
    extent: int
    merged: tuple[int, ...] = ()

    def cuts(self, dims: set[int]) -> bool:
        return not dims.isdisjoint({self.kind.dim, *range(len(self.merged))})

    def merge(self, whole: Tensor) -> Tensor:
        ones = (1,) * (len(self.merged) - 1)
        return whole.reshape(*ones, self.extent, *whole.shape[len(self.merged) :]) if self.merged else whole

    def unmerge(self, whole: Tensor) -> Tensor:
        return whole.reshape(*self.merged, *whole.shape[len(self.merged) :]) if self.merged else whole


@dataclass(frozen=True)
class Layout:
    """``shape`` of the whole parameter, ``padded`` that with the rows that make its types divide.

    ``splits`` in the order in which they cut it: by the types in the mesh's order, then ZeRO's rows. ``device`` is
    where ranks communicate; what they store may lie on the host.
    """

    shape: tuple[int, ...]
    padded: tuple[int, ...]
    splits: tuple[Split, ...]
    device: torch.device

    @classmethod
    def of(cls, parameter: Parameter, axes: Axes) -> Layout:
        return cls(parameter.full_shape, parameter.padded_shape, tuple(_splits(parameter, axes)), axes.device)

    @property
    def elements(self) -> int:
        """Of the whole parameter."""
        return math.prod(self.shape)

    def axes(self, *dims: int) -> tuple[Axis, ...]:
        """The axes that split one of ``dims`` (which may be negative); without dims, any."""
        wanted = {dim % len(self.shape) for dim in dims}
        return tuple(split.axis for split in self.splits if not dims or split.cuts(wanted))

    def own(self, whole: Tensor) -> Tensor:
        """This rank's part of ``whole``, zeros where it holds padding."""
        for dim, extent in enumerate(self.padded):
            whole = _padded(whole, dim, extent - whole.shape[dim])
        for split in self.splits:
            dim, outer, n = split.kind.dim, split.kind.outer, split.axis.size
            whole = split.merge(whole)
            whole = _padded(whole, dim, -split.extent % (outer * n))
            blocks = whole.reshape(*whole.shape[:dim], outer, n, -1, *whole.shape[dim + 1 :])
            whole = blocks.select(dim + 1, split.axis.index).flatten(dim, dim + 1)
        return whole


def gather(parts: Sequence[tuple[Tensor, Layout]]) -> list[Tensor]:
    """The whole tensors of one dtype, on the layouts' device, from this rank's part of each.

    One collective per axis that splits any. All ranks of those axes must call it with the same layouts.
    """
    tensors = [tensor.to(layout.device) for tensor, layout in parts]
    for axis in reversed(_axes_of(layout.axes() for _, layout in parts)):
        cut = [(i, s) for i, (_, layout) in enumerate(parts) for s in layout.splits if s.axis is axis]
        joined = gather_parts([(tensors[i], split.kind) for i, split in cut], axis)
        for (i, split), whole in zip(cut, joined, strict=True):
            tensors[i] = split.unmerge(whole.narrow(split.kind.dim, 0, split.extent))
    for i, (_, layout) in enumerate(parts):
        for dim, extent in enumerate(layout.shape):
            tensors[i] = tensors[i].narrow(dim, 0, extent)
    return tensors


def add_up(terms: Sequence[tuple[Tensor, tuple[Axis, ...]]], device: torch.device) -> None:
    """Sum each tensor in place over its axes. One all-reduce per axis and dtype, of all that are summed over it.

    ``device`` is where ranks communicate. All ranks of those axes must call it with the same terms.
    """
    for axis in _axes_of(axes for _, axes in terms):
        mine = [tensor for tensor, axes in terms if axis in axes]
        for dtype in dict.fromkeys(tensor.dtype for tensor in mine):
            same = [tensor for tensor in mine if tensor.dtype == dtype]
            flat = torch.cat([tensor.reshape(-1) for tensor in same]).to(device)
            reduce_sum_(flat, axis)
            for tensor, total in zip(same, torch.split(flat, [t.numel() for t in same]), strict=True):
                tensor.copy_(total.view_as(tensor))


def is_split(parameter: Parameter, mesh: Mesh) -> bool:
    """Whether a rank stores only a part of ``parameter``."""
    kinds = {axis: parse(text) for axis, text in parameter.types.items()}
    return parameter.zero > 1 or any(kind.is_shard and mesh.size(axis) > 1 for axis, kind in kinds.items())


def _splits(parameter: Parameter, axes: Axes) -> Iterator[Split]:
    left = list(parameter.padded_shape)
    for name in AXES:
        kind = parse(parameter.types.get(name, "I"))
        if kind.is_shard and axes[name].size > 1:
            yield Split(axes[name], kind, left[kind.dim])
            left[kind.dim] //= axes[name].size
    if parameter.zero > 1:
        shard, dims = axes.line(tuple(parameter.types)).shard, parameter.row_dims
        merged = tuple(left[:dims]) if dims > 1 else ()
        yield Split(shard, S(max(0, dims - 1)), math.prod(left[:dims]), merged)


def _axes_of(groups: Iterable[tuple[Axis, ...]]) -> list[Axis]:
    """All axes of the groups, each once, in the one order that all ranks communicate in: as they cut, ZeRO's last."""
    found = {axis.name: axis for axes in groups for axis in axes}
    types = [name for name in AXES if name in found]
    return [found[name] for name in [*types, *sorted(set(found) - set(types))]]


def _padded(x: Tensor, dim: int, rows: int) -> Tensor:
    return F.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, rows]) if rows else x
