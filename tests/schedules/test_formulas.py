"""Bubble and memory of the generated lists against the formulas of the papers.

Every pass takes 1 per rank's whole share (a rank's chunks divide it), communication and the optimizer nothing. The
bubble is what the makespan, or the longest time of a rank from its first pass to its last, has over the work of one
rank; memory is the microbatches in flight of which a rank keeps its whole share.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from autopar.schedules import SCHEDULES, Costs, PassTimes, Schedule, Timeline, generate, lower, simulate_timeline
from autopar.schedules.flow import is_receive, is_send
from autopar.schedules.vocabulary import BARRIERS

RANKS = (2, 4, 8)
SIZES = [(p, times * p) for p in RANKS for times in (1, 2, 4)]
STEADY = [(p, m) for p, m in SIZES if m > p]
HEAD_SECONDS = 0.5
"""Of each S, U and T."""


def timeline(schedule: Schedule, forward: float = 1, backward: float = 1, weight: float = 1) -> Timeline:
    lowered, chunks = lower(schedule), schedule.chunks
    costs = Costs.uniform(
        lowered,
        forward_seconds=forward / chunks,
        backward_seconds=(backward + weight) / chunks,
        weight_seconds=weight / chunks,
        vocabulary_seconds=dict.fromkeys("STU", HEAD_SECONDS),
    )
    return simulate_timeline(lowered, costs)


def work(schedule: Schedule) -> float:
    return schedule.microbatches * (3 + HEAD_SECONDS * len({"naive": "SUT", "": ""}.get(schedule.head, "ST")))


def bubble(result: Timeline) -> float:
    return round(result.makespan_seconds - work(result.schedule), 9)


def inner_bubble(result: Timeline) -> float:
    spans = []
    for rank in range(result.schedule.ranks):
        passes = [event for event in result.events if event.rank == rank and event.action.kind in "FBIWSTU"]
        spans.append(passes[-1].end_seconds - passes[0].start_seconds)
    return round(max(spans) - work(result.schedule), 9)


def in_flight(result: Timeline) -> list[float]:
    return [count / result.schedule.chunks for count in result.peak_in_flight]


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_naive(p: int, m: int) -> None:
    """One rank works at a time."""
    result = timeline(generate("naive", p, m))
    assert bubble(result) == 3 * m * (p - 1)
    assert in_flight(result) == [1] * p


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_gpipe_and_1f1b(p: int, m: int) -> None:
    """Both idle for (p - 1) (F + B)."""
    gpipe, one_f_one_b, pipedream = (timeline(generate(name, p, m)) for name in ("gpipe", "1f1b", "pipedream"))
    assert bubble(gpipe) == bubble(one_f_one_b) == bubble(pipedream) == 3 * (p - 1)
    assert in_flight(gpipe) == [m] * p
    assert in_flight(one_f_one_b) == in_flight(pipedream) == [p - rank for rank in range(p)]


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_interleaved(p: int, m: int, chunks: int) -> None:
    """(p - 1) (F + B) / v, and p (1 + (p - 1) / (p v)) in flight; no more than there are."""
    result = timeline(generate("interleaved", p, m, chunks=chunks))
    assert bubble(result) == pytest.approx(3 * (p - 1) / chunks, abs=1e-9)
    assert in_flight(result)[0] == pytest.approx(min(p * (1 + (p - 1) / (p * chunks)) if chunks > 1 else p, m))


@pytest.mark.parametrize(("p", "m"), [(2, 5), (3, 7), (4, 6), (4, 11), (8, 15), (8, 27)])
def test_interleaved_where_microbatches_do_not_divide(p: int, m: int) -> None:
    """The bubble stays; groups of more than p microbatches cost memory."""
    for chunks in (2, 3):
        result = timeline(generate("interleaved", p, m, chunks=chunks))
        group = -(-m // (m // p))
        assert bubble(result) == pytest.approx(3 * (p - 1) / chunks, abs=1e-9)
        assert in_flight(result)[0] == min(((chunks - 1) * group + 2 * p - 1) / chunks, m)


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("name", ["zb-h1", "zb-1p"])
def test_zb_h1_and_1p(name: str, p: int, m: int) -> None:
    """(p - 1) (F + I - W), in the memory of 1F1B's first rank everywhere."""
    result = timeline(generate(name, p, m))
    assert bubble(result) == p - 1
    assert in_flight(result) == [p] * p


@pytest.mark.parametrize(("forward", "backward", "weight"), [(1, 1.25, 0.75), (1, 1, 0.5), (0.75, 1, 0.75)])
def test_zb_h1_with_unequal_passes(forward: float, backward: float, weight: float) -> None:
    for p, m in STEADY:
        result = timeline(generate("zb-h1", p, m), forward, backward, weight)
        ideal = m * (forward + backward + weight)
        assert result.makespan_seconds - ideal == pytest.approx((p - 1) * (forward + backward - weight))


