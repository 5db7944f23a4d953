"""What is next to the best plan so far: on other degrees, with other rows, with more on the host."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import pytest

from autopar.errors import BudgetError
from autopar.mesh import Mesh
from autopar.search import climb as climb_
from autopar.search.climb import Around, climb, polish_away, put_away, worth_away
from autopar.search.learned import Kind, Learned, kinds
from autopar.search.outcomes import Outcome
from autopar.search.search import Search
from autopar.search.space import Point, Region, regions
from tests.fast_cluster import FAST
from tests.search.spaces import BATCH, least, piped, search_of, space


def differ(one: Region, other: Region) -> int:
    """In how many degrees, dp aside, and rows."""
    sizes = [(r.mesh.pp, r.mesh.cp, r.mesh.tp, r.mesh.experts, r.rows) for r in (one, other)]
    return sum(a != b for a, b in zip(*sizes, strict=True))


@cache
def steps() -> dict[Region, float]:
    """Of all regions of a space that is small enough to lay out all of it."""
    return least("gpt2", 4, "cpu", 1, "1f1b")


@cache
def dead_end() -> Region:
    """A region that is better than all that differ from it in one degree, the furthest from the best one."""
    found = steps()
    ends = [r for r in found if all(found[r] <= found[other] for other in found if differ(r, other) == 1)]
    assert len(ends) > 1
    return max(ends, key=lambda region: found[region])


def climbed(placed: Iterable[Region] = ()) -> Outcome:
    """The best that a climb finds from there, where others are ``placed`` as well."""
    search = space("gpt2", 4, "cpu", schedule="1f1b")
    search._begin()
    assert search.place(dead_end()) is not None
    for point in search.points_of(dead_end()):
        search.lay_out(point)
    assert search.best_seconds == pytest.approx(steps()[dead_end()])
    for region in placed:
        search.place(region)
    climb(search, Around.of(regions(search.sizes, search.pins)), Learned(), ())
    return search.ranked()[0]


@pytest.mark.slow
def test_the_climb_changes_several_degrees_at_once() -> None:
    best = climbed()
    assert differ(best.point.region, dead_end()) > 1
    assert best.step_seconds < 0.9 * steps()[dead_end()]


@pytest.mark.slow
def test_degree_by_degree_it_ends_where_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(climb_, "_CHANGES", 1)
    assert climbed().point.region == dead_end()


@pytest.mark.slow
def test_a_climb_looks_at_regions_that_are_placed_however_many_others_look_better(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It places so many; of those that are, any may be better."""
    monkeypatch.setattr(climb_, "_LOOKED", 0)
    assert climbed().point.region == dead_end()
    better = [region for region, seconds in steps().items() if seconds < 0.9 * steps()[dead_end()]]
    assert climbed(better).point.region in better


def test_what_is_next_to_the_best_is_looked_at_again_by_what_was_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others that looked better before they were known to be worse than the best aren't placed instead of the last."""
    search = space("gpt2", 8, "h100")
    found = search._begin()
    here = next(region for region in found if region.mesh.dp == 8)
    search.place(here)
    best = search.lay_out(next(search.points_of(here)))
    around, looked, placed = Around.of(found), Counter[Region](), list[Region]()
    near = list({region.mesh: region for region in reversed(around.next_to(here))}.values())[::-1]  # the first of each
    assert len(near) > climb_._LOOKED + 1

    def likely(_search: object, region: Region, *_: object) -> float:
        looked[region] += 1
        if region not in near or (looked[region] > 1 and region != near[-1]):
            return math.inf
        return best.step_seconds * (near.index(region) + 1) / (len(near) + 1)

    def place(_search: object, region: Region) -> None:
        placed.append(region)

    monkeypatch.setattr(climb_, "_likely_best", likely)
    monkeypatch.setattr(type(search), "place", place)
    climb(search, around, Learned(), ())
    assert placed == [near[0], near[-1]]


