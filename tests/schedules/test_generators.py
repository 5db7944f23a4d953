from __future__ import annotations

from collections.abc import Callable

import pytest

from autopar.errors import ScheduleError
from autopar.schedules import GENERATORS, Schedule, format_list, generate, gpipe, lower, one_f_one_b


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8), (4, 2)])
def test_compute_lists(name: str, stages: int, microbatches: int, golden: Callable[[str, str], None]) -> None:
    golden(f"schedules/{name}_pp{stages}_m{microbatches}.txt", str(generate(name, stages, microbatches)))


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 2), (2, 3), (4, 4)])
def test_lowered_lists(name: str, stages: int, microbatches: int, golden: Callable[[str, str], None]) -> None:
    schedule = lower(generate(name, stages, microbatches))
    golden(f"schedules/{name}_pp{stages}_m{microbatches}_lowered.txt", str(schedule))


def test_the_registry_calls_the_generators() -> None:
    assert generate("gpipe", 3, 5) == gpipe(3, 5)
    assert generate("1f1b", 3, 5) == one_f_one_b(3, 5)


def test_one_f_one_b_is_gpipe_without_a_steady_state() -> None:
    """One microbatch leaves nothing to alternate."""
    assert one_f_one_b(4, 1).lists == gpipe(4, 1).lists


def test_one_f_one_b_alternates_on_the_last_rank() -> None:
    assert format_list(one_f_one_b(3, 3).lists[2]) == "F0@2 B0@2 F1@2 B1@2 F2@2 B2@2"


def test_unknown_name() -> None:
    with pytest.raises(ScheduleError, match="unknown schedule '2f2b'; known schedules are gpipe, 1f1b"):
        generate("2f2b", 2, 2)


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize(("stages", "microbatches"), [(0, 4), (4, 0), (-1, 4), (4, -1)])
def test_sizes_below_one(name: str, stages: int, microbatches: int) -> None:
    with pytest.raises(ScheduleError, match="needs at least 1, whole"):
        generate(name, stages, microbatches)


def test_schedules_are_values() -> None:
    assert isinstance(generate("1f1b", 2, 2), Schedule)
    assert hash(generate("1f1b", 2, 2)) == hash(generate("1f1b", 2, 2))
