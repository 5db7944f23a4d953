from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import ScheduleError
from autopar.schedules import (
    SCHEDULES,
    Action,
    Schedule,
    check,
    generate,
    lower,
    parse_action,
    parse_list,
    run_order,
)
from tests.schedules.interpreter import Interpreter, ends_well

NAMED = re.compile(
    r"rank \d+.*\b([FBIW]\d+@\d+|UPDATE\d+@\d+|(SEND|RECV)_[FB]\d+@\d+[<>]\d+|REDUCE@\d+|REDUCE_V|STEP|[EGSUT]\d+|"
    r"(SUM_E|CAST_E|CAST_X|MAX|STATS|SUM_X)\d+)",
    re.DOTALL,
)
HEADED = [(name, head) for name, row in SCHEDULES.items() for head in row.heads]


def count_of(schedule: Schedule) -> int:
    """How many actions a lowered schedule has, from its sizes alone."""
    ranks, stages, m = schedule.ranks, schedule.stages, schedule.microbatches
    moves = sum(a != b for a, b in zip(schedule.placement, schedule.placement[1:], strict=False))
    passes = {"": 0, "naive": 3 + 4, "vocab-1": 2 + 3, "vocab-2": 2 + 3}[schedule.head] + 4 * schedule.embedding
    return (
        2 * m * stages
        + len(schedule.split)
        + (m * stages if schedule.is_asynchronous else stages)
        + 4 * m * moves
        + m * passes * ranks
        + ranks * (1 + bool(schedule.head))
    )


@pytest.mark.parametrize(("name", "head"), HEADED)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 9), (2, 5), (3, 8), (5, 13), (7, 3)])
def test_generated_schedules_are_right(name: str, head: str, ranks: int, microbatches: int) -> None:
    microbatches = max(microbatches, SCHEDULES[name].least_per_rank * ranks)
    for embedding in dict.fromkeys((False, bool(head))):
        schedule = lower(generate(name, ranks, microbatches, head=head, embedding=embedding))
        assert sum(map(len, schedule.lists)) == count_of(schedule)
        check(schedule)
        Interpreter(schedule).run()


@pytest.mark.parametrize("chunks", [1, 2, 3, 5])
@pytest.mark.parametrize("head", ["", "vocab-1", "vocab-2"])
def test_interleaved_takes_any_chunks_and_microbatches(chunks: int, head: str) -> None:
    for ranks in range(1, 6):
        for microbatches in range(1, 2 * ranks + 2):
            check(lower(generate("interleaved", ranks, microbatches, chunks=chunks, head=head)))


@pytest.mark.parametrize(("ranks", "microbatches"), [(8, 64), (64, 4), (32, 33)])
@pytest.mark.parametrize("name", [name for name, row in SCHEDULES.items() if not row.least_per_rank])
def test_larger_schedules_are_right(name: str, ranks: int, microbatches: int) -> None:
    check(lower(generate(name, ranks, microbatches, head=SCHEDULES[name].heads[0])))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_largest_schedule_is_right(name: str) -> None:
    schedule = lower(generate(name, 64, 512))
    assert sum(map(len, schedule.lists)) == 2 * 64 * 512 + 4 * 63 * 512 + 2 * 64
    check(schedule)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "head"), HEADED)
@pytest.mark.parametrize(("ranks", "microbatches"), [(8, 96), (64, 16)])
def test_every_schedule_of_every_size_is_right(name: str, head: str, ranks: int, microbatches: int) -> None:
    microbatches = max(microbatches, SCHEDULES[name].least_per_rank * ranks)
    schedule = lower(generate(name, ranks, microbatches, head=head, embedding=bool(head)))
    assert sum(map(len, schedule.lists)) == count_of(schedule)
    check(schedule)


LARGEST = ("naive", "1f1b", "interleaved", "zb-h1", "zb-v")
"""One of each family; all others are checked on as many ranks, with fewer microbatches."""


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGEST)
def test_a_schedule_of_each_family_of_the_largest_size_is_right(name: str) -> None:
    check(lower(generate(name, 64, 512)))


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "microbatches"), [(64, 128), (16, 512)])
@pytest.mark.parametrize("name", ["1f1b", "interlaced"])
def test_large_schedules_with_a_split_vocabulary_are_right(name: str, ranks: int, microbatches: int) -> None:
    check(lower(generate(name, ranks, microbatches, head="vocab-2", embedding=True)))


def drop(draw: random.Random, actions: list[Action], schedule: Schedule) -> None:
    del actions[draw.randrange(len(actions))]


def duplicate(draw: random.Random, actions: list[Action], schedule: Schedule) -> None:
    actions.insert(draw.randint(0, len(actions)), draw.choice(actions))


def swap(draw: random.Random, actions: list[Action], schedule: Schedule) -> None:
    i, j = draw.randrange(len(actions)), draw.randrange(len(actions))
    actions[i], actions[j] = actions[j], actions[i]


