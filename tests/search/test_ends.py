"""What is left of a step's messages before its first pass and after its last."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from autopar.mesh import Mesh
from autopar.search.ends import left_seconds, most_parameters
from autopar.search.space import Point, Region

ONCE = Point(Region(Mesh(pp=4), 1, 8), "1f1b", None, "redistributed", 1, 0, (), 1)
LOOPED = ONCE._replace(schedule="interleaved", chunks=4)
FOLDED = ONCE._replace(schedule="zb-v")


def test_a_stage_of_its_own_runs_beside_one_pass_of_it() -> None:
    units = 4 * 5
    assert left_seconds(8.0, 3.0, ONCE, units) == pytest.approx(8.0 - 3.0 * 4 / 5), "while the other layers' pass"
    assert left_seconds(2.0, 3.0, ONCE, units) == pytest.approx(2.0 / 5), "that of the layer that is complete last"


def test_what_moves_of_other_stages_runs_beside_a_round_of_microbatches() -> None:
    """Of four stages, three are complete while four microbatches pass through each of the others."""
    units = 4 * 4 * 2
    assert left_seconds(20.0, 4.0, LOOPED, units) == 20.0 - 4.0 / 4 - 3 * 4 * 4.0 / 4
    assert left_seconds(12.0, 4.0, LOOPED, units) == pytest.approx(12.0 / 4 - 4.0 / 4 / 2), "the last stage's"
    few = LOOPED._replace(region=Region(Mesh(pp=4), 1, 2))
    assert left_seconds(20.0, 4.0, few, units) == 20.0 - 4.0 / 4 - 3 * 2 * 4.0 / 4, "a round has no more than there are"
    assert left_seconds(20.0, 4.0, FOLDED, units) == 20.0 - 4.0 / 2 - 4 * 4.0 / 2


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
