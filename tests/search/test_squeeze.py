"""Where nothing that looks good fits: what does is found from what lacks the least memory."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final

import pytest

from autopar.errors import BudgetError
from autopar.search import climb, dive, squeeze
from autopar.search.dive import dive as look
from autopar.search.learned import Learned
from autopar.search.search import Search
from autopar.search.space import Point, Region
from tests.fast_cluster import FAST
from tests.search.spaces import every_point, search_of

HOST: Final = replace(FAST, device=replace(FAST.device, host_memory_bytes=10**12, host_bytes_per_second=1e12))
PLAINEST: Final = ("1f1b", None, "redistributed", 0, 0)


def begun(budget: int, **given: Any) -> Search:
    search = search_of("gpt2", 4, 2, HOST, budget_bytes=budget, **given)
    search._begin()
    return search


def refused(search: Search, **mesh: int) -> Point:
    """The plainest of so many microbatches as there are rows, laid out."""
    (region,) = (each for each in search.regions if each.rows == 1 and each.mesh.to_json().items() >= mesh.items())
    assert search.place(region) is not None
    (point,) = (each for each in search.points_of(region) if each[1:6] == PLAINEST)
    with pytest.raises(BudgetError):
        search.lay_out(point)
    return point


def needs(search: Search, point: Point) -> float:
    return squeeze.needed_bytes(search, point)


@pytest.mark.parametrize(
    ("given", "way"), [({"budget_bytes": 950_000}, (("parameters",), 1)), ({"budget_bytes": 1_934_500}, ((), 8))]
)
def test_a_dive_looks_at_all_that_saves_memory(
    given: dict[str, Any], way: tuple[tuple[str, ...], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one rank, which has room for all there is to keep in no other way."""
    monkeypatch.setattr(dive, "squeeze", lambda search: None)
    pinned = {} if way[0] else {"offload": ()}
    found = search_of("gpt2", 4, 1, HOST, **given, **pinned).glance()
    assert (found[0].point.offload, found[0].point.head_chunks) == way


def ways(search: Search, monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[str, ...], int]]:
    """That dives of ``search`` look at, one after the other."""
    runs, run = list[tuple[tuple[str, ...], int]](), dive._Dive.run

    def noted(own: dive._Dive, some: list[Region]) -> None:
        runs.append((own.offload, own.chunks))
        run(own, some)

    monkeypatch.setattr(dive._Dive, "run", noted)
    look(search, search.regions)
    return runs


