"""A job as ranks see it: programs, action lists, where weights come from, how to optimize; and how a rank starts."""

from __future__ import annotations

import atexit
import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.errors import ArgumentError
from autopar.mesh import Mesh
from autopar.options import Options, masters_on_host
from autopar.runtime.axes import Axes
from autopar.runtime.collectives import broadcast_object
from autopar.runtime.executor import Executor
from autopar.runtime.host import to_host
from autopar.runtime.load import Loaded, LoadedVocabulary, load_program, load_vocabulary
from autopar.runtime.loads import Load
from autopar.runtime.optimizers import (
    Maker,
    SchedulerMaker,
    adamw,
    check_optimizer,
    follow,
    make_optimizer,
    specs_of,
)
from autopar.runtime.powersgd import require_linear_sums
from autopar.runtime.program import Parameter, Program, VocabularyProgram
from autopar.runtime.scaling import LossScaler
from autopar.runtime.store import Departures, Store
from autopar.runtime.vocabulary import VOCABULARY
from autopar.runtime.weights import Source, materialize, unshard, unstacked, whole
from autopar.schedules import Schedule
from autopar.schedules.weight_moves import MESSAGES, MessageSizes, moves_of


@dataclass(frozen=True)
class Job:
    """Everything that is the same on all ranks. ``texts`` are the emitted programs by stage.

    ``schedule`` says which pipeline rank holds which stages. ``vocabulary`` is the text of vocabulary layers that are
    split over the pipeline; None: they are in its stages. ``optimizer`` makes each rank's from its
    :class:`autopar.runtime.optimizers.Parameters`; ``scheduler`` makes a scheduler of it, stepped when it is.
    ``sizes`` are those of messages in which weights and gradients travel.
    """

    texts: tuple[str, ...]
    schedule: Schedule
    mesh: Mesh
    source: Source
    optimizer: Maker = adamw
    clip_norm: float | None = None
    seed: int = 0
    vocabulary: str | None = None
    options: Options = field(default_factory=Options)
    scheduler: SchedulerMaker | None = None
    sizes: MessageSizes = MESSAGES

    def __post_init__(self) -> None:
        if self.schedule.is_asynchronous and self.clip_norm is not None:
            raise ArgumentError(
                f"schedule {self.schedule.name!r} updates each stage's weights by itself, so there is no gradient of "
                "the whole model whose norm clip_norm could bound; leave clip_norm out, or use another schedule"
            )
        if self.schedule.is_asynchronous and self.options.precision == "fp16":
            raise ArgumentError(
                f"schedule {self.schedule.name!r} updates each stage's weights by itself, so ranks can't decide "
                "together to skip a step that overflowed, as precision='fp16' has to; use precision='bf16', or another "
                "schedule"
            )
        if self.options.powersgd:
            require_linear_sums(self.options, self.mesh.dp, self.schedule.is_asynchronous, self._tied_over_ranks())

    def _tied_over_ranks(self) -> list[str]:
        """Weights of several stages, on more than one pipeline rank."""
        homes = {
            p.name: {self.schedule.placement[stage] for stage in p.shared_stages}
            for loaded in self.programs
            for p in loaded.program.parameters
        }
        return sorted(name for name, ranks in homes.items() if len(ranks) > 1)

    @cached_property
    def programs(self) -> tuple[Loaded, ...]:
        return tuple(load_program(text, filename=f"stage_{i}.py") for i, text in enumerate(self.texts))

    @cached_property
    def vocabulary_program(self) -> LoadedVocabulary | None:
        return None if self.vocabulary is None else load_vocabulary(self.vocabulary, filename="vocabulary.py")

    @cached_property
    def trainable(self) -> dict[str, Parameter]:
        """Every parameter that is trained on any rank, by name."""
        vocabulary = self.vocabulary_program
        programs: list[Program | VocabularyProgram] = [loaded.program for loaded in self.programs]
        programs += [vocabulary.program] if vocabulary is not None else []
        return specs_of(p for program in programs for p in program.parameters)

    def like(self, **changes: Any) -> Job:
        """With other fields, but the same programs: they are loaded once."""
        other = replace(self, **changes)
        for name in ("programs", "vocabulary_program", "trainable"):
            other.__dict__[name] = getattr(self, name)
        return other

    def of_plan(self, digest: str) -> Job:
        """The same programs, as those of the plan with this ``digest``; what is loaded stays."""
        before = self.programs[0].program.plan_digest
        vocabulary = self.vocabulary.replace(before, digest) if self.vocabulary is not None else None
        other = self.like(texts=tuple(text.replace(before, digest) for text in self.texts), vocabulary=vocabulary)
        other.__dict__["programs"] = tuple(loaded.of_plan(digest) for loaded in self.programs)
        if self.vocabulary_program is not None:
            other.__dict__["vocabulary_program"] = self.vocabulary_program.of_plan(digest)
        return other

    def check_optimizer(self) -> None:
        """Raise ArgumentError where optimizer or scheduler would be wrong on this mesh, before any rank starts."""
        check_optimizer(self.optimizer, self.scheduler, self.trainable, self.mesh, self.options, torch.device("cpu"))

    def axes(self, rank: int, device: torch.device | str) -> Axes:
        """``rank``'s place, with groups; all ranks of the world must ask for theirs. Raises ArgumentError."""
        return Axes.build(self.mesh, rank, device, self.seed, self.options.zero_ranks)

    def stages(self, rank: int) -> list[int]:
        """The stages that ``rank`` holds. Raises ArgumentError where there is no such rank."""
        index = self.mesh.coordinates(rank)["pp"]
        return [stage for stage, home in enumerate(self.schedule.placement) if home == index]

    def modules(self, rank: int) -> list[nn.Module]:
        """The modules of ``rank`` with their weights, outside of a running job: for a look, or ``torch.compile``."""
        return build_modules(self, Axes.alone(self.mesh, rank, "cpu", self.seed)).all

    def gather(self, results: Sequence[RankResult]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Full gradients and parameters by the model's own names, from those of all ranks."""
        return self._gather([r.gradients for r in results]), self._gather([r.parameters for r in results])

    def _gather(self, by_rank: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        full: dict[str, Tensor] = {}
        found: set[str] = set()
        for program, ranks in self._holders():
            for parameter in program.parameters:
                if parameter.trainable and parameter.name in by_rank[ranks[0]] and parameter.name not in found:
                    found.add(parameter.name)
                    full |= unstacked(parameter, self._whole(parameter, by_rank, ranks))
        return full

    def _holders(self) -> Iterator[tuple[Program | VocabularyProgram, list[int]]]:
        """Every program, and the ranks that run it."""
        homes = self.mesh.places("pp")
        for stage, loaded in enumerate(self.programs):
            yield loaded.program, [r for r, home in enumerate(homes) if home == self.schedule.placement[stage]]
        if self.vocabulary_program is not None:
            yield self.vocabulary_program.program, list(range(self.mesh.world))

    def _whole(self, parameter: Parameter, by_rank: Sequence[Mapping[str, Tensor]], ranks: list[int]) -> Tensor:
        return unshard(parameter, [(self.mesh.coordinates(r), by_rank[r][parameter.name]) for r in ranks])


@dataclass
class RankResult:
    """What one rank leaves behind: losses and loads of experts per step, in the part that it stores the last step's
    gradients and parameters, and the buffers that steps change: selection biases of its routers, running averages."""

    losses: list[float] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Modules:
    """What one rank runs, with weights, on its device. A weight of several of its stages is one Parameter."""

    stages: dict[int, nn.Module]
    vocabulary: nn.Module | None

    @property
    def all(self) -> list[nn.Module]:
        return [*self.stages.values(), *([self.vocabulary] if self.vocabulary is not None else [])]


def build_modules(job: Job, axes: Axes) -> Modules:
    """The modules with whole weights, as if ZeRO stored none of them in parts: for a look."""
    make, known = whole(job.source, axes, axes.device), dict[str, Tensor]()

    def fill(module: nn.Module, program: Program | VocabularyProgram) -> nn.Module:
        materialize(module, program, lambda p: known[p.name] if p.name in known else make(p))
        known.update((p.name, module.get_parameter(p.name)) for p in program.parameters if p.shared_stages)
        return module

    stages = {
        stage: fill(job.programs[stage].stage(axes), job.programs[stage].program) for stage in job.stages(axes.rank)
    }
    loaded = job.vocabulary_program
    return Modules(stages, None if loaded is None else fill(loaded.vocabulary(axes), loaded.program))


def build_stores(job: Job, axes: Axes) -> dict[int, Store]:
    """The modules by stage, with what this rank stores of their weights."""
    found: dict[int, Store] = {}
    on_host = masters_on_host(job.options.offload)
    resident = moves_of(job.schedule).gathers != "pass"
    shared: dict[str, Store] = {}
    sent: dict[str, Any] = {"host": on_host, "departures": Departures(), "sizes": job.sizes}
    for stage in job.stages(axes.rank):
        module, program = job.programs[stage].stage(axes), job.programs[stage].program
        others = {p.name: shared[p.name] for p in program.parameters if p.name in shared}
        found[stage] = Store.load(module, program, axes, job.source, resident=resident, others=others, **sent)
        shared |= {p.name: found[stage] for p in program.parameters if p.shared_stages and p.name not in shared}
    if (loaded := job.vocabulary_program) is not None:
        vocabulary = loaded.vocabulary(axes)
        found[VOCABULARY] = Store.load(vocabulary, loaded.program, axes, job.source, **sent)
    return found


def start(job: Job, axes: Axes, *, on_gradients: Callable[[dict[str, Tensor]], None] | None = None) -> Executor:
    """Build this rank's stages and optimizer; all ranks of the world must call it."""
    stores = build_stores(job, axes)
    masters = {name: master for store in stores.values() for name, master in store.masters.items()}
    routers = [router for program in job.programs for router in program.program.routers]
    optimizer = make_optimizer(job.optimizer, job.trainable, masters, axes, job.options, routers)
    if optimizer is not None and job.scheduler is not None:
        follow(optimizer, job.scheduler)
    loaded, stages = job.vocabulary_program, job.stages(axes.rank)
    return Executor(
        {stage: stores[stage].module for stage in stages},
        {stage: job.programs[stage].program for stage in stages},
        job.schedule,
        axes,
        optimizer,
        vocabulary=None if loaded is None else (stores[VOCABULARY].module, loaded.program),
        stores=stores,
        clip_norm=job.clip_norm,
        options=job.options,
        scaler=LossScaler() if job.options.precision == "fp16" else None,
        on_gradients=on_gradients,
        routers=routers,
        sizes=job.sizes,
    )


def run_rank(
    job: Job, rank: int, batch: Mapping[str, Tensor], steps: int, device: torch.device | str = "cpu"
) -> RankResult:
    """Train ``steps`` steps as ``rank`` on ``device``, in an initialised torch.distributed world; the result is on the
    CPU."""
    result = RankResult()

    def keep(gradients: dict[str, Tensor]) -> None:
        result.gradients = {name: to_host(g) for name, g in gradients.items()}  # for the caller; no memory of the rank

    executor = start(job, job.axes(rank, device), on_gradients=keep)
    for _ in range(steps):
        result.losses.append(float(executor.step(batch)))
        result.loads.append(executor.expert_load)
    result.parameters = {n: p.detach().cpu() for n, p in executor.named_parameters().items()}
    result.buffers = {n: bias.cpu() for n, bias in (executor.selection_biases | executor.averages).items()}
    return result


def connect(job: Job, *, timeout_seconds: float = 600.0) -> Axes:
    """This process' place in the job, as torchrun numbers it: NCCL on CUDA, else gloo.

    Raises ArgumentError where torchrun started another number of processes than the mesh has ranks.
    """
    mesh = job.mesh
    rank, world, device = join_world(timeout_seconds=timeout_seconds)
    if world != mesh.world:
        raise ArgumentError(
            f"the job is for {mesh.world} ranks ({mesh}), this is a world of {world}; "
            f"start it with torchrun --nproc-per-node {mesh.world}"
        )
    return job.axes(rank, device)


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
    """Groups end with their last reference, and then wait for their threads. One that is still there when the
    interpreter ends, and frees a tensor then, aborts the process."""
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # executors are in cycles, and hold groups
    time.sleep(0.05)  # those that a script still refers to: their threads finish what they are at


def text_of_rank_zero(text: str) -> str:
    """``text`` of rank 0, on every rank of the world."""
    return str(broadcast_object(text)) if dist.is_initialized() else text
