"""What an exchange of experts' rows takes, at once and hop by hop; which ranks lie alike in nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cluster import Cluster, Link
from autopar.cost_models import collective
from autopar.mesh import Mesh
from autopar.passes.expert_roads import across_seconds, flat_seconds, nodes_of, within_seconds

NEAR, FAR = Link("near", 0.0, 400e9), Link("far", 0.0, 40e9)
MEGABYTE = 10**6


def cluster(near: Link = NEAR, far: Link = FAR) -> Cluster:
    return replace(Cluster.load("h100"), intra_node=near, inter_node=far)


@pytest.mark.parametrize(
    ("mesh", "axes", "expected"),
    [
        (Mesh(ep=8), ("ep",), 7 / 8 / 400e9),  # all in one node
        (Mesh(ep=32), ("ep",), 24 / 32 / 40e9),  # eight in each of four: a quarter stays
        (Mesh(ep=2, tp=8), ("ep",), 1 / 2 / 40e9),  # no two in one
        (Mesh(ep=4, tp=4, borrowed=("tp",)), ("ep", "tp"), 1 / 2 / 40e9),
        (Mesh(dp=2, ep=12), ("ep",), 11 / 12 / 40e9),  # not alike in all groups: as if no two shared a node
    ],
)
def test_what_stays_in_a_node_travels_beside_what_leaves_it(mesh: Mesh, axes: tuple[str, ...], expected: float) -> None:
    assert flat_seconds(MEGABYTE, axes, cluster(), mesh) == pytest.approx(MEGABYTE * expected)


def test_the_slower_of_the_two_counts() -> None:
    """Four nodes of eight: where links in a node are as slow as those that leave it, three quarters still leave."""
    slow = flat_seconds(MEGABYTE, ("ep",), cluster(near=replace(NEAR, bytes_per_second=5e9)), Mesh(ep=32))
    assert slow == pytest.approx(MEGABYTE * 7 / 32 / 5e9)


def test_hops_save_messages() -> None:
    mesh, slow = Mesh(ep=64), cluster(far=replace(FAR, latency_seconds=1e-3))
    assert flat_seconds(MEGABYTE, ("ep",), slow, mesh) == pytest.approx(56e-3, rel=0.01)
    assert across_seconds(MEGABYTE, 8, slow) == pytest.approx(7e-3, rel=0.01)
    assert within_seconds(MEGABYTE, 8, slow) == pytest.approx(MEGABYTE * 7 / 8 / 400e9)


@pytest.mark.parametrize(
    ("mesh", "axes", "expected"),
    [
        (Mesh(ep=8), ("ep",), 1),
        (Mesh(ep=64), ("ep",), 8),
        (Mesh(dp=2, ep=16, tp=2), ("ep",), 4),
        (Mesh(ep=2, tp=8), ("ep",), 2),  # each rank has a node for itself
        (Mesh(ep=4, tp=8, borrowed=("tp",)), ("ep", "tp"), 4),
        (Mesh(dp=2, ep=12), ("ep",), 1),  # some groups fill a node and a half, others begin in one
        (Mesh(ep=6, tp=3), ("ep",), 1),
    ],
)
def test_nodes_that_groups_lie_alike_in(mesh: Mesh, axes: tuple[str, ...], expected: int) -> None:
    assert nodes_of(axes, cluster(), mesh) == expected


@pytest.mark.parametrize("mesh", [Mesh(ep=8), Mesh(ep=32), Mesh(ep=16, tp=2), Mesh(ep=2, tp=8)])
def test_along_one_axis_it_is_that_axis_all_to_all(mesh: Mesh) -> None:
    """So that placements are chosen by the price that they have in the end."""
    link = cluster().link(mesh.ep, mesh.stride("ep"), mesh.world)
    price = collective.seconds("all_to_all", MEGABYTE, mesh.ep, link)
    assert flat_seconds(MEGABYTE, ("ep",), cluster(), mesh) == pytest.approx(price)
