"""torch's own parallelism on simulated ranks: each program equals the same on one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from autopar import simulate

STEPS = 3


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    layers = [nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)]
    return nn.Sequential(*layers).double()


def make_batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(8, 8, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(8, 4, generator=generator, dtype=torch.float64)


def my_share(tensor: Tensor) -> Tensor:
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def train(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor().detach() if isinstance(parameter, DTensor) else parameter.detach()


def one_device() -> list[Tensor]:
    model = make_model()
    train(model, *make_batch())
    return [whole(parameter) for parameter in model.parameters()]


def data_parallel(rank: int) -> list[Tensor]:
    model = nn.parallel.DistributedDataParallel(make_model())
    train(model, *map(my_share, make_batch()))
    return [whole(parameter) for parameter in model.parameters()]


def fully_sharded(rank: int) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = make_model()
    for layer in model[::2]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, *map(my_share, make_batch()))
    return [whole(parameter) for parameter in model.parameters()]


def tensor_parallel(rank: int) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = make_model()
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(model, *make_batch())
    return [whole(parameter) for parameter in model.parameters()]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("program", [data_parallel, fully_sharded, tensor_parallel])
def test_training_equals_one_device(program: Callable[[int], list[Tensor]], world_size: int) -> None:
    expected = one_device()
    for parameters in simulate.run(program, world_size).results:
        torch.testing.assert_close(parameters, expected, rtol=1e-12, atol=1e-12)


def test_pipeline_equals_one_device() -> None:
    def program(rank: int) -> list[Tensor]:
        model = make_model()
        chunk = nn.Sequential(*(model[:2], model[2:4], model[4:])[rank])
        schedule = Schedule1F1B(PipelineStage(chunk, rank, 3, torch.device("cpu")), 4, F.mse_loss)
        optimizer = torch.optim.AdamW(chunk.parameters(), lr=0.1)
        inputs, targets = make_batch()
        for _ in range(STEPS):
            if rank == 0:
                schedule.step(inputs)
            else:
                schedule.step(target=targets if rank == 2 else None)
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach() for parameter in chunk.parameters()]

    parameters = [parameter for chunk in simulate.run(program, 3).results for parameter in chunk]
    torch.testing.assert_close(parameters, one_device(), rtol=1e-12, atol=1e-12)


def test_dtensor_redistributes_on_a_mesh() -> None:
    def program(rank: int) -> tuple[Tensor, list[int] | None]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        left, right = torch.arange(16.0).view(4, 4), torch.arange(32.0).view(4, 8)
        product = distribute_tensor(left, mesh, [Shard(0), Shard(1)]) @ distribute_tensor(
            right, mesh, [Replicate(), Shard(0)]
        )
        assert product.placements == (Shard(0), Partial())
        moved = product.redistribute(mesh, [Shard(1), Shard(0)])
        return moved.full_tensor(), mesh.get_coordinate()

    run = simulate.run(program, 4)
    expected = torch.arange(16.0).view(4, 4) @ torch.arange(32.0).view(4, 8)
    for result, _ in run.results:
        assert torch.equal(result, expected)
    assert [coordinate for _, coordinate in run.results] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(set(sent) == {"dp", "tp"} for sent in run.sent_bytes)


def test_meshes_of_ranks_are_told_apart() -> None:
    meshes = simulate.run(lambda rank: init_device_mesh("cpu", (2,)), 2).results
    assert meshes[0] != meshes[1]


@pytest.mark.filterwarnings("ignore:.*_single. instead:FutureWarning")
def test_functional_collectives() -> None:
    def program(rank: int) -> list[list[float]]:
        x, world = torch.arange(4.0) + rank, dist.group.WORLD
        results = [
            functional.all_reduce(x, "sum", world),
            functional.all_gather_tensor(x, 0, world),
            functional.reduce_scatter_tensor(x, "max", 0, world),
            functional.all_to_all_single(x, [2, 2], [2, 2], world),
            functional.broadcast(x, 1, world),
        ]
        return [(result + 0).tolist() for result in results]  # the sum waits

    first, second = simulate.run(program, 2).results
    gathered = [0, 1, 2, 3, 1, 2, 3, 4]
    assert first == [[1, 3, 5, 7], gathered, [1, 2], [0, 1, 1, 2], [1, 2, 3, 4]]
    assert second == [[1, 3, 5, 7], gathered, [3, 4], [2, 3, 3, 4], [1, 2, 3, 4]]


@pytest.mark.parametrize("track_memory", [True, False])
def test_compiled_program(track_memory: bool) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    def program(rank: int) -> Tensor:
        def step(x: Tensor) -> Tensor:
            return functional.all_reduce(x.sin(), "sum", dist.group.WORLD).cos()

        return torch.compile(step, backend=backend, fullgraph=True)(torch.arange(3.0) + rank)

    expected = (torch.arange(3.0).sin() + (torch.arange(3.0) + 1).sin()).cos()
    for result in simulate.run(program, 2, track_memory=track_memory).results:
        torch.testing.assert_close(result, expected)
    assert graphs
