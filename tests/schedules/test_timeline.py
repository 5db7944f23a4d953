from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from autopar.errors import ArgumentError, ScheduleError
from autopar.schedules import Costs, Event, Schedule, Timeline, generate, lower, parse_list, simulate_timeline

# Halves and quarters: sums of them are exact, so formulas hold to the last bit.
FORWARD, BACKWARD = 0.75, 1.5


def timeline_of(name: str, stages: int, microbatches: int, **costs: Any) -> Timeline:
    schedule = lower(generate(name, stages, microbatches))
    costs = {"forward_seconds": FORWARD, "backward_seconds": BACKWARD, **costs}
    return simulate_timeline(schedule, Costs.uniform(schedule, **costs))


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [2, 4, 8, 16])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_bubble_of_gpipe_and_one_f_one_b(name: str, stages: int, rounds: int) -> None:
    """(p - 1)(F + B) on top of m(F + B): Narayanan et al., arXiv 2104.04473, section 2.2."""
    microbatches = rounds * stages
    timeline = timeline_of(name, stages, microbatches)
    ideal = microbatches * (FORWARD + BACKWARD)
    assert timeline.makespan_seconds - ideal == (stages - 1) * (FORWARD + BACKWARD)
    assert timeline.busy_seconds == (ideal,) * stages
    assert timeline.idle_seconds == ((stages - 1) * (FORWARD + BACKWARD),) * stages
    assert timeline.idle_share == pytest.approx((stages - 1) / (microbatches + stages - 1), rel=1e-12)
    assert timeline.communication_overhead_seconds == 0


@pytest.mark.parametrize("stages", [2, 4, 8, 16])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_in_flight(stages: int, rounds: int) -> None:
    microbatches = rounds * stages
    gpipe = timeline_of("gpipe", stages, microbatches, activation_bytes=3)
    assert gpipe.peak_in_flight == (microbatches,) * stages
    assert gpipe.peak_activation_bytes == (3 * microbatches,) * stages
    one_f_one_b = timeline_of("1f1b", stages, microbatches, activation_bytes=3)
    assert one_f_one_b.peak_in_flight == tuple(stages - rank for rank in range(stages))
    assert one_f_one_b.peak_activation_bytes == tuple(3 * (stages - rank) for rank in range(stages))


@pytest.mark.parametrize(("stages", "microbatches"), [(4, 1), (4, 3), (8, 5)])
def test_fewer_microbatches_than_stages(stages: int, microbatches: int) -> None:
    timeline = timeline_of("1f1b", stages, microbatches)
    assert timeline.makespan_seconds == (microbatches + stages - 1) * (FORWARD + BACKWARD)
    assert timeline.peak_in_flight == tuple(min(stages - rank, microbatches) for rank in range(stages))


def test_one_rank_has_no_bubble() -> None:
    timeline = timeline_of("1f1b", 1, 7, forward_seconds=0.1, backward_seconds=0.3, step_seconds=0.7)
    assert timeline.idle_share == 0


def test_costs_of_nothing() -> None:
    timeline = timeline_of("1f1b", 2, 2, forward_seconds=0, backward_seconds=0)
    assert (timeline.makespan_seconds, timeline.idle_share) == (0, 0)


def test_one_microbatch_by_hand() -> None:
    timeline = timeline_of(
        "1f1b",
        2,
        1,
        forward_seconds=1,
        backward_seconds=2,
        send_seconds=0.5,
        reduce_seconds=1,
        step_seconds=0.25,
    )
    assert [(e.rank, str(e.action), e.start_seconds, e.end_seconds) for e in timeline.events] == [
        (0, "F0@0", 0, 1),
        (0, "SEND_F0@0>1", 1, 1.5),
        (0, "RECV_B0@0<1", 1, 5),
        (0, "B0@0", 5, 7),
        (0, "REDUCE@0", 7, 8),
        (0, "STEP", 8, 8.25),
        (1, "RECV_F0@1<0", 0, 1.5),
        (1, "F0@1", 1.5, 2.5),
        (1, "B0@1", 2.5, 4.5),
        (1, "SEND_B0@1>0", 4.5, 5),
        (1, "REDUCE@1", 4.5, 5.5),
        (1, "STEP", 5.5, 5.75),
    ]
    assert timeline.makespan_seconds == 8.25
    assert timeline.busy_seconds == (3.25, 3.25)
    assert timeline.idle_seconds == (5, 5)
    assert timeline.idle_share == 10 / 16.5
    assert timeline.communication_overhead_seconds == 2  # two transfers of 0.5 and rank 0's reduction


def ends(timeline: Timeline, kind: str, rank: int) -> list[float]:
    return [e.end_seconds for e in timeline.events if e.action.kind == kind and e.rank == rank]


def test_a_channel_moves_one_message_after_another_while_its_sender_computes() -> None:
    timeline = timeline_of("gpipe", 2, 3, forward_seconds=1, backward_seconds=1, send_seconds=4)
    assert ends(timeline, "F", 0) == [1, 2, 3]
    assert ends(timeline, "SEND_F", 0) == [5, 9, 13]
    assert ends(timeline, "F", 1) == [6, 10, 14]


