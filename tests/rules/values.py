"""What the types mean: the value every rank holds of a tensor, and the tensor from those of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.spmd import I, P, R, Type

TOLERANCES = {torch.float64: 1e-12, torch.complex128: 1e-12, torch.float32: 4e-6}
_OF_GRADIENT = {R: P, P: I}


def noise(x: Tensor) -> Tensor:
    if x.dtype.is_floating_point or x.dtype.is_complex:
        return torch.randn_like(x)
    return torch.randint(-3, 4, x.shape).to(x.dtype)


def cut(x: Tensor, kind: Type, size: int) -> list[Tensor]:
    """The value of every rank; the parts of a pending sum are random."""
    if kind.is_shard:
        chunk = x.shape[kind.dim] // kind.outer // size
        seen = x.unflatten(kind.dim, (kind.outer, size, chunk))
        return [part.flatten(kind.dim, kind.dim + 1).contiguous() for part in seen.unbind(kind.dim + 1)]
    if kind == P:
        parts = [noise(x) for _ in range(size - 1)]
        return [*parts, x - sum(parts, torch.zeros_like(x))]
    return [x.clone() for _ in range(size)]


def join(parts: Sequence[Tensor], kind: Type) -> Tensor:
    """Inverse of :func:`cut`. Raises AssertionError where ranks that must agree don't."""
    if kind.is_shard:
        chunk = parts[0].shape[kind.dim] // kind.outer
        seen = [part.unflatten(kind.dim, (kind.outer, chunk)) for part in parts]
        return torch.stack(seen, kind.dim + 1).flatten(kind.dim, kind.dim + 2)
    if kind == P:
        return torch.stack(list(parts)).sum(0).to(parts[0].dtype)
    for other in parts[1:]:
        close(other, parts[0], "ranks disagree")
    return parts[0]


def of_gradient(kind: Type) -> Type:
    """The type, as a value, of the gradient of a value of type ``kind``."""
    return _OF_GRADIENT.get(kind, kind)


def close(got: Tensor, wanted: Tensor, what: str, tolerance: float | None = None) -> None:
    assert got.shape == wanted.shape, f"{what}: shape {tuple(got.shape)} instead of {tuple(wanted.shape)}"
    assert got.dtype == wanted.dtype, f"{what}: {got.dtype} instead of {wanted.dtype}"
    tolerance = tolerance or TOLERANCES.get(wanted.dtype, 0.0)
    same = torch.allclose(got, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert same, f"{what}: {got.tolist()} instead of {wanted.tolist()}"
