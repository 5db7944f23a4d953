"""Attention over positions: which ways are offered, and what they are reckoned to cost. That they are right is tested
in tests/rules/test_rules.py (every choice), tests/runtime/test_context_attention.py and tests/ranks/test_attention.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.graph import AxisRef, Choice, Meta
from autopar.rules import lookup
from autopar.rules.attention import OFFSET, RING, WAYS, is_causal, offers, way
from autopar.rules.base import Op, Rule
from autopar.rules.forms import FORMS
from autopar.spmd import R, S
from tests.rules.examples import aten, b, g
from tests.rules.harness import Example, choices_of

SDPA = aten.scaled_dot_product_attention.default
ROWS = S(2)


def example(*masks: Any, causal: bool = False, dropout: float = 0.0, groups: int = 4) -> Example:
    q, k, v = g(2, 4, 8, 8), g(2, groups, 8, 8), g(2, groups, 8, 8)
    named = {"enable_gqa": True} if groups != 4 else {}
    return Example(SDPA, (q, k, v, *(masks or (None,)), dropout, causal), named, compare=not dropout)


def ways(x: Example, size: int = 2) -> set[str]:
    op = Op.of(x.node)
    return {found for c in choices_of(x.node, size) if (found := way(op, c))}


def test_every_way_is_offered() -> None:
    assert ways(example()) == ways(example(causal=True)) == ways(example(b(8, 8))) == set(WAYS)
    assert ways(example(groups=2), 4) == {"all_gather", "ring"}  # two heads of keys can't be split over four ranks


def test_dropout_has_no_form_by_positions() -> None:
    assert ways(example(causal=True, dropout=0.1)) == {"heads"}


def test_causal_cross_attention_has_no_ring() -> None:
    """Positions of queries and keys don't line up in blocks."""
    x = Example(SDPA, (g(2, 4, 4, 8), g(2, 4, 8, 8), g(2, 4, 8, 8), None, 0.0, True))
    assert ways(x) == {"all_gather", "heads"}


@pytest.mark.parametrize(
    ("mask", "taken"), [((8, 8), S(0)), ((2, 1, 8, 8), S(2)), ((4, 8, 8), S(1)), ((2, 1, 1, 8), R), ((1, 8), R)]
)
def test_a_mask_is_taken_by_rows(mask: tuple[int, ...], taken: Any) -> None:
    x = example(g(*mask))
    for form in (RING, ""):
        found = [c for c in choices_of(x.node, 2) if c.form == form and c.result == ROWS]
        assert [c.operands[3] for c in found] == [taken]


def test_only_an_axis_of_the_sequence_has_forms() -> None:
    x = example(causal=True)
    op, choices = Op.of(x.node), choices_of(x.node, 2)
    assert {c.form for c in choices} == {"", OFFSET, RING}
    assert {c.form for c in choices if offers(op, c, False, "auto")} == {""}
    for wanted in WAYS:
        assert {way(op, c) for c in choices if offers(op, c, True, wanted)} == {wanted}
    other = Op.of(Example(aten.relu.default, (g(4),)).node)
    assert offers(other, Choice((R,), R), True, "ring")


# --- costs --------------------------------------------------------------------------------------------


def rule_of(op: Op) -> Rule:
    return lookup(op.name)


def local(name: str, queries: int, keys: int, ref: AxisRef, **named: Any) -> Op:
    metas = tuple(Meta((1, 1, n, 8), torch.float32, True) for n in (queries, keys, keys))
    return Op(name, (*metas, ref), named, metas, (metas[0],))


LENGTH = 1024


def work(name: str, size: int, paired: bool, **named: Any) -> int:
    keys = LENGTH // size if name == RING else LENGTH
    op = local(name, LENGTH // size, keys, AxisRef("cp", size, paired), **named)
    return rule_of(op).flops(op)


def test_causal_work_is_equal_in_pairs_and_not_of_neighbours() -> None:
    whole = 4 * 8 * LENGTH**2
    for size in (2, 8):
        for form, named in ((OFFSET, {}), (RING, {"causal": True})):
            assert work(form, size, True, **named) == whole / 2 / size
            assert work(form, size, False, **named) == pytest.approx(whole / 2 / size * (2 - 1 / size))
        assert work(RING, size, True) == work(RING, size, False) == whole / size


def test_the_busiest_rank_of_a_choice() -> None:
    causal, whole = Op.of(example(causal=True).node), Op.of(example().node)
    ring = Choice((ROWS, ROWS, ROWS), ROWS, RING)
    assert rule_of(causal).imbalance(causal, ring, 4) == 1.75
    assert rule_of(whole).imbalance(whole, ring, 4) == 1.0
    assert rule_of(causal).imbalance(causal, Choice((S(1), S(1), S(1)), S(1)), 4) == 1.0


def test_messages_of_a_ring() -> None:
    """(n - 1) times one rank's keys and values, and in the backward their gradients too, once more."""
    op = Op.of(example(groups=2, causal=True).node)
    local_bytes = 2 * (2 * 2 * 8 * 8 * 8) // 4
    ring = Choice((ROWS, ROWS, ROWS), ROWS, RING)
    rule = rule_of(op)
    assert rule.communication(op, ring, 4) == [("send", local_bytes)] * 3
    assert rule.communication_back(op, ring, 4) == [("send", local_bytes)] * 7
    assert rule.overlaps(op, ring)
    gathered = Choice((ROWS, R, R), ROWS, OFFSET)
    assert rule.communication(op, gathered, 4) == rule.communication_back(op, gathered, 4) == []


def test_what_is_causal() -> None:
    assert [is_causal(Op.of(x.node)) for x in (example(causal=True), example(), example(b(8, 8)))] == [
        True,
        False,
        False,
    ]
    ref = AxisRef("cp", 2)
    assert is_causal(local(OFFSET, 4, 8, ref))
    assert [is_causal(local(RING, 4, 4, ref, **named)) for named in ({}, {"causal": True})] == [False, True]


def test_kept_are_the_operands_the_result_and_a_number_per_row() -> None:
    op = local(OFFSET, 4, 8, AxisRef("cp", 2))
    kept = FORMS[OFFSET](op)
    assert (kept.operands, kept.result, kept.extra_bytes) == ((0, 1, 2), True, 4 * 4)
