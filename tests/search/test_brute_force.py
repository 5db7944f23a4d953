"""The search against laying out its whole space: what it finds, what it proves, and each bound on the way."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from autopar import Cluster
from autopar.errors import AutoparError
from autopar.mesh import Mesh
from autopar.planner.modes import MODES
from autopar.preparation import Captured
from autopar.schedules.registry import SCHEDULES
from autopar.search import proof, searching
from autopar.search import search as module
from autopar.search.choose import _build
from autopar.search.reckoning import TOLERANCE
from autopar.search.search import Search
from autopar.search.space import Point, Region
from tests.fast_cluster import BUSY, FAST, SLOW_NETWORK
from tests.models import llama
from tests.models import prepared as made
from tests.search.spaces import brute_force, every_point, experts_on, pins_of, prepared, search_of

ROUNDED = 1 + 1e-9
SLOW = replace(
    BUSY,
    intra_node=replace(BUSY.intra_node, bytes_per_second=1e6, held_multiprocessors=8),
    inter_node=replace(BUSY.inter_node, bytes_per_second=0.5e6),
)
HOSTS = replace(FAST, device=replace(FAST.device, host_call_seconds=1e-5))
CLUSTERS = {"fast": FAST, "cpu": Cluster.load("cpu"), "h100": Cluster.load("h100"), "busy": BUSY, "slow": SLOW}
CLUSTERS["hosts"] = HOSTS  # which take longer than devices
SMALL = [
    ("mlp", 2, 2, "cpu", 5, {}),
    ("mlp", 4, 4, "fast", 61, {}),
    ("gpt2", 2, 2, "fast", 61, {}),
]
MOVING = [  # weights, over links that are slow and take multiprocessors
    ("gpt2", 8, 4, "busy", 1, {"mesh": {"tp": 2, "dp": 2}, "offload": (), "head_chunks": 1}),
    ("gpt2", 8, 4, "slow", 7, {"mesh": {"tp": 2, "dp": 2}, "offload": (), "head_chunks": 1}),
    ("llama", 8, 4, "slow", 1, {"mesh": {"tp": 2, "dp": 2}, "offload": (), "head_chunks": 1, "zero": 3}),
    ("mlp", 4, 4, "hosts", 97, {}),
]
LARGE = [
    ("gpt2", 4, 4, "h100", 97, {}),
    ("gpt2", 4, 4, "fast", 13, {"zero": 1, "offload": (), "head_chunks": 1, "vocabulary": "redistributed"}),
    ("llama", 4, 4, "cpu", 97, {}),
    ("llama", 8, 8, "fast", 97, {"zero": 0, "offload": (), "head_chunks": 1, "mesh": {"cp": 1}}),
]
TIGHT = [  # MiB that force recomputation, ZeRO or offload
    ("gpt2", 8, 2, "fast", 13, {"budget_bytes": 3 << 20}),
    ("gpt2", 8, 4, "h100", 97, {"budget_bytes": 2 << 20}),
]


def check(name: str, batch: int, gpus: int, cluster: str, every: int, given: dict[str, Any]) -> float:
    """Returns the share of the best step that is proven."""
    return checked(search_of(name, batch, gpus, CLUSTERS[cluster], **given), every)


def checked(search: Search, every: int) -> float:
    """The same of one that hasn't begun."""
    found, tried = brute_force(search, every)
    assert found.points == sum(1 for _ in every_point(search))
    assert found.outcomes, "something fits"
    assert tried
    least = min(one.outcome.step_seconds for one in tried)
    assert found.bound_seconds <= min(least, found.outcomes[0].step_seconds) * ROUNDED
    if found.bound_seconds >= found.outcomes[0].step_seconds * (1 - search.tolerance):
        assert found.outcomes[0].step_seconds * (1 - search.tolerance) <= least * ROUNDED
    for one in tried:
        assert max(one.bounds) <= one.outcome.step_seconds * ROUNDED, one
    return found.bound_seconds / found.outcomes[0].step_seconds


@pytest.mark.parametrize(("name", "batch", "gpus", "cluster", "every", "given"), SMALL)
def test_small_spaces(name: str, batch: int, gpus: int, cluster: str, every: int, given: dict[str, Any]) -> None:
    """What is left out would show as a gap: these are searched to the end."""
    assert check(name, batch, gpus, cluster, every, given) >= 1 - TOLERANCE


