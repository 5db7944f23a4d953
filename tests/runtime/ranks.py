"""What tests of the runtime share: running a function on ranks, and what its types say of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from autopar import simulate
from autopar.mesh import Mesh
from autopar.runtime import Axes
from autopar.spmd import Type

T = TypeVar("T")


def on_ranks(mesh: Mesh, fn: Callable[[Axes], T], seed: int = 0) -> list[T]:
    """``fn`` on every rank of ``mesh``; the results by rank."""
    return simulate.run(lambda rank: fn(Axes.build(mesh, rank, "cpu", seed)), mesh.world).results


def part(whole: Tensor, kind: Type, index: int, size: int) -> Tensor:
    """What rank ``index`` of ``size`` holds of ``whole``, by definition. Partial sums are random."""
    if kind.is_shard:
        blocks = whole.chunk(kind.outer, kind.dim)
        return torch.cat([block.chunk(size, kind.dim)[index] for block in blocks], kind.dim)
    if kind.kind != "P":
        return whole.clone()
    random = torch.Generator().manual_seed(1)
    terms = [torch.randint(-9, 9, whole.shape, generator=random).to(whole.dtype) for _ in range(size - 1)]
    return (whole - sum(terms)) if index == size - 1 else terms[index]


def wholes(parts: list[Tensor], kind: Type) -> list[Tensor]:
    """The tensors that the ranks' parts stand for, by definition; I and R: one per rank, which agree."""
    if kind.is_shard:
        blocks = [p.chunk(kind.outer, kind.dim) for p in parts]
        return [torch.cat([b[i] for i in range(kind.outer) for b in blocks], kind.dim)]
    return [torch.stack(parts).sum(0)] if kind.kind == "P" else parts


def gradient_type(kind: Type) -> Type:
    """The type of the gradient of a value of type ``kind``: the table of autopar.spmd."""
    return {"I": Type("I"), "R": Type("P"), "P": Type("I")}.get(kind.kind, kind)
