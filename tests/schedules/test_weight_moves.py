"""GATHER and SCATTER in action lists: where they go, what the checker says, what they cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.errors import ArgumentError, ScheduleError
from autopar.schedules import Action, Costs, Schedule, Timeline, check, generate, lower, parse_list, simulate_timeline
from autopar.schedules.flow import COMPUTE
from autopar.schedules.weight_moves import (
    BUCKETS,
    MESSAGES,
    MessageSizes,
    Travels,
    WeightMoves,
    followers,
    joined_units,
    moves_of,
)

NAMES = [("1f1b", ""), ("gpipe", ""), ("interleaved", ""), ("zb-h1", ""), ("zb-v", ""), ("v-half", "vocab-2")]
MOVES = [WeightMoves(g, s) for g in ("step", "pass") for s in (False, True)]  # type: ignore[arg-type]


def lowered(name: str, head: str, moves: WeightMoves, ranks: int = 2, microbatches: int = 4) -> Schedule:
    return lower(generate(name, ranks, microbatches, head=head, embedding=bool(head)), moves=moves)


@pytest.mark.parametrize("moves", MOVES, ids=str)
@pytest.mark.parametrize(("name", "head"), NAMES)
def test_lists_are_right_say_what_they_were_made_for_and_compute_the_same(
    name: str, head: str, moves: WeightMoves
) -> None:
    schedule = lowered(name, head, moves)
    check(schedule)
    assert moves_of(schedule) == moves
    assert Schedule.from_text(str(schedule)) == schedule
    plain = lowered(name, head, WeightMoves())
    added = ("GATHER", "GATHER_V", "GATHER_F", "GATHER_B", "SCATTER")
    kept = tuple(tuple(a for a in row if a.kind not in added) for row in schedule.lists)
    assert kept == plain.lists
    assert moves_of(plain) == WeightMoves()


def test_once_per_step() -> None:
    first, second = map(str, lowered("1f1b", "", WeightMoves("step", True), microbatches=2).lists)
    assert first.startswith("(GATHER@0, F0@0, ")
    assert second == (
        "(GATHER@1, RECV_F0@1<0, F0@1, B0@1, SEND_B0@1>0, SCATTER0@1, "
        "RECV_F1@1<0, F1@1, B1@1, SEND_B1@1>0, SCATTER1@1, REDUCE@1, STEP)"
    )


def test_per_pass_one_compute_action_ahead_where_the_stage_changes() -> None:
    schedule = Schedule("hand", 2, 2, (0, 0), (parse_list("F0@0 F1@0 F0@1 B0@1 F1@1 B1@1 B0@0 B1@0"),))
    (row,) = lower(schedule, moves=WeightMoves("pass")).lists
    assert " ".join(map(str, row)) == (
        "GATHER_F0@0 F0@0 GATHER_F0@1 F1@0 F0@1 B0@1 F1@1 GATHER_B0@0 B1@1 REDUCE@1 B0@0 B1@0 REDUCE@0 STEP"
    )


def test_a_gather_ahead_hides_behind_a_pass_that_reads_no_weights() -> None:
    schedule = Schedule("hand", 2, 1, (0, 0), (parse_list("F0@0 F0@1 I0@1 W0@1 I0@0 W0@0"),))
    (row,) = lower(schedule, moves=WeightMoves("pass", True)).lists
    assert "I0@1 GATHER_B0@0 W0@1 SCATTER0@1 REDUCE@1 I0@0 W0@0 SCATTER0@0" in " ".join(map(str, row))


def test_passes_of_one_stage_in_a_row() -> None:
    row = parse_list("F0@0 S0 B0@0 W0@0 F0@1")
    assert followers(row) == {row[0]: row[2], row[2]: None, row[4]: None}


def test_the_vocabulary_is_gathered_once() -> None:
    for moves in MOVES:
        for row in lowered("v-half", "vocab-2", moves).lists:
            assert row.count(Action("GATHER_V")) == 1
            assert row.index(Action("GATHER_V")) < min(row.index(a) for a in row if a.kind in COMPUTE)


@pytest.mark.parametrize("moves", [WeightMoves("step"), WeightMoves("", True)], ids=str)
def test_an_asynchronous_schedule_has_no_moment_to_gather(moves: WeightMoves) -> None:
    with pytest.raises(
        ScheduleError, match="'pipedream' updates each stage's weights while microbatches are under way"
    ):
        lower(generate("pipedream", 2, 4), moves=moves)


@pytest.mark.parametrize(
    ("moves", "old", "new", "message"),
    [
        (WeightMoves("step"), "GATHER@1 ", "", "rank 1 lacks GATHER@1"),
        (WeightMoves("step"), "GATHER@1 RECV_F0@1<0 F0@1", "RECV_F0@1<0 F0@1 GATHER@1", "F0@1 comes before GATHER@1"),
        (WeightMoves("pass"), "GATHER_F0@1 ", "", "rank 1 lacks GATHER_F0@1"),
        (WeightMoves("pass", True), " SCATTER0@1", "", "rank 1 lacks SCATTER0@1"),
        (WeightMoves("pass", True), "B1@1 SEND_B1@1>0 SCATTER1@1", "SCATTER1@1 B1@1 SEND_B1@1>0", "SCATTER1@1 comes"),
        (WeightMoves("step", True), "SCATTER3@1 REDUCE@1", "REDUCE@1 SCATTER3@1", "REDUCE@1 comes before SCATTER3@1"),
    ],
)
def test_wrong_lists_are_refused(moves: WeightMoves, old: str, new: str, message: str) -> None:
    text = str(lowered("1f1b", "", moves))
    assert old in text
    with pytest.raises(ScheduleError, match=message):
        check(Schedule.from_text(text.replace(old, new)))


def costs(schedule: Schedule, gather: float, scatter: float) -> Costs:
    plain = Costs.uniform(schedule, forward_seconds=1.0, backward_seconds=2.0, reduce_seconds=0.5, step_seconds=0.25)
    stages = schedule.stages
    return replace(plain, gather_seconds=(gather,) * stages, scatter_seconds=(scatter,) * stages)


def alone(moves: WeightMoves, gather: float = 0.0, scatter: float = 0.0) -> Timeline:
    schedule = lower(generate("1f1b", 1, 2), moves=moves)
    return simulate_timeline(schedule, costs(schedule, gather, scatter))


def test_a_gather_of_the_step_delays_its_first_pass() -> None:
    assert alone(WeightMoves("step"), gather=3.0).makespan_seconds == 3 + 6 + 0.5 + 0.25


def test_streamed_gathers_cost_what_compute_does_not_hide() -> None:
    assert alone(WeightMoves("pass"), gather=1.0).makespan_seconds == 6 + 0.5 + 0.25
    slow = alone(WeightMoves("pass"), gather=1.5)  # forwards wait for half a second each
    assert slow.makespan_seconds == 7 + 0.5 + 0.25
    assert slow.communication_overhead_seconds == 1.5


def test_scatters_run_beside_compute() -> None:
    assert alone(WeightMoves("step", True), scatter=1.0).makespan_seconds == 6 + 1 + 0.5 + 0.25  # the last one shows


def test_sums_wait_for_those_before() -> None:
    """Of each two and a half seconds, half a second is left when a backward ends, or all when the stream is free."""
    schedule = lower(generate("1f1b", 1, 4), moves=WeightMoves("step", True))
    left = replace(costs(schedule, 0.0, 0.5), scattering_seconds=(2.5,))
    assert simulate_timeline(schedule, left).makespan_seconds == 12 + 0.5 + 0.5 + 0.25
    busy = replace(left, scattering_seconds=(5.0,), scatter_seconds=(3.0,))
    timeline = simulate_timeline(schedule, busy)
    assert timeline.makespan_seconds == 1 + 4 * 5 + 0.5 + 0.25
    assert [e.end_seconds for e in timeline.events if e.action.kind == "SCATTER"] == [6.0, 11.0, 16.0, 21.0]
    summed = replace(busy, reducing_seconds=(1.5,))
    assert simulate_timeline(schedule, summed).makespan_seconds == 1 + 4 * 5 + 1.5 + 0.25
    assert simulate_timeline(schedule, summed).communication_overhead_seconds == 22.75 - 12.25


def test_gather_costs_must_be_for_these_stages() -> None:
    schedule = lower(generate("1f1b", 2, 2), moves=WeightMoves("step"))
    with pytest.raises(ArgumentError, match="costs have 1 gather_seconds, but schedule '1f1b' needs 2, one per stage"):
        simulate_timeline(schedule, replace(costs(schedule, 1.0, 1.0), gather_seconds=(1.0,)))


@pytest.mark.parametrize("ranks", [2, 8, 64, 1024])
def test_messages_grow_with_the_ring(ranks: int) -> None:
    """Up to an eighth of what a stage sends once a step, and at least as large as those of few ranks."""
    assert MESSAGES.large(ranks) == ranks * MESSAGES.part_bytes
    assert MESSAGES.of_pass(ranks) == max(MESSAGES.bucket_bytes, ranks * MESSAGES.part_bytes)
    plenty, little = 100 * BUCKETS * MESSAGES.of_pass(ranks), MESSAGES.least_bytes
    assert MESSAGES.of_step(ranks, plenty) == MESSAGES.of_pass(ranks)
    assert MESSAGES.of_step(ranks, little) == MESSAGES.least_bytes
    between = BUCKETS * (MESSAGES.least_bytes + 1)
    assert MESSAGES.of_step(ranks, between) == MESSAGES.least_bytes + 1


def test_what_is_gathered_once_a_step_is_joined_by_ring_over_whole_units() -> None:
    """At least 8 bytes of a ring; unit 2 has a large weight, which goes by itself, and unit 5 is on another ring."""
    sizes = MessageSizes(part_bytes=10, bucket_bytes=1, least_bytes=8)
    weights = [(0, "a", 5), (1, "a", 5), (1, "a", 5), (2, "a", 20), (2, "a", 1), (4, "a", 6), (5, "b", 3), (6, "a", 1)]
    travels = [Travels(unit, ring, 2, bytes_) for unit, ring, bytes_ in weights]
    assert joined_units(travels, sizes) == [0, 0, 0, 2, 2, 2, 5, 2]
    assert joined_units(travels, MessageSizes(part_bytes=0)) == [unit for unit, *_ in weights]
    assert joined_units([]) == []