@pytest.mark.parametrize("aim", [1e-3, 1.0, 1e3])
def test_what_a_proof_aims_at_until_a_plan_is_known_proves_nothing(aim: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be too low, or nothing; and no plan may be known then, either."""
    monkeypatch.setattr(proof, "_AIM", aim)
    monkeypatch.setattr(module, "dive", lambda *_: None)
    assert check("mlp", 4, 4, "fast", 61, {}) >= 1 - TOLERANCE


@pytest.mark.parametrize("aim", [1e-3, 1e3])
@pytest.mark.parametrize(("mesh", "budget"), [({"dp": 2}, 5 << 19), ({"pp": 2}, 3 << 19)], ids=str)
def test_what_saves_memory_is_looked_at_by_the_proof_itself(
    monkeypatch: pytest.MonkeyPatch, mesh: dict[str, int], budget: int, aim: float
) -> None:
    """Also where its points were looked at before anything was known that they may be worse than."""
    monkeypatch.setattr(proof, "_AIM", aim)
    monkeypatch.setattr(module, "dive", lambda *_: None)
    given = {"schedule": "1f1b", "microbatch": 2, "vocabulary": "redistributed", "zero": 0, "budget_bytes": budget}
    search = search_of("gpt2", 8, 2, FAST, mesh=mesh, **given)
    assert checked(search, 1) >= 1 - TOLERANCE
    assert search.ranked()[0].point.offload


@pytest.mark.parametrize(("name", "batch", "gpus", "cluster", "every", "given"), MOVING)
def test_weights_that_move(name: str, batch: int, gpus: int, cluster: str, every: int, given: dict[str, Any]) -> None:
    """Some are laid out on placements of their own, which split more weights than the fastest passes ask for."""
    check(name, batch, gpus, cluster, every, given)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "batch", "gpus", "cluster", "every", "given"), [*LARGE, *TIGHT])
def test_larger_spaces(name: str, batch: int, gpus: int, cluster: str, every: int, given: dict[str, Any]) -> None:
    check(name, batch, gpus, cluster, every, given)


@pytest.mark.slow
def test_tokens_that_go_once_to_each_node() -> None:
    """Where they do on some placements, and on others, which these bound, don't; and experts may be over cp and tp."""
    given = {"mesh": {"pp": 1}, "zero": 0, "offload": (), "head_chunks": 1, "recompute": "none"}
    search = experts_on(SLOW_NETWORK, 4, choices=4, **given)
    checked(search, 1)
    known = search.profiler.known.values()
    assert {(p.key.ep, row.nodes) for p in known for row in p.placed.remarks.experts} >= {(2, 1), (4, 2)}


def test_rows_of_a_whole_vocabulary_are_aligned_as_those_of_one_that_pipeline_ranks_share() -> None:
    """So what each of these takes of the head is no less than its part of what one rank takes for all."""
    case = made(lambda: llama(8, vocabulary=1001), torch.float32)
    captured = Captured(case.model, case.batch, case.loss, precision="bf16").on("cpu")
    given = {"mesh": {"pp": 2}, "microbatch": 2, "zero": 0, "offload": (), "head_chunks": 1, "precision": "bf16"}
    search = searching(captured, pins_of(2, **given), FAST, {})
    checked(search, 1)
    assert {bool(MODES[outcome.point.vocabulary].head) for outcome in search.outcomes} == {False, True}


def test_what_was_found_is_what_is_built() -> None:
    """The shared placement of a region's key costs what one of the point's own does."""
    search = search_of("mlp", 4, 2, FAST)
    found = search.run()
    for outcome in found.outcomes[:3]:
        built = _build(search, outcome.point, None)
        assert built.plan.step_seconds == pytest.approx(outcome.step_seconds, rel=1e-3)


def test_a_profile_without_copies_is_none_of_ranks_with_copies() -> None:
    """Gradients are summed over dp, which one that was placed without dp doesn't know of."""
    search = search_of("mlp", 4, 4, FAST, microbatch=1)
    search.run()
    for key, profile in search.profiler.known.items():
        assert key.copies == (profile.placed.request.mesh.dp > 1)
        assert key.several == (profile.placed.request.microbatches > 1)


def test_two_searches_find_the_same() -> None:
    first, second = (search_of("mlp", 4, 4, FAST).run() for _ in range(2))
    assert first.outcomes == second.outcomes
    assert (first.bound_seconds, first.points, first.placed, first.laid_out) == (
        second.bound_seconds,
        second.points,
        second.placed,
        second.laid_out,
    )
    assert prepared("mlp", 4) is prepared("mlp", 4)


@pytest.mark.slow
@pytest.mark.parametrize("region", [Region(Mesh(pp=2, dp=2), 1, 4), Region(Mesh(dp=4), 1, 2)], ids=str)
def test_what_just_fits_isnt_said_not_to(region: Region) -> None:
    """In budgets of what a point holds when it may hold anything, and of less, as long as it fits."""
    roomy = search_of("gpt2", 8, 4, FAST)
    roomy.glance()
    roomy.place(region)
    points, fitting = list(roomy.points_of(region))[:: 1 if region.mesh.pp == 1 else 24], 0
    for point, share in itertools.product(points, (1.0, 0.8, 0.6)):
        try:
            budget = int(share * roomy.lay_out(point).peak_bytes)
            tight = search_of("gpt2", 8, 4, FAST, budget_bytes=budget)
            tight._begin()
            profile = tight.place(region)
            seconds = tight.lay_out(point).step_seconds
        except AutoparError:
            continue
        assert profile is not None
        bounds = [*tight.bounds([point], profile), tight.costing.memory_bound(point, profile)]
        assert max(*bounds, tight.region_bound(region)) <= seconds * ROUNDED, (point, budget)
        fitting += 1
    assert fitting > 3


@pytest.mark.slow
@pytest.mark.parametrize("offload", [(), ("activations",)], ids=["here", "away"])
def test_what_just_fits_has_room_for_what_weights_gradients_need(offload: tuple[str, ...]) -> None:
    """In less and less memory, with a host that is slow: of few microbatches that is most of what a rank keeps.
    Copies both ways at once are slower still."""
    host = {"host_memory_bytes": 10**12, "host_bytes_per_second": 1e8, "host_duplex_bytes_per_second": 7e7}
    device = replace(FAST.device, **host, element_seconds=1e-10)
    cluster = replace(FAST, device=device)
    roomy, fitting, tight_ones = search_of("gpt2", 8, 4, cluster), 0, 0
    roomy._begin()
    points = list[Point]()
    for region in (Region(Mesh(pp=2, dp=2), 4, 1), Region(Mesh(pp=4), 1, 8)):
        roomy.place(region)
        points += [p for p in roomy.points_of(region) if SCHEDULES[p.schedule].splits_backward and p.zero != 1][::7]
    for point, share in itertools.product(points, (1.0, 0.8, 0.6)):
        try:
            budget = int(share * roomy.lay_out(point).peak_bytes)
            tight = search_of("gpt2", 8, 4, cluster, budget_bytes=budget)
            tight._begin()
            profile, here = tight.place(point.region), point._replace(offload=offload)
            seconds = tight.lay_out(here).step_seconds
        except AutoparError:
            continue
        assert profile is not None
        (bound,), (passes,) = tight.bounds([here], profile), tight.bounds([here], profile, memory=False)
        assert max(bound, tight.region_bound(point.region)) <= seconds * ROUNDED, (here, budget)
        fitting, tight_ones = fitting + 1, tight_ones + (bound > passes * ROUNDED)
    assert fitting > 3
    assert tight_ones > 1, "memory says more than passes"


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_what_comes_after_passes_is_no_less_after_longer_ones(zero: int) -> None:
    """Which hide more of what is copied to the host beside them."""
    device = replace(FAST.device, host_memory_bytes=10**12, host_bytes_per_second=1e7)
    given: dict[str, Any] = {"offload": ("optimizer",), "zero": zero, "head_chunks": 1}
    search = search_of("gpt2", 8, 2, replace(FAST, device=device), **given)
    search._begin()
    region = Region(Mesh(dp=2), 2, 2)
    profile = search.place(region)
    assert profile is not None
    (point, *_) = search.points_of(region)
    slower = replace(profile, units=[replace(unit, backward=1e6 * unit.backward) for unit in profile.units])
    after = search.costing.after_seconds(point, profile)
    longest, shortest = (search.costing.under(search.pins.options)._update_seconds(point, p) for p in (slower, profile))
    assert 0 < after <= longest * ROUNDED
    assert longest < shortest


def test_a_region_that_is_placed_is_bounded_by_its_own_passes() -> None:
    """Which take longer than their part of what the whole batch takes."""
    search, region = search_of("gpt2", 8, 4, FAST), Region(Mesh(dp=2, tp=2), 1, 4)
    search._begin()
    before, profile = search.region_bound(region), search.place(region)
    assert profile is not None
    every = [point for point in every_point(search) if point.region == region]
    families = {point.family: [other for other in every if other.family == point.family] for point in every}
    least = min(bound for points in families.values() for bound in search.bounds(points, profile))
    assert 1.1 * before < search.region_bound(region) <= least * ROUNDED


def test_ranks_that_fill_up_before_their_first_backward_copy_beside_forwards_alone() -> None:
    """An interleaved schedule, with seven tenths of the memory."""
    device = replace(FAST.device, host_memory_bytes=10**12, host_bytes_per_second=1e8)
    given: dict[str, Any] = {"schedule": "interleaved", "chunks": 2, "recompute": "none", "zero": 0, "head_chunks": 1}
    region = Region(Mesh(pp=2), 1, 8)

    def begun(**more: Any) -> tuple[Search, Point]:
        cluster = replace(FAST, device=device)
        search = search_of("gpt2", 8, 2, cluster, mesh={"pp": 2}, vocabulary="redistributed", **given, **more)
        search._begin()
        assert search.place(region) is not None
        (point,) = search.points_of(region)
        return search, point

    roomy, point = begun(offload=())
    budget = int(0.7 * roomy.lay_out(point).peak_bytes)
    tight, point = begun(offload=("activations",), budget_bytes=budget)
    profile = tight.profile(region)
    assert profile is not None
    assert 1.1 * roomy.region_bound(region) < tight.region_bound(region) <= tight.bounds([point], profile)[0] * ROUNDED
