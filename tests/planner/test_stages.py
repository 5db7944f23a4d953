"""Cuts into stages against brute force."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import StageError
from autopar.planner.stages import FoundCuts, Unit, even_partition, find_partition, leanest_partition, partition
from tests.pinned import compile_pinned
from tests.random_models import Recipe, case_of


def unit(seconds: float, *, state: int = 0, saved: int = 0, cut: float = 0.0, layer: bool = True) -> Unit:
    return Unit("layer", seconds, state, saved, cut, layer)


def slowest(units: list[Unit], starts: tuple[int, ...]) -> float:
    ends = [*starts[1:], len(units)]
    send = [0.0, *(u.cut_seconds for u in units[1:]), 0.0]
    work = [sum(u.seconds for u in units[a:b]) for a, b in zip(starts, ends, strict=True)]
    return max(w + send[a] + send[b] for w, a, b in zip(work, starts, ends, strict=True))


@given(st.lists(st.integers(1, 9), min_size=3, max_size=7), st.lists(st.integers(0, 3), min_size=7, max_size=7))
def test_equals_brute_force(times: list[int], cuts: list[int]) -> None:
    units = [unit(t * 1e-3, cut=c * 1e-3) for t, c in zip(times, cuts, strict=False)]
    found = partition(units, [3, 2, 1], None)
    best = min(slowest(units, (0, *inner)) for inner in itertools.combinations(range(1, len(units)), 2))
    assert found.slowest_seconds == pytest.approx(best)
    assert slowest(units, found.starts) == pytest.approx(best)
    assert found.bound_seconds == pytest.approx(best)


def test_a_heavy_head_gets_fewer_layers() -> None:
    units = [unit(0.1), *[unit(1.0)] * 6, unit(3.0)]
    assert partition(units, [2, 1], None).starts == (0, 5)


def test_microbatches_in_flight_count_against_the_budget() -> None:
    units = [unit(1.0, saved=2**30)] * 4
    assert partition(units, [2, 1], 3 * 2**30).starts == (0, 1)
    with pytest.raises(StageError, match=r"fits the 1 GiB .* the leanest needs 3 GiB"):
        partition(units, [2, 1], 2**30)


def test_fewer_units_than_stages() -> None:
    with pytest.raises(StageError, match="use pp <= 2"):
        partition([unit(1.0)] * 2, [3, 2, 1], None)


@given(st.lists(st.integers(1, 9), min_size=6, max_size=9))
def test_chunks_balance_ranks_not_stages(times: list[int]) -> None:
    """Two stages on each of two ranks, in a V: what counts is the sum of a rank's stages."""
    units = [unit(t * 1e-3) for t in times]
    placement = (0, 1, 1, 0)
    found = partition(units, [2, 2, 2, 2], None, placement)

    def pace(starts: tuple[int, ...]) -> float:
        ends = (*starts[1:], len(units))
        work = [sum(u.seconds for u in units[a:b]) for a, b in zip(starts, ends, strict=True)]
        return max(work[0] + work[3], work[1] + work[2])

    best = min(pace((0, *inner)) for inner in itertools.combinations(range(1, len(units)), 3))
    assert pace(found.starts) == pytest.approx(best)
    assert found.slowest_seconds == pytest.approx(best)


def test_the_stages_of_a_rank_share_its_memory() -> None:
    units = [unit(1.0, saved=2**30)] * 4
    assert partition(units, [1, 1, 1, 1], 2 * 2**30, (0, 1, 1, 0)).starts == (0, 1, 2, 3)
    with pytest.raises(StageError, match=r"fits the 1 GiB .* the leanest needs 2 GiB"):
        partition(units, [1, 1, 1, 1], 2**30, (0, 1, 1, 0))


def test_too_many_chunks() -> None:
    with pytest.raises(StageError, match="fewer than pp=2 x 2 chunks; use pp x chunks <= 3"):
        partition([unit(1.0)] * 3, [1] * 4, None, (0, 1, 0, 1))


def test_even_cuts_count_layers() -> None:
    """The embedding stays before the first layer, norm and head behind the last, whatever they cost."""
    units = [unit(9.0, layer=False), *[unit(1.0)] * 7, unit(9.0, layer=False)]
    found = even_partition(units, 3)
    assert found.starts == (0, 4, 6)
    assert found.slowest_seconds == 12.0
    with pytest.raises(StageError, match="the model has 7 units"):
        even_partition(units, 8)
    assert even_partition([unit(1.0, layer=False)], 1).starts == (0,)


