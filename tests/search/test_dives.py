"""Which regions are looked at to find a first good plan, and in which order."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final, NamedTuple

import pytest

from autopar.search import dive
from autopar.search.learned import Learned
from autopar.search.search import Search
from autopar.search.space import Point, Region
from tests.fast_cluster import FAST
from tests.search.spaces import BATCH, PLAIN, experts_on, piped, search_of


class Run(NamedTuple):
    """One dive, the best step before it, and whether it found none at all."""

    offload: tuple[str, ...]
    regions: list[Region]
    worth: float
    best_seconds: float
    fails: bool


class Going(NamedTuple):
    """A dive as it begins or goes on: how much waits, and whether anything is known that fits."""

    dive: dive._Dive
    waiting: int
    fits: bool


def runs_of(search: Search, monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """All dives of a search."""
    found, run = list[Run](), dive._Dive.run

    def noted(own: dive._Dive, some: list[Region]) -> None:
        before = search.best_seconds
        run(own, some)
        found.append(Run(own.offload, some, own.worth, before, not search.outcomes))

    monkeypatch.setattr(dive._Dive, "run", noted)
    search.glance()
    return found


@pytest.mark.slow
def test_experts_on_ranks_of_tp_are_looked_at_within_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at first: by then most are no better than the best."""
    first, *others = runs_of(experts_on(replace(FAST, devices_per_node=2), 4, **PLAIN), monkeypatch)
    assert not any(region.mesh.borrowed for region in first.regions)
    borrowed = [region.mesh for run in others for region in run.regions if region.mesh.borrowed]
    assert borrowed
    assert all(mesh.tp * mesh.cp <= 2 for mesh in borrowed)


HOST: Final = replace(FAST, device=replace(FAST.device, host_memory_bytes=10**12, host_bytes_per_second=1e12))


@pytest.mark.slow
@pytest.mark.parametrize("crowded", [0.0, math.inf])
@pytest.mark.parametrize("patience", [0.0, math.inf])
def test_where_nothing_fits_for_long_something_goes_to_the_host(
    patience: float, crowded: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masters first, where they take much of the memory."""
    monkeypatch.setattr(dive, "_PATIENCE", patience)
    monkeypatch.setattr(dive, "_CROWDED", crowded)
    search = search_of("gpt2", BATCH, 4, HOST, budget_bytes=10**6, head_chunks=1)
    first, second, *_ = runs_of(search, monkeypatch)
    assert first.offload == ()
    there = ("activations",) if crowded else ("optimizer",)
    assert (second.offload == there and math.isinf(second.best_seconds)) == (patience == 0.0)


@pytest.mark.parametrize("crowded", [0.0, math.inf])
@pytest.mark.parametrize(
    ("budget", "patience", "given"), [(10**6, math.inf, {}), (10**6, 0.0, {}), (10**9, 1.0, {}), (10**6, 1.0, PLAIN)]
)
def test_all_that_may_be_on_the_host_is_looked_at_where_memory_is_short(
    budget: int, patience: float, given: dict[str, Any], crowded: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masters where they take much of it; nothing where a user says what is on the host. Each once."""
    monkeypatch.setattr(dive, "_PATIENCE", patience)
    monkeypatch.setattr(dive, "_CROWDED", crowded)
    search = search_of("gpt2", BATCH, 4, HOST, budget_bytes=budget, **{"head_chunks": 1, **given})
    runs = runs_of(search, monkeypatch)
    looked = [run.offload for run in runs if run.offload and not (math.isinf(run.best_seconds) and run.fails)]
    assert {run.worth for run in runs if run.offload and not math.isinf(run.best_seconds)} <= {dive._WORTH}
    masters = [("optimizer",), ("parameters",), ("optimizer", "activations"), ("parameters", "activations")]
    free = [("activations",), *(masters if crowded == 0.0 else [])]
    assert sorted(looked) == (sorted(free) if budget == 10**6 and not given else [])


def test_what_there_was_no_patience_for_is_looked_at_once_something_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing on the host, where something else has to fit first."""
    monkeypatch.setattr(dive, "_PATIENCE", 0.0)
    search, going, go_on = search_of("gpt2", BATCH, 4, HOST, budget_bytes=10**6), list[Going](), dive._Dive.go_on

    def noted(own: dive._Dive, share: float) -> None:
        going.append(Going(own, len(own.waiting), bool(search.outcomes)))
        go_on(own, share)

    monkeypatch.setattr(dive._Dive, "go_on", noted)
    search.glance()
    first, *others = going
    assert first.dive.offload == ()
    assert not others[0].fits
    assert [(each.waiting > 0, each.fits) for each in others if each.dive is first.dive] == [(True, True)]


@pytest.mark.parametrize(("worth", "tried"), [(1.0, 2), (0.85, 1), (0.5, 0)])
def test_what_is_not_worth_it_is_not_tried(worth: float, tried: int, monkeypatch: pytest.MonkeyPatch) -> None:
    search, _, points = piped()
    best = search.lay_out(points[0]).step_seconds
    dive_, found = dive._Dive(search, (), Learned(), 1.0, worth=worth), list[Point]()
    for share, point in zip((0.8, 0.9), points[1:], strict=False):
        dive_._wait(share * best, point)
    monkeypatch.setattr(dive._Dive, "_try", lambda _, point: found.append(point))
    dive_.run([])
    assert found == points[1 : 1 + tried]


@pytest.mark.parametrize(("share", "tried"), [(0.9, 1), (0.5, 3)])
def test_a_dive_does_four_times_its_work_where_what_waits_looks_much_better(
    share: float, tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    search, _, points = piped()
    best = search.lay_out(points[0]).step_seconds
    dive_, found = dive._Dive(search, (), Learned(), 0.1), list[Point]()
    for point in points[1:7]:
        dive_._wait(share * best, point)

    def attempt(_: dive._Dive, point: Point) -> None:
        found.append(point)
        search._work += 0.15 * search.most_work

    monkeypatch.setattr(dive._Dive, "_try", attempt)
    monkeypatch.setattr(dive._Dive, "_try_placed", lambda _: None)
    dive_.run([])
    assert len(found) == tried


def test_regions_that_cannot_be_better_are_not_estimated() -> None:
    """Beyond the first estimate; others are with those that work alike."""
    search = search_of("mlp", BATCH, 4, FAST, **PLAIN)
    found = search._begin()
    first = {region: dive._first_estimate(search, region) for region in dive._coarse(found)}
    own = dive._Dive(search, (), Learned(), 1.0)
    own.run(found)
    assert {region for region in first if first[region] < search.best_seconds} <= set(own.likely)
    assert len(own.likely) < len(first)
    assert all(seconds > 0 for seconds in own.likely.values())
