"""Runners-up and fronts: what a plan says of the points that weren't chosen."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import pytest

import autopar
from autopar.errors import StageError
from autopar.plan import change_text
from autopar.planner.budget import Exact
from autopar.planner.build import Built
from autopar.search.fronts import (
    _compare,
    _place_next,
    compared,
    gpus_front,
    memory_front,
    runners_up,
    unplaced,
    whole_fronts,
    why,
)
from autopar.search.outcomes import Found, Outcome
from autopar.search.search import Search
from autopar.search.space import Point, Region, regions
from tests.fast_cluster import FAST
from tests.models import make
from tests.search.spaces import search_of

pytestmark = pytest.mark.slow

GPUS = 4


@pytest.fixture(scope="module")
def searched() -> tuple[Search, Found]:
    search = search_of("gpt2", 8, GPUS, FAST, schedule="1f1b", vocabulary="redistributed", offload=())
    search.run()
    search.tried.append(compared(search))
    return search, search.found()


def test_runners_up_are_of_other_kinds_and_no_faster(searched: tuple[Search, Found]) -> None:
    search, found = searched
    best = found.outcomes[0]
    rows = runners_up(search, found, best)
    assert len(rows) == 5
    assert all(row.step_seconds >= best.step_seconds and row.why.startswith("step ") for row in rows)
    other = [row.mesh for row in rows if row.mesh != best.point.region.mesh]
    assert len(other) == len(set(other)) >= 3


def test_reasons_add_up_in_view(searched: tuple[Search, Found]) -> None:
    """Half a step more of waiting for a hundredth more in all: a reader sees what makes up for it."""
    point = searched[1].outcomes[0].point
    chosen = Outcome(point, 1.0, 1, recomputes=False, parts={"compute": 0.9, "optimizer": 0.1})
    other = Outcome(point, 1.01, 1, recomputes=False, parts={"compute": 0.4, "waiting": 0.51, "optimizer": 0.1})
    assert why(chosen, other) == "step +1.0 %: waiting +51.0 %, but compute -50.0 %"
    slower = Outcome(point, 1.2, 1, recomputes=False, parts={"compute": 1.15, "optimizer": 0.05})
    assert why(chosen, slower) == "step +20.0 %: compute +25.0 %"
    assert why(chosen, chosen) == "step same: what is simpler is taken"


def test_what_looks_best_of_other_degrees_is_laid_out() -> None:
    """Not what has the least bound, which may be far below what a point takes; also of regions that weren't placed."""
    search = search_of("gpt2", 8, 8, FAST)
    search.run()
    known = {outcome.point for outcome in search.outcomes}
    meshes, left = {point.region.mesh for point in known}, unplaced(search)
    assert left
    laid_out = len(search.outcomes)
    _compare(search)
    assert search.profile(left[0]) is not None
    looks = sorted(pair for pair in search.promising.values() if pair[1] not in known)
    _, first = next((seconds, point) for seconds, point in looks if point.region.mesh not in meshes)
    assert all(search.profile(point.region) is not None for _, point in looks)
    assert search.outcomes[laid_out].point == first
    assert {point.region for _, point in looks} & set(left)


def test_what_is_compared_is_counted(searched: tuple[Search, Found]) -> None:
    search, found = searched
    assert found.laid_out == len(found.outcomes) + len(found.refusals) > search.laid_out
    assert {outcome.point for outcome in search.outcomes} < {outcome.point for outcome in found.outcomes}
    assert [outcome.step_seconds for outcome in found.outcomes] == sorted(o.step_seconds for o in found.outcomes)


def test_nothing_is_learned_of_what_is_compared() -> None:
    """It may be elsewhere."""
    search = search_of("gpt2", 8, 8, FAST)
    search.glance()
    before = (len(search.outcomes), dict(search.refusals), dict(search.promising), set(search.profiler.known))
    tried = compared(search)
    assert tried.outcomes
    assert not {outcome.point for outcome in tried.outcomes} & {outcome.point for outcome in search.outcomes}
    assert all(outcome.layout is None for outcome in tried.outcomes)
    assert (len(search.outcomes), search.refusals, search.promising, set(search.profiler.known)) == before
    again = search.own(tried.outcomes[0])
    assert again == tried.outcomes[0]
    assert again.layout is not None


def test_less_memory_takes_more_time(searched: tuple[Search, Found]) -> None:
    search, found = searched
    rows, _ = whole_fronts(search, found, found.outcomes[0])
    assert len(rows) > len(memory_front(search, found.outcomes))
    assert [row.step_seconds for row in rows] == sorted(row.step_seconds for row in rows)
    assert [row.peak_bytes for row in rows] == sorted((row.peak_bytes for row in rows), reverse=True)
    assert rows[-1].peak_bytes <= 0.75 * rows[0].peak_bytes


