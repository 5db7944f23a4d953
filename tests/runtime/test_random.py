"""Random ops: equal where replicated, independent where split, repeatable."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from autopar.mesh import Mesh
from autopar.runtime import Axes, rng
from autopar.runtime.random import op_seed
from tests.runtime.ranks import on_ranks

MESH = Mesh(dp=2, tp=2)


def draw(axes: Axes, op: int = 7, own: tuple[str, ...] = ("dp", "tp")) -> Tensor:
    with rng(axes, op, own):
        return torch.rand(16)


@pytest.mark.parametrize(
    ("own", "groups"),
    [((), [0, 0, 0, 0]), (("dp",), [0, 0, 1, 1]), (("tp",), [0, 1, 0, 1]), (("dp", "tp"), [0, 1, 2, 3])],
)
def test_ranks_draw_alike_exactly_where_the_value_is_replicated(own: tuple[str, ...], groups: list[int]) -> None:
    drawn = on_ranks(MESH, lambda axes: draw(axes, own=own))
    for a, b in product(range(4), repeat=2):
        assert torch.equal(drawn[a], drawn[b]) == (groups[a] == groups[b])


def test_step_microbatch_op_scope_and_seed_each_change_the_stream() -> None:
    axes = Axes.alone(MESH, 1, "cpu", seed=0)
    seeds = [op_seed(axes, 7, ("tp",)), op_seed(axes, 8, ("tp",)), op_seed(axes, 7, ("dp",))]
    seeds.append(op_seed(axes.within("layers.0"), 7, ("tp",)))
    seeds.append(op_seed(Axes.alone(MESH, 1, "cpu", seed=1), 7, ("tp",)))
    axes.stream.step = 1
    seeds.append(op_seed(axes, 7, ("tp",)))
    axes.stream.microbatch = 1
    seeds.append(op_seed(axes, 7, ("tp",)))
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_order_of_axes_does_not_matter() -> None:
    axes = Axes.alone(MESH, 2, "cpu")
    assert op_seed(axes, 1, ("dp", "tp")) == op_seed(axes, 1, ("tp", "dp"))


def test_a_recomputed_op_repeats_itself_whatever_was_drawn_between() -> None:
    axes = Axes.alone(MESH, 0, "cpu")
    first = draw(axes)
    torch.rand(100)
    draw(axes, op=8)
    assert torch.equal(draw(axes), first)


def test_the_stream_outside_is_left_alone_also_after_an_error() -> None:
    axes = Axes.alone(MESH, 0, "cpu")
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    draw(axes)
    with pytest.raises(RuntimeError, match="size"), rng(axes, 1, ()):
        torch.rand(3) @ torch.rand(4)
    assert torch.equal(torch.rand(4), expected)


def test_streams_of_different_ranks_are_uncorrelated() -> None:
    a, b = (draw_many(Axes.alone(MESH, rank, "cpu")) for rank in (0, 1))
    assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1].item()) < 0.02


def draw_many(axes: Axes) -> Tensor:
    with rng(axes, 0, ("tp",)):
        return torch.rand(40_000)
