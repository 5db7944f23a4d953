"""The mesh as one rank sees it: its place on every axis, and the process groups along them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import torch
import torch.distributed as dist

from autopar.errors import ArgumentError, ShardingError
from autopar.mesh import AXES, Mesh
from autopar.runtime.later import Later
from autopar.runtime.routers import Routers


@dataclass(frozen=True, eq=False)
class Axis:
    """One axis, or any other group of ranks, seen from one of them.

    ``index`` is this rank's place in ``ranks`` (global ranks, in order); ``group`` is None when ``size`` is
    1, where there is nothing to communicate. ``paired``: shards of activations are two parts of 2 ``size``, the
    ``index``-th from either end. ``purpose``: what it is used for, of any kind that prints and compares; ranks whose
    collectives meet have equal ones. Only simulated ranks look (:mod:`autopar.simulate.sites`), and refuse others.
    """

    name: str
    size: int
    index: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None
    paired: bool = False
    purpose: object = None

    @classmethod
    def of(
        cls, name: str, ranks: Sequence[int], rank: int, group: dist.ProcessGroup | None, paired: bool = False
    ) -> Axis:
        return cls(name, len(ranks), ranks.index(rank), tuple(ranks), group, paired)

    @property
    def parts(self) -> int:
        """How many equal parts a split dim is cut into."""
        return 2 * self.size if self.paired else self.size

    def parts_of(self, index: int) -> tuple[int, ...]:
        """Which of those the rank at ``index`` holds, in the order in which it holds them."""
        return (index, 2 * self.size - 1 - index) if self.paired else (index,)

    def meant_for(self, purpose: object) -> Axis:
        """The same axis and group, for this ``purpose``."""
        return replace(self, purpose=purpose)


Groups = Callable[..., list[tuple[int, ...]]]
"""The groups of ranks along some axes."""


@dataclass(frozen=True, eq=False)
class DataLine:
    """The ranks whose tokens make up a parameter's gradient: all, and as ZeRO groups them.

    ``shard`` are the neighbours that share one copy of what ZeRO splits, ``replicate`` the ranks that hold the same
    part of other copies.
    """

    whole: Axis
    shard: Axis
    replicate: Axis


@dataclass
class Stream:
    """Where in the training a rank is; the executor moves it, random ops are seeded from it."""

    step: int = 0
    microbatch: int = 0


@dataclass(frozen=True, eq=False)
class Axes(Mapping[str, Axis]):
    """Every mesh axis by name, and what else a rank knows of itself.

    ``world`` is all ranks as one axis. ``lines`` are by :meth:`autopar.mesh.Mesh.data_axes`: those of most parameters,
    and of experts; ``joints`` are several axes as one, over which rows travel to experts. ``scope`` tells the
    instances of one layer class apart: their random ops have the same number, but not the same scope. ``later`` holds
    the weight gradients that the rank put off, ``routers`` what its experts had to do. ``imbalance``: instead of
    reading how many rows a rank's experts get, take so many times the mean (where tensors have no values).
    """

    mesh: Mesh
    rank: int
    device: torch.device
    seed: int
    by_name: Mapping[str, Axis]
    world: Axis
    lines: Mapping[tuple[str, ...], DataLine]
    stream: Stream = field(default_factory=Stream)
    later: Later = field(default_factory=Later)
    routers: Routers = field(default_factory=Routers)
    joints: Mapping[tuple[str, ...], Axis] = field(default_factory=dict)
    imbalance: float | None = None
    scope: str = ""

    @classmethod
    def build(
        cls,
        mesh: Mesh,
        rank: int,
        device: torch.device | str,
        seed: int = 0,
        zero_ranks: int = 0,
        *,
        own: bool = False,
    ) -> Axes:
        """Join the groups of ``rank`` along every axis; all ranks of the world must call it. ``own``: make no others,
        where nobody else takes part.

        ``zero_ranks``: how many neighbours make up a ``shard`` (0: all that split tokens). A mesh of one rank needs no
        torch.distributed. Raises ArgumentError where the initialised world has another size or gives this process
        another rank, or ``zero_ranks`` doesn't divide the ranks that split tokens.
        """
        _check_world(mesh, rank)
        alone = cls.alone(mesh, rank, device, seed, zero_ranks)
        world = replace(alone.world, group=dist.group.WORLD if mesh.world > 1 else None)
        groups = (lambda *axes: [mesh.group(rank, *axes)]) if own else mesh.groups
        by_name = {name: _join(mesh, (name,), rank, groups) for name in AXES}
        lines = {axes: _joined_line(mesh, axes, rank, zero_ranks, by_name, groups) for axes in mesh.data_lines()}
        joints = {axes: _join(mesh, axes, rank, groups) for axes in _joint_axes(mesh)}
        return replace(alone, by_name=by_name, world=world, lines=lines, joints=joints)

    @classmethod
    def alone(cls, mesh: Mesh, rank: int, device: torch.device | str, seed: int = 0, zero_ranks: int = 0) -> Axes:
        """``rank``'s place without groups, to build its module outside of a job; it can't communicate.

        Raises ArgumentError where ``zero_ranks`` doesn't divide the ranks that split tokens.
        """
        mesh.coordinates(rank)
        by_name = {name: Axis.of(name, mesh.group(rank, name), rank, None, _paired(mesh, name)) for name in AXES}
        world = Axis.of("world", range(mesh.world), rank, None)
        lines = {axes: _line(mesh, axes, rank, zero_ranks) for axes in mesh.data_lines()}
        return cls(mesh, rank, torch.device(device), seed, by_name, world, lines)

    def joint(self, names: Sequence[str]) -> Axis:
        """Several axes as one, the first outermost. Raises ShardingError where no experts are split over them."""
        if tuple(names) not in self.joints:
            raise ShardingError(f"no experts are split over {list(names)} on mesh {self.mesh}: the axes have no group")
        return self.joints[tuple(names)]

    def line(self, split: Sequence[str]) -> DataLine:
        """That of a parameter split on these axes."""
        return self.lines[self.mesh.data_axes(split)]

    def __getitem__(self, name: str) -> Axis:
        return self.by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_name)

    def __len__(self) -> int:
        return len(self.by_name)

    def within(self, scope: str) -> Axes:
        """The same rank, stream and put-off gradients, for a layer at the module path ``scope``."""
        path = self.path(scope)
        by_name = {name: axis.meant_for(path) for name, axis in self.by_name.items()}
        joints = {names: axis.meant_for(path) for names, axis in self.joints.items()}
        return replace(self, scope=path, by_name=by_name, joints=joints)

    def path(self, module: str) -> str:
        """The full path of a module below ``scope``."""
        return ".".join(filter(None, (self.scope, module)))


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


def _joint_axes(mesh: Mesh) -> list[tuple[str, ...]]:
    """Axes over which experts may be split together: those of the mesh for them, and tp, where the planner may."""
    names = [name for name in AXES if name in (*mesh.expert_axes, "tp") and mesh.size(name) > 1]
    several = range(2, len(names) + 1) if mesh.expert_axes else range(0)
    return [chosen for count in several for chosen in combinations(names, count)]


def _paired(mesh: Mesh, name: str) -> bool:
    return mesh.paired and name == "cp"


def shard_lines(line: Sequence[int], size: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Of a line of ranks: groups of ``size`` neighbours, and groups of those at the same place in them."""
    shards = [tuple(line[first : first + size]) for first in range(0, len(line), size)]
    return shards, [tuple(line[first::size]) for first in range(size)]


