from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import ScheduleError
from autopar.schedules import Action, Schedule, format_list, generate, lower, parse_action, parse_list
from autopar.schedules.actions import HEADS

numbers = st.integers(0, 10_000)


def action_of(kind: str, *numbers: int) -> Action:
    """Hypothesis would give values to all fields of a named tuple."""
    return Action(kind, *numbers)


actions = st.one_of(
    st.builds(action_of, st.sampled_from(["F", "B", "I", "W", "UPDATE"]), numbers, numbers),
    st.builds(action_of, st.sampled_from(["E", "G", "S", "U", "T", "SUM_E", "CAST_X", "MAX", "STATS"]), numbers),
    st.builds(action_of, st.sampled_from(["SEND_F", "RECV_F", "SEND_B", "RECV_B"]), numbers, numbers, numbers),
    st.builds(lambda stage: Action("REDUCE", stage=stage), numbers),
    st.sampled_from([Action("STEP"), Action("REDUCE_V")]),
)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    lists = draw(st.lists(st.lists(actions, max_size=12).map(tuple), min_size=1, max_size=5))
    placement = draw(st.lists(st.integers(0, len(lists) - 1), min_size=1, max_size=6))
    name = draw(st.from_regex(r"[a-z0-9_.+-]+", fullmatch=True))
    head = draw(st.sampled_from(HEADS))
    embedding = bool(head) and draw(st.booleans())
    microbatches = draw(st.integers(1, 1000))
    return Schedule(name, len(placement), microbatches, tuple(placement), tuple(lists), head, embedding)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("F3@1", Action("F", 3, 1)),
        ("B0@2", Action("B", 0, 2)),
        ("SEND_F3@1>2", Action("SEND_F", 3, 1, 2)),
        ("RECV_F3@2<1", Action("RECV_F", 3, 2, 1)),
        ("SEND_B3@2>1", Action("SEND_B", 3, 2, 1)),
        ("RECV_B3@1<2", Action("RECV_B", 3, 1, 2)),
        ("REDUCE@1", Action("REDUCE", stage=1)),
        ("STEP", Action("STEP")),
        ("I2@5", Action("I", 2, 5)),
        ("W2@5", Action("W", 2, 5)),
        ("UPDATE2@5", Action("UPDATE", 2, 5)),
        ("S7", Action("S", 7)),
        ("SUM_X7", Action("SUM_X", 7)),
        ("REDUCE_V", Action("REDUCE_V")),
    ],
)
def test_text_of_every_kind(text: str, action: Action) -> None:
    assert str(action) == text
    assert parse_action(text) == action


@given(actions)
def test_an_action_survives_its_text(action: Action) -> None:
    assert parse_action(str(action)) == action


@given(st.lists(actions))
def test_a_list_survives_its_text(row: list[Action]) -> None:
    assert parse_list(format_list(row)) == tuple(row)


@given(schedules())
def test_a_schedule_survives_text_and_json(schedule: Schedule) -> None:
    assert Schedule.from_text(schedule.to_text()) == schedule
    assert Schedule.from_json(json.loads(json.dumps(schedule.to_json()))) == schedule


def test_random_lowered_schedules_survive_text_and_json(random_schedule: Callable[[int], Schedule]) -> None:
    for seed in range(20):
        schedule = lower(random_schedule(seed))
        assert Schedule.from_text(str(schedule)) == schedule
        assert Schedule.from_json(schedule.to_json()) == schedule


@pytest.mark.parametrize(
    "text",
    [
        "",
        "F",
        "F3",
        "F@1",
        "F3@1>2",
        "F-1@0",
        "f3@1",
        "X3@1",
        "F3@1 ",
        "F٣@1",
        "SEND_F3@1",
        "S3@1",
        "W3",
        "REDUCE_V3",
        "STEP0",
        "REDUCE",
        "REDUCE3@1",
        f"F{'9' * 5000}@0",
    ],
)
def test_what_is_not_an_action(text: str) -> None:
    with pytest.raises(ScheduleError):
        parse_action(text)


def test_errors_of_actions_say_what_would_work() -> None:
    with pytest.raises(ScheduleError, match="G can't have microbatch 3, stage 1, peer -1; it is written like G3"):
        parse_action("G3@1")
    with pytest.raises(ScheduleError, match=r"unknown kind of action 'X'; known kinds are F, B, I, W, .*, REDUCE_V"):
        parse_action("X3@1")
    with pytest.raises(ScheduleError, match="'SEND_F3@1<2' is not an action; did you mean SEND_F3@1>2"):
        parse_action("SEND_F3@1<2")
    with pytest.raises(ScheduleError, match="'F03@1' is not an action; did you mean F3@1"):
        parse_action("F03@1")
    with pytest.raises(ScheduleError, match="F can't have microbatch 3, stage -1, peer -1; it is written like F3@1"):
        Action("F", 3)
    with pytest.raises(ScheduleError, match="STEP can't have microbatch -5"):
        Action("STEP", -5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "two words"}, "'two words' can't name a schedule"),
        ({"stages": 0}, "has 0 stages; it needs at least 1, whole"),
        ({"microbatches": True}, "has True microbatches"),
        ({"microbatches": 1.5}, "has 1.5 microbatches"),
        ({"placement": (0,)}, "places 1 stages, but has 2"),
        ({"placement": (0, 2)}, "places stage 1 on rank 2, but has 2 action lists"),
        ({"placement": (0, "1")}, "places stage 1 on rank '1'"),
        (
            {"head": "vocab-3"},
            "has head 'vocab-3' and embedding False; head is one of '', 'naive', 'vocab-1', ",
        ),
        ({"embedding": True}, "has head '' and embedding True; .* an embedding is split with a head only"),
    ],
)
def test_sizes_that_do_not_fit_together(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        replace(generate("gpipe", 2, 2), **change)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1 is ''; a schedule begins like"),
        ("schedule x stages=1 microbatches=1", "line 1 is 'schedule x stages=1 microbatches=1'"),
        ("schedule x stages=1 microbatches=1 placement=0\n1: F0@0", "line 2 must begin with '0:'"),
        ("schedule x stages=1 microbatches=1 placement=0\nF0@0", "line 2 must begin with '0:'"),
        ("schedule x stages=1 microbatches=1 placement=0\n0: F0@0 B0", "line 2: B can't have microbatch 0"),
        ("schedule x stages=2 microbatches=1 placement=0,1\n0: F0@0", "places stage 1 on rank 1, but has 1"),
    ],
)
def test_text_that_is_not_a_schedule(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_text(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": 1}, "has the keys name, stages, microbatches, placement, lists, head, embedding, not .*extra"),
        ({"name": 3}, "key 'name' of a schedule must be text"),
        ({"stages": "2"}, "has '2' stages"),
        ({"placement": 0}, "key 'placement' of a schedule must be a list"),
        ({"lists": ["F0@0", 3]}, "key 'lists' of a schedule must be a list with one text per rank"),
        ({"lists": "F0@0"}, "key 'lists' of a schedule must be a list with one text per rank"),
    ],
)
def test_json_that_is_not_a_schedule(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_json({**generate("gpipe", 2, 2).to_json(), **change})


def test_truncated_json() -> None:
    with pytest.raises(ScheduleError, match="placement, lists, head, embedding, not none"):
        Schedule.from_json({})
