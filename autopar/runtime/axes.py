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

    ``world`` is all ranks as one axis. ``shard`` are the neighbours on ``dp`` that share one copy of what ZeRO splits,
    ``replicate`` the ranks on ``dp`` that hold the same part of other copies. ``scope`` tells the instances of one
    layer class apart: their random ops have the same number, but not the same scope. ``later`` holds the weight
    gradients that the rank put off.
    """

    mesh: Mesh
    rank: int
    device: torch.device
    seed: int
    by_name: Mapping[str, Axis]
    world: Axis
    shard: Axis
    replicate: Axis
    stream: Stream = field(default_factory=Stream)
    later: Later = field(default_factory=Later)
    scope: str = ""

    @classmethod
    def build(cls, mesh: Mesh, rank: int, device: torch.device | str, seed: int = 0, zero_ranks: int = 0) -> Axes:
        """Join the groups of ``rank`` along every axis; all ranks of the world must call it.

        ``zero_ranks``: how many neighbours on dp make up ``shard`` (0: all of them). A mesh of one rank needs no
        torch.distributed. Raises ArgumentError where the initialised world has another size or gives this process
        another rank, or ``zero_ranks`` doesn't divide dp.
        """
        _check_world(mesh, rank)
        alone = cls.alone(mesh, rank, device, seed, zero_ranks)
        world = replace(alone.world, group=dist.group.WORLD if mesh.world > 1 else None)
        by_name = {name: _join(mesh.groups(name), rank, name) for name in AXES}
        dp = by_name["dp"]
        lines = mesh.groups("dp")
        if alone.shard.size == dp.size:
            return replace(alone, by_name=by_name, world=world, shard=dp)
        shard = _join([part for line in lines for part in shard_lines(line, alone.shard.size)[0]], rank, "dp_shard")
        replicas = [part for line in lines for part in shard_lines(line, alone.shard.size)[1]]
        replicate = dp if shard.size == 1 else _join(replicas, rank, "dp_replicate")
        return replace(alone, by_name=by_name, world=world, shard=shard, replicate=replicate)

    @classmethod
    def alone(cls, mesh: Mesh, rank: int, device: torch.device | str, seed: int = 0, zero_ranks: int = 0) -> Axes:
        """``rank``'s place without groups, to build its module outside of a job; it can't communicate.

        Raises ArgumentError where ``zero_ranks`` doesn't divide dp.
        """
        mesh.coordinates(rank)
        by_name = {name: Axis.of(name, mesh.group(rank, name), rank, None) for name in AXES}
        world = Axis.of("world", range(mesh.world), rank, None)
        shards, replicas = shard_lines(by_name["dp"].ranks, mesh.dp_shards(zero_ranks))
        shard = Axis.of("dp_shard", next(line for line in shards if rank in line), rank, None)
        replicate = Axis.of("dp_replicate", next(line for line in replicas if rank in line), rank, None)
        return cls(mesh, rank, torch.device(device), seed, by_name, world, shard, replicate)

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


def shard_lines(line: Sequence[int], size: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Of a line of ranks on dp: groups of ``size`` neighbours, and groups of those at the same place in them."""
    shards = [tuple(line[first : first + size]) for first in range(0, len(line), size)]
    return shards, [tuple(line[first::size]) for first in range(size)]


def _join(lines: Sequence[Sequence[int]], rank: int, name: str) -> Axis:
    """One group for every one of ``lines``; every rank must take part in making each of them.

    Not through DeviceMesh: for an axis that spans the world it hands out the default group, which doesn't
    carry the axis' name, and is used for other things.
    """
    ranks = tuple(next(line for line in lines if rank in line))
    if len(ranks) == 1:
        return Axis.of(name, ranks, rank, None)
    groups = {tuple(line): dist.new_group(list(line), group_desc=f"mesh_{name}") for line in lines}
    return Axis.of(name, ranks, rank, groups[ranks])