@pytest.mark.parametrize(("p", "m"), STEADY)
def test_zb_h2(p: int, m: int) -> None:
    """(p - 1) (F + I - 2 W), which is 0, within each rank; m >= 2p - 1. The start of the last rank adds (p - 1) F."""
    result = timeline(generate("zb-h2", p, m))
    assert inner_bubble(result) == 0
    assert bubble(result) == p - 1
    assert in_flight(result) == [2 * p - 1] * p


@pytest.mark.parametrize(("p", "m"), STEADY)
def test_zb_2p(p: int, m: int) -> None:
    result = timeline(generate("zb-2p", p, m))
    assert inner_bubble(result) == 0
    assert bubble(result) == p - 1
    assert max(in_flight(result)) <= 2 * p


@pytest.mark.parametrize(("p", "m"), [(p, m) for p in RANKS for m in (1, p // 2, p)])
def test_few_microbatches(p: int, m: int) -> None:
    """For m <= p, 1F1B takes (m + p - 1) (F + I + W), a split backward (m + p - 1) (F + I) + W."""
    assert timeline(generate("1f1b", p, m)).makespan_seconds == 3 * (m + p - 1)
    for name in ("zb-h1", "zb-h2", "zb-1p", "zb-2p"):
        assert timeline(generate(name, p, m)).makespan_seconds == 2 * (m + p - 1) + 1


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_zb_v(p: int, m: int) -> None:
    """Only the start of the last rank idles: (p - 1) F / 2. Memory p on every rank. From m = 2p on nothing else."""
    result = timeline(generate("zb-v", p, m))
    assert bubble(result) == (p - 1) / 2
    assert max(in_flight(result)) == p
    assert min(in_flight(result)) == p or m == p


@pytest.mark.parametrize(("p", "m"), STEADY)
def test_v_half(p: int, m: int) -> None:
    """(p + 2) // 2 in flight, the same on all ranks; bubbles of 0.28, 0.40 and 0.46 of that of 1F1B."""
    result = timeline(generate("v-half", p, m))
    assert in_flight(result) == [(p + 2) // 2] * p
    assert bubble(result) == (3 * p - 7 if p > 2 else 1) / 2
    published = {4: 0.28, 8: 0.40, 16: 0.46}
    assert bubble(result) / (3 * (p - 1)) == pytest.approx(published.get(p, 1 / 6), abs=0.006)


def test_v_half_does_not_idle_in_every_interval() -> None:
    """With W + 2I >= 2F and W + 2F >= 2I: 0.53 to 0.69 of the bubble of 1F1B; 0.51 to 0.67 are published."""
    for p in (4, 8, 12, 16):
        costs = PassTimes(*((seconds,) * 2 * p for seconds in (1, 1.3, 0.7)))
        few, many = (timeline(generate("v-half", p, m, costs=costs), 1, 1.3, 0.7) for m in (2 * p, 4 * p))
        extra = many.makespan_seconds - 3 * 4 * p
        assert extra == pytest.approx(few.makespan_seconds - 3 * 2 * p)
        assert 0.5 < extra / (3 * (p - 1)) < 0.69


@pytest.mark.parametrize(("p", "m"), [*STEADY, (12, 24), (12, 48)])
def test_v_min(p: int, m: int) -> None:
    """(p + 4) // 3 in flight; bubbles of 0.61 to 0.66 of that of 1F1B."""
    result = timeline(generate("v-min", p, m))
    assert max(in_flight(result)) == (p + 4) // 3
    if p > 2:
        assert 0.605 < bubble(result) / (3 * (p - 1)) < 0.66


def test_v_min_idles_in_every_interval_where_passes_differ() -> None:
    few, many = (timeline(generate("v-min", 8, m), 1, 1.3, 0.7).makespan_seconds - 3 * m for m in (32, 64))
    assert many > 1.5 * few


def pairs_at_once(schedule: Schedule) -> Schedule:
    """Each forward with the whole backward after it as one pass: inputs first, then both, then outputs."""
    lists = []
    for actions in lower(schedule).lists:
        row, held = [], []
        passes = [action for action in actions if not is_send(action) and not is_receive(action)]
        after = {a: b for a, b in pairwise(passes) if a.kind == "F" and b.kind == "B"}
        for action in actions:
            if is_send(action) and held:
                held.append(action)
            elif is_receive(action) and held:
                row.insert(row.index(held[0]), action)
            else:
                row.append(action)
                if action in after:
                    held = [action]
                elif held:
                    row += held[1:]
                    held = []
        lists.append(tuple(row))
    return replace(lower(schedule), lists=tuple(lists))


@pytest.mark.parametrize(("p", "m"), STEADY)
def test_dualpipe_v(p: int, m: int) -> None:
    """(p - 1) (F&B + B - 3 W) of its chunks' passes if nothing leaves a pair before its end; p + 1/2 in flight.

    Sent at once, outputs arrive earlier, and the start of the last rank, (p - 1) F / 2, is all that is left.
    """
    schedule = generate("dualpipe-v", p, m)
    result = timeline(schedule)
    assert in_flight(result) == [p + 0.5] * p
    assert bubble(result) == (p - 1) / 2
    paired = simulate_timeline(pairs_at_once(schedule), result.costs)
    assert bubble(paired) == (p - 1) * (3 + 2 - 3) / 2


@pytest.mark.parametrize("embedding", [False, True])
@pytest.mark.parametrize("head", ["naive", "vocab-1", "vocab-2"])
@pytest.mark.parametrize(("p", "m"), STEADY)
def test_1f1b_with_vocabulary(p: int, m: int, head: str, embedding: bool) -> None:
    """p - r microbatches and one per barrier on rank r; no bubble beyond 1F1B's.

    With vocab-2 it is shorter by one T: the last one runs while the gradients are on their way to rank 0.
    """
    result = timeline(generate("1f1b", p, m, head=head, embedding=embedding))
    barriers = {"naive": 3, "vocab-1": 2, "vocab-2": 1}[head]
    assert in_flight(result) == [min(p - rank + barriers, m) for rank in range(p)]
    assert bubble(result) == 3 * (p - 1) - (HEAD_SECONDS if head == "vocab-2" else 0)


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m >= 2 * p])
def test_interlaced(p: int, m: int) -> None:
    """One and a half times the microbatches of 1F1B on rank 0. Its exchanges cost, not its order."""
    for head in ("vocab-1", "vocab-2"):
        result = timeline(generate("interlaced", p, m, head=head))
        assert in_flight(result)[0] == 1.5 * p
        assert bubble(result) == 3 * (p - 1)


NAMES = ["interleaved", "zb-h1", "zb-h2", "zb-1p", "zb-2p", "zb-v", "v-half"]


@pytest.mark.parametrize("head", ["naive", "vocab-1", "vocab-2"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("p", [2, 4, 8])
def test_a_barrier_costs_one_microbatch_and_no_bubble(name: str, p: int, head: str) -> None:
    """On every rank alike, from m = 4p on; V-Half even hides some of its bubble behind the vocabulary's passes."""
    m = 4 * p
    plain = timeline(generate(name, p, m))
    for embedding in (False, True):
        result = timeline(generate(name, p, m, head=head, embedding=embedding))
        grown = [after - before for before, after in zip(in_flight(plain), in_flight(result), strict=True)]
        assert grown == [min(BARRIERS[head], m - before) for before in in_flight(plain)]
        assert bubble(result) <= bubble(plain)


@pytest.mark.parametrize("head", ["naive", "vocab-1", "vocab-2"])
def test_naive_and_gpipe_keep_their_memory_with_vocabulary(head: str) -> None:
    for p, m in SIZES[:6]:
        assert in_flight(timeline(generate("gpipe", p, m, head=head))) == [m] * p
        assert in_flight(timeline(generate("naive", p, m, head=head))) == [1] * p


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 8, 12])
def test_zb_keeps_to_its_limit_and_uses_it(limit: int) -> None:
    p, m = 4, 24
    for name in ("zb", "zb-v"):
        results = [timeline(generate(name, p, m, limit=each)) for each in (limit, limit + 1)]
        assert max(in_flight(results[0])) <= limit
        assert bubble(results[1]) <= bubble(results[0])


def test_cost_aware_schedules_follow_the_costs() -> None:
    """With W far shorter than I and slow sends, the order for these times beats that for equal ones."""
    p, m = 4, 16
    costs = PassTimes((1.0,) * p, (1.25,) * p, (0.5,) * p, send=0.5)
    measured = []
    for schedule in (generate("zb-2p", p, m, costs=costs), generate("zb-h2", p, m), generate("zb-2p", p, m)):
        lowered = lower(schedule)
        times = Costs.uniform(lowered, forward_seconds=1, backward_seconds=1.75, weight_seconds=0.5, send_seconds=0.5)
        measured.append(simulate_timeline(lowered, times).makespan_seconds)
    assert measured[0] < min(measured[1:])


def test_all_schedules_have_a_formula_here() -> None:
    tested = {"naive", "gpipe", "1f1b", "pipedream", "interlaced", "zb", "v-min", "dualpipe-v", *NAMES}
    assert tested == set(SCHEDULES)
