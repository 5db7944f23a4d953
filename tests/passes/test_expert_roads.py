"""What an exchange of experts' rows takes, in one hop and in two."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cluster import Cluster, Link
from autopar.cost_models import collective
from autopar.mesh import Mesh
from autopar.passes.expert_roads import exchange_seconds, nodes_of

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
    assert exchange_seconds(MEGABYTE, axes, 1, cluster(), mesh) == pytest.approx(MEGABYTE * expected)


def test_the_slower_of_the_two_counts() -> None:
    """Four nodes of eight: where links in a node are as slow as those that leave it, three quarters still leave."""
    slow = exchange_seconds(MEGABYTE, ("ep",), 1, cluster(near=replace(NEAR, bytes_per_second=5e9)), Mesh(ep=32))
    assert slow == pytest.approx(MEGABYTE * 7 / 32 / 5e9)


def test_two_hops_save_messages() -> None:
    mesh, far = Mesh(ep=64), replace(FAR, latency_seconds=1e-3)
    once, twice = (exchange_seconds(MEGABYTE, ("ep",), nodes, cluster(far=far), mesh) for nodes in (1, 8))
    assert nodes_of(("ep",), cluster(), mesh) == 8
    assert once == pytest.approx(56e-3, rel=0.01)
    assert twice == pytest.approx(7e-3, rel=0.01)


@pytest.mark.parametrize("mesh", [Mesh(ep=8), Mesh(ep=32), Mesh(ep=16, tp=2), Mesh(ep=2, tp=8)])
def test_along_one_axis_it_is_that_axis_all_to_all(mesh: Mesh) -> None:
    """So that placements are chosen by the price that they have in the end."""
    link = cluster().link(mesh.ep, mesh.stride("ep"), mesh.world)
    price = collective.seconds("all_to_all", MEGABYTE, mesh.ep, link)
    assert exchange_seconds(MEGABYTE, ("ep",), 1, cluster(), mesh) == pytest.approx(price)
