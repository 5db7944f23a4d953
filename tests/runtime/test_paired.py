"""On a paired axis, rank i of n holds parts i and 2 n - 1 - i of 2 n, whatever the transition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.errors import ShardingError
from autopar.graph import AxisRef, Meta
from autopar.mesh import Mesh
from autopar.rules.base import Op
from autopar.rules.moves import Moves
from autopar.rules.transitions import RULES
from autopar.runtime import Axes
from autopar.spmd import I, P, R, S, Type
from tests.runtime.ranks import gradient_type, on_ranks, part, wholes
from tests.runtime.test_collectives import change

SHAPE = (2, 48, 16)
SHARDS = [S(1), S(2), S(1, 3), S(2, 2)]
PAIRS = [
    *[(shard, kind) for shard in SHARDS for kind in (R, I)],
    *[(kind, shard) for shard in SHARDS for kind in (I, R, P)],
    *[(a, b) for a in SHARDS for b in SHARDS if a != b],
    *[(I, R), (P, I), (P, R)],
]


def order(size: int) -> list[int]:
    """The 2 ``size`` parts in the order in which ranks hold them."""
    return [number for index in range(size) for number in (index, 2 * size - 1 - index)]


def reordered(whole: Tensor, kind: Type, size: int, inverse: bool = False) -> Tensor:
    """``whole`` such that neighbouring parts of it are what ranks of a paired axis hold."""
    if not kind.is_shard:
        return whole
    places = torch.tensor(order(size))
    seen = whole.unflatten(kind.dim, (kind.outer, 2 * size, -1))
    return seen.index_select(kind.dim + 1, places.argsort() if inverse else places).flatten(kind.dim, kind.dim + 2)


def held(whole: Tensor, kind: Type, index: int, size: int) -> Tensor:
    return part(reordered(whole, kind, size), kind, index, size)


def expect(parts: list[Tensor], kind: Type, whole: Tensor, what: str) -> None:
    for found in wholes(parts, kind):
        back = reordered(found, kind, len(parts), inverse=True)
        torch.testing.assert_close(back, whole, rtol=0, atol=1e-12, msg=lambda m: f"{what}: {m}")


@pytest.mark.parametrize("size", [2, 4])
def test_every_transition_and_its_gradient(size: int) -> None:
    whole, weight = torch.randn(SHAPE, dtype=torch.float64), torch.randn(SHAPE, dtype=torch.float64)
    pairs = [(a, b) for a, b in PAIRS if all(SHAPE[k.dim] % (k.outer * 2 * size) == 0 for k in (a, b) if k.is_shard)]

    def program(axes: Axes) -> list[tuple[Tensor, Tensor]]:
        index, found = axes["cp"].index, []
        for src, dst in pairs:
            x = held(whole, src, index, size).requires_grad_()
            y = change(x, axes, src, dst, "cp")
            y.backward(held(weight, gradient_type(dst), index, size))
            assert x.grad is not None
            assert y.is_contiguous()
            found.append((y.detach(), x.grad))
        return found

    results = on_ranks(Mesh(cp=size, paired=True), program)
    for i, (src, dst) in enumerate(pairs):
        expect([r[i][0] for r in results], dst, whole, f"{src} -> {dst}")
        expect([r[i][1] for r in results], gradient_type(src), weight, f"gradient of {src} -> {dst}")


def test_positions_of_ranks() -> None:
    def program(axes: Axes) -> list[int]:
        return change(torch.arange(8), axes, R, S(0), "cp").tolist()

    assert on_ranks(Mesh(cp=2, paired=True), program) == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert on_ranks(Mesh(cp=2), program) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_an_axis_inside_of_a_paired_one() -> None:
    """Parts that tp makes of each of a pair's are parts of each of cp's once cp is gathered: what the rule says."""
    whole = torch.arange(32.0).reshape(2, 16)
    src, dst = S(1), R
    metas = [Meta((2, n), torch.float32) for n in (4, 8)]
    gather = Op("all_gather", (metas[0], AxisRef("cp", 2, True)), {"src": src, "dst": dst}, (metas[0],), (metas[1],))
    rule = RULES["all_gather"]
    assert isinstance(rule, Moves)
    assert rule.forward(gather, 0, S(1)) is None
    before, after = S(1, 2), rule.forward(gather, 0, S(1, 2))
    assert after == S(1, 4)
    assert rule.backward(gather, after) == (before,)

    def program(axes: Axes) -> tuple[Tensor, Tensor]:
        part_of_cp = change(whole, axes, R, src, "cp")
        inside = change(part_of_cp, axes, R, before, "tp")
        return change(inside, axes, src, dst, "cp"), change(whole, axes, R, after, "tp")

    for found, wanted in on_ranks(Mesh(cp=2, tp=2, paired=True), program):
        assert torch.equal(found, wanted)


def test_other_axes_have_neighbouring_parts() -> None:
    mesh = Mesh(dp=2, cp=2, tp=2, paired=True)
    paired = on_ranks(mesh, lambda axes: [name for name, axis in axes.items() if axis.paired])
    assert paired == [["cp"]] * 8


def test_a_dim_that_does_not_divide_in_pairs() -> None:
    def program(axes: Axes) -> None:
        with pytest.raises(ShardingError, match="doesn't divide over 2 ranks with a pair of parts each"):
            change(torch.ones(6), axes, R, S(0), "cp")
        with pytest.raises(ShardingError, match="doesn't divide over 2 ranks with a pair of parts each"):
            change(torch.ones(3), axes, S(0), R, "cp")

    on_ranks(Mesh(cp=2, paired=True), program)
