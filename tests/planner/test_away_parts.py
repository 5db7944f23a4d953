"""How much goes to the host: the search for the part at which a step is shortest."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from autopar.planner.away_parts import Tried, parts


def tries(of: Callable[[float], Tried], known: Tried | None = None) -> dict[float, Tried]:
    """What is tried of steps that take ``of`` a part; ``known``: with nothing on the host."""
    tried = {} if known is None else {0.0: known}
    for part in parts(tried):
        tried[part] = of(part)
    return tried


def best(tried: dict[float, Tried]) -> float:
    return min(each.seconds for each in tried.values())


def copying(falls: float, rises: float, keeps_up: float, bend: float = 1.0) -> Callable[[float], Tried]:
    """Passes take from 10 s to ``falls`` less; beyond ``keeps_up``, copies make them longer by up to ``rises``."""

    def of(part: float) -> Tried:
        plain = 10 - falls * part
        late = max(0.0, (part - keeps_up) / (1 - keeps_up)) if keeps_up < 1 else 0.0
        return Tried(plain, plain + rises * late**bend)

    return of


KEEP_UP = (0.07, 0.13, 0.29, 0.4, 0.55, 0.61, 0.8, 0.93)
LINES = ((1.0, 6.0), (2.0, 8.0), (1.0, 1.5), (3.0, 40.0))


@pytest.mark.parametrize("keeps_up", KEEP_UP)
@pytest.mark.parametrize(("falls", "rises"), LINES)
def test_the_best_is_found_from_both_sides(falls: float, rises: float, keeps_up: float) -> None:
    of = copying(falls, rises, keeps_up)
    found = best(tries(of, Tried(10, 10)))
    assert found <= 1.025 * of(keeps_up).seconds
    assert found < 10


def test_lines_are_followed_to_where_they_cross() -> None:
    lines = [(copying(*line, keeps_up), keeps_up) for line in LINES for keeps_up in KEEP_UP]
    over = [best(tries(of, Tried(10, 10))) / of(keeps_up).seconds - 1 for of, keeps_up in lines]
    assert sum(over) / len(over) <= 2e-3  # bisection alone leaves more than twice as much


@pytest.mark.parametrize("keeps_up", [0.05, 0.1, 0.2, 0.4])
@pytest.mark.parametrize("bend", [0.5, 1.5, 2.0, 3.0, 4.0])
def test_a_bend_is_no_line(bend: float, keeps_up: float) -> None:
    """Copies that cost much from where they begin to, or little at first."""
    of = copying(2.0, 12.0, keeps_up, bend)
    least = min(of(part / 1000).seconds for part in range(1001))
    assert best(tries(of, Tried(10, 10))) <= 1.02 * least


def test_copies_that_are_waited_for_a_little_may_go_on() -> None:
    """As was laid out of DeepSeek-V3 on 2,048 GPUs: few copies are late from early on, many from far later."""
    known = (0.0, 0.134, 0.25, 0.317, 0.5, 1.0)
    plain = (35.60, 33.96, 32.31, 31.85, 30.01, 28.66)
    seconds = (35.60, 34.15, 33.37, 33.28, 38.37, 44.47)

    def of(part: float) -> Tried:
        return Tried(float(np.interp(part, known, plain)), float(np.interp(part, known, seconds)))

    assert best(tries(of, of(0.0))) < 33.5


def test_where_copies_keep_up_all_goes() -> None:
    assert list(tries(copying(2.0, 0.0, 1.0), Tried(10, 10))) == [0.0, 1.0]


def test_what_is_not_said_is_asked_for_again() -> None:
    tried = {0.0: Tried(10, 10)}
    asked = parts(tried)
    assert [next(asked), next(asked)] == [1.0, 1.0]
    tried[1.0] = Tried(8, 12)
    assert 0 < (first := next(asked)) < 1
    assert next(asked) == first


def test_where_copies_never_keep_up_little_is_tried() -> None:
    tried = tries(lambda part: Tried(10 - 0.02 * part, 30.0), Tried(10, 10))
    assert best(tried) == 10
    assert len(tried) == 2  # what can be saved isn't worth more


def test_smaller_parts_until_one_fits() -> None:
    tried = tries(lambda part: Tried(10 - part, 10 - part if part < 0.2 else math.inf))
    assert math.isfinite(best(tried))
    assert 1.0 in tried


def test_what_has_no_cut_is_gone_round() -> None:
    """With little on the host nothing fits, with much the passes wait."""

    def of(part: float) -> Tried:
        return Tried(math.inf, math.inf) if part < 0.3 else copying(1.0, 10.0, 0.5)(part)

    assert best(tries(of)) <= 1.02 * 9.5


def test_few_parts_are_tried() -> None:
    for keeps_up in (0.1, 0.5, 0.9):
        tried = tries(copying(2.0, 9.0, keeps_up), Tried(10, 10))
        assert len(tried) <= 6
        assert all(0 <= part <= 1 for part in tried)
