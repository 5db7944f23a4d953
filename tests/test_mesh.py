"""Ranks on named axes: coordinates, groups along one or several axes, and what experts borrow."""

from __future__ import annotations

import math
from itertools import product

import pytest

from autopar.errors import ArgumentError
from autopar.mesh import AXES, EXPERTS, Mesh


@pytest.mark.parametrize(
    ("sizes", "elementary", "axes"),
    [
        ({"dp": 8, "ep": 4}, {"dp": 2, "ep": 4}, ("ep",)),
        ({"dp": 8, "ep": 8}, {"dp": 1, "ep": 8}, ("ep",)),
        ({"dp": 4, "cp": 2, "ep": 2}, {"dp": 2, "ep": 2, "cp": 2}, ("ep",)),
        ({"dp": 4, "cp": 2, "ep": 8}, {"dp": 1, "ep": 4, "cp": 2}, ("ep", "cp")),
        ({"dp": 1, "cp": 2, "ep": 2}, {"cp": 2}, ("cp",)),
        ({"dp": 4, "tp": 2, "ep": 4, "etp": 2}, {"ep": 4, "tp": 2}, ("ep",)),
        ({"dp": 4, "tp": 2, "ep": 4, "etp": 1}, {"dp": 2, "ep": 2, "tp": 2}, ("ep", "tp")),
        ({"dp": 2, "cp": 2, "tp": 2, "ep": 4, "etp": 1}, {"ep": 2, "dp": 1, "cp": 2, "tp": 2}, ("ep", "tp")),
        ({"dp": 2, "cp": 2, "tp": 2, "ep": 4, "ecp": 1}, {"ep": 2, "dp": 1, "cp": 2, "tp": 2}, ("ep", "cp")),
        ({"dp": 4, "cp": 2, "tp": 2, "ep": 4, "ecp": 1, "etp": 1}, {"dp": 4, "cp": 2, "tp": 2}, ("cp", "tp")),
        ({"dp": 2, "tp": 2, "ep": 4}, {"ep": 2, "tp": 2}, ("ep", "tp")),
        ({"dp": 2, "cp": 2, "tp": 2, "ep": 8}, {"ep": 2, "cp": 2, "tp": 2}, ("ep", "cp", "tp")),
        ({"pp": 2, "dp": 2, "tp": 3}, {"pp": 2, "dp": 2, "tp": 3}, ()),
    ],
    ids=str,
)
def test_experts_borrow_ranks(sizes: dict[str, int], elementary: dict[str, int], axes: tuple[str, ...]) -> None:
    world = math.prod(size for axis, size in sizes.items() if axis not in EXPERTS)
    mesh = Mesh.of(sizes, world)
    assert {axis: mesh.size(axis) for axis in AXES} == dict.fromkeys(AXES, 1) | elementary
    assert (mesh.world, mesh.expert_axes, mesh.experts) == (world, axes, sizes.get("ep", 1))
    assert mesh.replicas == sizes.get("dp", 1)
    assert Mesh.from_json(mesh.to_json()) == mesh


def test_what_experts_cannot_borrow() -> None:
    with pytest.raises(ArgumentError, match=r"'ep' has size 3.*ep may be one of \[1, 2, 4, 8\]"):
        Mesh.of({"dp": 4, "tp": 2, "ep": 3}, 8)
    with pytest.raises(ArgumentError, match="make the product equal"):
        Mesh.of({"dp": 4, "ep": 2}, 8)
    with pytest.raises(ArgumentError, match="unknown axes"):
        Mesh.of({"dp": 4, "sp": 2}, 8)
    with pytest.raises(ArgumentError, match="'ep' has size 0"):
        Mesh.of({"dp": 4, "ep": 0}, 4)
    with pytest.raises(ArgumentError, match="'etp' has size 2; it may be 1 or that of tp, 4"):
        Mesh.of({"dp": 2, "tp": 4, "ep": 2, "etp": 2}, 8)
    with pytest.raises(ArgumentError, match="'ecp' has size 2; it may be 1 or that of cp, 4"):
        Mesh.of({"dp": 2, "cp": 4, "ep": 2, "ecp": 2}, 8)


@pytest.mark.parametrize("sizes", [{"dp": 10**30}, {"dp": 2**20, "tp": 2**20}, {"pp": 10**30, "ep": 7}])
def test_a_mesh_of_more_ranks_than_there_are_devices(sizes: dict[str, int]) -> None:
    """And it is refused at once: nothing goes through the divisors of its sizes."""
    with pytest.raises(ArgumentError, match=r"must be at most 16777216, more than any cluster has devices"):
        Mesh.from_json(sizes)


def test_ranks_and_coordinates() -> None:
    mesh = Mesh(2, 2, 2, 2, 3)
    for rank in range(mesh.world):
        assert mesh.rank(**mesh.coordinates(rank)) == rank


def test_places_are_the_coordinates_of_all_ranks() -> None:
    mesh = Mesh(pp=2, dp=3, ep=2, cp=2, tp=2)
    for axis in AXES:
        assert mesh.places(axis) == [mesh.coordinate(rank, axis) for rank in range(mesh.world)]


def test_joint_groups_partition_the_world() -> None:
    mesh = Mesh(2, 2, 2, 2, 2)
    for axes in product(AXES, AXES):
        groups = mesh.groups(*dict.fromkeys(axes))
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.world))
        for group in groups:
            kept = {tuple(mesh.coordinate(rank, axis) for axis in AXES if axis not in axes) for rank in group}
            assert len(kept) == 1


def test_whose_tokens_make_a_gradient() -> None:
    mesh = Mesh.of({"dp": 4, "cp": 2, "tp": 2, "ep": 2}, 16)
    assert mesh.data_axes() == ("dp", "ep", "cp")
    assert mesh.data_axes(["tp"]) == ("dp", "ep", "cp")
    assert mesh.data_axes(["ep"]) == ("dp", "cp")
    assert mesh.data_lines() == (("dp", "ep", "cp"), ("dp", "cp"), ("dp", "ep"), ("dp",))
    assert Mesh.of({"dp": 4, "cp": 2}, 8).data_lines() == (("dp", "cp"),)
    assert [mesh.zero_shards(ranks) for ranks in (0, 2, 8)] == [8, 2, 8]
    assert mesh.zero_shards(8, ("dp", "cp")) == 4
    with pytest.raises(ArgumentError, match="zero_ranks=3"):
        mesh.zero_shards(3)


def test_every_mesh_can_be_written_down() -> None:
    """Also those of which a user who pins no more than degrees gets another."""
    for sizes in product((1, 2), (1, 2, 4), (1, 2), (1, 2, 4), (1, 2)):
        axes = [axis for axis in ("cp", "tp") if Mesh(*sizes).size(axis) > 1]
        for borrowed in [(), *((axis,) for axis in axes), tuple(axes)]:
            mesh = Mesh(*sizes, borrowed=borrowed)
            assert Mesh.from_json(mesh.to_json()) == mesh


def test_text() -> None:
    assert str(Mesh.of({"pp": 2, "dp": 4, "ep": 4}, 8)) == "pp 2 x dp 4 x tp 1, ep 4"
    assert str(Mesh.of({"dp": 2, "cp": 2}, 4)) == "pp 1 x dp 2 x cp 2 x tp 1"
