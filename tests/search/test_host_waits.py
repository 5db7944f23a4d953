"""Passes that wait for their host, which reads what routers chose: in bounds and in estimates of searches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, Final

import numpy as np
import pytest

from autopar.cluster import Cluster
from autopar.cost_models import step
from autopar.errors import AutoparError
from autopar.mesh import Mesh
from autopar.search import climb
from autopar.search import dive as dives
from autopar.search.dive import dive
from autopar.search.keeping import EQUAL, Keeping
from autopar.search.layers import layer_block
from autopar.search.learned import Learned
from autopar.search.profiles import Profile
from autopar.search.ranks import waited
from autopar.search.search import Search
from autopar.search.space import Point, Region, promise
from tests.fast_cluster import FAST
from tests.search.spaces import every_point, experts_on, search_of

CALL: Final = 2e-5
OFF: Final = 0.25


def slow_host(cluster: Cluster = FAST) -> Cluster:
    """One that takes longer than the device for all passes."""
    return replace(cluster, device=replace(cluster.device, host_call_seconds=CALL))


@pytest.fixture(scope="module")
def waiting() -> Search:
    search = experts_on(slow_host(), 4, offload=(), head_chunks=1)
    search.glance()
    return search


def some(search: Search, every: int) -> Iterator[tuple[Point, float]]:
    """Points with the seconds of their steps."""
    for point in itertools.islice(every_point(search), 0, None, every):
        search.place(point.region)
        try:
            yield point, search.lay_out(point).step_seconds
        except AutoparError:
            continue


@pytest.mark.slow
def test_nothing_is_below_what_passes_wait(waiting: Search) -> None:
    tried = tight = orders = 0
    for point, seconds in some(waiting, 7):
        profile = waiting.profile(point.region)
        assert profile is not None
        costing = waiting.costing
        least = max(costing.host_waits(point, profile), costing.least_issued(point, profile))
        assert least <= seconds * (1 + 1e-9), point
        assert waiting.costing.bound(point, profile) <= seconds * (1 + 1e-9), point
        tried, tight = tried + 1, tight + (least > 0.6 * seconds)
        issued = waiting.costing.passes_issued(point.region, profile.inner_calls)
        orders += point.region.mesh.pp > 1 and least > 1.2 * issued
    assert tried >= 20
    assert tight > tried / 3
    assert orders, "ranks wait for each other's hosts, too"


def test_what_hosts_issue_passes_in_they_may_issue_beside_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where hosts take longer than devices for passes, and these have much to update, a step is as long as one of
    both."""
    updates = partial(_longer, step.optimizer_seconds)
    monkeypatch.setattr(step, "optimizer_seconds", updates)
    search = search_of("mlp", 4, 2, slow_host(), offload=(), head_chunks=1)
    search.glance()
    hosts = tried = 0
    for point, seconds in some(search, 7):
        profile, costing = search.profile(point.region), search.costing
        assert profile is not None
        bounds = [costing.bound(point, profile), *search.bounds([point], profile)]
        assert max(bounds) <= seconds * (1 + 1e-9), point
        issued = costing.least_issued(point, profile)
        tried, hosts = tried + 1, hosts + (issued + costing.after_seconds(point, profile) > seconds)
    assert tried >= 10
    assert hosts >= 3, "else one could follow the other"


def _longer(seconds: Callable[..., float], *what: Any, **where: Any) -> float:
    return 1000 * seconds(*what, **where)