def test_a_hidden_transfer_costs_nothing() -> None:
    """The slower second stage has its next input in time: of four transfers each way, one lengthens the
    step."""
    schedule = lower(generate("gpipe", 2, 4))
    costs = replace(
        Costs.uniform(schedule, forward_seconds=1, backward_seconds=1, send_seconds=1),
        forward_seconds=(1, 2),
        backward_seconds=(1, 2),
    )
    assert simulate_timeline(schedule, costs).communication_overhead_seconds == 2


def test_a_backward_in_one_pass_changes_with_the_others() -> None:
    plain = Costs.uniform(lower(generate("gpipe", 2, 2)), forward_seconds=1, backward_seconds=2)
    longer = replace(plain, joined_seconds=(0.5, -0.5))
    assert longer.whole_seconds == (2.5, 1.5)
    simulate_timeline(lower(generate("gpipe", 2, 2)), longer)
    assert replace(longer, backward_seconds=(3, 4)).whole_seconds == (3.5, 3.5)


def test_reductions_overlap_with_the_backwards_of_other_stages() -> None:
    schedule = lower(Schedule("hand", 2, 1, (0, 0), (parse_list("F0@0 F0@1 B0@1 B0@0"),)))
    costs = Costs.uniform(schedule, forward_seconds=1, backward_seconds=4, reduce_seconds=3)
    timeline = simulate_timeline(schedule, costs)
    assert ends(timeline, "REDUCE", 0) == [9, 13]
    assert timeline.makespan_seconds == 13
    assert timeline.communication_overhead_seconds == 3
    busy = simulate_timeline(schedule, replace(costs, reduce_seconds=(3, 6)))
    assert ends(busy, "REDUCE", 0) == [12, 15]  # one after the other


def test_activations_of_several_stages_on_a_rank() -> None:
    schedule = lower(Schedule("hand", 2, 2, (0, 0), (parse_list("F0@0 F0@1 F1@0 B0@1 B0@0 F1@1 B1@1 B1@0"),)))
    costs = replace(Costs.uniform(schedule, forward_seconds=1, backward_seconds=1), activation_bytes=(100, 7))
    timeline = simulate_timeline(schedule, costs)
    assert timeline.peak_in_flight == (3,)
    assert timeline.peak_activation_bytes == (207,)


def _random_costs(schedule: Schedule, seed: int) -> Costs:
    def some(count: int, step: int) -> tuple[float, ...]:
        return tuple((seed * step + 3 * index) % 7 / 4 for index in range(count))

    stages = schedule.stages
    return Costs(
        some(stages, 1),
        some(stages, 2),
        some(stages, 3),
        some(stages, 4),
        some(stages, 5),
        (1,) * stages,
        some(schedule.ranks, 6),
    )


def test_physics_on_any_schedule(random_schedule: Callable[[int], Schedule]) -> None:
    for seed in range(60):
        schedule = lower(random_schedule(seed))
        costs = _random_costs(schedule, seed)
        timeline = simulate_timeline(schedule, costs)
        at = {(event.rank, event.action): event for event in timeline.events}
        assert [e.action for e in timeline.events] == [a for actions in schedule.lists for a in actions]
        for event in timeline.events:
            assert event.end_seconds - event.start_seconds >= costs.seconds(event.rank, event.action)
            if event.action.kind == "RECV_B":
                _, microbatch, stage, peer = (getattr(event.action, f) for f in ("kind", "microbatch", "stage", "peer"))
                send = parse_list(f"SEND_B{microbatch}@{stage + 1}>{event.rank}")[0]
                assert event.end_seconds == max(event.start_seconds, at[peer, send].end_seconds)
        for rank in range(schedule.ranks):
            _never_overlap([e for e in timeline.events if e.rank == rank and e.action.kind in ("F", "B", "STEP")])
        assert timeline.makespan_seconds >= max(timeline.busy_seconds)
        assert timeline.communication_overhead_seconds >= 0
        free = simulate_timeline(schedule, costs.without_communication())
        assert timeline.makespan_seconds - free.makespan_seconds == timeline.communication_overhead_seconds


def _never_overlap(events: list[Event]) -> None:
    for before, after in pairwise(events):
        assert before.end_seconds <= after.start_seconds


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"forward_seconds": (1.0,)},
            "costs have 1 forward_seconds, but schedule 'gpipe' needs 2, one per stage",
        ),
        (
            {"step_seconds": (1.0,) * 3},
            "costs have 3 step_seconds, but schedule 'gpipe' needs 2, one per rank",
        ),
        ({"activation_bytes": (1, -1)}, "activation_bytes of stage 1 is -1; it must be finite, from 0 up"),
        ({"reduce_seconds": (float("nan"), 0.0)}, "reduce_seconds of stage 0 is nan"),
        ({"step_seconds": (0.0, float("inf"))}, "step_seconds of rank 1 is inf"),
    ],
)
def test_costs_that_can_not_be(change: dict[str, Any], message: str) -> None:
    schedule = lower(generate("gpipe", 2, 2))
    costs = replace(Costs.uniform(schedule, forward_seconds=1, backward_seconds=1), **change)
    with pytest.raises(ArgumentError, match=message):
        simulate_timeline(schedule, costs)


def test_a_schedule_that_is_not_right_has_no_timeline() -> None:
    schedule = generate("gpipe", 2, 2)
    with pytest.raises(ScheduleError, match="lower"):
        simulate_timeline(schedule, Costs.uniform(schedule, forward_seconds=1, backward_seconds=1))
