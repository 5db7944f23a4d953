"""A job as ranks see it: programs, action lists, where weights come from, how to optimize; and how a rank starts."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.errors import ArgumentError
from autopar.mesh import Mesh
from autopar.runtime.axes import Axes
from autopar.runtime.collectives import broadcast_object
from autopar.runtime.executor import Executor
from autopar.runtime.load import Loaded, load_program
from autopar.runtime.program import Parameter
from autopar.runtime.weights import Source, materialize, unshard
from autopar.schedules import Schedule

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The default optimizer: AdamW, learning rate 1e-3."""
    return torch.optim.AdamW(parameters, lr=1e-3)


@dataclass(frozen=True)
class Job:
    """Everything that is the same on all ranks. ``texts`` are the emitted programs by stage."""

    texts: tuple[str, ...]
    schedule: Schedule
    mesh: Mesh
    source: Source
    optimizer: Optimizer = adamw
    clip_norm: float | None = None
    seed: int = 0

    @cached_property
    def programs(self) -> tuple[Loaded, ...]:
        return tuple(load_program(text, filename=f"stage_{i}.py") for i, text in enumerate(self.texts))

    def module(self, rank: int) -> nn.Module:
        """The module of ``rank`` with its weights, outside of a running job: for a look, or ``torch.compile``."""
        return build_module(self, Axes.alone(self.mesh, rank, "cpu", self.seed))

    def gather(self, results: Sequence[RankResult]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Full gradients and parameters by the model's names, from those of all ranks."""
        return self._gather([r.gradients for r in results]), self._gather([r.parameters for r in results])

    def _gather(self, by_rank: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        full: dict[str, Tensor] = {}
        for stage, loaded in enumerate(self.programs):
            ranks = [r for r in range(self.mesh.world) if self.mesh.coordinate(r, "pp") == stage]
            for parameter in loaded.program.parameters:
                if parameter.trainable and parameter.name in by_rank[ranks[0]] and parameter.name not in full:
                    full[parameter.name] = self._whole(parameter, by_rank, ranks)
        return full

    def _whole(self, parameter: Parameter, by_rank: Sequence[Mapping[str, Tensor]], ranks: list[int]) -> Tensor:
        return unshard(parameter, [(self.mesh.coordinates(r), by_rank[r][parameter.name]) for r in ranks])


@dataclass
class RankResult:
    """What one rank leaves behind: losses per step, local gradients of the last step, local parameters."""

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)


def build_module(job: Job, axes: Axes) -> nn.Module:
    """The stage of this rank, with weights, on its device."""
    loaded = job.programs[axes["pp"].index]
    module = loaded.stage(axes)
    materialize(module, loaded.program, axes, job.source, axes.device)
    return module


def start(job: Job, axes: Axes, *, on_gradients: Callable[[dict[str, Tensor]], None] | None = None) -> Executor:
    """Build this rank's stage and optimizer; all ranks of the world must call it."""
    stage = axes["pp"].index
    module = build_module(job, axes)
    trainable = [p for p in module.parameters() if p.requires_grad]
    return Executor(
        {stage: module},
        {stage: job.programs[stage].program},
        job.schedule.lists[stage],
        axes,
        job.optimizer(trainable) if trainable else None,
        placement=job.schedule.placement,
        clip_norm=job.clip_norm,
        on_gradients=on_gradients,
    )


def run_rank(job: Job, rank: int, batch: Mapping[str, Tensor], steps: int) -> RankResult:
    """Train ``steps`` steps as ``rank`` on the CPU, in an initialised torch.distributed world."""
    result = RankResult()

    def keep(gradients: dict[str, Tensor]) -> None:
        result.gradients = {name: g.detach().clone() for name, g in gradients.items()}

    executor = start(job, Axes.build(job.mesh, rank, "cpu", job.seed), on_gradients=keep)
    for _ in range(steps):
        result.losses.append(float(executor.step(batch)))
    (module,) = executor.stages.values()
    result.parameters = {n: p.detach() for n, p in module.named_parameters() if p.requires_grad}
    return result


def connect(mesh: Mesh, seed: int, *, timeout_seconds: float = 600.0) -> Axes:
    """This process' place in the job, as torchrun numbers it: NCCL on CUDA, else gloo.

    Raises ArgumentError where torchrun started another number of processes than the mesh has ranks.
    """
    rank, world, device = join_world(timeout_seconds=timeout_seconds)
    if world != mesh.world:
        raise ArgumentError(
            f"the job is for {mesh.world} ranks ({mesh}), this is a world of {world}; "
            f"start it with torchrun --nproc-per-node {mesh.world}"
        )
    return Axes.build(mesh, rank, device, seed)


def join_world(*, timeout_seconds: float = 600.0) -> tuple[int, int, torch.device]:
    """Initialise torch.distributed as torchrun says, once. Returns rank, world size and this rank's device."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if world > 1 and not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
        atexit.register(_leave_world)  # threads of a backend that is still there abort the interpreter's exit
    return rank, world, device


def _leave_world() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def text_of_rank_zero(text: str) -> str:
    """``text`` of rank 0, on every rank of the world."""
    return str(broadcast_object(text)) if dist.is_initialized() else text
