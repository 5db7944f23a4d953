"""What waits: families by their passes alone, and points until too many are alike."""

from __future__ import annotations

import math
from typing import Any

import pytest

from autopar.mesh import Mesh
from autopar.search import work
from autopar.search.proof import Proof
from autopar.search.space import Family, Point, Region, Savers
from autopar.search.waiting import Item, work_beside
from autopar.search.work import work_of
from tests.fast_cluster import FAST
from tests.search.spaces import search_of


def point_of(zero: int, offload: tuple[str, ...] = ()) -> Point:
    return Point(Region(Mesh(pp=2, dp=2), 1, 4), "1f1b", None, "redistributed", zero, 0, offload, 1)


def test_a_better_bound_takes_all_points_that_are_as_good() -> None:
    plain, away, region = point_of(0), point_of(1, ("activations",)), Region(Mesh(dp=4), 1, 2)
    items = [Item(1.0, 0, plain), Item(1.0005, 1, away), Item(1.0, 2, region), Item(1.01, 3, point_of(2))]
    assert work_beside(items, 1.0, 2.0) == work_of(plain, 2.0) + work_of(away, 2.0)
    assert work_beside(items, 0.9, 2.0) == 0.0


def begun(**given: Any) -> Proof:
    """With nothing that waits, and one region placed."""
    search = search_of("gpt2", 8, 4, FAST, **given)
    search._begin()
    proof = search._proof(search.profiler.aside())
    assert proof.place(point_of(0).region) is not None
    return proof


@pytest.mark.parametrize(("left", "goes_on"), [(0.9, False), (1.1, True)])
def test_what_is_left_of_the_work_goes_into_no_point_where_more_are_alike(
    left: float, goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless more is known of these by themselves."""
    proof, point = begun(), point_of(0)
    outcome = proof.lay_out(point)
    alike = [point._replace(zero=zero) for zero in (1, 2, 3)]
    bound = outcome.step_seconds / 2
    items = [Item(bound, number, other) for number, other in enumerate(alike)]
    proof._waiting = list(items)
    proof.most_work = proof._work + left * sum(work_of(other, proof._length) for other in alike)
    with monkeypatch.context() as patched:
        patched.setattr(Proof, "_is_bettered", lambda *_: False)
        assert proof._can_better(bound) == goes_on
        assert {(item.bound, item.what) for item in proof._waiting} == {(bound, other) for other in alike}
        assert proof._can_better(bound / 2), "nothing has to be laid out"
    assert proof._can_better(bound)
    waiting = {item.what: item.bound for item in proof._waiting}
    assert set(alike) <= set(waiting)
    assert goes_on or min(waiting[other] for other in alike) > 1.1 * bound


def test_a_proof_ends_before_points_that_it_has_not_the_work_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which wait as they did; but something has to be found."""
    proof, point = begun(), point_of(1)
    profile = proof.profile(point.region)
    assert profile is not None
    bound = max(proof.costing.bound(point, profile), proof.costing.memory_bound(point, profile))
    monkeypatch.setattr(Proof, "_can_better", lambda *_: False)
    proof.most_work = math.inf
    proof._try(bound, point)
    assert proof.laid_out == 1
    other = point._replace(zero=2)
    bound = max(proof.costing.bound(other, profile), proof.costing.memory_bound(other, profile))
    proof._try(bound, other)
    assert proof.laid_out == 1
    assert (bound, other) in [(item.bound, item.what) for item in proof._waiting]
    assert not proof._goes_on()


def test_a_split_head_has_passes_of_its_own() -> None:
    plain, away = point_of(1), point_of(1)._replace(offload=("activations",))
    passes = plain.region.mesh.pp * plain.region.microbatches
    for point in (plain, away):
        assert work_of(point._replace(vocabulary="vocab-1")) == work_of(point) + 2 * work._ACTION * passes


def test_long_models_take_longer_to_put_on_the_host() -> None:
    here = point_of(1)
    there, passes = here._replace(offload=("activations",)), work_of(here, 0.0)
    for point in (here, there):
        assert work_of(point, 3.0) - passes == 3 * (work_of(point, 1.0) - passes)
    alone = Point(Region(Mesh(dp=4), 1, 2), "interleaved", 2, "redistributed", 1, 0, (), 1)
    pipeline, rank = (work_of(p._replace(offload=("activations",))) - work_of(p) for p in (here, alone))
    assert pipeline > rank > 0, "there are fewer ways for a rank alone"


def test_families_of_a_region_wait_by_their_passes_until_they_are_next() -> None:
    proof, region = begun(), point_of(0).region
    profile = proof.profile(region)
    assert profile is not None
    bound, read = proof._ahead.bound(region), proof.costing.keeping.read
    proof._open(bound, region)
    assert proof.costing.keeping.read == read, "what ranks keep isn't asked for yet"
    waiting, proof._waiting = proof._waiting, []
    assert {item.what for item in waiting} == set(proof.families_of(region))
    for item in waiting:
        assert isinstance(item.what, Family)
        points = list(proof.stored(item.what))
        assert item.bound >= min(proof.bounds(points, profile, memory=False))
        proof._open_family(item.bound, item.what)
        bounds = {other.what: other.bound for other in proof._waiting}
        fitting = {point for point, least in zip(points, proof.bounds(points, profile), strict=True) if least < 1e9}
        assert fitting
        assert fitting <= set(bounds)
        assert min(bounds.values()) >= item.bound
        proof._waiting = []


def test_what_is_beyond_the_aim_waits_as_well() -> None:
    """A plan may turn out to take longer than was aimed at."""
    family = Family(point_of(0).region, "1f1b", None, "redistributed")

    def saved(aim: float) -> set[Point]:
        proof = begun(budget_bytes=1 << 20)
        proof.aim = aim
        proof._open_family(0.0, family)
        waiting = (item.what for item in (*proof._waiting, *proof._passed))
        return {point for what in waiting if isinstance(what, Savers) for point in what.points}

    assert saved(1e-9) == saved(math.inf)
    assert saved(math.inf)
