"""The first good plan, found by estimates: against all points of small spaces, and step by step."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import autopar
from autopar import Cluster
from autopar.errors import AutoparError
from autopar.mesh import Mesh
from autopar.search import dive
from autopar.search import learned as learned_
from autopar.search.costing import Outcome
from autopar.search.dive import _alike, _Around, _climb
from autopar.search.learned import SEVERAL, Kind, Learned, kinds
from autopar.search.search import Search
from autopar.search.space import Point, Region, regions
from tests.fast_cluster import FAST
from tests.models import make
from tests.search.spaces import every_point, search_of

CLUSTERS = {"fast": FAST, "cpu": Cluster.load("cpu"), "h100": Cluster.load("h100")}
SPACES = [
    ("mlp", 4, "fast"),
    *(pytest.param(*one, marks=pytest.mark.slow) for one in [("mlp", 8, "h100"), ("gpt2", 4, "cpu")]),
]
PLAIN = {"offload": (), "head_chunks": 1, "vocabulary": "redistributed"}
BATCH = 8
CLOSE = 1.05  # times the best step, that the dive's may take: it proves nothing


def space(name: str, gpus: int, cluster: str, **given: Any) -> Search:
    return search_of(name, BATCH, gpus, CLUSTERS[cluster], **PLAIN, **given)


@cache
def least(name: str, gpus: int, cluster: str, every: int = 3, schedule: str | None = None) -> dict[Region, float]:
    """Seconds of the shortest step of each region, of each ``every``-th point."""
    search, found = space(name, gpus, cluster, schedule=schedule), dict[Region, float]()
    search.glance()
    for point in itertools.islice(every_point(search), 0, None, every):
        search.place(point.region)
        try:
            seconds = search.lay_out(point).step_seconds
        except AutoparError:
            continue
        found[point.region] = min(seconds, found.get(point.region, math.inf))
    return found


@pytest.mark.parametrize(("name", "gpus", "cluster"), SPACES)
def test_the_first_plan_is_close_to_the_best(name: str, gpus: int, cluster: str) -> None:
    found = space(name, gpus, cluster).glance()
    assert found == sorted(found, key=lambda outcome: outcome.step_seconds)
    assert found[0].step_seconds <= CLOSE * min(least(name, gpus, cluster).values())


@pytest.mark.slow
def test_with_more_effort_a_search_proves_more() -> None:
    case = make("gpt2", 8)
    captured = autopar.capture(case.model, sample=case.batch, loss=case.loss)

    def plan(effort: float) -> autopar.Plan:
        return autopar.plan(captured, 8, cluster="h100", effort=effort)

    little, much = plan(1e-3), plan(1.0)
    assert little.search is not None
    assert much.search is not None
    assert much.step_seconds <= little.step_seconds
    gaps = [1 - plan.search.bound_seconds / plan.step_seconds for plan in (little, much) if plan.search is not None]
    assert gaps[1] < gaps[0]
    assert much.search.laid_out > little.search.laid_out
    assert plan(1e-3).to_json() == little.to_json()


@pytest.mark.parametrize("most_work", [1.0, 2e4, 2e5])
@pytest.mark.parametrize(("name", "gpus", "cluster"), SPACES)
def test_nothing_is_better_by_more_than_a_search_says(name: str, gpus: int, cluster: str, most_work: float) -> None:
    """Though it ends right after the dive."""
    search = space(name, gpus, cluster)
    search.most_work = most_work
    found = search.run()
    best = min(least(name, gpus, cluster).values())
    assert found.bound_seconds <= best * (1 + 1e-9)
    assert found.bound_seconds <= found.outcomes[0].step_seconds
    gap = 1 - found.bound_seconds / found.outcomes[0].step_seconds
    assert found.outcomes[0].step_seconds * (1 - gap) <= best * (1 + 1e-9)


# --- the climb


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
    _climb(search, _Around.of(regions(search.sizes, search.pins)), Learned(), ())
    return search.ranked()[0]


@pytest.mark.slow
def test_the_climb_changes_several_degrees_at_once() -> None:
    best = climbed()
    assert differ(best.point.region, dead_end()) > 1
    assert best.step_seconds < 0.9 * steps()[dead_end()]


@pytest.mark.slow
def test_degree_by_degree_it_ends_where_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dive, "_CHANGES", 1)
    assert climbed().point.region == dead_end()


@pytest.mark.slow
def test_a_climb_looks_at_regions_that_are_placed_however_many_others_look_better(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It places so many; of those that are, any may be better."""
    monkeypatch.setattr(dive, "_LOOKED", 0)
    assert climbed().point.region == dead_end()
    better = [region for region, seconds in steps().items() if seconds < 0.9 * steps()[dead_end()]]
    assert climbed(better).point.region in better


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
    assert _Around.of([*far, *near, borrowing]).next_to(here) == near