@pytest.mark.slow
def test_estimates_know_what_passes_wait(waiting: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    laid_out = list(some(waiting, 11))
    assert len(laid_out) >= 15

    def off() -> float:
        """How far half of the estimates are off at least."""
        found = []
        for point, seconds in laid_out:
            profile = waiting.profile(point.region)
            assert profile is not None
            found.append(abs(waiting.estimates([point], profile)[0] / seconds - 1))
        return median(found)

    known = off()
    monkeypatch.setattr(Profile, "host_passes", lambda self, block: (0.0, 0.0))
    assert known < OFF
    assert off() > 1.5 * known


@pytest.mark.slow
def test_only_layers_that_read_what_routers_chose_wait(waiting: Search) -> None:
    profile = waiting.root
    waits = [any(profile.host_passes(unit.block)) for unit in profile.units]
    assert waits == [profile.costs[unit.block].reads_counts for unit in profile.units]
    assert any(waits)
    assert not all(waits)
    assert [bool(unit.seconds) for unit in profile.host_units] == waits
    plain = search_of("gpt2", 8, 4, slow_host())
    plain.glance()
    assert not plain.root.host_units


def test_a_region_that_is_not_placed_waits_as_those_on_one_axis_do(waiting: Search) -> None:
    block, scaling, tried = layer_block(waiting.root), waiting.scaling, 0
    assert block is not None
    for profile in waiting.references.known():
        if len(profile.key.axes()) == 1 and not profile.key.borrowed:
            found, own, least = (
                np.array(each)
                for each in (
                    scaling.likely(profile.key).host,
                    profile.host_passes(block),
                    waiting.root.host_passes(block),
                )
            )
            assert (found >= np.maximum(own, least)).all()
            tried += 1
    assert tried


@pytest.mark.parametrize(("ranks", "microbatches", "chunks"), [(4, 1, 2), (4, 2, 3), (8, 2, 2), (4, 4, 2), (4, 8, 2)])
def test_few_microbatches_wait_until_the_first_is_back(ranks: int, microbatches: int, chunks: int) -> None:
    found = Keeping().likely("interleaved", ranks, microbatches, chunks, "", EQUAL).waits
    assert waited(ranks, microbatches, chunks) == pytest.approx(found, rel=0.05)


def test_what_does_the_same_is_tried_once() -> None:
    """With one microbatch, schedules that only differ in when they do what of several have one order."""
    region = Region(Mesh(pp=2, dp=2), 4, 1)
    point, learned = Point(region, "zb-h1", None, "redistributed", 1, 0, (), 1), Learned()
    other = point._replace(schedule="zb-h2")
    search = search_of("gpt2", 8, 4, FAST)
    search.glance()
    search.place(region)
    learned.lay_out(search, point, 1.0)
    assert learned.is_tried(other, 1.0)
    assert search.lay_out(other).step_seconds == search.lay_out(point).step_seconds
    assert not learned.is_tried(other, 1.001)
    assert not learned.is_tried(other._replace(zero=2), 1.0)
    assert not learned.is_tried(other._replace(vocabulary="vocab-1"), 1.0)
    assert not learned.is_tried(other._replace(schedule="zb-v"), 1.0)


def test_what_was_learned_of_some_is_doubted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all that waits is left out because others took longer, what looks best of it is placed all the same."""

    def placed(share: float) -> int:
        monkeypatch.setattr(dives, "_DOUBTED", share)
        monkeypatch.setattr(Learned, "laid_out", lambda self, kind, estimate: 100 * estimate)
        search = search_of("gpt2", 8, 4, FAST, schedule="1f1b", vocabulary="redistributed", offload=())
        found = search._begin()
        dive(search, found)
        return sum(search.profile(region) is not None for region in found)

    assert placed(0.0) < placed(1.0)


def test_what_looks_a_little_worse_is_tried_too() -> None:
    """Of the region of the best; what looks much worse isn't."""
    search = search_of("gpt2", 8, 4, FAST, mesh={"pp": 2, "dp": 2}, offload=(), head_chunks=1)
    search.glance()
    region = search.ranked()[0].point.region
    profile = search.place(region)
    assert profile is not None
    families, learned = [list(search.stored(family)) for family in search.families_of(region)], Learned()
    for _ in range(4):  # of those that look better, until none does
        climb._try_likely(search, region, families, math.inf, learned)
    known, best = set(search.refusals) | {outcome.point for outcome in search.outcomes}, search.best_seconds
    estimates = {
        point: estimate * promise(point)
        for points in families
        for point, estimate in zip(points, search.estimates(points, profile), strict=True)
    }
    worse = {point: estimate for point, estimate in estimates.items() if point not in known and estimate > best}
    hope = 1.01 * min(worse.values()) / best
    laid_out = len(search.outcomes)
    for share in (1.0, 1.05 * hope):
        climb._try_likely(search, region, families, math.inf, learned, hope=share)
        new = [outcome.point for outcome in search.outcomes[laid_out:]]
        assert bool(new) == (share > 1)
    assert all(estimates[point] < 1.05 * hope * best for point in new)
