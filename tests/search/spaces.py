"""Searches of small models, and all points of their spaces."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

from autopar import Cluster
from autopar.errors import AutoparError
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.planner.budget import Exact
from autopar.planner.build import Built
from autopar.preparation import Captured, Prepared
from autopar.search import Pins, searching
from autopar.search.outcomes import Found, Outcome
from autopar.search.search import Search
from autopar.search.space import Point, Region, regions, savers
from tests.fast_cluster import FAST
from tests.models import make
from tests.models import prepared as made
from tests.moe_models import family

CLUSTERS: Final = {"fast": FAST, "cpu": Cluster.load("cpu"), "h100": Cluster.load("h100")}
PLAIN: Final[dict[str, Any]] = {"offload": (), "head_chunks": 1, "vocabulary": "redistributed"}
BATCH: Final = 8


@cache
def prepared(name: str, batch: int) -> Prepared:
    case = make(name, batch)
    return Captured(case.model, case.batch, case.loss).on("cpu")


def pins_of(gpus: int, **given: Any) -> Pins:
    """What a user would have pinned."""
    options = {name: value for name, value in given.items() if name in Options.model_fields}
    rest = {name: value for name, value in given.items() if name not in options}
    return Pins(gpus, options=Options.of(**options), given=frozenset(options), **rest)


def search_of(name: str, batch: int, gpus: int, cluster: Cluster, **given: Any) -> Search:
    """One that hasn't begun."""
    return searching(prepared(name, batch), pins_of(gpus, **given), cluster, {})


def hiding(bytes_: int) -> Exact[Built]:
    """As if each rank held so many bytes that nothing counts."""

    def measured(built: Built, enough: float) -> Built:
        ranks = [rank.model_copy(update={"peak_bytes": rank.peak_bytes + bytes_}) for rank in built.plan.rank_plans]
        return replace(built, plan=built.plan.model_copy(update={"rank_plans": ranks}).sealed())

    return measured


def experts_on(cluster: Cluster, gpus: int, choices: int = 2, **given: Any) -> Search:
    """Of a batch of 8 and eight experts, of which a token takes so many, in two layers."""
    case = made(lambda: family("mixtral", 8, top_k=choices, output_router_logits=False))
    return searching(Captured(case.model, case.batch, case.loss).on("cpu"), pins_of(gpus, **given), cluster, {})


def space(name: str, gpus: int, cluster: str, **given: Any) -> Search:
    return search_of(name, BATCH, gpus, CLUSTERS[cluster], **PLAIN, **given)


def piped() -> tuple[Search, Region, list[Point]]:
    """Points of a region with a pipeline, of which nothing is on the host."""
    search, region = search_of("gpt2", BATCH, 4, FAST, offload=(), head_chunks=1), Region(Mesh(pp=2, dp=2), 1, 4)
    search._begin()
    assert search.place(region) is not None
    return search, region, list(search.points_of(region))


def every_point(search: Search) -> Iterator[Point]:
    for region in regions(search.sizes, search.pins):
        for point in search.points_of(region):
            for offload, chunks in savers(point.family, search.costing.cluster, search.pins):
                yield point._replace(offload=offload, head_chunks=chunks)


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


@dataclass(frozen=True)
class Tried:
    """A point that was laid out, and what was said of it before."""

    outcome: Outcome
    by_region: float
    by_family: float
    by_family_passes: float
    by_passes: float
    by_memory: float

    @property
    def bounds(self) -> tuple[float, ...]:
        return self.by_region, self.by_family, self.by_family_passes, self.by_passes, self.by_memory


def brute_force(search: Search, every: int) -> tuple[Found, list[Tried]]:
    """What ``search`` finds, and then each ``every``-th point of its space that can run and fits."""
    found = search.run()
    tried = []
    for point in itertools.islice(every_point(search), 0, None, every):
        profile = search.place(point.region)
        try:
            outcome = search.lay_out(point)
        except AutoparError:
            continue
        assert profile is not None
        region, costing = search.region_bound(point.region), search.costing
        (family,), (passes,) = (search.bounds([point], profile, memory=memory) for memory in (True, False))
        own = costing.bound(point, profile), costing.memory_bound(point, profile)
        tried.append(Tried(outcome, region, family, passes, *own))
    return found, tried