# --- what is learned


def corrected(estimate: float, ratio: float, known: int) -> float:
    """By half of it, where one step alone says so."""
    off = ratio * (1 - learned_._DOUBT) - 1
    return estimate * (1 + (off if known > 1 else off / 2))


def test_estimates_are_corrected_by_the_least_ratio_of_their_kind() -> None:
    search, learned = space("mlp", 4, "fast"), Learned()
    search._begin()
    region = Region(Mesh(pp=2, dp=2), 1, 4)
    assert search.place(region) is not None
    point = next(p for p in search.points_of(region) if (p.schedule, p.zero) == ("1f1b", 0))
    other = point._replace(schedule="zb-h1")
    assert learned.likely(point, 3.0) == 3.0
    taken = search.lay_out(point).step_seconds
    for ratio, least_ratio, known in ((1.5, 1.5, 1), (1.25, 1.25, 2), (2.0, 1.25, 3)):
        learned.lay_out(search, point, taken / ratio)
        assert learned.likely(point, 3.0) == pytest.approx(corrected(3.0, least_ratio, known))
    assert learned.likely(point._replace(region=region._replace(rows=2)), 3.0) > 3.5
    learned.lay_out(search, point, 2 * taken)
    assert learned.likely(point, 3.0) == 3.0, "estimates that were too high aren't lowered"
    assert learned.likely(other, 3.0) == learned.likely(point._replace(zero=1), 3.0) == 3.0


def test_what_waits_is_put_off_by_what_others_of_its_region_took() -> None:
    """A point that waits is tried where its likely time is the least, not what its estimate was at first."""
    search, learned = space("mlp", 4, "fast"), Learned()
    search._begin()
    region = Region(Mesh(pp=2, dp=2), 1, 4)
    profile = search.place(region)
    assert profile is not None
    some = [p for p in search.points_of(region) if p.schedule == "1f1b" and not p.offload and p.zero_ranks == 0]
    first, second = (next(p for p in some if p.zero == zero) for zero in (0, 1))
    far = next(p for p in search.points_of(region) if p.schedule == "zb-h1" and p.zero == 0 and not p.offload)
    seconds = search.lay_out(first).step_seconds
    learned.lay_out(search, first, seconds / 2)
    assert learned.likely(second, 1.0) == pytest.approx(corrected(1.0, 2.0, 1))
    assert learned.likely(second._replace(region=region._replace(rows=2)), 1.0) == learned.likely(far, 1.0) == 1.0
    tried: list[Point] = []
    waiting = dive._Dive(search, (), learned, 1.0)
    waiting._wait(0.5 * seconds, second)
    waiting._wait(0.6 * seconds, far)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dive._Dive, "_try", lambda self, point: tried.append(point))
        waiting.run([])
    assert tried == [far, second]


def test_what_is_on_the_host_is_learned_for_other_schedules_too() -> None:
    """Its own schedule says more, once several of it were laid out: one may have been a bad one."""
    learned = Learned()
    away = Point(Region(Mesh(pp=2, dp=2), 1, 4), "1f1b", None, "redistributed", 1, 0, ("activations",), 1)
    other = away._replace(schedule="interleaved", chunks=2)
    for kind in kinds(away):
        learned.known[kind].append(1.5)
    assert learned.likely(other, 2.0) == pytest.approx(corrected(2.0, 1.5, 1))
    assert learned.likely(other._replace(offload=()), 2.0) == learned.likely(
        other._replace(offload=("optimizer",)), 2.0
    )
    own = learned.known[kinds(other)[0]]
    own.append(1.75)
    assert learned.likely(other, 2.0) == pytest.approx(corrected(2.0, 1.5, 1))
    own.append(1.6)
    assert learned.likely(other, 2.0) == pytest.approx(corrected(2.0, 1.6, 2))


