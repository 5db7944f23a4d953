from __future__ import annotations

from collections.abc import Callable

import pytest

from autopar.errors import ScheduleError
from autopar.schedules import Schedule, check, format_list, generate, lower, parse_list


def of(placement: tuple[int, ...], microbatches: int, *rows: str) -> Schedule:
    return Schedule("hand", len(placement), microbatches, placement, tuple(map(parse_list, rows)))


def test_a_v_of_four_stages_on_two_ranks(golden: Callable[[str, str], None]) -> None:
    schedule = lower(
        of(
            (0, 1, 1, 0),
            2,
            "F0@0 F1@0 F0@3 B0@3 F1@3 B1@3 B0@0 B1@0",
            "F0@1 F0@2 F1@1 F1@2 B0@2 B0@1 B1@2 B1@1",
        )
    )
    check(schedule)
    golden("schedules/v_pp2_m2_lowered.txt", str(schedule))


def test_neighbours_on_one_rank_send_nothing() -> None:
    schedule = lower(of((0, 0), 1, "F0@0 F0@1 B0@1 B0@0"))
    assert format_list(schedule.lists[0]) == "F0@0 F0@1 B0@1 REDUCE@1 B0@0 REDUCE@0 STEP"
    check(schedule)


def test_receives_follow_the_order_of_the_sends() -> None:
    """Rank 1 wants microbatch 1 first, but rank 0 makes microbatch 0 first."""
    schedule = lower(of((0, 1), 2, "F0@0 F1@0 B0@0 B1@0", "F1@1 F0@1 B1@1 B0@1"))
    assert format_list(schedule.lists[1]).startswith("RECV_F0@1<0 RECV_F1@1<0 F1@1 F0@1 B1@1 SEND_B1@1>0")
    assert "F1@0 SEND_F1@0>1 RECV_B1@0<1 RECV_B0@0<1 B0@0 B1@0" in format_list(schedule.lists[0])
    check(schedule)


def test_a_rank_without_stages_only_steps() -> None:
    schedule = lower(of((1,), 1, "", "F0@0 B0@0"))
    assert format_list(schedule.lists[0]) == "STEP"
    check(schedule)


def test_any_order_on_any_placement(random_schedule: Callable[[int], Schedule]) -> None:
    for seed in range(300):
        schedule = random_schedule(seed)
        lowered = lower(schedule)
        check(lowered)
        compute = tuple(tuple(a for a in actions if a.kind in "FB") for actions in lowered.lists)
        assert compute == schedule.lists


def test_lowering_twice_is_refused() -> None:
    schedule = lower(generate("1f1b", 2, 2))
    with pytest.raises(ScheduleError, match="rank 0: SEND_F0@0>1 is there before lowering"):
        lower(schedule)


@pytest.mark.parametrize("stray", ["F0@1", "F0@7"])
def test_an_action_on_the_wrong_rank(stray: str) -> None:
    with pytest.raises(ScheduleError, match=rf"rank 0: {stray} is on the wrong rank; the stages of rank 0 are \[0\]"):
        lower(of((0, 1), 1, f"F0@0 {stray} B0@0", "F0@1 B0@1"))


def test_an_input_that_nobody_makes() -> None:
    message = "rank 1: F1@1 needs RECV_F1@1<0, but rank 0 never makes what SEND_F1@0>1 would send"
    with pytest.raises(ScheduleError, match=message):
        lower(of((0, 1), 2, "F0@0 B0@0", "F0@1 F1@1 B0@1 B1@1"))
