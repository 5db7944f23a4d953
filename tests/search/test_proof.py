"""What a proof finds by itself."""

from __future__ import annotations

import importlib
import math

import pytest

from autopar.errors import AutoparError
from autopar.mesh import Mesh
from autopar.search.outcomes import Found, Outcome
from autopar.search.proof import Proof, Tried
from autopar.search.space import Point, Region, Savers
from autopar.search.waiting import Item
from autopar.search.work import work_of
from tests.fast_cluster import FAST
from tests.search.spaces import search_of


def test_what_it_lays_out_counts_where_nothing_was_found_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor looks likely to fit: then there is nothing to aim at, either."""
    known = search_of("gpt2", 8, 4, FAST, schedule="1f1b").run()
    laid_out, lay_out = list[Outcome](), Proof.lay_out

    def noted(self: Proof, point: Point) -> Outcome:
        laid_out.append(lay_out(self, point))
        return laid_out[-1]

    monkeypatch.setattr(Proof, "lay_out", noted)
    monkeypatch.setattr(Proof, "all_likely", lambda self, some, offload=(): [math.inf] * len(some))
    monkeypatch.setattr(importlib.import_module("autopar.search.search"), "dive", lambda search, regions: None)
    search = search_of("gpt2", 8, 4, FAST, schedule="1f1b")
    found = search.run()
    assert {outcome.point for outcome in laid_out} == {outcome.point for outcome in found.outcomes}
    assert found.outcomes[0].step_seconds <= known.outcomes[0].step_seconds / (1 - search.tolerance)
    assert found.bound_seconds <= known.outcomes[0].step_seconds


def tight() -> tuple[Proof, list[Point]]:
    """Points of a region in whose memory not all fits that they keep; what it takes to save that waits in the proof."""
    search, region = search_of("gpt2", 8, 4, FAST, budget_bytes=1_200_000), Region(Mesh(pp=2, dp=2), 1, 4)
    search._begin()
    proof = search._proof(search.profiler.aside())
    assert proof.place(region) is not None
    points = [point for point in proof.points_of(region) if point.schedule in ("1f1b", "zb-v", "interleaved")]
    for family in dict.fromkeys(point.family for point in points):
        proof._open_family(0.0, family)
    return proof, [point for point in points if point in proof._saved]


@pytest.mark.slow
def test_nothing_is_faster_than_with_all_the_memory_that_it_takes() -> None:
    """Of these orders; those of v-min may be, which are packed by one greedy rule (README, "Planning")."""
    proof, points = tight()
    slower = 0
    for point in points[::3]:
        with_room = proof.roomy_seconds(point)
        for other in (point, *Savers((point,), True).all(FAST, proof.pins)):
            try:
                outcome = proof.lay_out(other)
            except AutoparError:
                continue
            assert outcome.step_seconds >= with_room * (1 - 1e-9)
            slower += outcome.step_seconds > with_room * 1.01
    assert slower > 10


def test_what_is_too_slow_with_all_memory_needs_no_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else it may do to save memory; what that takes is found once."""
    proof, (point, *_) = tight()
    with_room, asked = proof.roomy_seconds(point), list[Point]()
    assert with_room > 0
    away = Savers((point,), True).all(FAST, proof.pins)

    def roomy_seconds(self: Proof, some: Point) -> float:
        asked.append(some)
        return with_room

    monkeypatch.setattr(Proof, "roomy_seconds", roomy_seconds)
    monkeypatch.setattr(Proof, "_is_bettered", lambda *_: False)
    monkeypatch.setattr(Proof, "lay_out", lambda *_: pytest.fail("it was laid out"))
    proof.outcomes = [Outcome(point, 0.9 * with_room, 0, recomputes=False)]
    proof._waiting, proof._passed = [], []
    for other in (point, *away):
        proof._try(with_room / 2, other)
    assert asked == [point]
    assert [item.what for item in proof._passed] == [point, *away]
    assert all(0.98 * with_room < item.bound < with_room for item in proof._passed), "a little less, for luck"
    assert not proof._waiting