def looked_at(
    monkeypatch: pytest.MonkeyPatch, *, rows: float, others: float, better: bool = False
) -> list[tuple[Region, Region]]:
    """By a climb that looks at one region that differs from the best in its rows alone: each best, and what is looked
    at from there. Those, and the others, are likely to take so many times the best; the first is ``better`` or not."""
    search, looked = space("gpt2", 8, "h100"), list[tuple[Region, Region]]()
    here = next(region for region in search._begin() if region.mesh.pp == 4 and region.rows == 2)
    search.place(here)
    best = search.lay_out(next(search.points_of(here)))

    def likely(_search: object, region: Region, *_: object) -> float:
        return search.best_seconds * (rows if region.mesh == here.mesh else others)

    def step_to(_search: object, region: Region, like: Point, *_: object) -> None:
        if better and not looked:
            found = replace(best, point=like._replace(region=region), step_seconds=best.step_seconds / 2)
            search.outcomes.append(found)
        looked.append((like.region, region))

    monkeypatch.setattr(climb_, "_likely_best", likely)
    monkeypatch.setattr(climb_, "_step_to", step_to)
    monkeypatch.setattr(climb_, "_ROWS_LOOKED", 1)
    around = Around.of(search.regions)
    assert sum(region.mesh == here.mesh for region in around.next_to(here)) > 1
    climb(search, around, Learned(), ())
    return looked