def test_each_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what is looked at on more regions."""
    search, patience, run = begun(500_000, mesh={"pp": 2}), list[float](), dive._Dive.run

    def noted(own: dive._Dive, some: list[Region]) -> None:
        patience.append(own.patience)
        run(own, some)

    monkeypatch.setattr(dive._Dive, "run", noted)
    runs = ways(search, monkeypatch)
    assert not search.outcomes
    lean = {each for each, way in zip(patience, runs, strict=True) if way[1] > 1 or way[0][:1] == ("parameters",)}
    assert lean == {dive._PATIENCE}, "or those that lay out much would leave no work for others"
    assert set(runs) == {(point.offload, point.head_chunks) for point in every_point(search)}
    assert runs.count(((), 1)) == 2
    assert runs.count((("activations",), 1)) == 1
    assert all(runs.count(way) == 1 for way in runs if way[1] > 1 or way[0][:1] == ("parameters",))


def test_what_else_is_looked_at_has_as_many_chunks_as_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    search = search_of("gpt2", 4, 1, HOST, budget_bytes=1_934_500)
    search._begin()

    def first(own: Search, every: dive._Every, learned: Learned) -> list[dive._Dive]:
        only = dive._Dive(own, (), learned, 1.0, chunks=8)
        only.run(every.near)
        assert own.ranked()[0].is_tight
        return [only]

    monkeypatch.setattr(dive, "_look_first", first)
    (_, *others) = ways(search, monkeypatch)
    kinds = {offload for offload, _ in others if offload}
    assert {chunks for offload, chunks in others if offload} == {8}
    assert {("optimizer",), ("parameters",)} <= kinds


def test_a_search_goes_on_from_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    search = begun(625_000, mesh={"pp": 2})

    def first(own: Search, _: object, learned: Learned) -> list[dive._Dive]:
        refused(own, pp=2)
        return [dive._Dive(own, (), learned, 0.0)]

    monkeypatch.setattr(dive, "_look_first", first)
    look(search, search.regions)
    assert search.outcomes


def test_what_fits_is_found_from_what_does_not() -> None:
    """On the region that lacks the least."""
    search = begun(625_000)
    whole, cut = refused(search, pp=1, dp=2), refused(search, pp=2)
    assert needs(search, cut) < needs(search, whole)
    squeeze.squeeze(search)
    (found,) = search.outcomes
    assert found.point.region == cut.region
    assert found.point.offload
    assert {point.region for point in search.refusals if point != whole} == {cut.region}


def test_it_goes_on_from_what_needs_the_least() -> None:
    """In one kind of choice after the other; then on other regions, until there is nothing else to try."""
    search = begun(500_000, schedule="1f1b")
    cut, whole = refused(search, pp=2), refused(search, pp=1, dp=2)
    before = list(search.refusals)
    squeeze.squeeze(search)
    assert not search.outcomes
    tried = [point for point in search.refusals if point not in before]
    first = [point for point in tried if point.region == cut.region]
    assert tried[: len(first)] == first
    assert {point.region for point in tried} == {cut.region, whole.region}
    needed = {point: needs(search, point) for point in (cut, *first)}
    saved = [point for point in first if point.way.zero == cut.zero and point.family == cut.family]
    best = min((cut, *saved), key=lambda point: needed[point])
    ordered = [point for point in first if point.family != cut.family]
    assert ordered
    assert {(point.offload, point.head_chunks) for point in ordered} == {(best.offload, best.head_chunks)}
    assert {point.zero for point in tried if point.region == whole.region} == {0, 1, 2, 3}


def test_what_is_missing_is_not_only_of_activations() -> None:
    """A rank whose state alone has no room lacks that, too, whatever the budget."""
    needed = set[float]()
    for budget in (300_000, 400_000):
        search = begun(budget, schedule="1f1b", recompute="none", offload=("activations",))
        point = refused(search, pp=2)
        needed.add(needs(search, point))
        assert ", where 0 MiB are left; give it" in str(search.refusals[point])
    (most,) = needed
    assert most > 600_000


def test_the_head_of_what_is_like_the_best_is_in_as_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing else fits, other schedules and degrees with fewer don't, either."""
    search, tried = search_of("gpt2", 4, 1, HOST, budget_bytes=1_934_500, offload=()), list[set[int]]()
    best, *_ = search.glance()
    assert best.point.head_chunks == 8

    def try_likely(_: Search, __: Region, families: list[list[Point]], *___: object, **____: object) -> list[Point]:
        tried.append({point.head_chunks for some in families for point in some})
        return []

    monkeypatch.setattr(climb, "_try_likely", try_likely)
    climb.polish(search, Learned())
    climb._step_to(search, best.point.region, best.point, math.inf, Learned())
    assert tried == [{8}] * 3


def test_it_takes_no_more_than_its_share_nor_points_that_are_too_much_work(monkeypatch: pytest.MonkeyPatch) -> None:
    search = begun(500_000)
    refused(search, pp=2)
    before = search.laid_out
    with monkeypatch.context() as patch:
        patch.setattr(squeeze, "_SHARE", 0.0)
        squeeze.squeeze(search)
    with monkeypatch.context() as patch:
        patch.setattr(squeeze, "POINT_WORK", 0.0)
        squeeze.squeeze(search)
    assert search.laid_out == before
