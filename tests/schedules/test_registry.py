from __future__ import annotations

from typing import Any

import pytest

from autopar.errors import ArgumentError, ScheduleError
from autopar.schedules import SCHEDULES, Costs, PassTimes, check, generate, lower, placement
from autopar.schedules.actions import HEADS
from autopar.schedules.registry import swaps_both_ways


@pytest.mark.parametrize("name", SCHEDULES)
def test_rows_say_what_is_generated(name: str) -> None:
    row = SCHEDULES[name]
    schedule = generate(name, 3, 6, head=row.heads[0])
    assert schedule.name == name
    assert schedule.placement == placement(name, 3)
    assert schedule.chunks == (row.chunks or 2)
    assert bool(schedule.split) == row.splits_backward
    assert schedule.is_asynchronous == row.asynchronous
    expected = {"straight": (0, 1, 2), "looped": (0, 1, 2, 0, 1, 2), "v": (0, 1, 2, 2, 1, 0)}
    assert schedule.placement == expected[row.placement]
    assert row.summary
    assert set(row.heads) <= set(HEADS)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_that_take_turns(name: str) -> None:
    """Whose ranks still have forwards ahead when their backwards begin: what goes to the host does so both ways."""
    schedule = generate(name, 3, 12, head=SCHEDULES[name].heads[0])
    kinds = ([action.kind for action in actions if action.kind in "FBI"] for actions in schedule.lists)
    turns = [len(row) - row[::-1].index("F") > min(map(row.index, {*row} - {"F"})) for row in kinds]
    assert all(turns) if SCHEDULES[name].takes_turns else not any(turns)
    assert swaps_both_ways(name, 12) == SCHEDULES[name].takes_turns
    assert not swaps_both_ways(name, 1)


@pytest.mark.parametrize(("name", "head"), [(name, head) for name, row in SCHEDULES.items() for head in row.heads])
def test_headed_schedules_say_so(name: str, head: str) -> None:
    schedule = generate(name, 2, 4, head=head, embedding=bool(head))
    assert (schedule.head, schedule.embedding) == (head, bool(head))


def test_placement_of_any_chunks() -> None:
    assert placement("interleaved", 2, 3) == (0, 1, 0, 1, 0, 1)
    assert placement("zb-v", 2) == (0, 1, 1, 0)
    assert generate("interleaved", 2, 4, chunks=3).placement == (0, 1, 0, 1, 0, 1)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("2f2b", {}, "unknown schedule '2f2b'; known schedules are naive, gpipe, 1f1b, "),
        ("dualpipe-v", {"microbatches": 7}, "'dualpipe-v' on 4 ranks needs at least 8 microbatches, not 7"),
        ("1f1b", {"chunks": 2}, "'1f1b' can't have 2 chunks per rank; it takes exactly 1"),
        ("zb-v", {"chunks": 1}, "'zb-v' can't have 1 chunks per rank; it takes exactly 2"),
        ("interleaved", {"chunks": 0}, "'interleaved' can't have 0 chunks per rank; it takes at least 1, whole"),
        ("interleaved", {"chunks": True}, "can't have True chunks per rank"),
        ("pipedream", {"head": "vocab-1"}, "'pipedream' can't have head 'vocab-1'; it takes ''; .* with naive, gpipe"),
        ("dualpipe-v", {"head": "naive"}, "'dualpipe-v' can't have head 'naive'; it takes ''"),
        ("interlaced", {}, "'interlaced' can't have head ''; it takes 'naive', 'vocab-1', 'vocab-2'; '' works with"),
        ("1f1b", {"head": "vocab-3"}, "can't have head 'vocab-3'; it takes '', 'naive', 'vocab-1', 'vocab-2'$"),
        ("1f1b", {"embedding": True}, "the embedding is split with a head only"),
        ("1f1b", {"limit": 4}, "'1f1b' takes no memory limit; zb, zb-v do"),
        ("zb", {"limit": 0}, "'zb' can't keep to 0 microbatches in flight; with head '' the least is 1"),
        ("zb", {"limit": 2, "head": "vocab-1"}, "with head 'vocab-1' the least is 3"),
        ("zb-v", {"limit": 1.5}, "can't keep to 1.5 microbatches"),
        ("zb", {"costs": PassTimes.unit(5, 5)}, "'zb' has 4 stages, but costs has pass times of 5"),
        ("zb-v", {"costs": PassTimes.unit(8, 2)}, "'zb-v' has 4 ranks, but costs has 2 times of S"),
    ],
)
def test_what_a_schedule_does_not_have(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        generate(name, 4, **{"microbatches": 8, **arguments})


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(0, 4), (4, 0), (-1, 4), (4, -1), (2.0, 4), (True, 4)])
def test_sizes_below_one(name: str, ranks: int, microbatches: int) -> None:
    with pytest.raises(ScheduleError, match="needs at least 1, whole"):
        generate(name, ranks, microbatches, head=SCHEDULES[name].heads[0])


@pytest.mark.parametrize(("name", "head"), [("zb", ""), ("zb", "vocab-1"), ("zb", "naive"), ("zb-v", "vocab-2")])
def test_the_least_limit_works(name: str, head: str) -> None:
    least = 1 + {"": 0, "vocab-1": 2, "vocab-2": 1, "naive": 3}[head]
    check(lower(generate(name, 4, 6, limit=least, head=head)))


def test_costs_of_fixed_orders_are_checked_too() -> None:
    with pytest.raises(ScheduleError, match="'gpipe' has 2 stages"):
        generate("gpipe", 2, 2, costs=PassTimes.unit(3, 3))


def test_pass_times_of_a_timeline() -> None:
    schedule = generate("zb-h1", 2, 2, head="vocab-2")
    costs = Costs.uniform(
        schedule,
        forward_seconds=1,
        backward_seconds=2.5,
        weight_seconds=1,
        send_seconds=0.25,
        vocabulary_seconds={"S": 3, "STATS": 9},
    )
    times = PassTimes.of(costs)
    assert times == PassTimes((1, 1), (1.5, 1.5), (1, 1), {"S": (3, 3)}, 0.25, {"STATS": 9})
    check(lower(generate("zb", 2, 4, costs=times, head="vocab-2")))


def test_pass_times_that_can_not_be() -> None:
    with pytest.raises(ArgumentError, match="2 forward, 2 input_gradient and 1 weight_gradient; give one of each"):
        PassTimes((1, 1), (1, 1), (1,))
    for bad in (-1, float("nan"), float("inf")):
        with pytest.raises(ArgumentError, match="finite, from 0 up"):
            PassTimes((1, bad), (1, 1), (1, 1))
        with pytest.raises(ArgumentError, match="finite, from 0 up"):
            PassTimes((1,), (1,), (1,), {"S": (bad,)})
        with pytest.raises(ArgumentError, match="finite, from 0 up"):
            PassTimes((1,), (1,), (1,), exchanges={"SUM_X": bad})
