"""List scheduling: what it makes can run, fits, and takes what the timeline says; no memory corner, no other clock."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import ArgumentError, ScheduleError
from autopar.schedules import Action, Costs, generate, lower, simulate_timeline
from autopar.schedules.greedy import RULES, Job, Rule, greedy, replay
from autopar.schedules.justify import justify, latest_starts

VOCABULARY = {"S": 0.5, "U": 0.2, "T": 0.25, "E": 0.05, "G": 0.07}
EXCHANGES = {"CAST_X": 0.06, "MAX": 0.02, "STATS": 0.02, "SUM_X": 0.06, "SUM_E": 0.05, "CAST_E": 0.03}


def straight(ranks: int) -> tuple[int, ...]:
    return tuple(range(ranks))


def vee(ranks: int) -> tuple[int, ...]:
    return (*range(ranks), *reversed(range(ranks)))


def costs_of(
    placement: tuple[int, ...],
    *,
    forward: float = 1.0,
    backward: float = 2.1,
    weight: float = 1.0,
    send: float = 0.05,
    activation: int = 10,
    later: int = 9,
    logits: int = 5,
    exchanges: bool = True,
) -> Costs:
    """The same in every stage; ``forward`` and ``backward`` of a rank's whole share."""
    stages, ranks = len(placement), max(placement) + 1
    share = ranks / stages
    named = {**VOCABULARY, **(EXCHANGES if exchanges else {})}
    return Costs(
        forward_seconds=(forward * share,) * stages,
        backward_seconds=(backward * share,) * stages,
        weight_seconds=(weight * share,) * stages,
        send_forward_seconds=(send,) * stages,
        send_backward_seconds=(send,) * stages,
        reduce_seconds=(0.3,) * stages,
        activation_bytes=(activation,) * stages,
        later_bytes=(later,) * stages,
        step_seconds=(0.2,) * ranks,
        vocabulary_seconds={kind: (seconds,) * ranks for kind, seconds in named.items()},
        logits_bytes=logits,
    )


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("placement", [straight(4), vee(3), (0, 1, 0, 1, 0, 1)])
def test_without_exchanges_the_run_is_the_timeline(placement: tuple[int, ...], split: bool, rule: Rule) -> None:
    """Same makespan, same start of every pass: nothing is simulated in another way."""
    ranks = max(placement) + 1
    job = Job(placement, 6, costs_of(placement), split=split, limit_bytes=(10 * (len(placement) + 1),) * ranks)
    run = greedy(job, rule)
    timeline = simulate_timeline(lower(run.schedule), job.costs)
    assert timeline.makespan_seconds == pytest.approx(run.makespan_seconds)
    starts = {event.action: event.start_seconds for event in timeline.events}
    for ran in (ran for row in run.rows for ran in row):
        assert starts[ran.action] == pytest.approx(ran.start_seconds)