def move(draw: random.Random, actions: list[Action], schedule: Schedule) -> None:
    action = actions.pop(draw.randrange(len(actions)))
    actions.insert(draw.randint(0, len(actions)), action)


def retarget(draw: random.Random, actions: list[Action], schedule: Schedule) -> None:
    """Give one action another microbatch, stage or peer: a valid one of this schedule."""
    index = draw.randrange(len(actions))
    sizes = {"microbatch": schedule.microbatches, "stage": schedule.stages, "peer": schedule.ranks}
    fields = [field for field in sizes if getattr(actions[index], field) >= 0]
    if fields:
        field = draw.choice(fields)
        actions[index] = actions[index]._replace(**{field: draw.randrange(sizes[field])})


def hand_over(draw: random.Random, actions: list[Action], schedule: Schedule) -> None:
    """Replace one action by one of another list."""
    actions[draw.randrange(len(actions))] = draw.choice(schedule.lists[draw.randrange(schedule.ranks)])


EDITS = (drop, duplicate, swap, move, retarget, hand_over)


@cache
def named(name: str, head: str, ranks: int, microbatches: int) -> Schedule:
    microbatches = max(microbatches, SCHEDULES[name].least_per_rank * ranks)
    return lower(generate(name, ranks, microbatches, head=head, embedding=head == "vocab-2"))


def victims(random_schedule: Callable[[int], Schedule], seed: int) -> Schedule:
    draw = random.Random(seed)
    if draw.randrange(4) == 0:
        return lower(random_schedule(seed))
    return named(*draw.choice(HEADED), draw.randint(1, 4), draw.randint(1, 5))


@pytest.mark.parametrize("edit", EDITS)
def test_check_refuses_exactly_what_does_not_run(
    edit: Callable[[random.Random, list[Action], Schedule], None],
    random_schedule: Callable[[int], Schedule],
) -> None:
    broken = 0
    for seed in range(250):
        schedule = victims(random_schedule, seed)
        assert ends_well(schedule)
        draw = random.Random(seed)
        lists = [list(actions) for actions in schedule.lists]
        edit(draw, draw.choice(lists), schedule)
        edited = replace(schedule, lists=tuple(map(tuple, lists)))
        if ends_well(edited):
            check(edited)
            continue
        broken += 1
        with pytest.raises(ScheduleError) as caught:
            check(edited)
        assert NAMED.search(str(caught.value)), str(caught.value)
    assert broken > 100


def exchanges_of(actions: list[Action]) -> list[int]:
    return [
        index for index, action in enumerate(actions) if action.kind in ("SUM_E", "CAST_E", "CAST_X", "STATS", "SUM_X")
    ]


@st.composite
def broken(draw: st.DrawFn) -> Schedule:
    """A lowered schedule with one edit after which it can't run any more."""
    schedule = named(*draw(st.sampled_from(HEADED)), draw(st.integers(2, 4)), draw(st.integers(2, 5)))
    lists = [list(actions) for actions in schedule.lists]
    rank = draw(st.integers(0, len(lists) - 1))
    actions = lists[rank]
    index = draw(st.integers(0, len(actions) - 1))
    match draw(st.sampled_from(["drop", "duplicate", "swap", "hand over", "exchanges"])):
        case "drop":
            del actions[index]
        case "duplicate":
            actions.insert(draw(st.integers(0, len(actions))), actions[index])
        case "swap":  # of neighbours that need no order it is no break; those are left out below
            other = draw(st.integers(0, len(actions) - 1))
            actions[index], actions[other] = actions[other], actions[index]
        case "hand over":
            lists[(rank + draw(st.integers(1, len(lists) - 1))) % len(lists)].append(actions.pop(index))
        case "exchanges":
            places = exchanges_of(actions)
            hypothesis.assume(places)
            first = draw(st.integers(0, len(places) - 2))
            i, j = places[first], places[first + 1]
            actions[i], actions[j] = actions[j], actions[i]
    edited = replace(schedule, lists=tuple(map(tuple, lists)))
    hypothesis.assume(not ends_well(edited))
    return edited


@pytest.mark.slow
@hypothesis.settings(
    max_examples=1000,
    suppress_health_check=[hypothesis.HealthCheck.filter_too_much, hypothesis.HealthCheck.too_slow],
)
@given(broken())
def test_a_thousand_broken_schedules_are_refused(schedule: Schedule) -> None:
    with pytest.raises(ScheduleError) as caught:
        check(schedule)
    assert NAMED.search(str(caught.value)), str(caught.value)


def edited(rank: int, old: str, new: str) -> Schedule:
    """A right 1F1B schedule of 2 stages and 2 microbatches, with one piece of one rank's text replaced."""
    lines = str(lower(generate("1f1b", 2, 2))).splitlines()
    row = f"{lines[rank + 1]} "
    assert row.count(f" {old} ") == 1
    lines[rank + 1] = row.replace(f" {old} ", f" {new} ")
    return Schedule.from_text("\n".join(lines))


