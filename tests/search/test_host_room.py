"""Bounds and estimates of what may send activations to a host that has little memory."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from autopar.mesh import Mesh
from autopar.preparation import Captured, Prepared
from autopar.search import searching
from autopar.search.loop import Search
from autopar.search.space import Point, Region
from tests.fast_cluster import FAST
from tests.search.spaces import pins_of
from tests.simulate.test_replay import Layers

ROUNDED = 1 + 1e-9
BUDGET = 4600 << 10
REGION = Region(Mesh(pp=2), 1024, 8)


@cache
def layers() -> Prepared:
    return Captured(Layers(24, 128), {"x": torch.randn(8192, 128)}).on("cpu")


def begun(host_bytes: int, chunks: int, **given: Any) -> tuple[Search, Point]:
    """Layers on two ranks with so many stages each, in an order that copies fit in."""
    cluster = replace(FAST, device=replace(FAST.device, host_memory_bytes=host_bytes))
    pinned: dict[str, Any] = {"mesh": {"pp": 2}, "schedule": "interleaved", "chunks": chunks, "zero": 0}
    search = searching(layers(), pins_of(2, **pinned, head_chunks=1, budget_bytes=BUDGET, **given), cluster, {})
    search._begin()
    search.place(REGION)
    (point,) = search.points_of(REGION)
    return search, point


@pytest.mark.parametrize("chunks", [2, 4])
def test_less_room_on_the_host_makes_steps_longer(chunks: int) -> None:
    found = []
    for host_bytes in (10**12, 10**6, 850_000):
        search, point = begun(host_bytes, chunks, offload=("activations",))
        profile = search.profile(REGION)
        assert profile is not None
        (bound,), (estimate,) = search.bounds([point], profile), search.estimates([point], profile)
        region, seconds = search.region_bound(REGION), search.lay_out(point).step_seconds
        assert region <= bound * ROUNDED
        assert bound <= seconds * ROUNDED
        found.append((region, bound, estimate, seconds))
    for figures in zip(*found, strict=True):
        assert list(figures) == sorted(figures)
        assert figures[-1] > figures[0]
