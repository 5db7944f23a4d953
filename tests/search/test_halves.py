"""A proof that ends in two halves, each of which has what the other doesn't."""

from __future__ import annotations

import pytest

from autopar.search import search as module
from autopar.search.proof import Proof, Proven, Tried
from autopar.search.space import Region
from autopar.search.waiting import axes_of
from tests.fast_cluster import FAST
from tests.search.spaces import search_of
from tests.search.test_brute_force import checked


@pytest.fixture
def long_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small they are."""
    monkeypatch.setattr(module, "_WORTH", 0)


@pytest.mark.usefixtures("long_searches")
@pytest.mark.parametrize("processes", [1, 2])
def test_both_together_prove_what_one_does(processes: int) -> None:
    search = search_of("mlp", 4, 4, FAST)
    search.processes = processes
    assert checked(search, 61) >= 1 - search.tolerance


def begun() -> tuple[Proof, Tried]:
    """A proof that just heard what a search found, of which nothing is proven yet; and what that is."""
    search = search_of("gpt2", 8, 8, FAST)
    search.glance()
    proof, known = search._proof(search_of("gpt2", 8, 8, FAST).profiler), Tried.of(search)
    proof.outcomes, proof.refusals = list(known.outcomes), dict(known.refusals)
    for bound, region in zip(proof.all_at_first(search.regions).tolist(), search.regions, strict=True):
        proof._push(bound, region)
    return proof, known


def test_each_has_what_the_other_does_not() -> None:
    """Whole groups of placements that say the most of each other, but for points; and about as many that are due."""
    proof, _ = begun()
    points = list(proof.points_of(proof._regions[0]))[:40]
    for point in points:
        proof._push(0.0, point)
    before = [*proof._waiting, *proof._passed]
    other = proof._half()
    halves = {0: proof, 1: other}
    parts = {place: [*half._waiting, *half._passed] for place, half in halves.items()}
    assert sorted(before) == sorted(parts[0] + parts[1])
    axes = [{axes_of(item.what) for item in part if isinstance(item.what, Region)} for part in parts.values()]
    assert not axes[0] & axes[1]
    assert all(any(item.what in points for item in part) for part in parts.values())
    due = [len(half._waiting) for half in halves.values()]
    assert min(due) > 0.4 * sum(due) > 0
    for place, half in halves.items():
        alike = {region for some in half._ahead.alike.values() for region in some}
        assert alike == {item.what for item in parts[place] if isinstance(item.what, Region)}
        assert half._waiting[0] == min(half._waiting)
        assert not any(half.is_beaten(item.bound) for item in half._waiting)


def test_neither_knows_what_the_other_places_or_finds() -> None:
    proof, _ = begun()
    other = proof._half()
    before, work = dict(other.profiler.known), other._work
    while proof._waiting and len(proof.profiler.known) < len(before) + 3:
        proof._look_at_next()
    assert other.profiler.known == before
    assert other.placed == []
    assert other._work == work < proof._work
    outcomes = len(other.outcomes)
    proof._saved.add(next(proof.points_of(proof._regions[0])))
    proof.outcomes.append(proof.outcomes[0])
    assert not other._saved
    assert len(other.outcomes) == outcomes


def test_work_and_what_was_placed_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the worse bound of both is what nothing is below."""
    proof, known = begun()
    proof.in_halves, halves, go_on = True, list[Proven](), Proof._go_on

    def noted(self: Proof, tried: Tried) -> Proven:
        halves.append(go_on(self, tried))
        return halves[-1]

    monkeypatch.setattr(Proof, "_go_on", noted)
    proof._work = before = 50.0
    found = proof._finish(known)
    one, other = halves
    assert found.bound_seconds == min(one.bound_seconds, other.bound_seconds)
    assert found.work == one.work + other.work - before
    assert sorted(map(repr, found.placed)) == sorted(map(repr, [*one.placed, *other.placed]))
    assert len(found.tried.outcomes) == len(one.tried.outcomes) + len(other.tried.outcomes)


@pytest.mark.parametrize("fits", [False, True])
def test_what_fits_is_not_looked_for_in_halves(fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that finds something wouldn't end the other."""
    proof, known = begun()
    proof.in_halves, halved = True, list[Proof]()
    monkeypatch.setattr(Proof, "_half", lambda self: halved.append(self) or self)
    monkeypatch.setattr(Proof, "_go_on", lambda self, tried: Proven(1.0, Tried([], {}), [], 0.0))
    proof._finish(known if fits else Tried([], {}))
    assert bool(halved) == fits


@pytest.mark.usefixtures("long_searches")
def test_a_long_search_proves_in_halves_in_another_process_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    search, halved, half = search_of("mlp", 4, 4, FAST), list[Proof](), Proof._half

    def noted(self: Proof) -> Proof:
        halved.append(self)
        return half(self)

    monkeypatch.setattr(Proof, "_half", noted)
    search.run()
    assert len(halved) == 1
    for processes, elsewhere in ((1, False), (2, True)):
        search.processes = processes
        assert search._proof(search.profiler).elsewhere == elsewhere
    monkeypatch.setattr(module, "_WORTH", 1e9)
    assert not search._proof(search.profiler).in_halves, "it is over sooner"


def test_there_may_be_nothing_for_the_other() -> None:
    proof, known = begun()
    proof._waiting, proof._passed = proof._waiting[:1], []
    proof.in_halves = True
    found = proof._finish(known)
    assert 0 < found.bound_seconds <= proof.best_seconds
