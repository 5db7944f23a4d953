from __future__ import annotations

import random
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import replace

import pytest

from autopar.errors import ScheduleError
from autopar.schedules import (
    GENERATORS,
    Action,
    Schedule,
    check,
    generate,
    lower,
    parse_action,
    parse_list,
    run_order,
)

NAMED = re.compile(r"rank \d+.*\b(F\d+@\d+|B\d+@\d+|(SEND|RECV)_[FB]\d+@\d+[<>]\d+|REDUCE@\d+|STEP)", re.DOTALL)


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 512), (2, 3), (8, 5), (16, 64), (64, 1), (64, 63)])
def test_generated_schedules_are_right(name: str, stages: int, microbatches: int) -> None:
    check(lower(generate(name, stages, microbatches)))


@pytest.mark.parametrize("name", GENERATORS)
def test_the_largest_schedule_is_right(name: str) -> None:
    schedule = lower(generate(name, 64, 512))
    assert sum(map(len, schedule.lists)) == 2 * 64 * 512 + 4 * 63 * 512 + 2 * 64
    check(schedule)


class Interpreter:
    """Runs lists the slow way, with queues of real messages; knows nothing of how check works."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.queues: dict[tuple[int, int, str], deque[tuple[int, int]]] = defaultdict(deque)
        self.values: list[set[tuple[str, int, int]]] = [set() for _ in schedule.lists]
        self.count: Counter[tuple[str, int, int]] = Counter()
        self.reduced: Counter[int] = Counter()
        self.stepped: Counter[int] = Counter()

    def ends_well(self) -> bool:
        try:
            self.run()
        except AssertionError:
            return False
        once = Counter(
            (kind, m, s)
            for kind in "FB"
            for m in range(self.schedule.microbatches)
            for s in range(self.schedule.stages)
        )
        return (
            self.count == once
            and not any(self.queues.values())
            and self.reduced == Counter(range(self.schedule.stages))
            and self.stepped == Counter(range(self.schedule.ranks))
        )

    def run(self) -> None:
        left = [deque(actions) for actions in self.schedule.lists]
        moved = True
        while moved:
            moved = False
            for rank, actions in enumerate(left):
                while actions and self.does(rank, actions[0]):
                    actions.popleft()
                    moved = True
        assert not any(left)

    def does(self, rank: int, action: Action) -> bool:
        assert not self.stepped[rank]
        direction = action.kind[-1]
        if action.kind.startswith("RECV"):
            queue = self.queues[action.peer, rank, direction]
            if not queue:
                return False
            source = action.stage - 1 if direction == "F" else action.stage + 1
            assert queue.popleft() == (action.microbatch, source)
            self.values[rank].add((direction, action.microbatch, source))
        else:
            getattr(self, action.kind.split("_")[0].lower())(rank, action)
        return True

    def f(self, rank: int, action: Action) -> None:
        assert self.schedule.placement[action.stage] == rank
        assert action.stage == 0 or ("F", action.microbatch, action.stage - 1) in self.values[rank]
        self.make(rank, action)

    def b(self, rank: int, action: Action) -> None:
        assert ("F", action.microbatch, action.stage) in self.values[rank]
        last = action.stage == self.schedule.stages - 1
        assert last or ("B", action.microbatch, action.stage + 1) in self.values[rank]
        self.make(rank, action)

    def make(self, rank: int, action: Action) -> None:
        key = (action.kind, action.microbatch, action.stage)
        self.values[rank].add(key)
        self.count[key] += 1

    def send(self, rank: int, action: Action) -> None:
        assert (action.kind[-1], action.microbatch, action.stage) in self.values[rank]
        assert self.schedule.placement[action.stage] == rank
        self.queues[rank, action.peer, action.kind[-1]].append((action.microbatch, action.stage))

    def reduce(self, rank: int, action: Action) -> None:
        assert self.schedule.placement[action.stage] == rank
        assert all(self.count["B", m, action.stage] for m in range(self.schedule.microbatches))
        self.reduced[action.stage] += 1

    def step(self, rank: int, action: Action) -> None:
        assert all(self.reduced[stage] for stage, home in enumerate(self.schedule.placement) if home == rank)
        self.stepped[rank] += 1


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
        actions[index] = replace(actions[index], **{field: draw.randrange(sizes[field])})


def hand_over(draw: random.Random, actions: list[Action], schedule: Schedule) -> None:
    """Replace one action by one of another list."""
    actions[draw.randrange(len(actions))] = draw.choice(schedule.lists[draw.randrange(schedule.ranks)])


EDITS = (drop, duplicate, swap, move, retarget, hand_over)


def victims(random_schedule: Callable[[int], Schedule], seed: int) -> Schedule:
    draw = random.Random(seed)
    compute = [generate(name, draw.randint(1, 4), draw.randint(1, 5)) for name in GENERATORS]
    return lower(draw.choice([*compute, random_schedule(seed)]))


@pytest.mark.parametrize("edit", EDITS)
def test_check_refuses_exactly_what_does_not_run(
    edit: Callable[[random.Random, list[Action], Schedule], None],
    random_schedule: Callable[[int], Schedule],
) -> None:
    broken = 0
    for seed in range(250):
        schedule = victims(random_schedule, seed)
        assert Interpreter(schedule).ends_well()
        draw = random.Random(seed)
        lists = [list(actions) for actions in schedule.lists]
        edit(draw, draw.choice(lists), schedule)
        edited = replace(schedule, lists=tuple(map(tuple, lists)))
        if Interpreter(edited).ends_well():
            check(edited)
            continue
        broken += 1
        with pytest.raises(ScheduleError) as caught:
            check(edited)
        assert NAMED.search(str(caught.value)), str(caught.value)
    assert broken > 100


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