def test_what_is_on_the_host_is_taken_to_do_as_well_as_what_is_not() -> None:
    """Until something like it was laid out."""
    learned = Learned()
    away = Point(Region(Mesh(pp=2, dp=2), 1, 4), "1f1b", None, "redistributed", 1, 0, ("activations",), 1)
    learned.known[kinds(away._replace(offload=()))[0]].append(1.5)
    assert learned.likely(away, 2.0) == pytest.approx(corrected(2.0, 1.5, 1))
    learned.known[("activations",),].append(1.75)
    assert learned.likely(away, 2.0) == pytest.approx(corrected(2.0, 1.5, 1)), "that was under another schedule"
    learned.known[("activations",),].append(1.0)
    assert learned.likely(away, 2.0) == 2.0


def test_regions_are_taken_to_turn_out_as_well_as_the_best_of_some() -> None:
    learned, kind = Learned(), Kind(is_like_others=False, has_pipeline=True, is_away=False)
    for ratio in (1.5, 1.25):
        learned.placed[kind].append(ratio)
        assert learned.unplaced(kind, 8.0) == 8.0, "few say nothing"
    learned.placed[kind].append(2.0)
    assert 8.0 < learned.unplaced(kind, 8.0) < 1.25 * 8.0
    assert learned.unplaced(kind._replace(is_like_others=True), 8.0) == 8.0, "of others"
    assert learned.unplaced(kind._replace(is_away=True), 8.0) == 8.0, "memory on the host makes up for what was short"
    learned.placed[kind].append(0.5)
    assert learned.unplaced(kind, 8.0) == 8.0, "estimates of placed ones are no less"


def test_what_was_placed_is_laid_out_though_all_work_is_done() -> None:
    search = space("gpt2", 8, "h100")
    found = search._begin()
    region = next(region for region in found if region.mesh.dp == 8)
    search.place(region)
    points = list(search.points_of(region))
    profile = search.profile(region)
    assert profile is not None
    dive_ = dive._Dive(search, (), Learned(), 0.0)
    for point, estimate in zip(points, search.estimates(points, profile), strict=True):
        dive_._wait(estimate, point)
    dive_._try_placed()
    tried = {outcome.point for outcome in search.outcomes} | set(search.refusals)
    best = [point for _, _, point in sorted(dive_.waiting)][: dive._LAST]
    assert tried
    assert tried <= set(best)


# --- what goes to the host


