"""Literals parse back; wrapping changes no meaning; comments line up."""

from __future__ import annotations

import ast
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.codegen.text import Line, attribute, human_bytes, layout, literal, spans, wrap
from autopar.errors import GraphError
from autopar.graph import AxisRef
from autopar.spmd import I, P, R, S

NAMES = {"torch": torch, "I": I, "P": P, "R": R, "S": S}
words = st.text("ab,()[]{}\"'\\ é\n", max_size=6)
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | words
lists = st.lists(plain, max_size=3)
nested = plain | lists | lists.map(tuple) | st.dictionaries(words, lists, max_size=2)


@given(nested)
def test_literals_parse_back(value: object) -> None:
    found = eval(literal(value), {})
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "value",
    [
        torch.float32,
        torch.bfloat16,
        torch.strided,
        torch.channels_last,
        R,
        S(1),
        S(0, 4),
        [torch.int64, P],
        (I,),
    ],
)
def test_values_of_torch_and_types_parse_back(value: object) -> None:
    assert eval(literal(value), dict(NAMES)) == value


def test_special_literals() -> None:
    assert math.isnan(eval(literal(float("nan")), {}))
    assert literal(torch.device("cpu")) == "self.axes.device"
    assert literal(AxisRef("tp")) == "tp"
    assert literal(S(0, 4)) == "S(0, 4)"


def test_an_argument_without_source_form_is_refused() -> None:
    with pytest.raises(GraphError, match="an argument of type Generator can't be written as source"):
        literal(torch.Generator())


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("model.norm.weight", "self.model.norm.weight"),
        ("h.3.ln_1.bias", "self.h[3].ln_1.bias"),
        ("0.weight", "self[0].weight"),
        ("", "self"),
        ("heads.a-b.w", 'getattr(self.heads, "a-b").w'),
        ("m.class", 'getattr(self.m, "class")'),
        ("m.07", 'getattr(self.m, "07")'),
    ],
)
def test_paths_of_modules(path: str, text: str) -> None:
    assert attribute(path) == text
    ast.parse(text)


@given(st.lists(nested, min_size=1, max_size=4), st.integers(20, 80), st.integers(0, 3))
def test_wrapping_changes_no_meaning(values: list[object], width: int, indent: int) -> None:
    code = f"f({', '.join(map(literal, values))})"
    rows = wrap("    " * indent + code, width)
    assert ast.dump(ast.parse("\n".join(row[4 * indent :] for row in rows))) == ast.dump(ast.parse(code))


def test_a_tuple_of_one_stays_a_tuple() -> None:
    rows = wrap("x = (alpha_beta_gamma_delta,)", 25)
    assert len(rows) == 3
    assert isinstance(ast.parse("\n".join(rows)).body[0].value, ast.Tuple)


def test_rows_are_filled() -> None:
    assert wrap("call(aaaaaaaa, bbbbbbbb, cccccccc, dddddddd)", 28) == [
        "call(",
        "    aaaaaaaa, bbbbbbbb,",
        "    cccccccc, dddddddd,",
        ")",
    ]


def test_comments_share_a_column() -> None:
    lines = [
        Line(0, "class A:", "a class"),
        Line(1, "a = 1", "one"),
        Line(1, "long_name = 2", "two"),
        Line(1, "b"),
    ]
    assert layout(lines) == [
        "class A:  # a class",
        "    a = 1          # one",
        "    long_name = 2  # two",
        "    b",
    ]


def test_a_comment_that_does_not_fit_stands_above() -> None:
    assert layout([Line(1, "x" * 100, "y" * 50)]) == [f"    # {'y' * 50}", "    " + "x" * 100]


def test_bytes_and_spans() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1024, 28 << 20, 3 << 40)] == [
        *("0 B", "1023 B", "1.0 KiB", "28.0 MiB", "3072.0 GiB"),
    ]
    assert spans([0, 1, 2, 3, 6, 8, 9]) == "0 … 3, 6, 8 … 9"
    assert spans([]) == ""
