"""Bounds and estimates where memory is short, of ranks with several stages: whatever layers each of these has, and with
activations on a host that has little memory, too."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from autopar.errors import ArgumentError, AutoparError
from autopar.mesh import Mesh
from autopar.preparation import Captured, Prepared
from autopar.search import choose, searching
from autopar.search.search import Search
from autopar.search.space import Point, Region
from tests.fast_cluster import FAST
from tests.search.spaces import pins_of, prepared, search_of
from tests.simulate.test_replay import Layers

ROUNDED = 1 + 1e-9
REGION = Region(Mesh(pp=2), 1024, 8)
HOSTS = (10**12, 4_000_000, 1)


@cache
def layers() -> Prepared:
    return Captured(Layers(24, 128), {"x": torch.randn(8192, 128)}).on("cpu")


def begun(host_bytes: int, chunks: int, budget_kib: int, **given: Any) -> tuple[Search, Point]:
    """On two ranks with so many stages each."""
    cluster = replace(FAST, device=replace(FAST.device, host_memory_bytes=host_bytes))
    pinned: dict[str, Any] = {"mesh": {"pp": 2}, "schedule": "interleaved", "chunks": chunks, "zero": 0}
    pins = pins_of(2, **pinned, head_chunks=1, budget_bytes=budget_kib << 10, **given)
    search = searching(layers(), pins, cluster, {})
    search._begin()
    search.place(REGION)
    (point,) = search.points_of(REGION)
    return search, point


def figures(search: Search, point: Point) -> tuple[float, float, float, float]:
    """What is said of the region and of the point, what is likely, and what was laid out."""
    profile = search.profile(REGION)
    assert profile is not None
    (bound,), (estimate,) = search.bounds([point], profile), search.estimates([point], profile)
    return search.region_bound(REGION), bound, estimate, search.lay_out(point).step_seconds


@pytest.mark.parametrize(("chunks", "budget_kib"), [(2, 14_000), (4, 16_000)])
def test_a_stage_that_keeps_few_microbatches_may_have_most_layers(chunks: int, budget_kib: int) -> None:
    """With as many layers in each stage, none would fit."""
    search, point = begun(10**12, chunks, budget_kib, offload=())
    region, bound, _, seconds = figures(search, point)
    starts = search.outcomes[-1].layout.fit.cut.starts if search.outcomes[-1].layout else ()
    lengths = [end - start for start, end in zip(starts, [*starts[1:], 26], strict=True)]
    assert max(lengths) > 2 * min(lengths)
    assert region <= bound * ROUNDED
    assert bound <= seconds * ROUNDED


def hosted_bytes() -> int:
    """What the host of one of two ranks has of parameters, gradients and moments that are there, of equal layers."""
    search, point = begun(10**12, 2, 25_000, offload=("optimizer",))
    profile = search.profile(point.region)
    assert profile is not None
    return math.ceil(sum(map(search.costing.hosted_bytes, profile.weights.values())) / 2)


@pytest.mark.parametrize("offload", [("activations",), ("optimizer", "activations")])
@pytest.mark.parametrize(("chunks", "budget_kib"), [(2, 16_000), (4, 14_000), (4, 16_000), (4, 25_000)])
def test_less_room_on_the_host_makes_no_step_shorter(chunks: int, budget_kib: int, offload: tuple[str, ...]) -> None:
    """Beside what of its state is there."""
    found, state = [], hosted_bytes() if "optimizer" in offload else 0
    for host_bytes in HOSTS:
        search, point = begun(state + host_bytes, chunks, budget_kib, offload=offload)
        try:
            found.append(figures(search, point))
        except AutoparError:
            assert found, "it fits with enough on the host"
            continue
        region, bound, _, seconds = found[-1]
        assert region <= bound * ROUNDED
        assert bound <= seconds * ROUNDED
    for each in zip(*found, strict=True):
        assert list(each) == sorted(each)
    assert len(found) < len(HOSTS) or found[-1][2:] > found[0][2:]


def test_a_host_has_to_hold_the_state_that_is_there() -> None:
    state = hosted_bytes()
    for chunks, offload in ((2, ("optimizer",)), (4, ("optimizer", "activations"))):
        for host_bytes, fits in ((state, True), (state - 1, False)):
            search, point = begun(host_bytes, chunks, 25_000, offload=offload)
            profile = search.profile(REGION)
            assert profile is not None
            assert search.costing.may_fit(point, profile) == fits
            assert (search.bounds([point], profile)[0] < math.inf) == fits
            assert (search.least_gpus <= 2) == fits
        with pytest.raises(ArgumentError, match="host memory"):
            search.lay_out(point)


def test_what_only_the_host_is_too_small_for_says_so() -> None:
    """Of two ranks that each have all of it, with room for what both together would have."""
    given: dict[str, Any] = {"mesh": {"dp": 2}, "offload": ("optimizer",)}
    search = search_of("mlp", 4, 2, FAST, zero=0, **given)
    search._begin()
    whole = sum(map(search.costing.hosted_bytes, search.root.weights.values()))
    small = replace(FAST, device=replace(FAST.device, host_memory_bytes=whole * 3 // 4))
    with pytest.raises(ArgumentError, match=r"offload of optimizer needs .* GiB of host memory for each rank"):
        choose(prepared("mlp", 4), pins_of(2, zero=0, **given), small, {})
    assert choose(prepared("mlp", 4), pins_of(2, zero=1, **given), small, {})
    none = replace(FAST, device=replace(FAST.device, host_memory_bytes=0))
    with pytest.raises(ArgumentError, match="no host memory belongs to it"):
        choose(prepared("mlp", 4), pins_of(2, zero=0, **given), none, {})
