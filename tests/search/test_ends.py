"""What is left of a step's messages before its first pass and after its last."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autopar.mesh import Mesh
from autopar.search.costing import BESIDE
from autopar.search.ends import left_seconds, most_parameters
from autopar.search.outlook import _with_moves
from autopar.search.space import Point, Region, Way
from autopar.search.wholesale import Layers, Stored, straight
from tests.fast_cluster import BUSY
from tests.search.spaces import search_of

WORKS = (4, 8)
ONCE = Point(Region(Mesh(pp=4), 1, 8), "1f1b", None, "redistributed", 1, 0, (), 1)


def test_a_stage_of_its_own_runs_beside_one_pass_of_it() -> None:
    units = 4 * 5
    assert left_seconds(8.0, 3.0, WORKS, 1, units) == pytest.approx(8.0 - 3.0 * 4 / 5), "while the other layers' pass"
    assert left_seconds(2.0, 3.0, WORKS, 1, units) == pytest.approx(2.0 / 5), "that of the layer that is complete last"


def test_what_moves_of_other_stages_runs_beside_a_round_of_microbatches() -> None:
    """Of four stages, three are complete while four microbatches pass through each of the others."""
    units = 4 * 4 * 2
    assert left_seconds(20.0, 4.0, WORKS, 4, units) == 20.0 - 4.0 / 4 - 3 * 4 * 4.0 / 4
    assert left_seconds(12.0, 4.0, WORKS, 4, units) == pytest.approx(12.0 / 4 - 4.0 / 4 / 2), "the last stage's"
    assert left_seconds(20.0, 4.0, (4, 2), 4, units) == 20.0 - 4.0 / 4 - 3 * 2 * 4.0 / 4, (
        "a round has no more than there are"
    )
    assert left_seconds(20.0, 4.0, WORKS, 2, units) == 20.0 - 4.0 / 2 - 4 * 4.0 / 2


def test_of_several_ways_each_is_as_if_alone() -> None:
    ways = np.array([20.0, 12.0, 2.0])
    assert left_seconds(ways, 4.0, WORKS, 4, 32).tolist() == [left_seconds(way, 4.0, WORKS, 4, 32) for way in ways]


def test_unplaced_regions_are_likely_to_wait_for_what_moves() -> None:
    """Of eight layers on two ranks, in four microbatches: a rank's pass takes 4 seconds and back 8."""
    none = np.zeros(1)
    layers = Layers(8, 0, 0, 1.0, 1.2, 0.8, (0.0, 0.0), np.array([1.0]), none, 0.0)
    ranks = straight(layers, 2, 4, np.ones(2), ends=False)

    def found(passes: float, **moves: float) -> float:
        return float(_with_moves(np.array([passes]), layers, [Stored(0.0, 0.0, 0.0, **moves)], ranks, 4)[0])

    assert found(100.0) == 100.0
    assert found(100.0, before=1.0, updated=0.1) == pytest.approx(100.0 + 1.0 + 0.4), "3 of 4 seconds beside the pass"
    assert found(100.0, after=3.0) == pytest.approx(100.0 + 12.0 - 6.0), "beside that of the other layers"
    assert found(100.0, each=3.0) == pytest.approx(100.0 + 4 * (12.0 - 8.0)), "in each microbatch"
    assert found(10.0, each=3.0) == pytest.approx(8.0 + 3 * 12.0), "one after the other, behind the first's forwards"
    several = replace(ranks, stages=2)
    assert float(_with_moves(np.array([100.0]), layers, [Stored(0.0, 0.0, 0.0, each=3.0)], several, 4)[0]) == (
        pytest.approx(100.0 + BESIDE * 16.0)
    )


def test_what_comes_once_is_told_of_a_region_before_it_is_placed() -> None:
    """On slower links it takes longer, and so is the region likely to; nothing is gathered once where it is for each
    pass."""
    region = Region(Mesh(dp=4), 4, 2)

    def told(slower: float) -> tuple[list[Stored], float]:
        intra, inter = (
            replace(link, bytes_per_second=link.bytes_per_second / slower)
            for link in (BUSY.intra_node, BUSY.inter_node)
        )
        search = search_of("gpt2", 32, 4, replace(BUSY, intra_node=intra, inter_node=inter), mesh={"dp": 4})
        search._begin()
        assert search._outlook is not None
        ways = [search._outlook._of_region(region.mesh, Way(zero, 0, ()), 2) for zero in range(4)]
        return ways, search.likely(region)

    (fast, before), (slow, after) = told(1.0), told(10.0)
    assert [bool(way.before) for way in slow] == [False, True, True, False]
    assert [bool(way.each) for way in slow] == [False, False, True, True]
    for a, b in zip(fast, slow, strict=True):
        assert 5 * a.after < b.after
        assert a.updated == b.updated > 0
    assert after - before > min(b.after - a.after for a, b in zip(fast, slow, strict=True))


def profile(*units: tuple[float, int]) -> Any:
    """Of so many seconds and parameters."""
    return SimpleNamespace(
        units=[SimpleNamespace(seconds=seconds) for seconds, _ in units],
        unit_parameters=[{"weights": parameters} for _, parameters in units],
    )


def test_a_rank_with_a_table_has_fewer_layers() -> None:
    """A head that takes as long as two layers, after eight of them, on two ranks: five layers' time each."""
    found = profile((0.0, 60), *[(1.0, 10)] * 8, (2.0, 60))
    point = ONCE._replace(region=Region(Mesh(pp=2), 1, 8))
    assert most_parameters(point, found) == pytest.approx((60 + 5 * 10) / 100)
    assert most_parameters(point._replace(schedule="zb-v"), found) == pytest.approx((60 + 60 + 3 * 10) / 100), "both"
    assert most_parameters(point._replace(vocabulary="vocab-1"), found) == 1.0, "tables are split"
    assert most_parameters(point._replace(region=Region(Mesh(), 1, 8)), found) == 1.0
    even = profile((0.0, 0), *[(1.0, 10)] * 8, (0.0, 0))
    assert most_parameters(point, even) == 1.0
    frozen = profile((0.0, 0), (1.0, 0), (0.0, 0))
    assert most_parameters(point, frozen) == 1.0
