"""Legal choices as text, and the small parts that rules are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.graph import AxisRef, Choice, Meta
from autopar.rules import lookup
from autopar.rules.base import Local, Op, Whole, legal_choices
from autopar.rules.moves import reshaped, sliced, unsliced
from autopar.rules.spec import Spec, match
from autopar.spmd import I, P, R, S, Type, divides
from tests.rules.examples import aten, b, g, i
from tests.rules.harness import Example, choices_of
from tests.rules.values import cut, join

GROUPED = {"is_causal": True, "enable_gqa": True}


def shown() -> Iterator[Example]:
    yield Example(aten.linear.default, (g(2, 4, 8), g(12, 8)))
    yield Example(aten.linear.default, (g(4, 8), g(12, 8), g(12)))
    yield Example(aten.add.Tensor, (g(4, 8), g(8)))
    yield Example(aten.add.Tensor, (g(4, 8), 1.0))
    yield Example(aten.where.ScalarOther, (b(4, 8), g(4, 8), 0.0))
    yield Example(aten.reshape.default, (g(4, 4, 24), [16, 3, 8]))
    yield Example(aten.split.Tensor, (g(4, 24), 8, 1))
    yield Example(aten.slice.Tensor, (g(4, 8), 1, 0, 4))
    yield Example(aten.expand.default, (g(1, 8), [4, -1]))
    yield Example(aten.mean.dim, (g(4, 8), [1]))
    yield Example(aten.layer_norm.default, (g(2, 4, 8), [8], g(8), g(8)))
    yield Example(aten.embedding.default, (g(8, 4), i(2, 4, high=8)))
    yield Example(aten.index.Tensor, (g(2, 4, 8), [None, i(4)]))
    yield Example(aten.gather.default, (g(4, 8), 1, i(2, 4, high=8)))
    heads = g(2, 4, 4, 8), g(2, 2, 4, 8), g(2, 2, 4, 8)
    yield Example(aten.scaled_dot_product_attention.default, heads, GROUPED)
    yield Example(aten.cross_entropy_loss.default, (g(4, 8), i(4, high=8), None, 2))
    yield Example(aten.zeros_like.default, (g(4, 8),))


def test_choices_of_some_rules(golden: Callable[[str, str], None]) -> None:
    blocks = ("\n".join([str(x), *(f"    {choice}" for choice in choices_of(x.node, 2))]) for x in shown())
    golden("rules/choices.txt", "\n".join(blocks))


# --- legal choices ----------------------------------------------------------------------------------


def of(name: str, *operands: Meta, result: Meta, args: tuple[object, ...] = ()) -> Op:
    return Op(name, args or operands, {}, operands, (result,))


def meta(*shape: int, grad: bool = True, dtype: torch.dtype = torch.float32) -> Meta:
    return Meta(shape, dtype, grad)


def legal(op: Op, size: int = 2) -> list[Choice]:
    inputs = [[{1} for _ in m.shape] for m in op.operands]
    return legal_choices(lookup(op.name), op, size, inputs, [{1} for _ in op.result.shape])


def test_values_without_gradient_are_never_invariant() -> None:
    op = of("aten.mul.Tensor", meta(4), meta(4, grad=False), result=meta(4))
    assert legal(op)[:2] == [Choice((R, R), R), Choice((I, R), I)]
    assert Choice((R,), R) in legal(of("aten.gt.Scalar", meta(4), result=meta(4, grad=False)))
    assert all(c.result != I for c in legal(of("aten.gt.Scalar", meta(4), result=meta(4, grad=False))))


def test_dims_that_do_not_divide_are_not_split() -> None:
    op = of("aten.relu.default", meta(3, 4), result=meta(3, 4))
    assert [c.result for c in legal(op)] == [R, I, S(1)]


def test_truth_values_are_never_pending() -> None:
    op = of("aten.clone.default", meta(4, grad=False, dtype=torch.bool), result=meta(4, dtype=torch.bool))
    assert P not in {c.result for c in legal(op)}


def test_an_op_that_does_not_fit_its_line_runs_whole() -> None:
    op = of("aten.mm.default", meta(4, 8), meta(6, 2), result=meta(4, 2))
    assert lookup("aten.mm.default").flops(op) == 0
    assert [c.result for c in legal(op)] == [R, I]


def test_getitem_passes_the_type_through() -> None:
    op = of("getitem", meta(4, 8), result=meta(4, 8, grad=False))
    assert {(c.operands[0], c.result) for c in legal(op)} >= {(S(0), S(0)), (S(1), S(1)), (P, P), (I, R)}


# --- costs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("example", "flops"),
    [
        (lambda: Example(aten.linear.default, (g(2, 4, 8), g(12, 8))), 2 * 2 * 4 * 8 * 12),
        (lambda: Example(aten.bmm.default, (g(2, 4, 8), g(2, 8, 4))), 2 * 2 * 4 * 8 * 4),
        (lambda: Example(aten.conv1d.default, (g(2, 4, 5), g(6, 4, 3))), 2 * (2 * 6 * 3) * 4 * 3),
        (lambda: Example(aten.einsum.default, ("ned,ne->nd", [g(4, 3, 8), g(4, 3)])), 2 * 4 * 3 * 8),
        (lambda: Example(aten.einsum.default, ("ned,ne->nd", [g(4, 1, 8), g(4, 1)])), 0),  # one term, multiplied
        (lambda: Example(aten.einsum.default, ("i,j->ij", [g(4), g(3)])), 0),
        (lambda: Example(aten.einsum.default, ("ab,bc->c", [g(4, 8), g(8, 3)])), 2 * 8 * 3),  # rows are summed before
        (lambda: Example(aten.relu.default, (g(4),)), 0),
        (lambda: Example(aten.embedding.default, (g(8, 4), i(4))), 0),
    ],
)
def test_flops(example: Callable[[], Example], flops: int) -> None:
    op = Op.of(example().node)
    assert lookup(op.name).flops(op) == flops


@pytest.mark.parametrize(
    ("example", "factors"),
    [
        (lambda: Example(aten.linear.default, (g(4, 8), g(12, 8), g(12))), (0, 1)),  # not the bias
        (lambda: Example(aten.conv1d.default, (g(2, 4, 5).detach(), g(6, 4, 3), g(6))), (1,)),  # nor the batch
        (lambda: Example(aten.conv_transpose1d.default, (g(2, 4, 5), g(4, 6, 3), g(6))), (0, 1)),
        (lambda: Example(aten.addmm.default, (g(4, 12), g(4, 8), g(8, 12))), (1, 2)),
        (lambda: Example(aten.bilinear.default, (g(4, 3), g(4, 5), g(6, 3, 5), g(6))), (0, 1, 2)),
        (lambda: Example(aten.gru_cell.default, (g(2, 4), g(2, 5), g(15, 4), g(15, 5), g(15), g(15))), (0, 2)),
        (lambda: Example(aten.scaled_dot_product_attention.default, (g(2, 4, 8, 4),) * 3), (0, 1)),
    ],
)
def test_gradients_of_factors_are_products(example: Callable[[], Example], factors: tuple[int, ...]) -> None:
    op = Op.of(example().node)
    assert lookup(op.name).factors(op) == factors


def test_a_causal_mask_halves_attention() -> None:
    rule = lookup("aten.scaled_dot_product_attention.default")
    q, k, v = g(2, 4, 16, 8), g(2, 2, 16, 8), g(2, 2, 16, 4)
    full = Example(aten.scaled_dot_product_attention.default, (q, k, v), {"enable_gqa": True})
    causal = Example(aten.scaled_dot_product_attention.default, (q, k, v, None, 0.0, True), {"enable_gqa": True})
    assert rule.flops(Op.of(full.node)) == 2 * 2 * 4 * 16 * 16 * (8 + 4)
    assert rule.flops(Op.of(causal.node)) == rule.flops(Op.of(full.node)) // 2


def test_a_class_split_loss_exchanges_a_few_numbers_per_token() -> None:
    example = Example(aten.cross_entropy_loss.default, (g(4, 8), i(4, high=8), None, 2))
    op, rule = Op.of(example.node), lookup("aten.cross_entropy_loss.default")
    form = next(c for c in choices_of(example.node, 2) if c.form)
    assert rule.communication(op, form, 2) == [("all_reduce", 4 * 8), ("all_reduce", 3 * 4 * 8)]
    assert rule.communication(op, Choice((S(0), S(0)), P), 2) == []


# --- local calls ------------------------------------------------------------------------------------


def test_a_local_call_replaces_appends_and_drops_arguments() -> None:
    assert Local({1: [2]}, {"n": 1}).call(("x", [4]), {"m": 0}) == (("x", [2]), {"m": 0, "n": 1})
    assert Local({2: 7}, {}).call(("x", "y"), {}) == (("x", "y", 7), {})
    assert Local({2: 7}, {"p": 1}, keep=2).call(("x", "y", 5, True), {"q": 2}) == (("x", "y", 7), {"p": 1})


def local(example: Example, choice: Choice) -> Local:
    op = Op.of(example.node)
    return lookup(op.name).localize(op, choice, 2, "tp")


def test_forms_name_the_axis_and_leave_out_defaults() -> None:
    embedding = Example(aten.embedding.default, (g(8, 4), i(4), 3))
    wanted = Local({2: AxisRef("tp")}, {"padding_idx": 3}, "embedding_sharded", keep=2)
    assert local(embedding, Choice((S(0), R), P, "embedding_sharded")) == wanted
    loss = Example(aten.cross_entropy_loss.default, (g(4, 8), i(4, high=8), None, 2, -100, 0.0))
    wanted = Local({2: AxisRef("tp")}, {}, "cross_entropy_sharded", keep=2)
    assert local(loss, Choice((S(1), R), I, "cross_entropy_sharded")) == wanted


def test_a_view_of_a_part_is_a_reshape() -> None:
    """A part may have other strides than the whole."""
    x = g(8, 4)
    call = local(Example(aten.view.default, (x, [32])), Choice((S(1),), S(0, 8)))
    args, _ = call.call((x.detach().split(2, 1)[1], [32]), {})
    assert call.target == "aten.reshape.default"
    assert torch.equal(aten.reshape.default(*args), cut(x.detach().view(32), S(0, 8), 2)[1])


def test_squeeze_keeps_a_dim_that_is_1_only_locally() -> None:
    example = Example(aten.squeeze.default, (g(1, 2, 8),))
    assert local(example, Choice((S(1),), S(0))) == Local({1: [1, 8]}, {}, "aten.reshape.default", keep=1)
    assert local(example, Choice((S(2),), S(1))) == Local.same()


# --- lines and moves --------------------------------------------------------------------------------


def test_letters() -> None:
    op = of("x", meta(4, 1, 8), meta(6, 8), result=meta(4, 6, 8))
    letters = match("a ..., ...! -> a ...", op)
    assert letters is not None
    assert letters.operands == (("a", "", ".1"), (".2", ".1"))
    assert letters.result == ("a", ".2", ".1")
    assert letters.splittable() == ["a"]


@pytest.mark.parametrize("line", ["a b -> a b", "a, b -> a b", "a b c, c a -> a b c", "a b c -> a b c"])
def test_a_line_of_other_ranks_or_sizes_fits_nothing(line: str) -> None:
    assert match(line, of("x", meta(4, 1, 8), meta(6, 8), result=meta(4, 6, 8))) is None


def test_link_spreads_split_points_both_ways() -> None:
    rule = Spec("m k, k n -> m n")
    op = of("x", meta(4, 8), meta(8, 12), result=meta(4, 12))
    inputs: list[list[set[int]]] = [[{1}, {2}], [{1}, {3}]]
    output: list[set[int]] = [{4}, {1}]
    rule.link(op, inputs, output)
    assert (inputs, output) == ([[{1, 4}, {1, 2}], [{1, 2}, {1, 3}]], [{1, 4}, {1, 3}])


def test_one_weight_of_three_is_split_by_heads() -> None:
    """[3 heads size] as one dim, as three parts, as heads."""
    assert reshaped((24,), (3, 8), S(0, 3)) == S(1)
    assert reshaped((3, 8), (24,), S(1)) == S(0, 3)
    assert reshaped((2, 4, 8), (8, 8), S(1)) == S(0, 2)
    assert reshaped((8, 8), (2, 4, 8), S(0)) == S(0)
    assert reshaped((4, 6), (3, 8), S(1)) is None
    assert sliced(24, 8, 16, 3) == 1
    assert unsliced(24, 8, 16, 1) == 3
    assert sliced(8, 1, 8, 1) is None


SHAPES = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4).map(tuple)


@given(SHAPES, st.permutations(range(4)), st.integers(0, 3), st.sampled_from([1, 2, 3, 4]))
def test_a_reshaped_shard_is_the_shard_of_the_reshaped(
    before: tuple[int, ...], order: list[int], d: int, outer: int
) -> None:
    """Parts of the tensor, reshaped, are the parts of the reshaped tensor."""
    after = tuple(before[k] for k in order if k < len(before))
    kind = S(d % len(before), outer)
    target = reshaped(before, after, kind)
    if target is None or not divides(before, kind, 2) or not divides(after, target, 2):
        return
    x = torch.arange(prod(before)).reshape(before)
    wanted = cut(x.reshape(after), target, 2)
    assert all(torch.equal(p.reshape(w.shape), w) for p, w in zip(cut(x, kind, 2), wanted, strict=True))
    assert reshaped(after, before, target) == kind


@pytest.mark.parametrize("kind", [I, R, P, S(0), S(1), S(1, 3), S(2, 2)], ids=str)
def test_cut_and_join_are_inverse(kind: Type) -> None:
    x = torch.randn(4, 12, 8, dtype=torch.float64)
    torch.testing.assert_close(join(cut(x, kind, 2), kind), x, rtol=0, atol=1e-14)


def test_the_rule_of_no_op() -> None:
    op = of("x", meta(4), result=meta(4))
    assert legal_choices(Whole(), op, 2, [[{1}]], [{1}]) == [Choice((R,), R), Choice((I,), I)]