def test_even_cuts_count_layers_of_all_kinds() -> None:
    """Windows in every other layer, or a model whose layers all differ."""
    case = case_of(Recipe(layers=4, window=3, uneven=True))
    for vocabulary in ("stage", "redistributed"):
        job = compile_pinned(case.model, 4, sample=case.batch, mesh={"pp": 4}, vocabulary=vocabulary)
        layers = [[name for name in stage if name.startswith("layers.")] for stage in job.plan.stages]
        assert layers == [[f"layers.{k}"] for k in range(4)]


def every_cut(units: list[Unit], stages: int) -> list[tuple[int, ...]]:
    return [(0, *inner) for inner in itertools.combinations(range(1, len(units)), stages - 1)]


def sizes(units: list[Unit], starts: tuple[int, ...], inflight: list[int]) -> list[int]:
    ends = [*starts[1:], len(units)]
    return [
        sum(u.state_bytes + n * u.saved_bytes for u in units[a:b])
        for n, a, b in zip(inflight, starts, ends, strict=True)
    ]


KIB = 2**10


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5), st.integers(0, 3)), min_size=4, max_size=8))
def test_of_the_fastest_cuts_within_the_budget_the_leanest(rows: list[tuple[int, int, int]]) -> None:
    units = [unit(t * 1e-3, state=s * KIB, saved=a * KIB) for t, s, a in rows]
    inflight = [3, 2, 1]
    largest = {starts: max(sizes(units, starts, inflight)) for starts in every_cut(units, 3)}
    budget = sorted(largest.values())[len(largest) // 2]
    found = partition(units, inflight, budget)
    assert largest[found.starts] <= budget
    best = min((slowest(units, starts), bytes_) for starts, bytes_ in largest.items() if bytes_ <= budget)
    assert slowest(units, found.starts) == pytest.approx(best[0])
    fastest = [s for s, b in largest.items() if b <= budget and slowest(units, s) <= best[0] * (1 + 1e-9)]
    assert largest[found.starts] == min(largest[s] for s in fastest)


@pytest.mark.parametrize(("ranks", "chunks", "layers"), [(4, 3, 32), (8, 2, 58), (16, 4, 126)])
def test_many_chunks_of_equal_layers_are_cut_to_the_bound(ranks: int, chunks: int, layers: int) -> None:
    """Too many cuts to try: the search reaches what no cut can beat, with stages nearly alike."""
    units = [unit(0.1), *[unit(1.0, saved=KIB)] * layers, unit(0.4)]
    placement = [*range(ranks)] * chunks
    found = partition(units, [2] * (ranks * chunks), None, placement)
    assert found.slowest_seconds == pytest.approx(found.bound_seconds)
    assert slowest(units, found.starts) <= -(-layers // (ranks * chunks)) + 1


@given(st.lists(st.integers(1, 9), min_size=6, max_size=9), st.integers(0, 3))
def test_the_bound_of_chunks_is_below_every_cut(times: list[int], cut: int) -> None:
    units = [unit(t * 1e-3, cut=cut * 1e-3) for t in times]
    found = partition(units, [2] * 4, None, (0, 1, 0, 1))
    assert found.bound_seconds <= found.slowest_seconds * (1 + 1e-9)
    assert found.bound_seconds >= (sum(times) + 6 * cut) * 1e-3 / 2 * (1 - 1e-9)


def test_found_cuts_are_those_of_their_own_demand() -> None:
    """Of jobs that differ in one thing each, asked in turn and again."""
    units = [Unit(f"unit {i}", 1.0 + i % 3, 512 * (i % 4), 2048 * i, 0.1) for i in range(9)]
    heavier = [replace(unit, saved_bytes=4 * unit.saved_bytes) for unit in units]
    jobs: list[tuple[Any, ...]] = [
        (units, (4, 2, 1), None, (0, 1, 2), 0, 8),
        (heavier, (4, 2, 1), None, (0, 1, 2), 0, 8),
        (units, (4, 2, 1), 1 << 16, (0, 1, 2), 0, 8),
        (heavier, (4, 2, 1), 1 << 16, (0, 1, 2), 0, 8),
        (units, (1, 2, 9), 1 << 16, (0, 1, 2), 0, 8),
        (units, (4, 2, 1), 1 << 16, (0, 1, 0), 0, 8),
        (units, (4, 2, 1), 1 << 16, (0, 1, 2), 1 << 13, 8),
        (units, (4, 2, 1), 1 << 16, (0, 1, 0), 0, 1),
    ]
    cuts = FoundCuts()
    for job in (*jobs, *jobs):
        assert cuts.fastest(*job) == find_partition(*job)
        first, inflight, _, placement, shared, _ = job
        assert cuts.leanest(first, inflight, placement, shared) == leanest_partition(*job[:2], placement, shared)[0]
    assert len({cuts.fastest(*job) for job in jobs}) == 4
