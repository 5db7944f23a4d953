"""Rules of what routers do with tokens: places along a split dim, sums by index in parts, weights of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.graph import Choice
from autopar.mesh import Mesh
from autopar.rules import lookup
from autopar.rules.base import Op
from autopar.runtime import Axes, convert, cumsum_sharded
from autopar.spmd import P, R, S, Type
from tests.rules.examples import aten, b, f, g, i
from tests.rules.harness import Example, choices_of
from tests.runtime.ranks import on_ranks, part, wholes


def legal(target: Any, *args: Any, **kwargs: Any) -> list[Choice]:
    return choices_of(Example(target, args, kwargs).node, 2)


def test_places_are_counted_across_ranks() -> None:
    choices = legal(aten.cumsum.default, b(8, 4), 0)
    assert Choice((S(0),), S(0), "cumsum_sharded") in choices
    assert Choice((S(0, 2),), S(0, 2), "cumsum_sharded") in choices
    assert Choice((S(1),), S(1)) in choices


def test_only_the_sums_of_parts_are_exchanged() -> None:
    op = Op.of(Example(aten.cumsum.default, (g(64, 4), 0)).node)
    choice = Choice((S(0, 2),), S(0, 2), "cumsum_sharded")
    rule = lookup(op.name)
    assert rule.communication(op, choice, 4) == [("all_gather", 4 * 8 * 2 * 4)]
    assert rule.communication_back(op, choice, 4) == [("reduce_scatter", 4 * 8 * 2 * 4)]
    assert rule.communication(op, Choice((S(1),), S(1)), 4) == []


@pytest.mark.parametrize("splits", [(S(0),), (S(0, 2),), (S(0), S(0, 2)), (S(0, 2), S(0, 4))], ids=str)
@pytest.mark.parametrize("paired", [False, True])
def test_a_cumulative_sum_and_its_gradient(splits: Sequence[Type], paired: bool) -> None:
    x, weight = (torch.randn(32, 3, dtype=torch.float64) for _ in range(2))
    names = ("dp", "cp")[-len(splits) :]
    sizes = {"dp": 2 if len(splits) > 1 else 1, "cp": 2}
    mesh = Mesh(dp=sizes["dp"], cp=2, paired=paired)

    def own(whole: Tensor, axes: Axes) -> Tensor:
        for name, kind in zip(names, splits, strict=True):
            whole = convert(whole, axes[name], src=R, dst=kind)
        return whole.detach()

    def program(axes: Axes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mine = own(x, axes).requires_grad_()
        y = cumsum_sharded(mine, 0, axes=[axes[n] for n in names], outers=[kind.outer for kind in splits])
        y.backward(own(weight, axes))
        assert mine.grad is not None
        whole = x.clone().requires_grad_()
        expected = whole.cumsum(0)
        expected.backward(weight)
        assert whole.grad is not None
        return y.detach(), own(expected, axes), mine.grad, own(whole.grad, axes)

    for made, expected, gradient, expected_gradient in on_ranks(mesh, program):
        torch.testing.assert_close(made, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-12)


def test_counts_stay_whole_numbers() -> None:
    x = b(8, 4)
    parts = on_ranks(Mesh(dp=4), lambda axes: cumsum_sharded(part(x, S(0), axes.rank, 4), 0, axes=[axes["dp"]]))
    assert {made.dtype for made in parts} == {torch.int64}
    assert all(torch.equal(whole, x.cumsum(0)) for whole in wholes(parts, S(0)))


def test_what_is_added_by_index_may_come_in_parts() -> None:
    assert Choice((P, S(0), S(0)), P) in legal(aten.index_add.default, g(8, 4), 0, i(4), g(4, 4))
    assert Choice((P, S(1), S(1)), P) in legal(aten.scatter_add.default, g(4, 8), 1, i(4, 4), g(4, 4))
    adding = legal(aten.index_put.default, g(4, 8), [i(4), i(4)], g(4), True)
    assert Choice((P, S(0), S(0), S(0)), P) in adding
    writing = legal(aten.index_put.default, g(4, 8), [i(4), i(4)], g(4), False)
    assert Choice((P, S(0), S(0), S(0)), P) not in writing
    assert Choice((), P) in legal(aten.zeros.default, [4, 8])
    assert Choice((), P) not in legal(aten.ones.default, [4, 8])


def test_counts_between_given_bounds_add_up() -> None:
    scores = f(8).detach()
    assert Choice((S(0),), P) in legal(aten.histc.default, scores, 4, 0, 1)
    assert Choice((S(0),), P) not in legal(aten.histc.default, scores, 4)


def test_ranks_may_make_whole_copies() -> None:
    choices = legal(aten.repeat.default, g(6, 2), [4, 1])
    assert Choice((R,), S(0)) in choices
    assert Choice((S(0),), S(0, 4)) in choices
    assert Choice((R,), S(0)) not in legal(aten.repeat.default, g(6, 2), [3, 1])


@pytest.mark.parametrize(
    ("example", "operands"),
    [
        (Example(aten.bmm.default, (g(4, 2, 8), g(4, 8, 6))), (0, 1)),
        (Example(aten.baddbmm.default, (g(4, 1, 6), g(4, 2, 8), g(4, 8, 6))), (0, 1, 2)),
        (Example(aten.baddbmm.default, (g(4, 2, 6), g(4, 2, 8), g(4, 8, 6))), (0, 1, 2)),
        (Example(aten.matmul.default, (g(4, 2, 8), g(4, 8, 6))), (0, 1)),
        (Example(aten.matmul.default, (g(4, 2, 8), g(8, 6))), ()),
        (Example(aten.linear.default, (g(4, 8), g(6, 8), g(6))), ()),
        (Example(aten.addmm.default, (g(6), g(4, 8), g(8, 6))), ()),
        (Example(aten.mm.default, (g(4, 8), g(8, 6))), ()),
        (Example(aten.einsum.default, ("egcm,emh->egch", [g(4, 2, 3, 8), g(4, 8, 6)])), (0, 1)),
        (Example(aten.einsum.default, ("becm,emh->bech", [g(2, 4, 3, 8), g(4, 8, 6)])), (1,)),
        (Example(aten.einsum.default, ("bsm,hmd->bhsd", [g(2, 4, 8), g(3, 8, 6)])), ()),
    ],
    ids=str,
)
def test_which_weights_are_of_experts(example: Example, operands: tuple[int, ...]) -> None:
    op = Op.of(example.node)
    assert lookup(op.name).expert_operands(op) == operands
