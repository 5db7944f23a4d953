"""A job as ranks see it: programs, action lists, where weights come from, how to optimize; and how a rank starts."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.errors import ArgumentError
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.runtime.axes import Axes
from autopar.runtime.collectives import broadcast_object
from autopar.runtime.executor import Executor
from autopar.runtime.load import Loaded, LoadedVocabulary, load_program, load_vocabulary
from autopar.runtime.program import Parameter, Program, VocabularyProgram
from autopar.runtime.weights import Source, materialize, unshard
from autopar.schedules import Schedule

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The default optimizer: AdamW, learning rate 1e-3."""
    return torch.optim.AdamW(parameters, lr=1e-3)


@dataclass(frozen=True)
class Job:
    """Everything that is the same on all ranks. ``texts`` are the emitted programs by stage.

    ``schedule`` says which pipeline rank holds which stages. ``vocabulary`` is the text of vocabulary layers that are
    split over the pipeline; None: they are in its stages.
    """

    texts: tuple[str, ...]
    schedule: Schedule
    mesh: Mesh
    source: Source
    optimizer: Optimizer = adamw
    clip_norm: float | None = None
    seed: int = 0
    vocabulary: str | None = None
    options: Options = field(default_factory=Options)

    def __post_init__(self) -> None:
        if self.schedule.is_asynchronous and self.clip_norm is not None:
            raise ArgumentError(
                f"schedule {self.schedule.name!r} updates each stage's weights by itself, so there is no gradient of "
                "the whole model whose norm clip_norm could bound; leave clip_norm out, or use another schedule"
            )

    @cached_property
    def programs(self) -> tuple[Loaded, ...]:
        return tuple(load_program(text, filename=f"stage_{i}.py") for i, text in enumerate(self.texts))

    @cached_property
    def vocabulary_program(self) -> LoadedVocabulary | None:
        return None if self.vocabulary is None else load_vocabulary(self.vocabulary, filename="vocabulary.py")

    def stages(self, rank: int) -> list[int]:
        """The stages that ``rank`` holds."""
        index = self.mesh.coordinate(rank, "pp")
        return [stage for stage, home in enumerate(self.schedule.placement) if home == index]

    def modules(self, rank: int) -> list[nn.Module]:
        """The modules of ``rank`` with their weights, outside of a running job: for a look, or ``torch.compile``."""
        return build_modules(self, Axes.alone(self.mesh, rank, "cpu", self.seed)).all

    def gather(self, results: Sequence[RankResult]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Full gradients and parameters by the model's names, from those of all ranks."""
        return self._gather([r.gradients for r in results]), self._gather([r.parameters for r in results])

    def _gather(self, by_rank: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        full: dict[str, Tensor] = {}
        for program, ranks in self._holders():
            for parameter in program.parameters:
                if parameter.trainable and parameter.name in by_rank[ranks[0]] and parameter.name not in full:
                    full[parameter.name] = self._whole(parameter, by_rank, ranks)
        return full

    def _holders(self) -> Iterator[tuple[Program | VocabularyProgram, list[int]]]:
        """Every program, and the ranks that run it."""
        for stage, loaded in enumerate(self.programs):
            yield loaded.program, [r for r in range(self.mesh.world) if stage in self.stages(r)]
        if self.vocabulary_program is not None:
            yield self.vocabulary_program.program, list(range(self.mesh.world))

    def _whole(self, parameter: Parameter, by_rank: Sequence[Mapping[str, Tensor]], ranks: list[int]) -> Tensor:
        return unshard(parameter, [(self.mesh.coordinates(r), by_rank[r][parameter.name]) for r in ranks])


@dataclass
class RankResult:
    """What one rank leaves behind: losses per step, local gradients of the last step, local parameters."""

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Modules:
    """What one rank runs, with weights, on its device. A weight of several of its stages is one Parameter."""

    stages: dict[int, nn.Module]
    vocabulary: nn.Module | None

    @property
    def all(self) -> list[nn.Module]:
        return [*self.stages.values(), *([self.vocabulary] if self.vocabulary is not None else [])]


def build_modules(job: Job, axes: Axes) -> Modules:
    stages: dict[int, nn.Module] = {}
    for stage in job.stages(axes.rank):
        loaded = job.programs[stage]
        module = loaded.stage(axes)
        materialize(module, loaded.program, axes, job.source, axes.device)
        _share(module, loaded.program, stages)
        stages[stage] = module
    loaded_vocabulary = job.vocabulary_program
    if loaded_vocabulary is None:
        return Modules(stages, None)
    vocabulary = loaded_vocabulary.vocabulary(axes)
    materialize(vocabulary, loaded_vocabulary.program, axes, job.source, axes.device)
    return Modules(stages, vocabulary)


def _share(module: nn.Module, program: Program, stages: Mapping[int, nn.Module]) -> None:
    """Let ``module`` use the weights that it shares with earlier stages of this rank."""
    for parameter in program.parameters:
        for stage in parameter.shared_stages:
            if stage in stages:
                _replace(module, parameter.name, stages[stage].get_parameter(parameter.name))


def _replace(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Under every name that ``module`` has it."""
    own = module.get_parameter(name)
    for place, found in list(module.named_parameters(remove_duplicate=False)):
        if found is own:
            owner, _, leaf = place.rpartition(".")
            setattr(module.get_submodule(owner), leaf, parameter)


def start(job: Job, axes: Axes, *, on_gradients: Callable[[dict[str, Tensor]], None] | None = None) -> Executor:
    """Build this rank's stages and optimizer; all ranks of the world must call it."""
    modules = build_modules(job, axes)
    trainable = list(dict.fromkeys(p for module in modules.all for p in module.parameters() if p.requires_grad))
    vocabulary = None
    if modules.vocabulary is not None and job.vocabulary_program is not None:
        vocabulary = modules.vocabulary, job.vocabulary_program.program
    return Executor(
        modules.stages,
        {stage: job.programs[stage].program for stage in modules.stages},
        job.schedule,
        axes,
        job.optimizer(trainable) if trainable else None,
        vocabulary=vocabulary,
        clip_norm=job.clip_norm,
        options=job.options,
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
    result.parameters = {n: p.detach() for n, p in executor.named_parameters().items()}
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
