"""What ranks with few layers say of all: none has so many that they take it longer than a step."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autopar.schedules.placements import looped
from autopar.search import wholesale
from autopar.search.interleaving import Interleaving
from autopar.search.wholesale import Host, Stored, folded, least_seconds, placed, straight
from tests.search.test_wholesale import EXTRA, FREE, ROUNDED, SAVED, layers_of, shares_of


def test_looking_at_ranks_with_few_layers_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = layers_of(40)
    kept = np.array([8.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    ways = [FREE, Stored(1.0, 0.5, 0.0), Stored(0.2, 2.0, 0.0)]
    ranks = straight(layers, 8, 8, kept, ends=False)
    for budget in (1e9, 60.0, 30.0, 20.0):
        found = least_seconds(layers, ways, ranks, 8, budget)
        with monkeypatch.context() as patched:
            patched.setattr(wholesale, "_WIDE", 40)
            assert found == pytest.approx(least_seconds(layers, ways, ranks, 8, budget))


@settings(max_examples=100)
@given(st.floats(0.0, 12.0), st.floats(40.0, 200.0), st.integers(2, 10))
@example(idle=2.0, budget=96.0, first=8)
@example(idle=6.25, budget=55.6, first=8)
def test_no_rank_has_layers_that_take_it_longer_than_the_step(idle: float, budget: float, first: int) -> None:
    """The second rank keeps less, so the mean is the least if it has all layers; but then others wait for it."""
    layers, kept, four = layers_of(12), np.array([first, 1.0]), 4
    works = replace(folded(layers, 2, kept, ends=False, stages=2, hops=0), idle=(idle, idle), ahead=np.zeros(2))
    (found,) = least_seconds(layers, [FREE], works, four, budget)
    steps = []
    for counts in shares_of(12, 2):
        room = budget / (kept * counts)
        extra = np.where(room < SAVED[-1], np.inf, np.interp(-room, -np.array(SAVED), EXTRA))
        taken = four * np.array(counts) * (3.0 + extra)
        steps.append(max(*taken, taken.mean() + idle * 3.0))
    assert 0.99 * min(steps) <= found <= min(steps) * ROUNDED


def test_a_rank_may_have_more_layers_than_it_is_looked_at_with() -> None:
    """As where the others have room for none: it takes as long as with those at least."""
    layers, four = layers_of(8), 4
    works = folded(layers, 4, np.array([100.0, 100.0, 100.0, 1.0]), ends=False, stages=2, hops=0)
    (found,) = least_seconds(layers, [FREE], works, four, 40.0)
    assert four * 6 * 3.0 <= found <= four * 8 * 3.0 + works.ahead[-1] * 3.0
    (mean,) = least_seconds(layers, [FREE], replace(works, idle=(100.0, 100.0)), four, 40.0)
    assert mean == pytest.approx(four * 8 * 3.0 / 4 + 100 * 3.0)


RATE, ROOM = 0.5, 6.0


def choices(count: int) -> Iterator[tuple[float, float]]:
    """Seconds of the passes of a rank with so many layers and one microbatch, without and with copies, for all that
    these may keep: what there is no room for goes out ahead of the first backward, and comes back behind it."""
    for saved in np.linspace(SAVED[-1], SAVED[0], 401):
        backward = count * (2.0 + float(np.interp(-saved, -np.array(SAVED), EXTRA)))
        copy = max(0.0, count * saved - ROOM) / RATE
        yield count * 1.0 + backward, copy + max(count * 1.0, backward, copy)


@settings(max_examples=40)
@given(st.floats(0.0, 12.0), st.integers(4, 10))
@example(idle=4.0, count=8)
def test_ranks_that_wait_for_others_recompute_what_their_copies_take_too_long_for(idle: float, count: int) -> None:
    """Where what is waited for is said of passes, copies may run meanwhile, if they take no longer than the step."""
    layers, kept, one, none = layers_of(count), np.ones(2), np.ones((1, 2)), np.zeros((1, 2))
    host = Host(RATE, math.inf, one, one, (one, none), (one, none), none[0])
    works = replace(folded(layers, 2, kept, ends=False, stages=2, hops=0), idle=(idle, idle), ahead=np.zeros(2))
    together = replace(works, by_passes=True)
    (found,) = least_seconds(layers, [FREE], together, 1, ROOM, host)
    steps = [
        max(*(copied for _, copied in some), sum(passes for passes, _ in some) / 2 + idle * 3.0, count * (1.0 + 1.2))
        for shares in shares_of(count, 2)
        for some in itertools.product(*(list(choices(number))[::8] for number in shares))
    ]
    assert found <= min(steps) * ROUNDED
    assert found >= 0.97 * min(steps)
    (waiting,) = least_seconds(layers, [FREE], works, 1, 1e9)
    (copying,) = least_seconds(layers, [FREE], replace(together, idle=(0.0, 0.0)), 1, ROOM, host)
    assert found >= max(waiting, copying) * (1 - 1e-9)


def test_what_is_recomputed_for_copies_adds_to_what_is_waited_for() -> None:
    """They take less than a step by themselves, so each alone says less than both."""
    layers, one, none = layers_of(8), np.ones((1, 2)), np.zeros((1, 2))
    host = Host(RATE, math.inf, one, one, (one, none), (one, none), none[0])
    works = replace(folded(layers, 2, np.ones(2), ends=False, stages=2, hops=0), idle=(3.0, 3.0), ahead=np.zeros(2))
    together = replace(works, by_passes=True)
    (waiting,) = least_seconds(layers, [FREE], works, 1, 1e9)
    (copying,) = least_seconds(layers, [FREE], replace(together, idle=(0.0, 0.0)), 1, ROOM, host)
    (found,) = least_seconds(layers, [FREE], together, 1, ROOM, host)
    assert found > max(waiting, copying) * 1.005


def test_what_paths_wait_for_comes_beside_copies() -> None:
    """These may run while a path is elsewhere."""
    layers = replace(layers_of(4), saved=np.array([1.0]), extra=np.array([0.0]))
    counts, one, none = Interleaving().counts(2, 2, 8, 4, ends=True), np.ones((1, 2)), np.zeros((1, 2))
    works = replace(placed(layers, looped(2, 2), counts, 8, np.ones(2), ends=True), idle=(100.0, 100.0))
    host = Host(0.01, math.inf, one, one, (one, none), (one, none), none[0])
    (found,) = least_seconds(layers, [FREE], works, 8, 0.0, host)
    assert found == pytest.approx(2 * 2 / 0.01 + 3.0), "two layers of the second rank, which waits for one"
