"""Measured memory of a job's ranks over one training step: how much when, and for what.

Either all ranks run, simulated; or one of each kind runs alone on shapes (:mod:`autopar.shapes`), at the model's full
size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from autopar.errors import ArgumentError, PlanError
from autopar.options import masters_on_host
from autopar.runtime.axes import Axes, Axis
from autopar.runtime.executor import Executor
from autopar.runtime.holdings import holdings
from autopar.runtime.job import Job, start
from autopar.runtime.modules import dtype_of
from autopar.runtime.program import Parameter
from autopar.runtime.shards import Positions, stored_shape
from autopar.schedules import Action
from autopar.schedules.flow import COMPUTE
from autopar.shapes import Shapes
from autopar.simulate.alone import run_alone
from autopar.simulate.kernels import kernels_of
from autopar.simulate.memory import MemoryTracker, ShapeTracker
from autopar.simulate.run import run
from autopar.simulate.torch_private import without_function_modes
from autopar.storages import ALLOCATED, BUFFERS, Phase

_KEEPS: Final = {
    **dict.fromkeys(("F", "S", "U", "E", "I", "FETCH"), "saved"),
    **dict.fromkeys(("B", "W", "T", "G"), "gradients"),
}
"""What an action leaves behind that nobody holds from step to step; the rest is on its way from or to another rank."""

BEGIN: Final = "begin"
"""The label of what a step does before its first action."""


@dataclass(frozen=True)
class RankMemory:
    """One rank's bytes over one training step, when optimizer state is there, action by action.

    ``host_kinds`` are what it holds on the host, ``host_peak_bytes`` the most of it at once.
    """

    phases: tuple[Phase, ...]
    host_kinds: Mapping[str, int]
    host_peak_bytes: int

    @property
    def peak(self) -> Phase:
        """The action in which the rank has the most device bytes, the first of equals."""
        return max(self.phases, key=lambda phase: phase.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        return self.peak.peak_bytes


def measured_memory(job: Job, batch: Mapping[str, Tensor]) -> list[RankMemory]:
    """Of every rank, simulated: the second of two steps on ``batch``."""

    def program(rank: int) -> RankMemory:
        with MemoryTracker() as tracker:
            return measure(tracker, job, job.axes(rank, "cpu"), batch)

    return run(program, job.mesh.world, seed=job.seed, track_memory=False).results


def fake_memory(job: Job, batch: Mapping[str, Tensor], device: str = "cpu") -> list[RankMemory]:
    """Of every rank, from one of each pipeline index, alone and on shapes: the others hold the same.

    No arithmetic, no memory: whole models at full size, with the kernels of such a ``device``.
    """
    return of_each_index(job, lambda rank: on_shapes(job, batch, rank, _measure_alone, device=device))


def of_each_index(job: Job, memory_of: Callable[[int], RankMemory]) -> list[RankMemory]:
    """Of every rank, from that of the first rank of each pipeline index."""
    kinds = [memory_of(job.mesh.rank(pp=index)) for index in range(job.mesh.pp)]
    return [kinds[index] for index in job.mesh.places("pp")]


Measure = Callable[[ShapeTracker, Job, Axes, Mapping[str, Tensor]], RankMemory]


def on_shapes(
    job: Job,
    batch: Mapping[str, Tensor],
    rank: int,
    measured: Measure,
    shapes: Shapes | None = None,
    device: str = "cpu",
) -> RankMemory:
    """What ``measured`` says of ``rank``, alone, on weights and a ``batch`` without values, with the kernels of such a
    ``device``. ``shapes`` may know what operations make, from ranks before."""
    fake = without_values(job)

    def program() -> RankMemory:
        axes = Axes.build(job.mesh, rank, "cpu", job.seed, job.options.zero_ranks, own=True)
        # Ranks tell each other which groups they want. There is nobody to tell.
        # And how many rows go to which expert is not known: the fullest rank gets what was reckoned.
        axes = replace(axes, world=Axis.of("world", [rank], rank, None), imbalance=1.0)
        answers = shapes or Shapes()
        given: dict[str, Tensor] = {path: answers.empty(t.shape, t.dtype) for path, t in batch.items()}
        with ShapeTracker(answers) as tracker, kernels_of(device):
            return measured(tracker, fake, axes, given)

    return run_alone(program, rank, job.mesh.world)


def without_values(job: Job) -> Job:
    """``job``, whose weights have shapes alone. Whether a step overflows depends on values: none does."""
    if isinstance(job.source, _Shapes):
        return job
    options = job.options
    if options.precision == "fp16":
        options = options.model_copy(update={"precision": "bf16"})
    return job.like(source=_Shapes(), options=options)


class _Shapes:
    """A source of weights without values."""

    def local(self, parameter: Parameter, axes: Positions) -> Tensor:
        return torch.empty(stored_shape(parameter), dtype=dtype_of(parameter.master or parameter.dtype))

    def save(self, directory: Path) -> tuple[str, str]:
        raise PlanError("weights without values can't be saved; write the job with its own source")


def device_memory(executor: Executor, batch: Mapping[str, Tensor]) -> RankMemory:
    """Of this rank on its GPU: two steps, of the second what torch's allocator says after each action.

    It knows no kinds: all is ``allocated``. Raises ArgumentError where the rank has no GPU.
    """
    device = executor.axes.device
    if device.type != "cuda":
        raise ArgumentError(f"memory of a device is measured on a GPU, and this rank runs on {device}; simulate it")
    executor.step(batch)
    phases: list[Phase] = []
    label, start = BEGIN, torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)

    def note(action: Action | None) -> None:
        nonlocal label, start
        peak, end = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
        phases.append(Phase(label, {ALLOCATED: start}, {ALLOCATED: peak}, {ALLOCATED: end}))
        label, start = str(action), end
        torch.cuda.reset_peak_memory_stats(device)

    executor.on_action = note
    executor.step(batch)
    executor.on_action = None
    note(None)
    return RankMemory(tuple(phases), {}, 0)


def measure(tracker: MemoryTracker, job: Job, axes: Axes, batch: Mapping[str, Tensor]) -> RankMemory:
    """Run two steps of this rank under ``tracker``, which counts from the start; what the second one takes."""
    executor = begin(tracker, job, axes)
    executor.step(batch)
    return record(tracker, executor, batch)


def _measure_alone(tracker: MemoryTracker, job: Job, axes: Axes, batch: Mapping[str, Tensor]) -> RankMemory:
    executor = begin(tracker, job, axes)
    warm_up(executor, batch)
    return record(tracker, executor, batch)


def warm_up(executor: Executor, batch: Mapping[str, Tensor]) -> None:
    """One step, so that there is optimizer state: of one microbatch, where that is as good, and the rank alone. Where
    nothing else stays of a step, gradients come from nowhere instead."""
    actions, options = executor.actions, executor.options
    if not is_asynchronous(actions):
        alone = not (masters_on_host(options.offload) or options.powersgd)
        executor.actions = tuple(a for a in actions if (a.kind == "STEP" if alone else a.microbatch <= 0))
        for master in executor.masters.values() if alone else ():
            master.grad = torch.empty_like(master)
    computes = any(action.kind in COMPUTE for action in executor.actions)
    with nullcontext() if computes else without_function_modes():
        executor.step(batch)
    executor.actions = actions


def is_asynchronous(actions: Iterable[Action]) -> bool:
    """Whether weights change within a step: how many versions there are depends on all actions before."""
    return any(action.kind == "UPDATE" for action in actions)


def begin(tracker: MemoryTracker, job: Job, axes: Axes) -> Executor:
    """The rank's executor, all of it made under ``tracker``."""
    tracker.mark("start", "gradients")  # beside parameters, the buckets of gradients are made here
    with without_function_modes():
        return start(job, axes)


def record(
    tracker: MemoryTracker,
    executor: Executor,
    batch: Mapping[str, Tensor],
    prepare: Callable[[Action], None] | None = None,
) -> RankMemory:
    """One more step: what it takes, action by action, each after ``prepare``, which counts with none."""
    _own(tracker, executor)
    tracker.forget()

    apart = ExitStack()

    def note(action: Action) -> None:
        apart.close()
        if action.kind == "STEP":
            _own(tracker, executor)  # gradients are about to go
        if prepare is not None:
            prepare(action)
        if action.kind not in COMPUTE:  # which run the model's code, whose kernels a mode chooses
            apart.enter_context(without_function_modes())
        tracker.mark(str(action), _KEEPS.get(action.kind, BUFFERS))

    executor.on_action = note
    tracker.mark(BEGIN)
    with apart:
        executor.step(batch)
    tracker.mark("")
    executor.on_action = None
    return RankMemory(tuple(tracker.phases), tracker.host_kinds(), tracker.host_peak_bytes)


def _own(tracker: MemoryTracker, executor: Executor) -> None:
    for kind, tensors in holdings(executor).items():
        tracker.own(kind, tensors)