@pytest.mark.parametrize(("rows", "others"), [(0.9, 0.1), (0.1, 0.9)])
def test_a_climb_looks_at_other_rows_of_the_best_first(
    rows: float, others: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else is likely better; not if they are likely worse than the best."""
    (here, first), *further = looked_at(monkeypatch, rows=rows, others=others)
    assert first.mesh == here.mesh
    assert further
    assert first.mesh not in {region.mesh for _, region in further}
    worse = looked_at(monkeypatch, rows=1.1, others=others)
    assert {region.mesh for _, region in worse}.isdisjoint([first.mesh])
    assert len(worse) == len(further)


def test_a_climb_goes_on_from_other_rows_that_are_better(monkeypatch: pytest.MonkeyPatch) -> None:
    (here, first), *further = looked_at(monkeypatch, rows=0.9, others=0.1, better=True)
    assert first.mesh == here.mesh
    assert {best for best, _ in further} == {first}


def test_what_is_next_to_a_region() -> None:
    here = Region(Mesh(pp=2, dp=4), 2, 4)
    near = [Region(Mesh(dp=8), 2, 4), Region(Mesh(pp=8), 2, 4), Region(Mesh(dp=4, tp=2), 1, 8)]
    far = [
        here,
        Region(Mesh(pp=32), 2, 4),
        Region(Mesh(pp=2, dp=4, tp=4), 2, 4),
        Region(Mesh(pp=2, dp=4), 8, 1),
        Region(Mesh(dp=2, cp=2, tp=2), 1, 8),
    ]
    borrowing = Region(Mesh(pp=2, dp=2, cp=2, borrowed=("cp",)), 1, 8)
    assert Around.of([*far, *near, borrowing]).next_to(here) == near


# --- with something on the host


HOSTED = replace(FAST, device=replace(FAST.device, host_memory_bytes=10**12, host_bytes_per_second=1e12))


def short_of_memory() -> tuple[Search, Region]:
    """With a host, and a region with a pipeline that is placed."""
    region = Region(Mesh(pp=2, dp=2), 1, 4)
    search = search_of("gpt2", BATCH, 4, HOSTED, budget_bytes=10**6, head_chunks=1)
    search._begin()
    search.place(region)
    return search, region


def test_what_is_next_to_the_best_is_looked_at_by_its_own_estimates_where_it_is_placed() -> None:
    search, region = short_of_memory()
    learned, other = Learned(), Region(Mesh(pp=4), 1, 8)
    best = Point(other, "interleaved", 2, "redistributed", 1, 0, ("activations",), 1)
    assert climb_._likely_best(search, other, best, learned) == search.likely(other, ("activations",))
    families = [points for points in climb_._alike(search, region, best) if points[0].chunks == 2]
    profile = search.profile(region)
    assert profile is not None
    least = min(min(search.estimates(points, profile)) for points in families)
    found = climb_._likely_best(search, region, best, learned)
    assert least < found < 1.1 * least
    here = families[0][0]._replace(offload=())
    search.note(here, 123.0)
    assert climb_._likely_best(search, region, best._replace(offload=()), learned) == 123.0
    search.note(families[0][0], 12.0)  # says nothing of what has nothing on the host
    assert climb_._likely_best(search, region, best._replace(offload=()), learned) == search.likely(region)


def test_other_rows_of_the_best_are_not_doubted_for_what_others_took() -> None:
    """What the best itself took says how far they are off."""
    search, region = short_of_memory()
    learned, best = Learned(), Point(region, "1f1b", None, "redistributed", 1, 0, ("activations",), 1)
    rows, other = region._replace(rows=2, microbatches=2), Region(Mesh(pp=4), 1, 8)
    kind = Kind.of(search, other, best.offload)
    for each in (kind, kind._replace(is_like_others=True)):
        learned.placed[each] += [2.0] * 3
    assert climb_._likely_best(search, other, best, learned) > 1.9 * search.likely(other, best.offload)
    assert climb_._likely_best(search, rows, best, learned) == search.likely(rows, best.offload)
    learned.known[kinds(best)[0]] += [1.5] * 2
    assert climb_._likely_best(search, rows, best, learned) > 1.4 * search.likely(rows, best.offload)


def test_the_best_may_have_better_with_activations_on_the_host_on_its_own_degrees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where it is short of memory."""
    search, region = short_of_memory()
    best = search.lay_out(Point(region, "1f1b", None, "redistributed", 1, 0, (), 1))
    looked = list[tuple[Region, tuple[str, ...]]]()
    monkeypatch.setattr(climb_, "_likely_best", lambda *_: math.inf)
    monkeypatch.setattr(climb_, "_step_to", lambda _, region, like, *__: looked.append((region, like.offload)))
    for is_tight, offload in ((True, ()), (False, ("activations",)), (True, ("activations",))):
        search.outcomes = [replace(best, is_tight=is_tight)]
        assert not looked, "what is on the device is polished"
        climb(search, Around.of(search.regions), Learned(), offload)
    assert looked == [(region, ("activations",))]


def test_what_has_room_is_not_tried_with_activations_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    search, region = short_of_memory()
    here = Point(region, "1f1b", None, "redistributed", 1, 0, (), 1)
    best, away = search.lay_out(here), here._replace(offload=("activations",))
    monkeypatch.setattr(search, "estimates", lambda points, _: [0.5 * best.step_seconds] * len(points))
    for is_tight in (False, True):
        search.outcomes = [replace(best, is_tight=is_tight)]
        climb_._try_likely(search, region, [[away]], math.inf, Learned())
        assert (away in {outcome.point for outcome in search.outcomes} | set(search.refusals)) == is_tight


def test_as_many_are_placed_with_a_pipeline_as_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much better those with one look: estimates of these are off by other amounts."""
    search, placed = space("gpt2", 8, "h100"), list[Region]()
    here = next(region for region in search._begin() if region.mesh.pp == 2 and region.mesh.dp == 4)
    search.place(here)
    best = search.lay_out(next(search.points_of(here)))

    def likely(_search: object, region: Region, *_: object) -> float:
        return best.step_seconds * (0.9 if region.mesh == here.mesh or region.mesh.pp == 1 else 0.5)

    monkeypatch.setattr(climb_, "_likely_best", likely)
    monkeypatch.setattr(climb_, "_LOOKED", 1)
    monkeypatch.setattr(climb_, "_ROWS_LOOKED", 0)
    monkeypatch.setattr(type(search), "place", lambda _, region: placed.append(region))
    climb(search, Around.of(search.regions), Learned(), ())
    assert [region.mesh.pp > 1 for region in placed] == [True, False]


def test_what_is_like_the_best_has_any_number_of_chunks() -> None:
    search = search_of("gpt2", BATCH, 4, FAST)
    here, there = Region(Mesh(pp=2, dp=2), 1, 4), Region(Mesh(pp=2, dp=2), 2, 2)
    best = Point(here, "interleaved", 3, "redistributed", 1, 0, ("activations",), 8)
    found = list(itertools.chain.from_iterable(climb_._alike(search, there, best)))
    assert {point.chunks for point in found} == {2, 3}
    for name in ("schedule", "vocabulary", "offload", "head_chunks"):
        assert {getattr(point, name) for point in found} == {getattr(best, name)}
    assert {point.region for point in found} == {there}
    assert {point.zero for point in found} == {0, 1, 2, 3}


def test_other_rows_of_the_best_may_have_the_vocabulary_elsewhere() -> None:
    """Where only rows are others; where degrees are, too, that is another plan."""
    search = search_of("gpt2", BATCH, 4, FAST)
    best = Point(Region(Mesh(pp=2, dp=2), 1, 4), "1f1b", None, "redistributed", 1, 0, ("activations",), 1)
    rows, degrees = Region(Mesh(pp=2, dp=2), 2, 2), Region(Mesh(pp=2, tp=2), 1, 8)
    heads = [{point.vocabulary for some in climb_._near(search, r, best) for point in some} for r in (rows, degrees)]
    assert heads[0] > heads[1] == {"redistributed"}


def test_other_rows_are_likely_and_laid_out_as_the_best_of_these(monkeypatch: pytest.MonkeyPatch) -> None:
    search, region = short_of_memory()
    like, tried = Point(region, "1f1b", None, "redistributed", 1, 0, ("activations",), 1), set[str]()
    rows = region._replace(rows=2, microbatches=2)
    search.place(rows)

    def estimates(points: list[Point], _: object) -> list[float]:
        return [1.0 if point.vocabulary == "vocab-1" else 2.0 for point in points]

    def try_likely(_: Search, __: Region, families: list[list[Point]], *___: object, **____: object) -> list[Point]:
        tried.update(points[0].vocabulary for points in families)
        return []

    monkeypatch.setattr(search, "estimates", estimates)
    monkeypatch.setattr(climb_, "_try_likely", try_likely)
    assert climb_._likely_best(search, rows, like, Learned()) < 1.5
    climb_._step_to(search, rows, like, math.inf, Learned())
    assert {"redistributed", "vocab-1"} <= tried


def test_what_is_refused_is_laid_out_with_the_vocabulary_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    search, region, points = piped()
    some = [point for point in points if point.schedule == "1f1b" and point.zero == 0]
    like, tried = some[0], list[str]()

    def lay_out(_: Learned, __: Search, point: Point, ___: float) -> None:
        tried.append(point.vocabulary)
        if len(tried) < 3:
            raise BudgetError("too large", 1)

    monkeypatch.setattr(Learned, "lay_out", lay_out)
    monkeypatch.setattr(type(search), "families_of", lambda *_: iter([point.family for point in some]))
    climb_._step_to(search, region, like, math.inf, Learned())
    assert len(tried) == len(set(tried)) == 3, "until one isn't"


def test_weights_may_be_stored_within_nodes_or_over_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """With activations on the host as well."""
    search = search_of("gpt2", BATCH, 8, replace(HOSTED, devices_per_node=2), budget_bytes=2 * 10**6, head_chunks=1)
    search._begin()
    region = Region(Mesh(pp=2, dp=4), 1, 2)
    search.place(region)
    best = Point(region, "1f1b", None, "redistributed", 2, 2, ("activations",), 1)
    search.lay_out(best)
    tried = list[set[tuple[int, int]]]()
    monkeypatch.setattr(
        climb_,
        "_try_likely",
        lambda _, __, families, *___, **____: tried.append({(p.zero, p.zero_ranks) for some in families for p in some}),
    )
    polish_away(search, Learned())
    assert all(len(ways) == 1 for ways in tried)
    assert {(2, 0), (3, 0), (3, 2)} <= set.union(*tried)
    assert {(2, 2)} not in tried


def test_the_best_with_activations_on_the_host_is_laid_out_with_weights_stored_otherwise() -> None:
    search, region = short_of_memory()
    best = Point(region, "1f1b", None, "redistributed", 1, 0, ("activations",), 1)
    search.lay_out(best)
    polish_away(search, Learned())
    points = {outcome.point for outcome in search.outcomes} | set(search.refusals)
    assert len(points) > 1
    assert {point._replace(zero=1, zero_ranks=0) for point in points} == {best}
    assert len({point.way for point in points}) == len(points), "each way once"


def test_activations_go_to_the_host_under_schedules_that_were_laid_out_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If that is likely better there: others have been seen to make little of it."""
    search, region = short_of_memory()
    here = Point(region, "1f1b", None, "redistributed", 1, 0, (), 1)
    there = here._replace(schedule="interleaved", chunks=2)
    elsewhere = there._replace(region=Region(Mesh(pp=2, tp=2), 1, 8))
    search.place(elsewhere.region)
    assert search.lay_out(here).recomputes
    search.lay_out(elsewhere)
    tried = list[Point]()
    monkeypatch.setattr(climb_, "_try_likely", lambda _, __, families, *___, **____: tried.extend(families[0]))
    for bad, good in ((here, there), (there, here)):
        learned = Learned()
        learned.known[kinds(bad._replace(offload=("activations",)))[0]] += [100.0] * 2
        put_away(search, learned)
        assert [point for point in tried if point.region == region] == [good._replace(offload=("activations",))]
        tried.clear()


@pytest.mark.parametrize(("times", "is_tried"), [(0.999, True), (1.001, False)])
def test_the_best_is_tried_with_activations_on_the_host_whatever_is_said_of_such_plans(
    times: float, is_tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That they take a little longer than they are estimated at; not if that is longer already."""
    search, region = short_of_memory()
    best = search.lay_out(Point(region, "interleaved", 2, "redistributed", 1, 0, (), 1)).step_seconds
    monkeypatch.setattr(search, "estimates", lambda points, _: [times * best] * len(points))
    put_away(search, Learned())
    tried = {outcome.point for outcome in search.outcomes} | set(search.refusals)
    assert (len(tried) > 1) == is_tried


def test_what_goes_to_the_host_keeps_its_vocabulary() -> None:
    search, _, points = piped()
    for name in ("redistributed", "vocab-1"):
        search.lay_out(next(p for p in points if (p.schedule, p.vocabulary) == ("1f1b", name)))
    search.lay_out(next(p for p in points if (p.schedule, p.vocabulary) == ("zb-h1", "vocab-1")))
    asked = next(p for p in points if (p.schedule, p.vocabulary) == ("interleaved", "redistributed"))
    assert {(p.schedule, p.vocabulary) for p in climb_._as_laid_out(search, asked)} == {("1f1b", "redistributed")}


def test_others_may_be_better_with_activations_on_the_host() -> None:
    """However much room the best has: others may have more rows."""
    search, region = short_of_memory()
    here = Point(region, "1f1b", None, "redistributed", 1, 0, (), 1)
    assert worth_away(search, here) == ("activations",)
    assert worth_away(search, here._replace(offload=("optimizer", "activations"))) == ("optimizer", "activations")
    alone = here._replace(region=Region(Mesh(dp=4), 1, 2))
    assert worth_away(search, alone) == ("activations",), "of several stages"
    search.pins = replace(search.pins, schedule="1f1b")
    assert worth_away(search, alone) == (), "one stage has no time to copy any"
