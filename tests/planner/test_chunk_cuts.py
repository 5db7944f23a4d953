"""Cuts of pipelines whose ranks hold several stages, against timelines of all cuts."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from autopar.planner.chunk_cuts import _best, _bound, _ByRank, _improved, _moves, _Search, paces
from autopar.planner.cuts import NEVER, CutTable
from autopar.planner.stages import Unit, leanest_partition, partition
from autopar.schedules import Costs, generate, lower, simulate_timeline


def step_seconds(seconds: list[float], starts: tuple[int, ...], microbatches: int) -> float:
    """Of interleaved 1F1B on two ranks; a backward takes two thirds."""
    ends = (*starts[1:], len(seconds))
    stages = [sum(seconds[a:b]) for a, b in zip(starts, ends, strict=True)]
    none = (0.0,) * len(stages)
    costs = Costs(
        forward_seconds=tuple(s / 3 for s in stages),
        backward_seconds=tuple(2 * s / 3 for s in stages),
        send_forward_seconds=none,
        send_backward_seconds=none,
        reduce_seconds=none,
        activation_bytes=(0,) * len(stages),
        step_seconds=(0.0, 0.0),
    )
    schedule = generate("interleaved", 2, microbatches, chunks=len(stages) // 2)
    return simulate_timeline(lower(schedule, costs.seconds), costs).makespan_seconds


def cut(seconds: list[float], stages: int, microbatches: int) -> tuple[int, ...]:
    units = [Unit(f"unit {i}", each, 0, 0, 0.0) for i, each in enumerate(seconds)]
    placement = [stage % 2 for stage in range(stages)]
    return partition(units, [1] * stages, None, placement, microbatches=microbatches).starts


@pytest.mark.parametrize("microbatches", [4, 16])
def test_cuts_are_among_the_best(microbatches: int) -> None:
    """Paces are about right: of a few units of any lengths, the cut takes little more than the best of all cuts."""
    generator = np.random.default_rng(0)
    ratios = []
    for count in (6, 7, 8) * 5:
        seconds = [float(each) for each in generator.uniform(0.5, 3.0, count)]
        found = step_seconds(seconds, cut(seconds, 4, microbatches), microbatches)
        cuts = itertools.combinations(range(1, count), 3)
        ratios.append(found / min(step_seconds(seconds, (0, *inner), microbatches) for inner in cuts))
    assert np.mean(ratios) < 1.05
    assert max(ratios) < 1.2


def test_of_many_units_ranks_hardly_wait() -> None:
    """Too many cuts to try all; of these units, one in four takes four times as long. The best that equal stages give
    is up to an eighth above what ranks are busy."""
    generator = np.random.default_rng(0)
    for _ in range(6):
        seconds = [float(each) for each in generator.choice([1.0, 1.0, 1.0, 4.0], 22)]
        assert step_seconds(seconds, cut(seconds, 8, 16), 16) < 1.05 * 16 * sum(seconds) / 2


@pytest.mark.parametrize("stages", [4, 8])
def test_stages_of_a_rank_are_alike(stages: int) -> None:
    """What ranks hold in all can be equal with the first stages tiny: then they wait for the others."""
    seconds = [1.0] * 32
    equal = tuple(range(0, 32, 32 // stages))
    assert cut(seconds, stages, 16) == equal
    tiny = (*range(stages // 2), *(stages // 2 + (32 - stages // 2) * k // (stages // 2) for k in range(stages // 2)))
    assert step_seconds(seconds, equal, 16) < step_seconds(seconds, tiny, 16)


@pytest.mark.parametrize("budget", [None, 2**30])
def test_a_rank_alone_has_equal_stages(budget: int | None) -> None:
    """It takes as long however it is cut. Few units or many; and though passes hold less where stages are long."""
    for count, stages in ((8, 4), (36, 12)):
        units = [Unit(f"unit {i}", 1.0, 0, 4096, 0.0, transient_bytes=2**20 if i else 2**21) for i in range(count)]
        found = partition(units, [1] * stages, budget, [0] * stages, microbatches=2)
        equal = tuple(range(0, count, count // stages))
        assert found.starts == leanest_partition(units, [1] * stages, [0] * stages)[0].starts == equal
        assert found.slowest_seconds == found.bound_seconds == count


def test_ranks_wait_for_the_longest_pair_of_passes() -> None:
    """Rounds of 1 and 9 units: all ranks hold 10, but run a round of 9 beside another's of 1."""
    microbatches, placement = 16, [0, 1, 2, 3, 0, 1, 2, 3]
    even, uneven = np.full((1, 8), 5000), np.array([[1000] * 4 + [9000] * 4])
    assert paces(even, placement, microbatches)[0] == 16 * 10_000 + 3 * 5000
    assert paces(uneven, placement, microbatches)[0] > 1.2 * paces(even, placement, microbatches)[0]
    assert paces(uneven, placement, 0)[0] == 10_000, "of very many microbatches, the slowest rank's"