@pytest.mark.parametrize(
    ("rank", "old", "new", "message"),
    [
        (0, "SEND_F1@0>1", "", "rank 0 lacks SEND_F1@0>1"),
        (1, "REDUCE@1", "", "rank 1 lacks REDUCE@1"),
        (1, "STEP", "", "rank 1 lacks STEP"),
        (1, "B1@1", "B1@1 B1@1", "rank 1 repeats B1@1"),
        (1, "B1@1", "B0@1", "rank 1 lacks B1@1 and repeats B0@1"),
        (1, "F1@1", "F0@1", "rank 1 lacks F1@1 and repeats F0@1"),
        (1, "F1@1", "F1@1 F7@1", "rank 1 doesn't need F7@1$"),
        (1, "F1@1", "F1@1 F1@0", "rank 1 doesn't need F1@0; F1@0 belongs on rank 0$"),
        (1, "F1@1", "F1@1 B1@2", "rank 1 doesn't need B1@2$"),
        (0, "SEND_F1@0>1", "SEND_F1@0>0", "rank 0 lacks SEND_F1@0>1 and doesn't need SEND_F1@0>0"),
        (1, "F0@1 B0@1", "B0@1 F0@1", "rank 1: B0@1 comes before F0@1, which it needs"),
        (1, "RECV_F0@1<0 F0@1", "F0@1 RECV_F0@1<0", "rank 1: F0@1 comes before RECV_F0@1<0"),
        (1, "B1@1 SEND_B1@1>0", "SEND_B1@1>0 B1@1", "rank 1: SEND_B1@1>0 comes before B1@1"),
        (0, "B1@0 REDUCE@0", "REDUCE@0 B1@0", "rank 0: REDUCE@0 comes before B1@0"),
        (0, "REDUCE@0 STEP", "STEP REDUCE@0", "rank 0: REDUCE@0 comes after STEP, which must be last"),
    ],
)
def test_errors_name_rank_and_action(rank: int, old: str, new: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=f"schedule '1f1b', {message}"):
        check(edited(rank, old, new))


def test_channels_must_agree_on_the_order() -> None:
    schedule = edited(0, "F0@0 SEND_F0@0>1 F1@0 SEND_F1@0>1", "F0@0 F1@0 SEND_F1@0>1 SEND_F0@0>1")
    message = "message 0 from rank 0 to rank 1 is SEND_F1@0>1 at the sender, but RECV_F0@1<0 at the receiver"
    with pytest.raises(ScheduleError, match=message):
        check(schedule)


def of(stages: int, microbatches: int, *rows: str) -> Schedule:
    placement = tuple(range(stages))
    return Schedule("hand", stages, microbatches, placement, tuple(map(parse_list, rows)))


def test_a_cycle_of_waits() -> None:
    """Rank 0 wants its first gradient before it starts microbatch 1; rank 1 wants both inputs first."""
    schedule = lower(of(2, 2, "F0@0 B0@0 F1@0 B1@0", "F0@1 F1@1 B0@1 B1@1"))
    message = "can't go on: rank 0 waits for rank 1 in RECV_B0@0<1, rank 1 waits for rank 0 in RECV_F1@1<0"
    with pytest.raises(ScheduleError, match=message):
        check(schedule)


def test_the_cycle_leaves_out_who_only_waits_for_it() -> None:
    schedule = lower(
        of(3, 2, "F0@0 F1@0 B0@0 B1@0", "F0@1 B0@1 F1@1 B1@1", "F0@2 F1@2 B0@2 B1@2"),
    )
    with pytest.raises(ScheduleError) as caught:
        check(schedule)
    assert str(caught.value) == (
        "schedule 'hand' can't go on: rank 1 waits for rank 2 in RECV_B0@1<2, rank 2 waits for rank 1 in RECV_F1@2<1"
    )


def test_compute_lists_are_not_enough() -> None:
    with pytest.raises(ScheduleError, match=r"rank 0 lacks .*; lower\(\) adds the communication"):
        check(generate("gpipe", 2, 2))


def test_run_order_puts_sends_before_their_receives(random_schedule: Callable[[int], Schedule]) -> None:
    for seed in range(50):
        schedule = lower(random_schedule(seed))
        order = list(run_order(schedule))
        for rank in range(schedule.ranks):
            assert tuple(action for home, action in order if home == rank) == schedule.lists[rank]
        Interpreter(schedule).run()
        position = {step: index for index, step in enumerate(order)}
        for rank, action in order:
            if action.kind == "RECV_F":
                source = schedule.placement[action.stage - 1]
                send = parse_action(f"SEND_F{action.microbatch}@{action.stage - 1}>{rank}")
                assert position[source, send] < position[rank, action]


def test_run_order_names_a_sender_that_has_ended() -> None:
    schedule = of(2, 1, "STEP", "RECV_F0@1<0 F0@1")
    with pytest.raises(ScheduleError, match="can't go on: rank 1 waits for rank 0 in RECV_F0@1<0"):
        list(run_order(schedule))
