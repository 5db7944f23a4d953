"""Schedules that are looked through once, for several costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from autopar.schedules import Costs, Schedule, Timelines, generate, lower, simulate_timeline
from autopar.schedules.offloads import ALL, Away, offload_activations
from autopar.schedules.registry import SCHEDULES
from autopar.schedules.weight_moves import WeightMoves
from tests.schedules.test_sweep import any_costs

MOVES = (WeightMoves(), WeightMoves("step"), WeightMoves("pass", True))


def every_way(name: str) -> Iterator[Schedule]:
    """Two numbers of microbatches, all heads, weights that are gathered or not, activations here or on the host."""
    row = SCHEDULES[name]
    for microbatches in (4, 6):
        for head in row.heads:
            made = generate(name, 2, microbatches, chunks=None if row.chunks else 2, head=head)
            for moves in MOVES[:1] if row.asynchronous else MOVES:
                schedule = lower(made, moves=moves)
                yield schedule
                if not row.asynchronous:
                    yield offload_activations(schedule, Away({0: ALL, schedule.stages - 1: 3}))


def check_all(timelines: Timelines, schedule: Schedule) -> None:
    """Two costs, one after the other, and the first again."""
    for seed in (1, 2, 1):
        costs = replace(any_costs(schedule, seed), offload_seconds=(0.1 * seed,) * schedule.stages)
        shared, alone = timelines.of(schedule, costs), simulate_timeline(schedule, costs)
        assert shared == alone
        assert shared.events == alone.events
        assert [shared.kept(rank) for rank in range(schedule.ranks)] == [
            alone.kept(rank) for rank in range(schedule.ranks)
        ]
        assert shared.communication_overhead_seconds == alone.communication_overhead_seconds


@pytest.mark.slow
def test_each_schedule_and_each_cost_has_its_own_timeline() -> None:
    """Schedules that are equal in name and sizes among them."""
    timelines = Timelines()
    for name in SCHEDULES:
        for schedule in every_way(name):
            check_all(timelines, schedule)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_ranks_do(random_schedule: Callable[[int], Schedule], seed: int) -> None:
    timelines = Timelines()
    for moves in MOVES:
        check_all(timelines, lower(random_schedule(seed), moves=moves))


def test_a_schedule_is_looked_through_once() -> None:
    """Whichever of its copies it comes as."""
    timelines = Timelines()
    first, again = (lower(generate("1f1b", 2, 4)) for _ in range(2))
    costs = Costs.uniform(first, forward_seconds=1.0, backward_seconds=2.0)
    assert timelines.of(first, costs).swept.sweep is timelines.of(again, costs).swept.sweep


@pytest.mark.parametrize("name", [name for name, row in SCHEDULES.items() if not row.asynchronous])
def test_any_stages_on_the_host_take_what_their_own_list_does(name: str) -> None:
    """In whichever order they are asked for."""
    row, timelines = SCHEDULES[name], Timelines()
    made = generate(name, 3, 6, chunks=None if row.chunks else 2, head=row.heads[0])
    for moves in MOVES:
        schedule = lower(made, moves=moves)
        last = schedule.stages - 1
        for seed, shares in enumerate([{0: ALL, last: 3}, {last: 5}, {}, dict.fromkeys(range(last + 1), ALL), {0: 1}]):
            costs = any_costs(schedule, seed)
            slow = replace(costs, offload_seconds=(3.0,) * schedule.stages, offload_bytes=costs.activation_bytes)
            peaks = timelines.of(schedule, slow).peak_activation_bytes
            away = Away(shares, [peak // 2 for peak in peaks])
            found = timelines.offloading(schedule, away, slow)
            alone = simulate_timeline(offload_activations(schedule, away, slow), slow)
            assert found == alone
            assert found.events == alone.events
            assert found.communication_overhead_seconds == alone.communication_overhead_seconds


def test_what_is_kept_is_said_by_the_list() -> None:
    """However long copies take; a rank waits for them where it has no room otherwise."""
    schedule = lower(generate("1f1b", 3, 6))
    costs = replace(any_costs(schedule, 1), activation_bytes=(7, 8, 9), offload_bytes=(7, 8, 9))
    plain = Timelines().of(schedule, costs)
    assert plain.peak_activation_bytes == (21, 16, 9)
    schedule = offload_activations(schedule, Away({0: ALL, 1: ALL}, (14, 16, 9)), costs)
    for seconds in (0.0, 5.0):
        found = simulate_timeline(schedule, replace(costs, offload_seconds=(seconds,) * 3))
        assert found.peak_activation_bytes == (14, 16, 9)
        assert [max(point.bytes for point in found.kept(r)) for r in range(3)] == [14, 16, 9]
        waits = sum(e.end_seconds - e.start_seconds for e in found.events if e.action.kind == "FREE")
        assert (waits > 0) == (seconds > 0)


def test_lists_are_lowered_once_unless_exchanges_ask_for_costs() -> None:
    timelines = Timelines()
    plain, split = generate("1f1b", 2, 4), generate("1f1b", 2, 4, head="vocab-1")
    costs = [Costs.uniform(split, forward_seconds=seconds, backward_seconds=2.0) for seconds in (1.0, 9.0)]
    first, again = (timelines.lowered(plain, each, WeightMoves("step")) for each in costs)
    assert first is again
    assert first == lower(plain, moves=WeightMoves("step"))
    assert timelines.lowered(plain, costs[0], WeightMoves()) == lower(plain)
    for each in costs:
        assert timelines.lowered(split, each, WeightMoves()) == lower(split, each.seconds)


def test_the_last_few_schedules_are_remembered() -> None:
    timelines = Timelines()
    first = lower(generate("1f1b", 2, 1))
    costs = Costs.uniform(first, forward_seconds=1.0, backward_seconds=2.0)
    sweep = timelines.of(first, costs).swept.sweep
    for microbatches in range(2, 5):
        timelines.of(lower(generate("1f1b", 2, microbatches)), costs)
    assert timelines.of(first, costs).swept.sweep is sweep
    for microbatches in range(2, 12):
        timelines.of(lower(generate("1f1b", 2, microbatches)), costs)
    assert timelines.of(first, costs).swept.sweep is not sweep
