"""A formula prints what it computes, on numbers and on arrays, and refuses wrong names."""

from __future__ import annotations

import numpy as np
import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models.formula import Formula, Quantity
from autopar.errors import ArgumentError

a, b = sympy.symbols("a b")
SYMBOLS = {"a": Quantity("B", "bytes"), "b": Quantity("B/s", "bandwidth")}
RATIO = Formula("ratio", "s", sympy.Max(a / b, 2), SYMBOLS, "nowhere")


def test_it_prints() -> None:
    assert str(RATIO).splitlines() == [
        "ratio [s] = Max(2, a/b)",
        "    a  B    bytes",
        "    b  B/s  bandwidth",
        "    from: nowhere",
    ]


def test_numbers_give_a_float() -> None:
    value = RATIO(a=12, b=4)
    assert type(value) is float
    assert value == 3.0
    assert RATIO(a=1, b=4) == 2.0


def test_arrays_broadcast() -> None:
    value = RATIO(a=[4, 12, 20], b=np.array([[1], [4]]))
    np.testing.assert_array_equal(value, [[4, 12, 20], [2, 3, 5]])
    assert value.dtype == np.float64
    np.testing.assert_array_equal(RATIO(a=np.array([12, 1]), b=4), [3, 2])


def test_large_whole_numbers_do_not_overflow() -> None:
    square = Formula("square", "1", a * a, {"a": Quantity("1", "")}, "nowhere")
    assert square(a=np.array([10**12]))[0] == 1e24


@given(st.lists(st.floats(1, 1e12), min_size=1, max_size=5), st.floats(1, 1e12))
def test_an_array_is_its_numbers_one_by_one(many: list[float], one: float) -> None:
    np.testing.assert_array_equal(RATIO(a=many, b=one), [RATIO(a=number, b=one) for number in many])


def test_wrong_names_are_refused() -> None:
    with pytest.raises(ArgumentError, match="formula ratio takes a, b; missing: b, unknown: c"):
        RATIO(a=1, c=2)
    with pytest.raises(ArgumentError, match="missing: nothing, unknown: c"):
        RATIO(a=1, b=1, c=2)
    with pytest.raises(ArgumentError, match="missing: a, b, unknown: nothing"):
        RATIO()


def test_symbols_are_those_of_the_expression() -> None:
    with pytest.raises(ArgumentError, match=r"formula bad: .* differ in b"):
        Formula("bad", "s", a, SYMBOLS, "nowhere")
    with pytest.raises(ArgumentError, match=r"formula bad: .* differ in c"):
        Formula("bad", "s", a * b * sympy.Symbol("c"), SYMBOLS, "nowhere")
