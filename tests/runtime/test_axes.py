"""A rank's place on the mesh, and its groups."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from autopar import simulate
from autopar.errors import ArgumentError, DeadRankError
from autopar.mesh import AXES, Mesh
from autopar.runtime import Axes
from autopar.runtime.collectives import reduce_sum_
from tests.runtime.ranks import on_ranks

MESH = Mesh(pp=2, dp=2, tp=2)


def test_every_rank_knows_its_place() -> None:
    def program(axes: Axes) -> dict[str, tuple[int, tuple[int, ...]]]:
        return {name: (axis.index, axis.ranks) for name, axis in axes.items()}

    for rank, found in enumerate(on_ranks(MESH, program)):
        assert list(found) == list(AXES)
        assert found == {name: (MESH.coordinate(rank, name), MESH.group(rank, name)) for name in AXES}


def test_groups_are_named_after_their_axis_also_where_it_spans_the_world() -> None:
    def program(axes: Axes) -> list[str | None]:
        groups = [axes[name].group for name in AXES]
        return [None if group is None else group.group_desc for group in groups]

    assert on_ranks(MESH, program)[5] == ["mesh_pp", "mesh_dp", None, None, "mesh_tp"]
    assert on_ranks(Mesh(tp=2), program)[0] == [None, None, None, None, "mesh_tp"]


def test_one_rank_needs_no_process_group() -> None:
    axes = Axes.build(Mesh(), 0, "cpu")
    assert not dist.is_initialized()
    assert [axis.size for axis in axes.values()] == [1] * len(AXES)
    assert (axes.world.size, axes.world.group) == (1, None)


def test_the_world_is_one_axis() -> None:
    worlds = on_ranks(MESH, lambda axes: (axes.world.ranks, axes.world.index, axes.rank))
    assert worlds == [(tuple(range(8)), rank, rank) for rank in range(8)]


EXPERTS = (Mesh(dp=2, ep=2, cp=2), Mesh(ep=2, cp=2, tp=2, borrowed=("cp",)), Mesh(dp=2, ep=2, tp=2, borrowed=("tp",)))


@pytest.mark.parametrize("split", [(), ("ep",), ("cp",), ("ep", "cp"), ("tp",), ("ep", "tp")], ids=str)
@pytest.mark.parametrize("mesh", EXPERTS, ids=str)
def test_whoever_has_the_same_part_of_a_parameter_sums_its_gradient(mesh: Mesh, split: tuple[str, ...]) -> None:
    """Wherever it is split of the axes that may hold experts: over ranks whose tokens differ and whose part doesn't,
    all at once, or those that share rows first and then those that have the same."""

    def program(axes: Axes) -> list[float]:
        line, own = axes.line(split), torch.tensor([2.0**axes.rank])
        several = own.clone()
        for axis, total in ((line.whole, own), (line.shard, several), (line.replicate, several)):
            reduce_sum_(total, axis)
        assert line.shard.size == (2 if line.whole.size > 1 else 1)
        return [float(own), float(several)]

    same = [axis for axis in AXES if axis in (*split, "pp", "tp")]
    places = [tuple(mesh.coordinate(rank, axis) for axis in same) for rank in range(mesh.world)]
    sums = [float(sum(2.0**rank for rank, place in enumerate(places) if place == mine)) for mine in places]
    ranks = simulate.run(lambda rank: program(Axes.build(mesh, rank, "cpu", zero_ranks=2)), mesh.world)
    assert ranks.results == [[total, total] for total in sums]


def test_a_scope_shares_everything_else() -> None:
    axes = Axes.build(Mesh(), 0, "cpu", seed=3)
    layer = axes.within("model").within("layers.1")
    axes.stream.step = 5
    assert (layer.scope, layer.stream.step, layer.seed) == ("model.layers.1", 5, 3)
    assert (layer["tp"].ranks, layer["tp"].group) == (axes["tp"].ranks, axes["tp"].group)
    assert (layer["tp"].purpose, axes["tp"].purpose) == ("model.layers.1", None)


def test_a_mesh_of_several_ranks_needs_a_world() -> None:
    with pytest.raises(ArgumentError, match="start the job with torchrun"):
        Axes.build(MESH, 0, "cpu")


@pytest.mark.parametrize(("mesh", "rank"), [(Mesh(tp=4), 0), (Mesh(tp=2), 0)])
def test_a_world_of_another_size_or_order_is_refused(mesh: Mesh, rank: int) -> None:
    with pytest.raises(DeadRankError) as caught:
        simulate.run(lambda _: Axes.build(mesh, rank, "cpu"), 2)
    assert isinstance(caught.value.__cause__, ArgumentError)
    assert f"torch.distributed says rank {0 if mesh.tp == 4 else 1} of 2" in str(caught.value.__cause__)


def test_a_rank_outside_of_the_mesh_is_refused() -> None:
    with pytest.raises(ArgumentError, match="rank 8 is not in"):
        Axes.alone(MESH, 8, "cpu")