def test_other_numbers_of_gpus(searched: tuple[Search, Found]) -> None:
    search, found = searched
    rows = gpus_front(search, found.outcomes[0])
    assert [row.gpus for row in rows] == sorted({row.gpus for row in rows})
    assert {1, 2, GPUS, 8} <= {row.gpus for row in rows}
    assert all(row.mesh.world == row.gpus for row in rows)
    assert rows[0].why.startswith("0.25x the GPUs, ")
    assert search.pins.gpus == GPUS


def test_nothing_is_placed_for_runners_up_where_enough_is_nearly_as_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what is likely the fastest."""
    search = search_of("gpt2", 8, 8, FAST, vocabulary="redistributed", offload=())
    search.run()
    left = unplaced(search)
    point = search.ranked()[0].point
    meshes = list({region.mesh: region for region in regions(search.sizes, search.pins)}.values())
    before = len(search.profiler.known)
    assert left
    search.promising = dict.fromkeys(meshes, (1.05 * search.best_seconds, point))
    _place_next(search)
    assert len(search.profiler.known) == before
    search.promising = dict.fromkeys(meshes, (2 * search.best_seconds, point))
    placed, likely = list[Region](), dict(zip(left, search.all_likely(left), strict=True))
    place = search.place
    monkeypatch.setattr(search, "place", lambda region: (placed.append(region), place(region))[1])
    _place_next(search)
    assert len(search.profiler.known) > before
    taken = [likely[region] for region in placed]
    assert taken == sorted(taken)
    assert placed != [region for region in left if region in placed], "not by bounds"


def test_runners_up_where_chunks_are_pinned() -> None:
    """Regions without a pipeline have no points then."""
    search = search_of("mlp", 4, 16, FAST, chunks=2, schedule="v-half")
    search.run()
    best, others = search.ranked()[0], compared(search).outcomes
    assert others
    assert all((outcome.point.chunks, outcome.point.region.mesh.pp > 1) == (2, True) for outcome in (best, *others))


def test_what_turned_out_not_to_fit_is_no_runner_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the best degrees are refused as they are built, but for what isn't looked at."""
    case, refused = make("llama", 8), list[Outcome]()

    def build(search: Search, point: Point, measured: Exact[Built], outcome: Outcome) -> Built:
        if not refused or point.region.mesh == refused[0].point.region.mesh:
            refused.append(outcome)
            raise StageError("too large")
        return built(search, point, measured, outcome)

    choosing = import_module("autopar.search.choose")  # the package has a function of that name
    built = choosing._build
    monkeypatch.setattr(choosing, "_build", build)
    plan = autopar.plan(case.model, 4, sample=case.batch, cluster=FAST)
    assert plan.search is not None
    rows = [(row.mesh_sizes, row.schedule, row.vocabulary, row.step_seconds) for row in plan.search.runners_up]
    assert rows
    for outcome in refused:
        point = outcome.point
        assert (point.region.mesh.to_json(), point.schedule, point.vocabulary, outcome.step_seconds) not in rows


def test_runners_up_are_compared_with_what_was_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is slower than as it was laid out, where its ranks hold more than was counted."""

    def build(search: Search, point: Point, measured: Exact[Built], outcome: Outcome) -> Built:
        made = built(search, point, measured, outcome)
        cost = made.plan.cost.model_copy(update={"step_seconds": 1.005 * made.plan.step_seconds})
        return replace(made, plan=made.plan.model_copy(update={"cost": cost}))

    choosing = import_module("autopar.search.choose")  # the package has a function of that name
    built = choosing._build
    monkeypatch.setattr(choosing, "_build", build)
    case = make("gpt2", 8)
    plan = autopar.plan(case.model, 8, sample=case.batch, cluster=FAST, chunks=1)  # with more, some are as fast
    assert plan.search is not None
    assert plan.search.runners_up
    for row in plan.search.runners_up:
        assert row.why.startswith(f"step {change_text(row.step_seconds / plan.step_seconds - 1)}")
    front = [row.step_seconds for row in plan.search.memory_front]
    assert plan.step_seconds in front


def test_what_may_be_faster_than_what_was_built(searched: tuple[Search, Found]) -> None:
    point = searched[1].outcomes[0].point
    chosen, other = (Outcome(point, seconds, 1, recomputes=False) for seconds in (1.0, 0.995))
    assert why(chosen, other).startswith("step -0.5 % as it was laid out")