@pytest.mark.parametrize("head", ["naive", "vocab-1", "vocab-2"])
@pytest.mark.parametrize("embedding", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_with_a_split_vocabulary_only_the_order_of_exchanges_differs(head: str, embedding: bool, split: bool) -> None:
    placement = straight(4)
    job = Job(placement, 12, costs_of(placement), head, embedding, split, (75,) * 4)
    run = greedy(job, Rule("alternate", alternate=True, ahead=4))
    timeline = simulate_timeline(lower(run.schedule), job.costs)
    assert timeline.makespan_seconds == pytest.approx(run.makespan_seconds, rel=0.02)


@settings(max_examples=80)
@given(
    placement=st.sampled_from([straight(1), straight(2), straight(5), vee(2), vee(4), (0, 1, 2) * 3, (1, 0, 1, 0)]),
    microbatches=st.integers(1, 7),
    head=st.sampled_from(["", "naive", "vocab-1", "vocab-2"]),
    split=st.booleans(),
    rule=st.sampled_from(RULES),
    later=st.sampled_from([0, 9, 10, 16]),
    room=st.integers(0, 40),
)
def test_no_limit_that_one_microbatch_fits_is_a_corner(
    placement: tuple[int, ...], microbatches: int, head: str, split: bool, rule: Rule, later: int, room: int
) -> None:
    """All passes run, and the limit holds at all times; so also where ``I`` adds bytes."""
    costs = costs_of(placement, later=later)
    least = Job(placement, microbatches, costs, head, bool(head), split).least_bytes
    job = Job(placement, microbatches, costs, head, bool(head), split, tuple(byte + room for byte in least))
    run = greedy(job, rule)
    again = greedy(job, justify(run, hold=0.5))
    for done in (run, again):
        for rank, row in enumerate(done.rows):
            kept = 0
            for ran in row:
                kept += costs.kept_bytes(ran.action)
                assert kept <= least[rank] + room
            assert kept == 0


def test_the_smallest_limit_is_that_of_one_microbatch_alone() -> None:
    placement = vee(2)
    job = Job(placement, 3, costs_of(placement, later=30), "vocab-1", split=True)
    assert job.least_bytes == (40, 40)  # 30 after I of the later stage beside the earlier's 10
    alone = simulate_timeline(lower(generate("naive", 2, 3, head="vocab-1")), costs_of(straight(2)))
    assert alone.peak_activation_bytes == (15, 15)
    assert Job(straight(2), 3, costs_of(straight(2)), "vocab-1").least_bytes == (15, 15)


def test_a_smaller_limit_is_refused_with_the_smallest_that_works() -> None:
    placement = straight(2)
    with pytest.raises(ScheduleError, match=r"rank 1 within 9 bytes: .* needs 10; .* \[10, 10\]"):
        Job(placement, 3, costs_of(placement), limit_bytes=(10, 9))


def test_costs_and_limits_of_other_sizes_are_refused() -> None:
    with pytest.raises(ArgumentError, match="3 stages"):
        Job(straight(2), 3, costs_of(straight(3)))
    with pytest.raises(ArgumentError, match="3 limits"):
        Job(straight(2), 3, costs_of(straight(2)), limit_bytes=(10, 10, 10))


def test_backwards_first_in_the_memory_of_1f1b_is_1f1b() -> None:
    placement = straight(4)
    job = Job(placement, 8, costs_of(placement, send=0.0), limit_bytes=(40, 30, 20, 10))
    assert greedy(job, Rule("backward")).schedule.lists == generate("1f1b", 4, 8).lists


def test_a_replay_keeps_the_order_and_the_makespan() -> None:
    schedule = generate("1f1b", 4, 8)
    job = Job(straight(4), 8, costs_of(straight(4)))
    run = replay(job, schedule)
    assert run.schedule.lists == schedule.lists
    assert run.makespan_seconds == pytest.approx(simulate_timeline(lower(schedule), job.costs).makespan_seconds)


def test_a_replay_beyond_the_limit_or_that_can_not_go_on_is_refused() -> None:
    job = Job(straight(2), 4, costs_of(straight(2)), limit_bytes=(30, 30))
    with pytest.raises(ScheduleError, match=r"'gpipe', rank 0: F3@0 would keep 40 bytes; the limit is 30"):
        replay(job, generate("gpipe", 2, 4))
    crossed = job.schedule("crossed", tuple(tuple(reversed(row)) for row in generate("1f1b", 2, 4).lists))
    with pytest.raises(ScheduleError, match=r"'crossed' is stuck on rank 0 after 0 of 8 passes"):
        replay(job, crossed)


def test_justification_uses_the_slack_of_a_bad_order() -> None:
    """Forwards first in little memory: the second run, by latest starts, is shorter."""
    placement = straight(4)
    costs = costs_of(placement)
    job = Job(placement, 12, costs, "vocab-2", True, limit_bytes=(55,) * 4)
    first = greedy(job, Rule("backward, T late, hold", order=("E", "S", "U", "B", "G", "F", "T", "W"), hold=0.5))
    second = greedy(job, justify(first))
    assert second.makespan_seconds < first.makespan_seconds
    assert second.name == "backward, T late, hold, justified"


def test_latest_starts_leave_time_for_all_that_follows() -> None:
    """None before it could start; each forward, head pass and backward early enough for its users on other ranks."""
    placement = straight(3)
    job = Job(placement, 6, costs_of(placement), "vocab-2")
    run = greedy(job, RULES[0])
    latest = latest_starts(run)
    for rank, row in enumerate(run.rows):
        for ran in row:
            assert latest[rank][ran.action] >= ran.start_seconds - 1e-9
    for j in range(6):
        assert latest[0][Action("F", j, 0)] + 1.0 + 0.05 <= latest[1][Action("F", j, 1)] + 1e-9
        assert latest[2][Action("B", j, 2)] + 2.1 + 0.05 <= latest[1][Action("B", j, 1)] + 1e-9
        for rank in range(3):
            scores = latest[rank][Action("S", j)] + 0.5
            assert scores + 0.02 <= latest[rank][Action("T", j)] + 1e-9
            assert scores + 0.02 + 0.06 <= latest[2][Action("B", j, 2)] + 1e-9
