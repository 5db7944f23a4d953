"""What is measured, as values: one product, one collective; and how much effort goes into it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

KIB: Final = 1 << 10
MIB: Final = 1 << 20

LinkName: TypeAlias = Literal["intra_node", "inter_node"]
Progress: TypeAlias = Callable[[str], None]
"""Called with what is measured next."""


@dataclass(frozen=True)
class Product:
    """``[m, k]`` times ``[k, n]`` in ``dtype``, and the seconds that it took."""

    dtype: str
    m: int
    n: int
    k: int
    item_bytes: int
    seconds: float

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k

    @property
    def moved_bytes(self) -> float:
        return float(self.item_bytes * (self.m * self.k + self.k * self.n + self.m * self.n))


@dataclass(frozen=True)
class Message:
    """A collective of ``kind`` (as in :mod:`autopar.cost_models.collective`) of ``bytes_`` on ``size`` ranks."""

    kind: str
    link: LinkName
    size: int
    bytes_: int
    seconds: float


@dataclass(frozen=True)
class Effort:
    """How much to measure. Products are of ``shapes`` (m, n, k), in that order until one takes ``longest_seconds``."""

    repeats: int
    """Runs of which the median counts."""
    run_seconds: float
    """What a run takes at least: short calls are repeated."""
    shapes: tuple[tuple[int, int, int], ...]
    longest_seconds: float
    copied_bytes: int
    message_bytes: tuple[int, ...]
    """Of collectives; none: links are not measured."""

    @classmethod
    def of(cls, device_type: str, *, quick: bool = False) -> Effort:
        """What suits a device, "cuda" or "cpu" (one thread). Quick: less than a minute on two CPU cores."""
        return _on_gpu(quick) if device_type == "cuda" else _on_cpu(quick)


def _on_gpu(quick: bool) -> Effort:
    # a layer's products under tensor parallelism: many tokens, one side narrow
    thin = ((4096, 512, 4096), (4096, 4096, 512), (4096, 14336, 4096), (8192, 1024, 8192))
    messages = tuple(KIB << shift for shift in range(0, 19, 3 if quick else 1))
    return Effort(5 if quick else 11, 0.01, (*cubes(256, 512, 1024, 2048, 4096, 8192), *thin), 1.0, 512 * MIB, messages)


def _on_cpu(quick: bool) -> Effort:
    if quick:
        messages = tuple(KIB << shift for shift in range(0, 15, 3))
        return Effort(5, 0.01, cubes(32, 64, 128, 256, 512), 0.05, 128 * MIB, messages)
    thin = ((512, 64, 512), (512, 512, 64), (256, 1024, 256))
    messages = tuple(KIB << shift for shift in range(0, 19, 2))
    shapes = (*cubes(32, 64, 96, 128, 192, 256, 384, 512, 768, 1024), *thin)
    return Effort(9, 0.01, shapes, 0.2, 128 * MIB, messages)


def cubes(*sides: int) -> tuple[tuple[int, int, int], ...]:
    return tuple((side, side, side) for side in sides)
