"""What a user fixed of a job, and so what there is to search."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from autopar.errors import ArgumentError
from autopar.mesh import AXES, EXPERTS, Mesh
from autopar.options import Options, masters_on_host
from autopar.planner.modes import mode_of
from autopar.planner.pinned_placements import split_axes
from autopar.planner.wanted import SYNTHESIZED
from autopar.schedules.registry import SCHEDULES

SEARCHED_OPTIONS: Final = ("zero", "zero_ranks", "offload", "head_chunks")
"""The fields of :class:`autopar.options.Options` that change what a step costs and not what it computes."""

SIZES: Final = ("pp", "dp", "cp", "tp")


@dataclass(frozen=True)
class Pins:
    """What is fixed of a job on ``gpus`` ranks; None, or an axis that isn't in ``mesh``, is free.

    A ``mesh`` whose sizes multiply to ``gpus`` is all of it. ``given`` names the fields of ``options`` that were asked
    for, which are fixed; of the others those in :data:`SEARCHED_OPTIONS` are free. Raises ArgumentError for what
    can't be pinned.
    """

    gpus: int
    mesh: Mapping[str, int] = field(default_factory=dict)
    microbatches: int | None = None
    microbatch: int | None = None
    schedule: str | None = None
    chunks: int | None = None
    vocabulary: str | None = None
    options: Options = field(default_factory=Options)
    given: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name in ("microbatches", "microbatch", "chunks"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ArgumentError(f"{name}={value!r}; it must be a whole number of at least 1")
        self._check_names()
        self._check_placements()
        # Raises for axes and sizes that there aren't.
        Mesh.of({axis: size for axis, size in self.mesh.items() if axis not in EXPERTS}, self.least_gpus)

    def _check_names(self) -> None:
        if not isinstance(self.mesh, Mapping):
            raise ArgumentError(f"mesh={self.mesh!r}; it must give axes their sizes, as {{'dp': 2, 'tp': 4}} does")
        if self.vocabulary is not None:
            mode_of(self.vocabulary)
        if self.schedule is not None and self.schedule not in (*SCHEDULES, SYNTHESIZED):
            raise ArgumentError(f"schedule={self.schedule!r} is none of {', '.join((*SCHEDULES, SYNTHESIZED))}")

    def _check_placements(self) -> None:
        """That no axis which parameters are split over is pinned to one rank."""
        for axis, pattern in split_axes(self.options.placements).items():
            size = self.fixed_mesh.size(axis) if self.mesh_is_whole else self.mesh.get(axis)
            if size == 1:
                raise ArgumentError(
                    f"placements: {pattern!r} is split over {axis}, which is 1 with mesh={dict(self.mesh)} on "
                    f"gpus={self.gpus}; give {axis} more ranks, or leave one of the two out"
                )

    @property
    def least_gpus(self) -> int:
        """The product of the degrees that were given, which has to divide ``gpus``."""
        sizes = [self.mesh.get(axis, 1) for axis in SIZES]
        return math.prod(size for size in sizes if isinstance(size, int))

    @property
    def mesh_is_whole(self) -> bool:
        """Whether every degree is fixed: those that were given multiply to all ranks."""
        return bool(self.mesh) and self.least_gpus == self.gpus

    @property
    def fixed_mesh(self) -> Mesh:
        """Raises ArgumentError where it is no mesh of this many ranks."""
        return Mesh.of(self.mesh, self.gpus)

    def fixes(self, option: str) -> bool:
        return option in self.given or option not in SEARCHED_OPTIONS

    @property
    def masters_on_host(self) -> bool | None:
        """Whether parameters and the optimizer's state have to lie on the host, or mustn't; None: either way."""
        return masters_on_host(self.options.offload) if self.fixes("offload") else None

    @property
    def free(self) -> list[str]:
        """By name, in the order in which a user would think of them."""
        found: list[str] = []
        if not self.mesh_is_whole:
            found += [axis for axis in (*SIZES, "ep") if axis in AXES and axis not in self.mesh]
        if self.microbatch is None and self.microbatches is None:
            found.append("microbatch")
        found += [name for name in ("schedule", "chunks", "vocabulary") if getattr(self, name) is None]
        return found + [name for name in SEARCHED_OPTIONS if not self.fixes(name)]