def test_what_ranks_hold_is_of_their_own_stages() -> None:
    generator = np.random.default_rng(0)
    placements = [generator.permutation([0, 1, 2, *generator.integers(0, 3, 5)]).tolist() for _ in range(20)]
    for placement in [*placements, [0, 1, 2], [0, 1, 2] * 3, [0, 1, 2, 2, 1, 0], [0, 1, 2, 0]]:
        values = generator.integers(0, 100, (4, len(placement)))
        mine = [[place for place, home in enumerate(placement) if home == rank] for rank in range(3)]
        by_rank = _ByRank.of(placement)
        assert by_rank.sums(values).tolist() == [[sum(row[places]) for places in mine] for row in values]
        assert by_rank.largest(values).tolist() == [[max(row[places]) for places in mine] for row in values]


@pytest.mark.parametrize("placement", [(0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0)])
@pytest.mark.parametrize("values", [3, 9])
@pytest.mark.parametrize(("by_seconds", "budget"), [(True, 60), (True, 1000), (False, 60)])
def test_the_best_of_many_cuts_below_another_is_the_best_of_all(
    by_seconds: bool, budget: int, values: int, placement: tuple[int, ...]
) -> None:
    """More cuts than pairs are looked at of, so that those above the other one are left out first. Of few different
    ``values`` many cuts take as long, and differ by what ranks hold."""
    generator = np.random.default_rng(0)
    fewer = 0
    for _ in range(10):
        times, saved, state, transient = (tuple(generator.integers(1, values, 14).tolist()) for _ in range(4))
        table = CutTable(times, (0, *times[1:]), state, saved, transient, 1, (3, 2, 1) * 2, placement, 8)
        search = _Search(table, budget, by_seconds=by_seconds)
        cuts = np.array([(0, *inner, 14) for inner in itertools.combinations(range(1, 14), 5)])
        everything = search.least(cuts)
        assert everything is not None
        keys = search.keys(cuts, paired=True)
        for key in sorted({tuple(key) for key in keys.tolist()})[:20]:
            other = tuple(int(k) for k in key)
            found = search.least(cuts, other)
            fewer += found is not None
            assert (found[0] if found is not None else other) == min(everything[0], other)
    assert fewer > 100


def random_table(generator: np.random.Generator, units: int, placement: tuple[int, ...], **given: int) -> CutTable:
    times, sends, state, saved, transient = (tuple(generator.integers(1, 9, units).tolist()) for _ in range(5))
    inflight = tuple(generator.integers(1, 4, len(placement)).tolist())
    return CutTable(times, (0, *sends[1:]), state, saved, transient, given.get("shared", 1), inflight, placement, 8)


def ranks_of(table: CutTable, starts: tuple[int, ...]) -> dict[int, list[tuple[int, int, int]]]:
    """By rank, of its stages: seconds with the sends at both ends, KiB, the most that a unit's passes hold beside, when
    those behind it keep nothing of a microbatch."""
    found: dict[int, list[tuple[int, int, int]]] = {}
    for stage, (first, end) in enumerate(itertools.pairwise((*starts, table.units))):
        sent = table.sends[first] + (table.sends[end] if end < table.units else 0)
        kept = table.inflight[stage] * (sum(table.saved[first:end]) + table.shared)
        kib = sum(table.state[first:end]) + kept
        transient = max(0, *(table.transient[unit] - sum(table.saved[unit + 1 : end]) for unit in range(first, end)))
        found.setdefault(table.placement[stage], []).append((sum(table.seconds[first:end]) + sent, kib, transient))
    return found


