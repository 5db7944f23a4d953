from __future__ import annotations

from collections.abc import Callable

import pytest

from autopar.errors import ScheduleError
from autopar.schedules import SCHEDULES, Schedule, format_list, generate, gpipe, lower, one_f_one_b, parse_list
from autopar.schedules.eager import Eager, InOrder, Pass
from autopar.schedules.pass_times import PassTimes


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (3, 6), (4, 8)])
def test_compute_lists(name: str, ranks: int, microbatches: int, golden: Callable[[str, str], None]) -> None:
    schedule = generate(name, ranks, microbatches, head=SCHEDULES[name].heads[0])
    golden(f"schedules/{name}_pp{ranks}_m{microbatches}.txt", str(schedule))


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "v-half", "zb-1p", "interleaved"])
@pytest.mark.parametrize("head", ["vocab-1", "vocab-2"])
def test_lists_with_vocabulary(name: str, head: str, golden: Callable[[str, str], None]) -> None:
    schedule = generate(name, 2, 4, head=head, embedding=head == "vocab-2")
    golden(f"schedules/{name}_pp2_m4_{head}.txt", str(schedule))


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (2, 3), (4, 4)])
def test_lowered_lists(name: str, ranks: int, microbatches: int, golden: Callable[[str, str], None]) -> None:
    schedule = lower(generate(name, ranks, microbatches))
    golden(f"schedules/{name}_pp{ranks}_m{microbatches}_lowered.txt", str(schedule))


@pytest.mark.parametrize("head", ["naive", "vocab-1", "vocab-2"])
def test_lowered_lists_with_vocabulary(head: str, golden: Callable[[str, str], None]) -> None:
    schedule = lower(generate("1f1b", 2, 3, head=head, embedding=True))
    golden(f"schedules/1f1b_pp2_m3_{head}_lowered.txt", str(schedule))


def test_the_registry_calls_the_generators() -> None:
    assert generate("gpipe", 3, 5) == gpipe(3, 5)
    assert generate("1f1b", 3, 5) == one_f_one_b(3, 5)


@pytest.mark.parametrize("name", SCHEDULES)
def test_generators_are_deterministic(name: str) -> None:
    head = SCHEDULES[name].heads[-1]
    assert generate(name, 4, 9, head=head) == generate(name, 4, 9, head=head)


def test_one_f_one_b_is_gpipe_without_a_steady_state() -> None:
    """One microbatch leaves nothing to alternate."""
    assert one_f_one_b(4, 1).lists == gpipe(4, 1).lists


def test_one_f_one_b_alternates_on_the_last_rank() -> None:
    assert format_list(one_f_one_b(3, 3).lists[2]) == "F0@2 B0@2 F1@2 B1@2 F2@2 B2@2"


def test_microbatches_keep_their_order() -> None:
    """So gradients add up in the order of one device."""
    for name, row in SCHEDULES.items():
        schedule = generate(name, 4, 9, head=row.heads[-1])
        for actions in schedule.lists:
            for kinds in ("F", "BI", "W", "S", "T"):
                for stage in range(-1, schedule.stages):
                    microbatches = [a.microbatch for a in actions if a.kind in kinds and a.stage == stage]
                    assert microbatches == sorted(microbatches)


def test_slots_run_the_earlier_microbatch_first() -> None:
    """T(j - 1) S(j), neighbours, on every rank of 1F1B."""
    for head in ("vocab-1", "vocab-2"):
        for actions in generate("1f1b", 5, 12, head=head).lists:
            text = format_list(actions)
            assert all(f"T{microbatch - 1} S{microbatch} " in text for microbatch in range(1, 12))


def test_slots_lie_within_a_backward_of_each_other() -> None:
    """From the last rank up, with B = 2F: three slots after the backward, one after the forward, then two, one."""
    steady = []
    for actions in reversed(generate("1f1b", 10, 40, head="vocab-2").lists):
        kinds = "".join(action.kind for action in actions)
        steady.append("BFTS" if "BFTSBFTS" in kinds else "BTSF")
    after_forward = [rank for rank, order in enumerate(steady) if order == "BFTS"]
    assert after_forward == [3, 6, 9]


def test_an_update_follows_every_backward() -> None:
    for rank, actions in enumerate(generate("pipedream", 3, 4).lists):
        text = format_list(actions)
        assert all(f"B{m}@{rank} UPDATE{m}@{rank}" in text for m in range(4))


def test_dualpipe_has_pairs() -> None:
    """In the middle of a list every forward has the other direction's backward next to it."""
    middle = generate("dualpipe-v", 4, 16).lists[3]
    assert middle[8:16] == parse_list("F4@3 B0@4 F4@4 B0@3 F5@3 B1@4 F5@4 B1@3")


def test_an_order_that_can_not_run() -> None:
    lists = ((Pass("B", 0, 0), Pass("F", 0, 0)),)
    with pytest.raises(ScheduleError, match="rank 0 begins 0 of 1 F"):
        Eager((0,), 1, PassTimes.unit(1, 1)).run(InOrder(lists))
    with pytest.raises(ScheduleError, match="rank 0 begins 0 of 1 W"):
        Eager((0,), 1, PassTimes.unit(1, 1)).run(InOrder(((Pass("F", 0, 0), Pass("I", 0, 0)),)))


def test_schedules_are_values() -> None:
    assert isinstance(generate("1f1b", 2, 2), Schedule)
    assert hash(generate("1f1b", 2, 2)) == hash(generate("1f1b", 2, 2))
