"""Which regions are looked at to find a first good plan, and in which order."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autopar.search import dive
from autopar.search.learned import Learned
from autopar.search.search import Search
from autopar.search.space import Region
from tests.fast_cluster import FAST
from tests.search.spaces import BATCH, PLAIN, experts_on, search_of


def runs_of(search: Search, monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[str, ...], list[Region], float]]:
    """What is on the host in each dive, its regions, and the best step before it."""
    found, run = [], dive._Dive.run

    def noted(own: dive._Dive, some: list[Region]) -> None:
        found.append((own.offload, some, search.best_seconds))
        run(own, some)

    monkeypatch.setattr(dive._Dive, "run", noted)
    search.glance()
    return found


@pytest.mark.slow
def test_experts_on_ranks_of_tp_are_looked_at_within_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at first: by then most are no better than the best."""
    first, *others = runs_of(experts_on(replace(FAST, devices_per_node=2), 4, **PLAIN), monkeypatch)
    assert not any(region.mesh.borrowed for region in first[1])
    borrowed = [region.mesh for _, some, _ in others for region in some if region.mesh.borrowed]
    assert borrowed
    assert all(mesh.tp * mesh.cp <= 2 for mesh in borrowed)


@pytest.mark.slow
@pytest.mark.parametrize("patience", [0.0, math.inf])
def test_where_nothing_fits_for_long_activations_go_to_the_host(
    patience: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dive, "_PATIENCE", patience)
    host = replace(FAST, device=replace(FAST.device, host_memory_bytes=10**12, host_bytes_per_second=1e12))
    search = search_of("gpt2", BATCH, 4, host, budget_bytes=10**6, head_chunks=1)
    (first, _, _), (second, _, least), *_ = runs_of(search, monkeypatch)
    assert first == ()
    assert (second == ("activations",) and math.isinf(least)) == (patience == 0.0)


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
