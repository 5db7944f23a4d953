"""What is built holds more than solvers count: how that is left room for."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import pytest

from autopar.planner.build import Built
from autopar.search import choose
from autopar.search import search as module
from autopar.search.proof import Tried
from autopar.search.search import Search
from tests.fast_cluster import FAST
from tests.search.spaces import hiding, pins_of, prepared

PINS = {"offload": (), "head_chunks": 1, "schedule": "1f1b"}


def best(name: str, budget_bytes: int, hidden_bytes: int, **given: Any) -> Built:
    pins = pins_of(4, budget_bytes=budget_bytes, **given)
    return choose(prepared(name, 8), pins, FAST, {}, hiding(hidden_bytes))


def test_what_fits_beside_what_is_not_counted_is_found() -> None:
    """Though there is little left above it: sparing much more than that leaves nothing."""
    found = best("mlp", 52_416, 10_483, offload=())
    assert max(found.plan.peak_bytes) <= 52_416
    assert found.plan.step_seconds == best("mlp", 52_416 - 10_483, 0, offload=()).plan.step_seconds


def test_what_a_proof_alone_found_is_built_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    choosing = import_module("autopar.search.choose")  # the package has a function of that name
    usual = best("mlp", 1 << 20, 0).plan
    with monkeypatch.context() as patch:
        patch.setattr(module, "dive", lambda *_: None)
        plan = best("mlp", 1 << 20, 0).plan
        patch.setattr(choosing, "compared", lambda _: Tried([], {}))
        alone = best("mlp", 1 << 20, 0).plan
    assert plan.search is not None
    assert alone.search is not None
    assert plan.step_seconds == alone.step_seconds == usual.step_seconds
    assert plan.search.laid_out > alone.search.laid_out


@pytest.mark.slow
def test_where_that_makes_the_best_slower_it_is_searched_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, with as much left as that takes."""
    spared, again = list[int](), Search.again

    def recorded(self: Search, spared_bytes: int) -> Search:
        spared.append(spared_bytes)
        return again(self, spared_bytes)

    monkeypatch.setattr(Search, "again", recorded)
    budget, hidden = 1_840_512, 920_256
    found = best("gpt2", budget, hidden, **PINS)
    assert len(spared) == 1
    assert hidden <= spared[0] < 1.02 * hidden
    at_once = best("gpt2", budget - hidden, 0, **PINS)
    assert found.plan.step_seconds <= at_once.plan.step_seconds * 1.02


@pytest.mark.parametrize(("hidden", "searched"), [(26_208, True), (52_416, False)])
def test_where_the_best_is_refused_it_is_searched_for_again(
    hidden: int, searched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With as much left as that holds beside what was counted, if that leaves anything, and if what is built instead is
    much slower."""
    choosing, spared, again = import_module("autopar.search.choose"), list[int](), Search.again
    budget, pins = 52_416, {"offload": (), "head_chunks": 1}
    first = best("mlp", budget, 0, **pins).plan

    def measured(built: Built, enough: float) -> Built:
        return hiding(hidden if built.plan.mesh == first.mesh else 0)(built, enough)

    def recorded(self: Search, spared_bytes: int) -> Search:
        spared.append(spared_bytes)
        return again(self, spared_bytes)

    monkeypatch.setattr(Search, "again", recorded)
    for slower in (math.inf, 0.0):
        monkeypatch.setattr(choosing, "_SLOWER", slower)
        found = choose(prepared("mlp", 8), pins_of(4, budget_bytes=budget, **pins), FAST, {}, measured).plan
        assert found.mesh != first.mesh
        assert found.step_seconds > first.step_seconds
        assert bool(spared) == (searched and slower == 0.0)
    assert all(each >= hidden for each in spared)


def test_zero_is_searched_over_as_many_ranks_as_were_asked_for() -> None:
    """On degrees that these divide."""
    options = best("mlp", 1 << 20, 0, offload=(), zero_ranks=2).plan.options
    assert options.zero in (1, 2, 3)
    assert options.zero_ranks == 2
