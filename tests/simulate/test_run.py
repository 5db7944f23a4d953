"""The public function: results, traffic, and what ranks get from the caller."""

from __future__ import annotations

import contextvars
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar import simulate
from autopar.errors import ArgumentError
from autopar.simulate import RankTraffic
from autopar.simulate.baton import Baton


def test_results_are_in_rank_order() -> None:
    def program(rank: int) -> tuple[int, int, int]:
        return rank, dist.get_rank(), dist.get_world_size()

    assert simulate.run(program, 5).results == [(rank, rank, 5) for rank in range(5)]


@pytest.mark.parametrize("world_size", [0, -1])
def test_no_ranks(world_size: int) -> None:
    with pytest.raises(ArgumentError, match=f"world_size is {world_size}; it must be"):
        simulate.run(lambda rank: None, world_size)


def test_traffic_by_group_and_operation() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        x = torch.ones(8)
        for _ in range(3):
            dist.all_reduce(x, group=mesh.get_group("tp"))
        dist.broadcast(x, group_src=0, group=mesh.get_group("dp"))
        dist.all_reduce(x, group=mesh.get_group("pp"))
        dist.all_reduce(x)
        some = dist.new_group([0, 2])
        named = dist.new_group([0, 2], group_desc="shared weights")
        if rank in (0, 2):
            dist.all_reduce(x, group=some)
            dist.all_reduce(x, group=named)

    run = simulate.run(program, 4)
    assert run.traffic[0] == (
        RankTraffic("dp", "broadcast", 1, 32),
        RankTraffic("pp", "all_reduce", 1, 0),
        RankTraffic("ranks 0,2", "all_reduce", 1, 32),
        RankTraffic("shared weights", "all_reduce", 1, 32),
        RankTraffic("tp", "all_reduce", 3, 96),
        RankTraffic("world", "all_reduce", 1, 48),
    )
    assert run.sent_bytes[2] == {
        "dp": 0,
        "pp": 0,
        "ranks 0,2": 32,
        "shared weights": 32,
        "tp": 96,
        "world": 48,
    }
    assert run.sent_bytes[3] == {"dp": 0, "pp": 0, "tp": 96, "world": 48}


def test_a_mesh_without_names() -> None:
    def program(rank: int) -> None:
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
        dist.all_reduce(torch.ones(1), group=mesh.get_group(1))

    assert simulate.run(program, 4).sent_bytes == [{"dim_1": 4}] * 4


def test_modes_of_the_caller_hold() -> None:
    variable = contextvars.ContextVar("variable", default="default")
    variable.set("caller's")

    def program(rank: int) -> list[object]:
        product = torch.ones(2, 2, requires_grad=True) @ torch.ones(2, 2)
        seen = [variable.get(), product.requires_grad, product.is_inference(), product.dtype]
        variable.set(f"rank {rank}'s")
        return seen

    assert simulate.run(program, 2).results == [["caller's", True, False, torch.float32]] * 2
    with torch.no_grad():
        assert simulate.run(program, 2).results == [["caller's", False, False, torch.float32]] * 2
    with torch.inference_mode():
        assert simulate.run(program, 2).results == [["caller's", False, True, torch.float32]] * 2
    with torch.autocast("cpu", torch.bfloat16):
        assert simulate.run(program, 2).results == [["caller's", True, False, torch.bfloat16]] * 2
    assert variable.get() == "caller's"


def test_kernels_use_the_callers_number_of_threads() -> None:
    before = torch.get_num_threads()
    try:
        for number in (3, 1):
            torch.set_num_threads(number)
            assert simulate.run(lambda rank: torch.get_num_threads(), 2).results == [number] * 2
            assert torch.get_num_threads() == number
    finally:
        torch.set_num_threads(before)


def test_from_a_thread() -> None:
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(simulate.run, lambda rank: dist.get_world_size(), 2).result()
    assert run.results == [2, 2]


def test_grad_modes_of_ranks_are_apart() -> None:
    def program(rank: int) -> bool:
        with torch.set_grad_enabled(rank == 0):
            dist.barrier()
            return torch.is_grad_enabled()

    assert simulate.run(program, 3).results == [True, False, False]


def test_gradients_flow_through_ranks() -> None:
    def program(rank: int) -> torch.Tensor:
        x = torch.full((2,), 1.0 + rank, requires_grad=True)
        (x * x).sum().backward()
        assert x.grad is not None
        dist.all_reduce(x.grad)
        return x.grad

    for grad in simulate.run(program, 4).results:
        assert grad.tolist() == [20.0, 20.0]


def test_a_rank_waits_once_per_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handing over is what many ranks take time for."""
    turns: list[int] = []
    hand_over = Baton._hand_over

    def counted(baton: Baton[object], rank: int) -> None:
        turns.append(rank)
        hand_over(baton, rank)

    def handed_over(operations: int) -> int:
        turns.clear()

        def program(rank: int) -> None:
            x = torch.ones(16)
            for _ in range(operations):
                dist.all_reduce(x)

        simulate.run(program, 64)
        return len(turns)

    monkeypatch.setattr(Baton, "_hand_over", counted)
    assert handed_over(10) - handed_over(0) == 63 * 10  # the last to come waits for nobody
