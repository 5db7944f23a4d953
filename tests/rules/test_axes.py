"""Two axes, one after the other: the second sees the local call that the first has left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import fx

from autopar.graph import AxisRef, Choice, Info, RuntimeOp, info, op_name, set_info
from autopar.rules import has_rule
from autopar.rules.base import Op
from autopar.rules.moves import Moves
from autopar.rules.transitions import RULES as TRANSITIONS
from autopar.runtime import chunked_cross_entropy
from autopar.spmd import I, P, R, S, Type, divides, local_shape, transition
from tests.rules.examples import aten, g, i
from tests.rules.harness import Example, Step, choices_of, localized, meta_of, prove, prove_local

SIZE = 2
GROUPED = {"is_causal": True, "enable_gqa": True}


def calls() -> Iterator[Example]:
    yield Example(aten.embedding.default, (g(8, 4), i(4, high=8), 5))
    yield Example(aten.cross_entropy_loss.default, (g(4, 8), i(4, high=8), None, 2, -100, 0.1))
    yield Example(aten.cross_entropy_loss.default, (g(4, 8), i(4, high=8), None, 0))
    yield Example(chunked_cross_entropy, (g(4, 6), g(8, 6), i(4, high=8), g(8)), {"chunks": 3, "label_smoothing": 0.1})
    yield Example(aten.mean.dim, (g(4, 8), [-1, 0]))
    yield Example(aten.cumsum.default, (g(16, 2), 0))
    yield Example(aten.reshape.default, (g(4, 4, 8), [16, 8]))
    yield Example(aten.reshape.default, (g(8, 24), [8, 3, 4, 2]))
    yield Example(aten.split.Tensor, (g(4, 24), 8, 1))
    yield Example(aten.slice.Tensor, (g(4, 24), 1, 8, 16))
    yield Example(aten.linear.default, (g(4, 8), g(12, 8)))
    yield Example(aten.scaled_dot_product_attention.default, (g(4, 8, 4, 8), g(4, 4, 4, 8), g(4, 4, 4, 8)), GROUPED)


def test_choices_on_two_axes() -> None:
    wrong, forms = [], set()
    for example, first, second in pairs():
        forms.add((first.form, second.form))
        try:
            prove(example, Step("dp", SIZE, first), Step("tp", SIZE, second))
        except (AssertionError, RuntimeError) as error:
            wrong.append(f"{example} {first} then {second}: {error}")
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)
    assert {first for first, _ in forms} == {
        "",
        "embedding_sharded",
        "cross_entropy_sharded",
        "chunked_cross_entropy",
        "mean_of_whole",
        "attention_with_offset",
        "cumsum_sharded",
        "ring_attention",
    }
    assert ("", "embedding_sharded") in forms
    assert ("mean_of_whole", "mean_of_whole") in forms


def pairs() -> Iterator[tuple[Example, Choice, Choice]]:
    """Choices on both axes, of which the second splits something."""
    for example in calls():
        for first in choices_of(example.node, SIZE):
            local = localized(example.node, Step("dp", SIZE, first))
            assert has_rule(op_name(local))
            for second in choices_of(local, SIZE):
                if any(kind.is_shard for kind in (*second.operands, second.result)):
                    yield example, first, second


TYPES = (I, R, P, S(0), S(0, 2), S(1))
CHANGES = [
    (src, dst)
    for src in TYPES
    for dst in TYPES
    if transition(src, dst) is not None and not (src.is_shard and src.dim == dst.dim)
]


@pytest.mark.parametrize(("src", "dst"), CHANGES, ids=str)
def test_a_change_on_one_axis_is_an_op_of_the_next(src: Type, dst: Type) -> None:
    x = g(8, 8)
    example = Example(aten.alias.default, (x,))
    node = changed(x, src, dst)
    choices = choices_of(node, SIZE)
    wrong = []
    for choice in choices:
        steps = Step("dp", SIZE, Choice((src,), dst)), Step("tp", SIZE, choice)
        try:
            prove_local(example, localized(node, steps[1]), steps)
        except (AssertionError, RuntimeError) as error:
            wrong.append(f"{choice}: {error}")
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)
    assert {c.result.kind for c in choices} == {"R", "I", "P", "S"}
    op, rule = Op.of(node), TRANSITIONS[op_name(node)]
    assert isinstance(rule, Moves)
    for choice in choices:
        if choice.result.is_shard:
            assert rule.forward(op, 0, choice.operands[0]) == choice.result


def changed(x: torch.Tensor, src: Type, dst: Type) -> fx.Node:
    """The node that insert_collectives and localize leave."""
    change = transition(src, dst)
    assert change is not None
    assert divides(tuple(x.shape), src, SIZE)
    meta = meta_of(x)
    graph = fx.Graph()
    before, after = (type(meta)(local_shape(meta.shape, kind, SIZE), meta.dtype, True) for kind in (src, dst))
    operand = set_info(graph.placeholder("x"), Info((before,)))
    node = graph.call_function(RuntimeOp(change.function), (operand, AxisRef("dp")), {"src": src, "dst": dst})
    return set_info(node, Info((after,)))


def test_a_gathered_dim_that_is_split_twice_is_strided() -> None:
    node = changed(g(8, 8), S(0), R)
    assert info(node).meta.shape == (8, 8)
    assert Choice((S(0),), S(0, 2)) in choices_of(node, SIZE)
    assert Choice((S(0),), S(0)) not in choices_of(node, SIZE)
