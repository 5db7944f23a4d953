"""Every transition against the definition of its types: values and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from autopar.errors import MismatchError, ShardingError
from autopar.mesh import Mesh
from autopar.runtime import Axes, Axis, collectives
from autopar.spmd import I, P, R, S, Type, transition
from tests.runtime.ranks import gradient_type, on_ranks, part, wholes

SHAPE = (8, 24, 16)
SHARDS = [S(0), S(1), S(2), S(1, 3), S(2, 2)]
PAIRS = [
    *[(S_, kind) for S_ in SHARDS for kind in (R, I)],
    *[(kind, S_) for S_ in SHARDS for kind in (I, R, P)],
    *[(a, b) for a in SHARDS for b in SHARDS if a != b],
    *[(I, R), (P, I), (P, R)],
    *[(I, P), (R, P)],
]


def change(x: Tensor, axes: Mapping[str, Axis], src: Type, dst: Type, axis: str = "tp") -> Tensor:
    way = transition(src, dst)
    assert way is not None
    function: Callable[..., Tensor] = getattr(collectives, way.function)
    return function(x, axes[axis], src=src, dst=dst)


def expect(parts: list[Tensor], kind: Type, whole: Tensor, what: str) -> None:
    for found in wholes(parts, kind):
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-12, msg=lambda m: f"{what}: {m}")


@pytest.mark.parametrize("size", [2, 4])
def test_every_transition_and_its_gradient(size: int) -> None:
    whole = torch.randn(SHAPE, dtype=torch.float64)
    weight = torch.randn(SHAPE, dtype=torch.float64)

    def program(axes: Axes) -> list[tuple[Tensor, Tensor]]:
        index, found = axes.rank, []
        for src, dst in PAIRS:
            x = part(whole, src, index, size).requires_grad_()
            y = change(x, axes, src, dst)
            y.backward(part(weight, gradient_type(dst), index, size))
            assert x.grad is not None
            assert y.is_contiguous()
            found.append((y.detach(), x.grad))
        return found

    results = on_ranks(Mesh(tp=size), program)
    for i, (src, dst) in enumerate(PAIRS):
        expect([r[i][0] for r in results], dst, whole, f"{src} -> {dst}")
        expect([r[i][1] for r in results], gradient_type(src), weight, f"gradient of {src} -> {dst}")


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    whole = torch.arange(8 * 12).reshape(8, 12).remainder(7).to(dtype)
    pairs = [(a, b) for a, b in PAIRS if max(a.dim, b.dim) < 2 and not (dtype == torch.bool and P in (a, b))]
    pairs = [(a, b) for a, b in pairs if b != P]  # whole numbers have no equal terms

    def program(axes: Axes) -> list[Tensor]:
        return [change(part(whole, a, axes.rank, 2), axes, a, b) for a, b in pairs]

    results = on_ranks(Mesh(tp=2), program)
    for i, (_, dst) in enumerate(pairs):
        parts = [r[i] for r in results]
        assert {p.dtype for p in parts} == {dtype}
        assert all(torch.equal(found, whole) for found in wholes(parts, dst))


def test_whole_numbers_have_no_equal_terms() -> None:
    def program(axes: Axes) -> str:
        with pytest.raises(ShardingError, match="int64 has no equal terms"):
            collectives.convert(torch.ones(2, dtype=torch.int64), axes["tp"], src=R, dst=P)
        return "refused"

    assert on_ranks(Mesh(tp=2), program) == ["refused"] * 2


def test_only_the_given_axis_communicates() -> None:
    def program(axes: Axes) -> list[list[float]]:
        x = torch.tensor([float(axes.rank)])
        return [collectives.all_gather(x, axes[name], src=S(0), dst=R).tolist() for name in ("dp", "tp")]

    results = on_ranks(Mesh(dp=2, tp=2), program)
    assert results == [[[0, 2], [0, 1]], [[1, 3], [0, 1]], [[0, 2], [2, 3]], [[1, 3], [2, 3]]]


def test_operands_are_not_changed() -> None:
    def program(axes: Axes) -> bool:
        same = True
        for src, dst in PAIRS:
            x = part(torch.ones(SHAPE), src, axes.rank, 2)
            before = x.clone()
            change(x, axes, src, dst)
            same &= torch.equal(x, before)
        return same

    assert all(on_ranks(Mesh(tp=2), program))


def test_an_axis_of_one_rank_is_the_identity() -> None:
    axes = Axes.build(Mesh(), 0, "cpu")
    x = torch.randn(3, 5, 7)
    assert all(change(x, axes, src, dst) is x for src, dst in PAIRS)


@pytest.mark.parametrize(
    ("function", "src", "dst", "hint"),
    [
        ("all_gather", R, I, "no transition does it"),
        ("convert", S(0), P, "no transition does it"),
        ("convert", I, I, "no transition does it"),
        ("all_reduce", S(0), R, "all_gather does it"),
        ("all_gather", P, R, "all_reduce does it"),
    ],
)
def test_a_pair_that_is_not_in_the_table(function: str, src: Type, dst: Type, hint: str) -> None:
    axes = Axes.build(Mesh(), 0, "cpu")
    with pytest.raises(ShardingError, match=rf"can't turn .* on axis 'tp'; {hint}"):
        getattr(collectives, function)(torch.ones(4), axes["tp"], src=src, dst=dst)


@pytest.mark.parametrize(
    ("src", "dst", "shape", "message"),
    [
        (
            P,
            S(0),
            (3, 4),
            r"reduce_scatter P -> S\(0\) on axis 'tp': dim 0 of shape \(3, 4\) doesn't divide over 2",
        ),
        (R, S(1, 3), (4, 8), r"convert R -> S\(1,3\) .* dim 1 of shape \(4, 8\) .* 3 blocks of 2 ranks each"),
        (I, S(2), (4, 4), r"convert I -> S\(2\) .* has no dim 2"),
        (S(0, 2), R, (3, 4), r"all_gather S\(0,2\) -> R .* dim 0 of shape \(3, 4\)"),
        (S(0), S(1), (2, 5), r"all_to_all .* dim 1 of shape \(2, 5\) doesn't divide over 2 ranks"),
        (S(0), S(0, 4), (6, 5), r"all_to_all .* dim 0 of shape \(6, 5\)"),
    ],
)
def test_sizes_that_do_not_divide(src: Type, dst: Type, shape: tuple[int, ...], message: str) -> None:
    def program(axes: Axes) -> None:
        with pytest.raises(ShardingError, match=message):
            change(torch.ones(shape), axes, src, dst)

    on_ranks(Mesh(tp=2), program)


def test_plain_collectives() -> None:
    def program(axes: Axes) -> list[float]:
        tp, mine = axes["tp"], float(axes.rank)
        total, top, first, got = (torch.tensor([mine]) for _ in range(4))
        work = collectives.reduce_sum_(total, tp, async_op=True)
        collectives.reduce_max_(top, tp)
        collectives.broadcast_(first, tp, source=1)
        sent = collectives.send(torch.tensor([mine]), tp, (tp.index + 1) % 3)
        collectives.receive_(got, tp, (tp.index - 1) % 3).wait()
        sent.wait()
        assert work is not None
        work.wait()
        return [total.item(), top.item(), first.item(), got.item()]

    assert on_ranks(Mesh(tp=3), program) == [[3, 2, 1, 2], [3, 2, 1, 0], [3, 2, 1, 1]]


def test_subgroups_that_only_some_ranks_want() -> None:
    def program(axes: Axes) -> dict[tuple[int, ...], float]:
        wanted = {0: {(0, 3): "ends", (0, 1, 2): "low"}, 3: {(0, 3): "ends", (3,): "own"}}
        joined = collectives.subgroups(axes, wanted.get(axes.rank, {(0, 1, 2): "low"}))
        found = {}
        for ranks in sorted(joined):
            x = torch.tensor(2.0**axes.rank)
            collectives.reduce_sum_(x, joined[ranks])
            found[ranks] = x.item()
        return found

    low = {(0, 1, 2): 7.0}
    assert on_ranks(Mesh(dp=4), program) == [low | {(0, 3): 9.0}, low, low, {(0, 3): 9.0, (3,): 8.0}]


def test_equal_sums_for_other_purposes_do_not_meet() -> None:
    def program(axes: Axes) -> None:
        for purpose in ("queries", "keys") if axes.rank == 0 else ("keys", "queries"):
            collectives.reduce_sum_(torch.ones(3), axes["tp"].meant_for(purpose))

    with pytest.raises(MismatchError) as caught:
        on_ranks(Mesh(tp=2), program)
    first, *ranks, rest = str(caught.value).splitlines()
    assert first == ("ranks 0 and 1 have different purposes ('queries' and 'keys') in collective 1 of group 'tp':")
    line = program.__code__.co_firstlineno + 2
    assert ranks == [
        f"  rank {rank}: all_reduce(float32[3], op=SUM) on tp, at {__file__}:{line} in program, for {purpose}"
        for rank, purpose in enumerate(("queries", "keys"))
    ]
    assert "in the same order" in rest


def test_long_purposes_are_shown_from_where_they_part() -> None:
    def program(axes: Axes) -> None:
        same = " ".join(f"layers.{i}.weight," for i in range(20))
        collectives.reduce_sum_(
            torch.ones(3), axes["tp"].meant_for(f"gradients of {same} layers.{20 + axes.rank}.weight")
        )

    with pytest.raises(MismatchError, match=r"\('… layers.20.weight' and '… layers.21.weight'\)"):
        on_ranks(Mesh(tp=2), program)


@pytest.mark.parametrize("src", [P, I], ids=["forward", "backward"])
def test_layers_in_another_order_on_another_rank(src: Type) -> None:
    """Forward and backward: ``I -> R`` communicates in the backward alone."""

    def program(axes: Axes) -> None:
        layers = [axes.within(f"layers.{i}")["tp"] for i in range(2)]
        x = torch.ones(3, requires_grad=True)
        for tp in layers if axes.rank == 0 else layers[::-1]:
            x = change(x, {"tp": tp}, src, R)
        x.sum().backward()

    names = r"\('layers.0' and 'layers.1'\)" if src == P else r"\('layers.1' and 'layers.0'\)"
    with pytest.raises(MismatchError, match=f"different purposes {names}"):
        on_ranks(Mesh(tp=2), program)