@pytest.mark.parametrize("placement", [(0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0)])
def test_keys_are_of_what_ranks_take_and_hold(placement: tuple[int, ...]) -> None:
    generator = np.random.default_rng(0)
    for budget in (40, 60, 1000):
        table = random_table(generator, 11, placement, shared=3)
        cuts = [(0, *inner) for inner in itertools.combinations(range(1, 11), 5)]
        rows = np.array([(*starts, 11) for starts in cuts])
        keys, lean = (_Search(table, budget, by_seconds=by).keys(rows, paired=False) for by in (True, False))
        for starts, key, other in zip(cuts, keys.tolist(), lean.tolist(), strict=True):
            ranks = ranks_of(table, starts).values()
            slowest = max(sum(seconds for seconds, _, _ in stages) for stages in ranks)
            longest = max(seconds for stages in ranks for seconds, _, _ in stages)
            largest = max(sum(kib for _, kib, _ in stages) + max(t for _, _, t in stages) for stages in ranks)
            assert key == [max(0, largest - budget), 8 * slowest + 2 * longest, slowest, longest, largest]
            assert other == [largest, slowest, longest]


@pytest.mark.parametrize("lengths", [(1, 2, 3, 4, 5, 6, 7, 8), (1, 1, 1, 1, 30)])
@pytest.mark.parametrize("placement", [(0, 1, 0, 1), (0, 1, 1, 0)])
@pytest.mark.parametrize("send", [0, 2, None])
def test_no_cut_has_a_faster_slowest_rank_than_the_bound(
    send: int | None, placement: tuple[int, ...], lengths: tuple[int, ...]
) -> None:
    """Where all sends take the same time, the bound is mostly reached; ``None``: each takes another."""
    generator = np.random.default_rng(0)
    reached = 0
    for _ in range(40):
        table = replace(random_table(generator, 9, placement), seconds=tuple(generator.choice(lengths, 9).tolist()))
        table = table if send is None else replace(table, sends=(0, *[send] * 8))
        cuts = [(0, *inner) for inner in itertools.combinations(range(1, 9), 3)]
        slowest = [max(sum(s for s, _, _ in stages) for stages in ranks_of(table, c).values()) for c in cuts]
        bound = _bound(table)
        assert bound <= min(slowest)
        reached += bound == min(slowest)
    assert reached >= (0 if send is None else 20)


def test_some_rank_has_as_many_of_the_longest_units_as_the_mean_rounded_up() -> None:
    """Two of three units of 20; the mean of both ranks is less."""
    seconds = (20, 20, 20, 1, 1, 1, 1)
    table = CutTable(seconds, (0, 1, 2, 3, 1, 2, 3), *[(0,) * 7] * 3, 0, (1,) * 4, (0, 1, 0, 1))
    assert _bound(table) == 40


def test_a_rank_may_have_all_units_but_one_of_each_other_stage() -> None:
    """Seven of 10 against two of 34; of fewer units, none that isn't below the mean of 69 takes less than 74."""
    seconds = (10, 10, 10, 10, 34, 10, 10, 10, 34)
    table = CutTable(seconds, (0,) * 9, *[(0,) * 9] * 3, 0, (1,) * 4, (0, 1, 0, 1))
    assert _bound(table) == 70 == _best(_Search(table, 0, by_seconds=True))[0][2]


def test_a_move_takes_a_unit_from_its_source() -> None:
    cut = np.array([0, 3, 6, 9, 12])
    moves, sources = _moves(4)
    found = set()
    for move, source in zip(moves, sources, strict=True):
        more = np.diff(cut + move) - np.diff(cut)
        assert more[source] == -1
        assert sorted(more.tolist()) == [-1, 0, 0, 1]
        found.add((int(source), int(more.argmax())))
    assert len(found) == 4 * 3


def test_no_move_makes_the_best_cut_better() -> None:
    generator = np.random.default_rng(0)
    for _ in range(6):
        table = random_table(generator, 24, (0, 1, 2) * 3)
        for search in (_Search(table, 200, by_seconds=True), _Search(table, 200, by_seconds=False)):
            key, starts = _best(search)
            cuts = np.array([*starts, 24]) + _moves(9)[0]
            cuts = cuts[(np.diff(cuts) > 0).all(axis=1)]
            assert key == min(map(tuple, [*search.keys(cuts, paired=True).tolist(), list(key)]))


def test_no_step_leaves_a_stage_without_units() -> None:
    """Ranks would be as fast as each other if the third stage gave its unit to the fourth."""
    none = (0,) * 4
    table = CutTable((4, 1, 4, 1), none, none, none, none, 0, (1,) * 4, (0, 1, 0, 1))
    _, starts = _improved(_Search(table, NEVER, by_seconds=True), (0, 1, 2, 3))
    assert starts.tolist() == [0, 1, 2, 3, 4]
