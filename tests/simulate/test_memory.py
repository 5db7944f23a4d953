"""Peak memory against sums by hand; float32 tensors, so 4 bytes an element."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from autopar import simulate


def peak(fn: Callable[[], object]) -> int:
    def program(rank: int) -> None:
        fn()

    return simulate.run(program, 1).peak_bytes[0]


def test_by_hand() -> None:
    def program(rank: int) -> None:
        a = torch.ones(1000)  # 4,000
        b = a * 2  # 8,000
        del a  # 4,000
        c = torch.empty(250 * (rank + 1))  # 5,000 or 6,000
        b.add_(1)
        d = c[10:].view(-1)  # no storage of its own
        del b, c  # 1,000 or 2,000, held by d
        e = torch.zeros(2000) + d.sum()  # the zeros and their sum live together: 16,000, and 4 bytes
        del e

    assert simulate.run(program, 2).peak_bytes == [17_004, 18_004]


def test_backward() -> None:
    size = 4 * 100

    def fn() -> None:
        x = torch.ones(100, requires_grad=True)  # x
        y = x.exp()  # x, y (kept for backward)
        z = y.exp()  # x, y, z (kept)
        loss = z.sum()  # and 4 bytes
        del y, z
        # x, y, z, the loss and its gradient, and on the way down: gz is an expanded scalar, then gy and gx
        # (gx = gy * y, with z and gz gone before it is made).
        loss.backward()

    assert peak(fn) == 4 * size + 8


def test_what_came_from_outside_does_not_count() -> None:
    shared = torch.ones(1000)
    parameter = nn.Parameter(torch.ones(1000))

    def fn() -> None:
        for _ in range(3):
            shared.view(10, 100).t()
            parameter.detach()[:10]
            shared.add_(0)

    assert peak(fn) == 0
    assert peak(lambda: shared * 2) == 4000


def test_tensors_made_without_an_operation_count() -> None:
    buffer = nn.BatchNorm1d(100)  # two buffers and two parameters of 100, a counter of one int64
    assert peak(lambda: torch.tensor([1.0] * 100)) == 400
    assert peak(lambda: copy.deepcopy(buffer)) == 4 * 400 + 8


def test_a_result_with_many_tensors() -> None:
    assert peak(lambda: torch.ones(1, 300).max(dim=1)) == 1200 + 4 + 8
    assert peak(lambda: torch._foreach_add([torch.ones(10), torch.ones(20)], 1)) == 2 * 120


def test_a_resized_storage() -> None:
    def fn() -> None:
        x = torch.ones(10)
        x.resize_(1000)

    assert peak(fn) == 4000


def test_communication_itself_takes_nothing() -> None:
    def program(rank: int) -> None:
        x = torch.ones(1000)
        dist.all_reduce(x)
        dist.all_reduce(x, async_op=True).wait()
        dist.all_to_all_single(x, x.view(1000))

    assert simulate.run(program, 2).peak_bytes == [4000, 4000]


def test_local_tensors_of_a_dtensor_count() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(1000, 4), mesh, [Shard(0)], src_data_rank=None)
        before = x + 1
        del x
        before * 2

    # The whole tensor, its half, and what the mesh holds; afterwards never more than three halves.
    for measured in simulate.run(program, 2).peak_bytes:
        assert 16_000 + 8000 <= measured < 16_000 + 8000 + 500


def test_fake_tensors_do_not_count() -> None:
    def fn() -> None:
        with FakeTensorMode():
            torch.ones(1000) + 1

    assert peak(fn) == 0


def test_what_is_returned_stays_valid() -> None:
    run = simulate.run(lambda rank: torch.ones(10) * rank, 2)
    assert run.results[1].tolist() == [1.0] * 10
    assert run.peak_bytes == [80, 80]


def test_not_tracked() -> None:
    assert simulate.run(lambda rank: torch.ones(10), 2, track_memory=False).peak_bytes == []


@pytest.mark.parametrize("world_size", [1, 3])
def test_each_rank_has_its_own(world_size: int) -> None:
    def program(rank: int) -> None:
        held = []
        for _ in range(rank + 1):
            held.append(torch.ones(100))
            dist.barrier()
        for _ in range(world_size - rank - 1):
            dist.barrier()

    assert simulate.run(program, world_size).peak_bytes == [400 * (rank + 1) for rank in range(world_size)]