@pytest.mark.parametrize(("budget", "given", "looked"), [(10**6, {}, True), (10**9, {}, False), (10**6, PLAIN, False)])
def test_regions_with_activations_on_the_host_are_looked_at_where_memory_is_short(
    budget: int, given: dict[str, Any], looked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where a user says what is on the host."""
    host = replace(FAST, device=replace(FAST.device, host_memory_bytes=10**12, host_bytes_per_second=1e9))
    search = search_of("gpt2", BATCH, 4, host, budget_bytes=budget, **{"head_chunks": 1, **given})
    away, run = set[Region](), dive._Dive.run

    def noted(own: dive._Dive, some: list[Region]) -> None:
        away.update(some if own.offload == ("activations",) else [])
        run(own, some)

    monkeypatch.setattr(dive._Dive, "run", noted)
    found = search.glance()
    assert found[0].is_tight == (budget == 10**6)
    assert bool(away) == looked
    assert {region.mesh.pp > 1 for region in away} == ({False, True} if looked else set())


def test_the_first_with_activations_on_the_host_are_laid_out_whatever_others_took() -> None:
    """What was best without them says little of others."""
    host = replace(FAST, device=replace(FAST.device, host_memory_bytes=10**12, host_bytes_per_second=1e9))
    search, learned = search_of("gpt2", BATCH, 4, host, budget_bytes=10**6, head_chunks=1), Learned()
    found = search._begin()
    dive._Dive(search, (), learned, 1.0).run(found)
    learned.known[("activations",),].extend([100.0] * 3)
    away = dive._Dive(search, ("activations",), learned, 1.0)
    away.run([region for region in found if region.mesh.pp > 1])
    assert len(away.laid_out) == SEVERAL
    points = {*(outcome.point for outcome in search.outcomes), *search.refusals}
    assert sum(point.offload == ("activations",) for point in points) == SEVERAL


def short_of_memory() -> tuple[Search, Region]:
    """With a host, and a region with a pipeline that is placed."""
    host = replace(FAST, device=replace(FAST.device, host_memory_bytes=10**12, host_bytes_per_second=1e12))
    region = Region(Mesh(pp=2, dp=2), 1, 4)
    search = search_of("gpt2", BATCH, 4, host, budget_bytes=10**6, head_chunks=1)
    search._begin()
    search.place(region)
    return search, region


def test_the_best_with_activations_on_the_host_is_laid_out_with_weights_stored_otherwise() -> None:
    search, region = short_of_memory()
    best = Point(region, "1f1b", None, "redistributed", 1, 0, ("activations",), 1)
    search.lay_out(best)
    dive._polish_away(search, Learned())
    points = {outcome.point for outcome in search.outcomes} | set(search.refusals)
    others = points - {best}
    assert {point.zero for point in others} <= {0, 2, 3}
    assert others
    assert {point._replace(zero=1, zero_ranks=0) for point in others} == {best}
    assert len({point.zero for point in others}) == len(others), "each way once"


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
    monkeypatch.setattr(dive, "_try_likely", lambda _, __, families, *___: tried.extend(families[0]))
    for bad, good in ((here, there), (there, here)):
        learned = Learned()
        learned.known[kinds(bad._replace(offload=("activations",)))[0]] += [100.0] * 2
        dive._put_away(search, learned)
        assert [point for point in tried if point.region == region] == [good._replace(offload=("activations",))]
        tried.clear()


def test_where_the_best_is_short_of_memory_others_may_be_better_with_activations_on_the_host() -> None:
    search, region = short_of_memory()
    here = search.lay_out(Point(region, "1f1b", None, "redistributed", 1, 0, (), 1))
    assert dive._worth_away(search, replace(here, is_tight=True)) == ("activations",)
    assert dive._worth_away(search, replace(here, is_tight=False)) == ()
    away = replace(here, is_tight=False, point=here.point._replace(offload=("optimizer", "activations")))
    assert dive._worth_away(search, away) == ("optimizer", "activations")
    alone = replace(here, is_tight=True, point=here.point._replace(region=Region(Mesh(dp=4), 1, 2)))
    assert dive._worth_away(search, alone) == ("activations",), "of several stages"
    search.pins = replace(search.pins, schedule="1f1b")
    assert dive._worth_away(search, alone) == (), "one stage has no time to copy any"


def test_what_is_next_to_the_best_is_looked_at_by_its_own_estimates_where_it_is_placed() -> None:
    search, region = short_of_memory()
    learned, other = Learned(), Region(Mesh(pp=4), 1, 8)
    best = Point(other, "interleaved", 2, "redistributed", 1, 0, ("activations",), 1)
    assert dive._likely_best(search, other, best, learned) == search.likely(other, ("activations",))
    families = [points for points in _alike(search, region, best) if points[0].chunks == 2]
    profile = search.profile(region)
    assert profile is not None
    least = min(min(search.estimates(points, profile)) for points in families)
    found = dive._likely_best(search, region, best, learned)
    assert least < found < 1.1 * least
    here = families[0][0]._replace(offload=())
    search.note(here, 123.0)
    assert dive._likely_best(search, region, best._replace(offload=()), learned) == 123.0


def test_what_is_next_to_the_best_is_looked_at_again_by_what_was_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others that looked better before they were known to be worse than the best aren't placed instead of the last."""
    search = space("gpt2", 8, "h100")
    found = search._begin()
    here = next(region for region in found if region.mesh.dp == 8)
    search.place(here)
    best = search.lay_out(next(search.points_of(here)))
    around, looked, placed = dive._Around.of(found), Counter[Region](), list[Region]()
    near = list({region.mesh: region for region in reversed(around.next_to(here))}.values())[::-1]  # the first of each
    assert len(near) > dive._LOOKED + 1

    def likely(_search: object, region: Region, *_: object) -> float:
        looked[region] += 1
        if region not in near or (looked[region] > 1 and region != near[-1]):
            return math.inf
        return best.step_seconds * (near.index(region) + 1) / (len(near) + 1)

    def place(_search: object, region: Region) -> None:
        placed.append(region)

    monkeypatch.setattr(dive, "_likely_best", likely)
    monkeypatch.setattr(type(search), "place", place)
    dive._climb(search, around, Learned(), ())
    assert placed == [near[0], near[-1]]


def test_what_is_like_the_best_has_any_number_of_chunks() -> None:
    search = search_of("gpt2", BATCH, 4, FAST)
    here, there = Region(Mesh(pp=2, dp=2), 1, 4), Region(Mesh(pp=2, dp=2), 2, 2)
    best = Point(here, "interleaved", 3, "redistributed", 1, 0, ("activations",), 8)
    found = list(itertools.chain.from_iterable(_alike(search, there, best)))
    assert {point.chunks for point in found} == {2, 3}
    for name in ("schedule", "vocabulary", "offload", "head_chunks"):
        assert {getattr(point, name) for point in found} == {getattr(best, name)}
    assert {point.region for point in found} == {there}
    assert {point.zero for point in found} == {0, 1, 2, 3}


# --- the same, however often


def told(outcomes: list[Outcome]) -> list[tuple[Point, float]]:
    return [(outcome.point, outcome.step_seconds) for outcome in outcomes]


def test_two_dives_lay_out_the_same() -> None:
    first, second = space("gpt2", 4, "cpu"), space("gpt2", 4, "cpu")
    assert told(first.glance()) == told(second.glance())
    assert told(first.outcomes) == told(second.outcomes), "in the same order"
    assert first.work == second.work


@pytest.mark.slow
def test_hashes_of_strings_change_nothing() -> None:
    code = (
        "from tests.search.test_dive import space, told\n"
        "search = space('gpt2', 4, 'cpu')\n"
        "search.glance()\n"
        "print(told(search.outcomes), search.work)"
    )
    found = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        found.add(done.stdout)
    assert len(found) == 1
    assert "1f1b" in found.pop()


def test_one_region_with_a_pipeline_and_one_without_are_new() -> None:
    """Of the same other degrees, once something is laid out; others with other rows aren't."""
    search = space("gpt2", 8, "h100")
    found = [region for region in search._begin() if (region.mesh.tp, region.mesh.cp) == (2, 1)]
    first = next(region for region in search._begin() if region.mesh.dp == 8)
    search.place(first)
    search.lay_out(next(search.points_of(first)))
    dive_ = dive._Dive(search, (), Learned(), 0.0)
    piped, alone = ([r for r in found if (r.mesh.pp > 1) == is_piped and r.mesh.dp > 1] for is_piped in (True, False))
    assert [dive_._is_new(region) for region in (*piped[:2], *alone[:2])] == [True, False, True, False]


@pytest.mark.parametrize("offload", [(), ("optimizer",)])
def test_estimates_of_many_are_those_of_each(offload: tuple[str, ...]) -> None:
    """In memory that is tight, and where some is not enough."""
    search = space("gpt2", 8, "h100", budget_bytes=2**19)
    found = search._begin()
    each = [search.likely(region, offload) for region in found]
    assert search.all_likely(found, offload) == pytest.approx(each)
    assert len({*map(math.isinf, each)}) == 2
    outlook = search._outlook
    assert outlook is not None
    outlook.scaler = replace(outlook.scaler, last=2.0**20)  # more than layers work in
    larger = search.all_likely(found, offload)
    assert any(a < b for a, b in zip(each, larger, strict=True)), "there is room for what the last call works in"


def test_regions_that_differ_by_a_few_rows_wait_until_one_of_them_is_the_best() -> None:
    """Of microbatches of 1 to 96 rows: one of 3 is next to 2, and one of 6 to 4."""
    meshes = [Mesh(dp=1), Mesh(dp=2)]
    rows = [size for size in range(1, 97) if 96 % size == 0]
    found = [Region(mesh, size, 96 // size) for mesh in meshes for size in rows]
    left = list(dive._coarse(reversed(found)))
    for mesh in meshes:
        assert [region.rows for region in left if region.mesh == mesh] == [1, 2, 4, 8, 16, 32, 96]
    near = dive._Around.of(found).next_to(left[1])
    assert {1, 3, 4} <= {region.rows for region in near}


def test_how_far_estimates_were_off_is_learned_from_what_is_placed() -> None:
    search = space("gpt2", 8, "h100")
    region = next(region for region in search._begin() if region.mesh.dp == 8)
    dive_ = dive._Dive(search, (), Learned(), 0.0)
    while not any(dive_.learned.placed.values()):  # references are made first
        likely = max(dive._first_estimate(search, region), search.likely(region))
        dive_._look_at(math.inf, region)
    points = [estimate for estimate, _, item in dive_.waiting if isinstance(item, Point)]
    kind = Kind(is_like_others=False, has_pipeline=False, is_away=False)
    assert dive_.learned.placed[kind] == [pytest.approx(min(points) / likely)]


def piped() -> tuple[Search, Region, list[Point]]:
    """Points of a region with a pipeline, of which nothing is on the host."""
    search, region = search_of("gpt2", BATCH, 4, FAST, offload=(), head_chunks=1), Region(Mesh(pp=2, dp=2), 1, 4)
    search._begin()
    assert search.place(region) is not None
    return search, region, list(search.points_of(region))


def test_estimates_are_off_otherwise_where_the_head_is_split() -> None:
    search, _, points = piped()
    learned, (one, *_) = Learned(), [p for p in points if p.schedule == "interleaved" and p.zero == 0]
    assert one.vocabulary == "redistributed"
    split = next(p for p in points if p._replace(vocabulary="redistributed") == one != p)
    learned.lay_out(search, one, search.lay_out(one).step_seconds / 1.5)
    assert learned.likely(one, 2.0) > 2.0
    assert learned.likely(split, 2.0) == 2.0


def test_what_looks_better_in_the_end_is_laid_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What looks best is laid out first, while it may be better than what was."""
    search, region, points = piped()
    profile = search.profile(region)
    assert profile is not None
    slowest = max(points, key=lambda point: search.estimates([point], profile)[0])
    begun = search.lay_out(slowest).step_seconds
    search.note(slowest, search.estimates([slowest], profile)[0])
    with monkeypatch.context() as patch:
        patch.setattr(dive, "_REST", 0.0)
        dive._lay_out_likely(search, Learned())
    assert search.laid_out == 1, "there was no work"
    dive._lay_out_likely(search, Learned())
    assert search.best_seconds < begun
    assert 1 < search.laid_out < len(points)


@pytest.mark.parametrize("refused", [False, True])
def test_more_is_tried_where_nothing_of_its_kind_fitted_yet(refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    search, _, points = piped()
    best = search.lay_out(points[0]).step_seconds
    dive_, tried = dive._Dive(search, (), Learned(), 0.1), list[Point]()
    for point in points[1:4]:
        dive_._wait(0.9 * best, point)

    def attempt(self: dive._Dive, point: Point) -> None:
        tried.append(point)
        self.laid_out.add(point)
        self.failed["some"] += refused
        search._work += 1.5 * 0.1 * search.most_work

    monkeypatch.setattr(dive._Dive, "_try", attempt)
    monkeypatch.setattr(dive._Dive, "_try_placed", lambda self: None)
    dive_.run([])
    assert len(tried) == (2 if refused else 1)


def test_twice_the_work_is_done_where_nothing_fitted_yet() -> None:
    search, _, points = piped()
    dive_ = dive._Dive(search, ("activations",), Learned(), 0.0)
    assert not dive_._only_refused, "nothing was tried"
    dive_.laid_out.update(points[:2])
    dive_.failed["some"] += 1
    assert not dive_._only_refused
    dive_.failed["others"] += 1
    assert dive_._only_refused


def test_what_goes_to_the_host_keeps_its_vocabulary() -> None:
    search, _, points = piped()
    for name in ("redistributed", "vocab-1"):
        search.lay_out(next(p for p in points if (p.schedule, p.vocabulary) == ("1f1b", name)))
    search.lay_out(next(p for p in points if (p.schedule, p.vocabulary) == ("zb-h1", "vocab-1")))
    asked = next(p for p in points if (p.schedule, p.vocabulary) == ("interleaved", "redistributed"))
    assert {(p.schedule, p.vocabulary) for p in dive._as_laid_out(search, asked)} == {("1f1b", "redistributed")}
