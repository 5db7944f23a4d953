"""Randomness: each rank has its own streams, the same on every run, and the caller keeps his."""

from __future__ import annotations

import random

import numpy
import torch
import torch.distributed as dist
from torch import nn

from autopar import simulate


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(numpy.random.rand())


def draw_between_hand_overs(rank: int) -> list[tuple[float, float, float]]:
    draws = []
    for _ in range(3):
        draws.append(draw())
        dist.barrier()
    return draws


def test_ranks_draw_as_processes_of_their_own() -> None:
    torch.manual_seed(7)
    random.seed(7)
    numpy.random.seed(7)
    alone = [draw() for _ in range(3)]
    assert simulate.run(draw_between_hand_overs, 4, seed=7).results == [alone] * 4
    assert simulate.run(draw_between_hand_overs, 4, seed=8).results != [alone] * 4


def test_a_rank_may_seed_itself() -> None:
    def program(rank: int) -> list[tuple[float, float, float]]:
        torch.manual_seed(rank)
        random.seed(rank)
        numpy.random.seed(rank)
        return draw_between_hand_overs(rank)

    together = simulate.run(program, 3).results
    assert together[0] != together[1] != together[2]
    for rank in range(3):
        assert simulate.run(lambda _, rank=rank: program(rank), 1).results == [together[rank]]


def test_large_and_negative_seeds() -> None:
    values = [simulate.run(lambda rank: draw(), 1, seed=seed).results[0] for seed in (2**63, -1, 0)]
    assert len(set(values)) == 3


def test_training_with_dropout_is_deterministic() -> None:
    def program(rank: int) -> list[float]:
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.3), nn.ReLU(), nn.Linear(32, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(4):
            loss = model(torch.randn(8, 16)).square().mean()
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    first = simulate.run(program, 8).results
    assert len({tuple(losses) for losses in first}) == 8
    for _ in range(3):
        assert simulate.run(program, 8).results == first


def test_the_caller_keeps_his_generators() -> None:
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    expected = [draw(), float(numpy.random.randn()), float(numpy.random.randn()), draw()]
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    kept = [draw(), float(numpy.random.randn())]
    simulate.run(draw_between_hand_overs, 2)
    assert [*kept, float(numpy.random.randn()), draw()] == expected
