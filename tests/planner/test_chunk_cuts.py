"""Cuts of pipelines whose ranks hold several stages, against timelines of all cuts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autopar.planner.chunk_cuts import _ByRank, _Search, paces
from autopar.planner.cuts import CutTable
from autopar.planner.stages import Unit, partition
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


@pytest.mark.parametrize(("by_seconds", "budget"), [(True, 60), (True, 1000), (False, 60)])
def test_the_best_of_many_cuts_below_another_is_the_best_of_all(by_seconds: bool, budget: int) -> None:
    """More cuts than pairs are looked at of, so that those above the other one are left out first."""
    generator = np.random.default_rng(0)
    fewer = 0
    for _ in range(10):
        times, saved, state, transient = (tuple(generator.integers(1, 9, 14).tolist()) for _ in range(4))
        placement = (0, 1, 2, 0, 1, 2)
        table = CutTable(times, (0, *times[1:]), state, saved, transient, 1, (3, 2, 1) * 2, placement, 8)
        search = _Search(table, budget, by_seconds=by_seconds)
        cuts = np.array([(0, *inner, 14) for inner in itertools.combinations(range(1, 14), 5)])
        everything = search.least(cuts)
        assert everything is not None
        keys = search.keys(cuts, paired=True)
        for key in sorted(map(tuple, keys.tolist()))[:20]:
            other = tuple(int(k) for k in key)
            found = search.least(cuts, other)
            fewer += found is not None
            assert (found[0] if found is not None else other) == min(everything[0], other)
    assert fewer > 100
