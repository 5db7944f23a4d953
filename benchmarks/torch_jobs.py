"""PyTorch's own parallelism, applied by hand to the small models as its documentation and torchtitan do it.

Each function takes the whole model, the same on both ranks, and returns a step: the global batch in, this
rank's share of the loss out. Shares of all ranks sum to the mean loss of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import GPT
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

Batch = Mapping[str, Tensor]
Step = Callable[[Batch], Tensor]


def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The optimizer of both sides. Fused: the plain loop over DTensors would measure little else."""
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def loss_of(output: Any) -> Tensor:
    """Of a model that gives it alone, or in an output of ``transformers``."""
    return output if isinstance(output, Tensor) else output.loss


def data_parallel(model: nn.Module, microbatches: int = 1) -> Step:
    """DistributedDataParallel over half of the batch each."""
    rank, world = dist.get_rank(), dist.get_world_size()
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = adamw(model.parameters())

    def step(batch: Batch) -> Tensor:
        own = {name: tensor.chunk(world)[rank] for name, tensor in batch.items()}
        loss = loss_of(replica(**own))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach() / world

    return step


def fully_sharded(model: nn.Module, microbatches: int = 1, blocks: Iterable[nn.Module] = ()) -> Step:
    """FSDP2, a unit per block (of a GPT, its own) and one for the rest, over half of the batch each."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    for block in blocks or model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model.parameters())

    def step(batch: Batch) -> Tensor:
        own = {name: tensor.chunk(world)[rank] for name, tensor in batch.items()}
        loss = loss_of(model(**own))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach() / world

    return step


def tensor_parallel(model: GPT, microbatches: int) -> Step:
    """``parallelize_module`` with sequence parallelism, vocabulary-parallel embedding, head and loss."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, outer_plan())
    for block in model.blocks:
        parallelize_module(block, mesh, block_plan())
    optimizer = adamw(model.parameters())
    first = dist.get_rank() == 0

    def step(batch: Batch) -> Tensor:
        with loss_parallel():
            loss = model(**batch)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach().full_tensor() * first

    return step


def outer_plan() -> dict[str, ParallelStyle]:
    return {
        "token": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "position": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }


def block_plan() -> dict[str, ParallelStyle]:
    whole_sequence = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    return {
        "norm_1": SequenceParallel(),
        "attention": whole_sequence,
        "attention.q": ColwiseParallel(),
        "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "norm_2": SequenceParallel(),
        "mlp": whole_sequence,
        "mlp.0": ColwiseParallel(),
        "mlp.2": RowwiseParallel(output_layouts=Shard(1)),
    }


def pipeline(model: GPT, microbatches: int) -> Step:
    """Two hand-cut stages under ``Schedule1F1B``."""
    rank, world = dist.get_rank(), dist.get_world_size()
    part = FirstStage(model) if rank == 0 else LastStage(model)
    stage = PipelineStage(part, rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, microbatches, loss_fn=cross_entropy)
    optimizer = adamw(part.parameters())

    def step(batch: Batch) -> Tensor:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(batch["tokens"])
        else:
            schedule.step(target=batch["targets"], losses=losses, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean().detach() if losses else torch.zeros(())

    return step


class FirstStage(nn.Module):
    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.token, self.position = model.token, model.position
        self.blocks = nn.Sequential(*model.blocks[: len(model.blocks) // 2])

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.blocks(self.token(tokens) + self.position(positions))


class LastStage(nn.Module):
    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.layers = nn.Sequential(*model.blocks[len(model.blocks) // 2 :], model.norm, model.head)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


BASELINES: dict[str, Callable[[GPT, int], Step]] = {
    "dp": data_parallel,
    "zero3": fully_sharded,
    "tp": tensor_parallel,
    "pp": pipeline,
}
