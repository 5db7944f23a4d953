"""The loss scaler: one decision for all ranks, and the scale of torch.amp.GradScaler."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from autopar.errors import ArgumentError
from autopar.mesh import Mesh
from autopar.runtime import Axes
from autopar.runtime.scaling import LossScaler
from tests.runtime.ranks import on_ranks

CPU = torch.device("cpu")


def alone() -> Axes:
    return Axes.build(Mesh(), 0, "cpu")


def test_gradients_are_unscaled() -> None:
    scaler, weight = LossScaler(), torch.ones(3, requires_grad=True)
    loss = (weight * 3).sum()
    loss.backward(scaler.root(loss))
    assert weight.grad is not None
    assert weight.grad.tolist() == [3 * 2.0**16] * 3
    assert scaler.settle([weight.grad], alone().world, CPU)
    assert weight.grad.tolist() == [3.0] * 3


def test_all_ranks_skip_where_one_overflows() -> None:
    def rank_program(axes: Axes) -> tuple[list[bool], float]:
        scaler = LossScaler(interval=2)
        finite = []
        for step, bad in enumerate([None, math.inf, math.nan, None, None]):
            gradient = torch.ones(2)
            if bad is not None and axes.rank == step % 4:
                gradient[1] = bad
            finite.append(scaler.settle([gradient, torch.ones(0)], axes.world, CPU))
        return finite, scaler.scale

    assert on_ranks(Mesh(dp=2, tp=2), rank_program) == [([True, False, False, True, True], 2.0**15)] * 4


def test_a_rank_without_gradients_takes_part() -> None:
    def rank_program(axes: Axes) -> bool:
        gradients = [torch.tensor([math.inf])] if axes.rank else []
        return LossScaler().settle(gradients, axes.world, CPU)

    assert on_ranks(Mesh(pp=2), rank_program) == [False, False]


def test_the_scale_is_that_of_grad_scaler() -> None:
    """The same scale after each step of a training with overflows."""
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=3)
    ours = LossScaler(scale=2.0**4, interval=3)
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for step in range(20):
        weight.grad = torch.full((2,), math.inf if step in (0, 5, 6, 13) else 1.0)
        ours.settle([weight.grad.clone()], alone().world, CPU)
        theirs.scale(torch.ones(()))
        theirs.step(optimizer)
        theirs.update()
        assert ours.scale == theirs.get_scale()


def test_the_scale_stays_finite() -> None:
    scaler = LossScaler(scale=2.0**127, interval=1)
    assert scaler.settle([torch.zeros(1)], alone().world, CPU)
    assert scaler.scale == 2.0**127


def test_state() -> None:
    scaler = LossScaler(interval=3)
    for value in (math.inf, 1.0, 1.0):
        scaler.settle([torch.tensor([value])], alone().world, CPU)
    again = LossScaler(interval=3)
    again.load_state_dict(scaler.state_dict())
    assert (again.scale, again.good_steps) == (2.0**15, 2)
    assert again.settle([torch.ones(1)], alone().world, CPU)
    assert again.scale == 2.0**16
    for wrong in ({"scale": 1.0}, {"scale": 0.0, "good_steps": 0}, {"scale": math.nan, "good_steps": 1}):
        with pytest.raises(ArgumentError, match="no state of a loss scaler"):
            again.load_state_dict(wrong)
