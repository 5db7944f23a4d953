"""The first good plan, found by estimates: against all points of small spaces, and step by step."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

import autopar
from autopar.mesh import Mesh
from autopar.search import dive
from autopar.search import learned as learned_
from autopar.search.climb import Around
from autopar.search.learned import SEVERAL, Kind, Learned, kinds
from autopar.search.outcomes import Outcome
from autopar.search.space import Point, Region, splits_head
from tests.fast_cluster import FAST
from tests.models import make
from tests.search.spaces import BATCH, PLAIN, least, piped, search_of, space

SPACES = [
    ("mlp", 4, "fast"),
    *(pytest.param(*one, marks=pytest.mark.slow) for one in [("mlp", 8, "h100"), ("gpt2", 4, "cpu")]),
]
CLOSE = 1.05  # times the best step, that the dive's may take: it proves nothing


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
    learned.lay_out(search, point, taken / 1.01)
    assert learned.likely(point, 3.0) == 3.0, "they may do a little better"
    learned.lay_out(search, point, taken / 0.9)
    assert learned.likely(point, 3.0) == pytest.approx(0.9 * 3.0), "or do better than they were likely to"
    assert learned.likely(other, 3.0) == 3.0
    assert learned.likely(point._replace(zero=1), 3.0) == pytest.approx(0.9 * 3.0), "by others of its region"


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
    assert learned.likely(other._replace(vocabulary="vocab-1"), 2.0) == 2.0, "its head takes less memory"
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
    learned.known[kinds(away)[-1]].append(1.75)
    assert learned.likely(away, 2.0) == pytest.approx(corrected(2.0, 1.5, 1)), "that was under another schedule"
    learned.known[kinds(away)[-1]].append(1.0)
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
    away, run, waiting = set[Region](), dive._Dive.run, list[dive._Dive]()

    def noted(own: dive._Dive, some: list[Region]) -> None:
        away.update(some if own.offload == ("activations",) else [])
        run(own, some)

    monkeypatch.setattr(dive._Dive, "run", noted)
    monkeypatch.setattr(dive, "_go_on", lambda _, dives: waiting.extend(dives))
    found = search.glance()
    assert found[0].is_tight == (budget == 10**6)
    assert bool(away) == looked
    assert {region.mesh.pp > 1 for region in away} == ({False, True} if looked else set())
    assert (("activations",) in {each.offload for each in waiting}) == looked, "they may go on"


def test_the_first_with_activations_on_the_host_are_laid_out_whatever_others_took() -> None:
    """What was best without them says little of others."""
    host = replace(FAST, device=replace(FAST.device, host_memory_bytes=10**12, host_bytes_per_second=1e9))
    search, learned = search_of("gpt2", BATCH, 4, host, budget_bytes=10**6, head_chunks=1), Learned()
    found = search._begin()
    dive._Dive(search, (), learned, 1.0).run(found)
    of_any_schedule = kinds(Point(found[0], "1f1b", None, "redistributed", 0, 0, ("activations",), 1))[-1]
    learned.known[of_any_schedule].extend([100.0] * 3)
    away = dive._Dive(search, ("activations",), learned, 1.0)
    away.run([region for region in found if region.mesh.pp > 1])
    assert len(away.laid_out) == SEVERAL
    points = {*(outcome.point for outcome in search.outcomes), *search.refusals}
    assert sum(point.offload == ("activations",) for point in points) == SEVERAL


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
    near = Around.of(found).next_to(left[1])
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


@pytest.mark.parametrize(
    ("took", "likely"), [([0.9, 0.95], 1.0), ([0.97, 0.9, 0.95], 0.9), ([1.01] * 3, 1.0), ([2.0, 1.5, 1.6], 1.47)]
)
def test_regions_take_what_others_took_or_a_little_less(took: list[float], likely: float) -> None:
    """Times their estimates: less than these only where others took less, too."""
    learned = Learned()
    kind = Kind(is_like_others=False, has_pipeline=True, is_away=False)
    learned.times[True] += took
    assert learned.laid_out(kind, 3.0) == pytest.approx(3 * likely)
    assert learned.laid_out(kind._replace(has_pipeline=False), 3.0) == 3


def test_what_is_too_much_work_says_nothing_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    search = search_of("gpt2", BATCH, 4, FAST, budget_bytes=10**5, offload=(), head_chunks=1)
    region = next(region for region in search._begin() if region.mesh.pp == 2 == region.mesh.tp)
    dive_ = dive._Dive(search, (), Learned(), 0.0)
    kind = Kind(is_like_others=False, has_pipeline=True, is_away=False)
    with monkeypatch.context() as patch:
        patch.setattr(dive, "POINT_WORK", 0)
        dive_._place(region, 1.0, kind)
    assert not any(dive_.full.values())
    assert search.profile(region) is None
    dive_._place(region, 1.0, kind)
    assert dive_.full == {dive._axes(region): [(2, region.rows)]}, "nothing fits"


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


def test_few_are_tried_with_the_head_in_a_stage_and_as_few_where_it_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one schedule: what is found of ones says little of the others."""
    search, _, points = piped()
    monkeypatch.setattr(Learned, "lay_out", lambda *_: None)
    dive_ = dive._Dive(search, (), Learned(), 1.0)
    for number, point in enumerate(p for p in points if (p.schedule, p.zero) == ("interleaved", 0)):
        dive_.estimates[point] = 1.0 + number
        dive_._try(point)
    tried = Counter(splits_head(point.family) for point in dive_.laid_out)
    assert tried == {False: dive._ALIKE, True: dive._ALIKE}


def test_dives_go_on_while_what_waits_looks_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one with what looks best first, until that took as much work as a whole search may."""
    search, _, points = piped()
    best = search.lay_out(points[0]).step_seconds
    dives = [dive._Dive(search, (), Learned(), 0.1) for _ in range(3)]
    for each, times in zip(dives, ([0.8, 0.95], [0.5, 0.9], [1.5]), strict=True):
        each.waiting = [(seconds * best, number, points[0]) for number, seconds in enumerate(times)]
    went = list[int]()

    def go_on(self: dive._Dive, share: float) -> None:
        went.append(dives.index(self))
        self.waiting.pop(0)
        search._work += 0.4 * search.most_work

    monkeypatch.setattr(dive._Dive, "go_on", go_on)
    search._work = 0.0
    dive._go_on(search, dives)
    assert went == [1, 0, 1]
    search._work = search.most_work
    dive._go_on(search, dives)
    assert len(went) == 3
    search._work = 0.0
    dive._go_on(search, dives)
    assert went == [1, 0, 1, 0], "what takes longer than the best isn't looked at"


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
