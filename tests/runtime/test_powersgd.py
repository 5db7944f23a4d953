"""Low-rank sums of gradients: what they equal, what they lose, what they send."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar import simulate
from autopar.compression import low_rank_pays, sent_elements
from autopar.errors import ArgumentError
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.runtime.axes import Axes
from autopar.runtime.powersgd import PowerSGD, relative_error, require_linear_sums
from tests.runtime.ranks import on_ranks

SHAPES = [(12, 8), (5,), (6, 3, 4), ()]


def terms(shapes: list[tuple[int, ...]], rank: int, step: int, *, true_rank: int = 0) -> list[Tensor]:
    """One rank's terms of a step; with ``true_rank``, matrices of that rank whose columns are alike on all ranks."""
    random = torch.Generator().manual_seed(100 * step + rank)
    made = [torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes]
    if true_rank:
        basis = torch.Generator().manual_seed(step)
        for i, x in enumerate(made):
            if x.dim() > 1:
                left = torch.randn(x.shape[0], true_rank, generator=basis, dtype=torch.float64)
                made[i] = (left @ x.flatten(1)[:true_rank]).view(x.shape)
    return made


def sums(shapes: list[tuple[int, ...]], ranks: int, step: int, **options: int) -> list[Tensor]:
    each = [terms(shapes, rank, step, **options) for rank in range(ranks)]
    return [torch.stack(parts).sum(0) for parts in zip(*each, strict=True)]


@pytest.mark.parametrize(("rank", "true_rank"), [(1, 1), (2, 2), (12, 0)])
def test_what_has_that_rank_is_summed_exactly(rank: int, true_rank: int) -> None:
    def program(axes: Axes) -> list[list[Tensor]]:
        low, found = PowerSGD(rank), []
        for step in range(3):
            views = terms(SHAPES, axes.rank, step, true_rank=true_rank)
            low.start(views, axes["dp"]).wait()
            found.append(views)
        return found

    for found in on_ranks(Mesh(dp=3), program):
        for step, views in enumerate(found):
            for view, expected in zip(views, sums(SHAPES, 3, step, true_rank=true_rank), strict=True):
                torch.testing.assert_close(view, expected, rtol=1e-10, atol=1e-10)


def test_what_is_lost_comes_later() -> None:
    """Error feedback: all that was ever summed is all that was given, but for what the ranks still keep."""

    def program(axes: Axes) -> tuple[Tensor, Tensor, float]:
        low, total = PowerSGD(2), torch.zeros(12, 8, dtype=torch.float64)
        for step in range(5):
            (view,) = terms([(12, 8)], axes.rank, step)
            low.start([view], axes["dp"]).wait()
            total += view
        (matrix,) = low._matrices
        return total, matrix.error, relative_error([low])

    found = on_ranks(Mesh(dp=2), program)
    given = torch.stack([s for step in range(5) for s in sums([(12, 8)], 2, step)]).sum(0)
    kept = sum(error for _, error, _ in found)
    for total, _, relative in found:
        torch.testing.assert_close(total + kept, given, rtol=1e-10, atol=1e-10)
        assert 0.3 < relative < 1  # of noise, two dimensions of eight are little


def test_the_same_gradient_again_and_again_is_found() -> None:
    """Warm start is a power iteration: on one matrix, what is lost goes down to the best that the rank allows."""
    left, right = (torch.linalg.qr(torch.randn(n, n, dtype=torch.float64)).Q for n in (16, 16))
    matrix = left @ torch.diag(torch.tensor([8.0, 4.0, *[0.1] * 14], dtype=torch.float64)) @ right

    def program(axes: Axes) -> list[float]:
        low, errors = PowerSGD(2), []
        for _ in range(6):
            low.start([matrix / 2], axes["dp"]).wait()
            errors.append(relative_error([low]))
            low._matrices[0].error.zero_()  # without feedback, each step is one iteration
        return errors

    best = (14 * 0.1**2 / float(matrix.square().sum())) ** 0.5
    errors = on_ranks(Mesh(dp=2), program)[0]
    assert errors[-1] == pytest.approx(best, rel=1e-3)


@pytest.mark.parametrize("rank", [1, 2])
def test_bytes_are_those_of_the_formula(rank: int) -> None:
    shapes = [(40, 30), (7,), (2, 2)]
    world = 2

    def program(number: int) -> None:
        axes = Axes.build(Mesh(dp=world), number, "cpu")
        PowerSGD(rank).start(terms(shapes, number, 0), axes["dp"]).wait()

    traffic = simulate.run(program, world).sent_bytes
    exact, low = sent_elements(shapes, rank)
    assert exact == 1200 + 7 + 4
    assert low == rank * 70 + 7 + 4
    for sent in traffic:
        assert sum(sent.values()) == 8 * low  # an all-reduce of two ranks sends what it is given, once


def test_both_halves_of_all_buckets_are_started_before_the_first_is_awaited() -> None:
    """advance() twice is advance() once, wait() without it the same."""

    def program(axes: Axes) -> list[Tensor]:
        found = []
        for calls in (0, 1, 2):
            low, views = PowerSGD(2), terms([(12, 8), (4,)], axes.rank, 0)
            work = low.start(views, axes["dp"])
            for _ in range(calls):
                work.advance()
            work.wait()
            found.append(views[0])
        return found

    a, b, c = on_ranks(Mesh(dp=2), program)[1]
    assert torch.equal(a, b)
    assert torch.equal(b, c)


def test_bfloat16_is_summed_in_float32() -> None:
    def program(axes: Axes) -> Tensor:
        view = torch.full((16, 16), 1.0 + axes.rank, dtype=torch.bfloat16)
        PowerSGD(1).start([view], axes["dp"]).wait()
        return view

    for found in on_ranks(Mesh(dp=2), program):
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, torch.full((16, 16), 3.0, dtype=torch.bfloat16))


def test_a_gradient_of_zeros_is_no_end() -> None:
    """An expert that nothing was routed to: the step after it still sends something."""

    def program(axes: Axes) -> tuple[Tensor, Tensor]:
        low, zeros, ones = PowerSGD(1), torch.zeros(8, 6), torch.ones(8, 6)
        for view in (zeros, ones):
            low.start([view], axes["dp"]).wait()
        return zeros, ones

    for zeros, ones in on_ranks(Mesh(dp=2), program):
        assert torch.equal(zeros, torch.zeros(8, 6))
        assert ones.isfinite().all()
        assert ones.abs().sum() > 1


def test_what_pays() -> None:
    assert low_rank_pays((40, 30), 2)
    assert low_rank_pays((10, 3, 10), 2)
    assert not low_rank_pays((40, 30), 30)
    assert not low_rank_pays((1000,), 1)
    assert not low_rank_pays((), 1)


@pytest.mark.parametrize(
    ("options", "arguments", "says"),
    [
        ({}, (1, False, ()), "dp is 1"),
        ({}, (2, True, ()), "asynchronous"),
        ({}, (2, False, ("wte.weight",)), "'wte.weight' is tied"),
        ({"precision": "fp16"}, (2, False, ()), "use bf16"),
    ],
)
def test_what_is_no_sum_over_dp_is_refused(
    options: dict[str, str], arguments: tuple[int, bool, tuple[str, ...]], says: str
) -> None:
    require_linear_sums(Options(**options), *arguments)  # without powersgd, all is well
    with pytest.raises(ArgumentError, match=says):
        require_linear_sums(Options(powersgd=2, **options), *arguments)


def test_scattered_gradients_are_refused() -> None:
    with pytest.raises(ArgumentError, match="zero=2"):
        Options.of(powersgd=2, zero=2)
