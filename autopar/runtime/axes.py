"""The mesh as one rank sees it: its place on every axis, and the process groups along them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from autopar.errors import ArgumentError
from autopar.mesh import AXES, Mesh
from autopar.runtime.later import Later


@dataclass(frozen=True, eq=False)
class Axis:
    """One axis, or any other group of ranks, seen from one of them.

    ``index`` is this rank's place in ``ranks`` (global ranks, in order); ``group`` is None when ``size`` is
    1, where there is nothing to communicate.
    """

    name: str
    size: int
    index: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, name: str, ranks: Sequence[int], rank: int, group: dist.ProcessGroup | None) -> Axis:
        return cls(name, len(ranks), ranks.index(rank), tuple(ranks), group)


@dataclass
class Stream:
    """Where in the training a rank is; the executor moves it, random ops are seeded from it."""

    step: int = 0
    microbatch: int = 0


@dataclass(frozen=True, eq=False)
class Axes(Mapping[str, Axis]):
    """Every mesh axis by name, and what else a rank knows of itself.

    ``world`` is all ranks as one axis. ``scope`` tells the instances of one layer class apart: their random
    ops have the same number, but not the same scope. ``later`` holds the weight gradients that the rank put off.
    """

    mesh: Mesh
    rank: int
    device: torch.device
    seed: int
    by_name: Mapping[str, Axis]
    world: Axis
    stream: Stream = field(default_factory=Stream)
    later: Later = field(default_factory=Later)
    scope: str = ""

    @classmethod
    def build(cls, mesh: Mesh, rank: int, device: torch.device | str, seed: int = 0) -> Axes:
        """Join the groups of ``rank`` along every axis; all ranks of the world must call it.

        A mesh of one rank needs no torch.distributed. Raises ArgumentError where the initialised world has
        another size or gives this process another rank.
        """
        _check_world(mesh, rank)
        alone = cls.alone(mesh, rank, device, seed)
        world = replace(alone.world, group=dist.group.WORLD if mesh.world > 1 else None)
        return replace(alone, by_name={name: _join(mesh, rank, name) for name in AXES}, world=world)

    @classmethod
    def alone(cls, mesh: Mesh, rank: int, device: torch.device | str, seed: int = 0) -> Axes:
        """``rank``'s place without groups, to build its module outside of a job; it can't communicate."""
        mesh.coordinates(rank)
        by_name = {name: Axis.of(name, mesh.group(rank, name), rank, None) for name in AXES}
        world = Axis.of("world", range(mesh.world), rank, None)
        return cls(mesh, rank, torch.device(device), seed, by_name, world)

    def __getitem__(self, name: str) -> Axis:
        return self.by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_name)

    def __len__(self) -> int:
        return len(self.by_name)

    def within(self, scope: str) -> Axes:
        """The same rank, stream and put-off gradients, for a layer at the module path ``scope``."""
        return replace(self, scope=f"{self.scope}.{scope}" if self.scope else scope)


def _check_world(mesh: Mesh, rank: int) -> None:
    if mesh.world == 1:
        return
    if not dist.is_initialized():
        raise ArgumentError(
            f"mesh {mesh} is {mesh.world} ranks, but torch.distributed is not initialised; "
            "start the job with torchrun, or call torch.distributed.init_process_group first"
        )
    world, own = dist.get_world_size(), dist.get_rank()
    if (world, own) != (mesh.world, rank):
        raise ArgumentError(
            f"mesh {mesh} needs rank {rank} of {mesh.world}, but torch.distributed says rank {own} "
            f"of {world}; start {mesh.world} processes"
        )


def _join(mesh: Mesh, rank: int, name: str) -> Axis:
    """One group for every line of ranks along the axis; every rank must take part in making each of them.

    Not through DeviceMesh: for an axis that spans the world it hands out the default group, which doesn't
    carry the axis' name, and is used for other things.
    """
    ranks = mesh.group(rank, name)
    if len(ranks) == 1:
        return Axis.of(name, ranks, rank, None)
    groups = {line: dist.new_group(list(line), group_desc=f"mesh_{name}") for line in mesh.groups(name)}
    return Axis.of(name, ranks, rank, groups[ranks])