def test_so_it_is_where_many_are_as_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is said that there is no work left for them."""
    proof, (point, *_) = tight()
    seconds = proof.roomy_seconds(point)
    monkeypatch.setattr(Proof, "_is_bettered", lambda *_: False)
    proof.outcomes = [Outcome(point, 2 * seconds, 0, recomputes=False)]
    proof._waiting = [Item(seconds / 2, 0, point)]
    proof.most_work = proof._work + work_of(point, proof._length) / 2
    proof._can_better(seconds / 2)
    assert [item.what for item in proof._waiting] == [point]
    assert proof._waiting[0].bound > 0.98 * seconds


def test_with_room_only_what_lacks_memory_is_laid_out() -> None:
    """And only if its order isn't sought for the memory there is."""
    proof, (point, *_) = tight()
    sought = point._replace(schedule="synthesized")
    proof._saved.add(sought)
    assert not proof._is_slow_with_room(0.0, sought)
    assert proof._is_slow_with_room(0.0, point)
    work = proof._work
    assert not proof._is_slow_with_room(2 * proof.roomy_seconds(point), point)
    assert proof._work == work + work_of(point, proof._length)
    proof._saved.clear()
    assert not proof._is_slow_with_room(0.0, point), "laying it out says as much"


def test_what_cannot_run_says_nothing_with_room() -> None:
    proof, (point, *_) = tight()
    too_many = point._replace(schedule="interleaved", chunks=64)
    assert proof.roomy_seconds(too_many) == 0


def found_with(monkeypatch: pytest.MonkeyPatch, work: float, close: float) -> Found:
    """By a proof of so much work, that is called close if its bound is."""
    monkeypatch.setattr("autopar.search.proof._CLOSE", close)
    search = search_of("gpt2", 8, 8, FAST)
    search.most_work = work
    return search.run()


@pytest.mark.slow
def test_a_proof_that_is_close_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """With twice the work in all."""
    whole, ended = (found_with(monkeypatch, work, 0.0) for work in (math.inf, 1e4))
    assert ended.bound_seconds < 0.95 * whole.bound_seconds
    assert found_with(monkeypatch, 1e4, 0.02).bound_seconds == ended.bound_seconds, "it isn't that close"
    longer = found_with(monkeypatch, 1e4, 0.5)
    assert longer.bound_seconds > 0.99 * whole.bound_seconds
    assert longer.bound_seconds <= whole.outcomes[0].step_seconds
    assert ended.work < longer.work < ended.work + 2e4


def test_what_fits_is_looked_for_with_more_work_but_not_for_ever() -> None:
    proof, (point, *_) = tight()
    proof.outcomes, proof.most_work = [], 10.0
    for work, goes_on in ((9.0, True), (11.0, True), (19.0, True), (21.0, False)):
        proof._work = work
        assert proof._goes_on() == goes_on
    proof._work, proof.outcomes = 11.0, [Outcome(point, 1.0, 0, recomputes=False)]
    assert not proof._goes_on()


def test_more_work_goes_into_no_proof_that_is_over_or_far_off() -> None:
    proof, (point, *_) = tight()
    proof.outcomes = [Outcome(point, 1.0, 0, recomputes=False)]
    for bounds, is_close in (((0.98, 2.0), True), ((0.98, 0.9), False), ((0.995,), False), ((), False)):
        proof._waiting = [Item(bound, number, point) for number, bound in enumerate(bounds)]
        assert proof._is_close() == is_close
    proof._waiting = [Item(0.98, 0, point)]
    assert proof._is_close()
    proof.quick = True
    assert not proof._is_close()
    proof.quick, proof.outcomes = False, []
    assert not proof._is_close()


def test_more_work_is_also_for_what_took_more_than_was_left(monkeypatch: pytest.MonkeyPatch) -> None:
    proof, (point, *_) = tight()
    known = Tried([Outcome(point, 1.0, 0, recomputes=False)], {})
    proof._waiting, proof._passed, proof._work, proof.most_work = [], [Item(0.98, 0, point)], 0.0, 10.0
    looked = list[float]()

    def look(self: Proof) -> None:
        looked.append(self.most_work)
        self._is_over = True
        self._waiting = self._waiting[: 2 - len(looked)]

    monkeypatch.setattr(Proof, "_look_at_next", look)
    proof._finish(known)
    assert looked == [10.0, 20.0]


def test_what_it_is_laid_out_on_may_say_more_by_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head in chunks is of a placement of its own, which isn't there when its family is bounded."""
    proof, (point, *_) = tight()
    chunked = point._replace(schedule="1f1b", chunks=None, head_chunks=8)
    monkeypatch.setattr(proof.costing, "bound", lambda *_: 0.0)
    monkeypatch.setattr(proof.costing, "memory_bound", lambda *_: 0.0)
    monkeypatch.setattr(Proof, "bounds", lambda *_: [3.0])
    assert not proof._is_bettered(1.0, chunked)
    assert proof.profiler.of(proof.key_of(chunked), point.region.mesh, point.region.microbatches) is not None
    assert proof._is_bettered(1.0, chunked)
    assert [item.bound for item in proof._waiting if item.what == chunked] == [3.0]
    assert not proof._is_bettered(1.0, point)