def _line(mesh: Mesh, axes: tuple[str, ...], rank: int, zero_ranks: int) -> DataLine:
    shards, replicas = shard_lines(mesh.group(rank, *axes), mesh.zero_shards(zero_ranks, axes) if axes else 1)
    names = "_".join(axes)
    return DataLine(
        Axis.of(names, mesh.group(rank, *axes), rank, None),
        Axis.of(f"{names}_shard", next(line for line in shards if rank in line), rank, None),
        Axis.of(f"{names}_replicate", next(line for line in replicas if rank in line), rank, None),
    )


def _joined_line(
    mesh: Mesh, axes: tuple[str, ...], rank: int, zero_ranks: int, by_name: Mapping[str, Axis], groups: Groups
) -> DataLine:
    """The same with groups."""
    alone = _line(mesh, axes, rank, zero_ranks)
    if not axes:
        return alone
    whole = by_name[axes[0]] if len(axes) == 1 else _join(mesh, axes, rank, groups)
    if alone.shard.size == 1:
        return DataLine(whole, alone.shard, replace(alone.replicate, group=whole.group))
    if alone.replicate.size == 1:
        return DataLine(whole, replace(alone.shard, group=whole.group), alone.replicate)
    parts = [shard_lines(line, alone.shard.size) for line in groups(*axes)]
    shard = _join_one_of([line for shards, _ in parts for line in shards], rank, alone.shard.name)
    replicate = _join_one_of([line for _, replicas in parts for line in replicas], rank, alone.replicate.name)
    return DataLine(whole, shard, replicate)


def _join(mesh: Mesh, axes: tuple[str, ...], rank: int, groups: Groups) -> Axis:
    joined = _join_one_of(groups(*axes), rank, "_".join(axes))
    return replace(joined, paired=axes == ("cp",) and mesh.paired)


def _join_one_of(lines: Sequence[Sequence[int]], rank: int, name: str) -> Axis:
    """One group for every one of ``lines``; every rank must take part in making each of them.

    Not through DeviceMesh: for an axis that spans the world it hands out the default group, which doesn't
    carry the axis' name, and is used for other things.
    """
    ranks = tuple(next(line for line in lines if rank in line))
    if len(ranks) == 1:
        return Axis.of(name, ranks, rank, None)
    groups = {tuple(line): dist.new_group(list(line), group_desc=f"mesh_{name}") for line in lines}
    return Axis.of(name, ranks, rank, groups[ranks])
