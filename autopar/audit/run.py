"""Runs the programs of a job without values, one rank of each pipeline index, to see what they do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from autopar.audit.matrices import Matrices
from autopar.audit.record import (
    ENDED,
    LOADS,
    LOSS,
    MADE,
    PACKS,
    PUT_OFF,
    SENT,
    TOTALS,
    UNPACKS,
    Calls,
    Kernels,
    Log,
    Moved,
    Phase,
    Where,
    watched,
)
from autopar.options import masters_on_host
from autopar.runtime.axes import Axes, Axis
from autopar.runtime.executor import Executor
from autopar.runtime.grads import Reducer
from autopar.runtime.job import Job, start
from autopar.runtime.program import Program, VocabularyProgram
from autopar.runtime.store import Unit
from autopar.runtime.vocabulary import VOCABULARY
from autopar.schedules.actions import Action, Schedule
from autopar.schedules.backwards import telling
from autopar.shapes import Shapes
from autopar.simulate.alone import run_alone
from autopar.simulate.kernels import kernels_of
from autopar.simulate.measure import without_values
from autopar.simulate.memory import ShapeTracker


@dataclass(frozen=True)
class Seen:
    """What one rank did in a step with the first and the last microbatch (and one that a stage offloads, where these
    aren't; and those that stand for others where backwards are of two kinds): by action, as its text. ``updated`` is
    how many elements of parameters its optimizer updates, those of so many ``masters``; ``gradients`` how many of
    gradients were moved. ``on_host``: that is where masters lie; ``returned`` are bytes of their gradients, by the
    stage that sums them. ``places``: at how many units of a stage, by its number, its first forward waits for weights.
    ``matrices`` are those of a split vocabulary.
    """

    phases: Mapping[str, Phase]
    updated: int
    masters: int
    gradients: Mapping[Where, Counter[Moved]]
    on_host: bool
    returned: Mapping[int, int]
    places: Mapping[int, int]
    matrices: Matrices


def see(job: Job, batch: Mapping[str, Tensor], device: str) -> list[Seen]:
    """Of each pipeline index, with the kernels of a ``device`` of this kind ("cpu" or "cuda"); of ``batch`` only shapes
    and dtypes count (the tensors may be on the meta device).

    It is the rank with the last part of a sequence, which has the most to do where attention is causal.
    """
    last = job.mesh.cp - 1
    fake, shapes = without_values(job), Shapes()
    found = []
    for index in range(job.mesh.pp):
        rank = job.mesh.rank(pp=index, cp=last)
        ends = telling(job.schedule, index)
        seen = _see(fake, batch, rank, ends, device, shapes)
        copied = {action.microbatch for action in first_offloads(job.schedule, index).values()}
        if copied - ends:  # stages that keep what they have of the first and the last microbatch on the device
            phases = {**_see(fake, batch, rank, copied - ends, device, shapes).phases, **seen.phases}
            seen = replace(seen, phases=phases)
        found.append(seen)
    return found


def first_offloads(schedule: Schedule, rank: int) -> dict[int, Action]:
    """By stage, the first of its actions that sends what it keeps to the host."""
    return {a.stage: a for a in reversed(schedule.lists[rank]) if a.kind == "OFFLOAD"}


def _see(
    job: Job, batch: Mapping[str, Tensor], rank: int, microbatches: Collection[int], device: str, shapes: Shapes
) -> Seen:
    log = Log([f"stage_{number}.py" for number in range(len(job.texts))] + ["vocabulary.py"])

    def program() -> Seen:
        axes = job.axes(rank, "cpu")
        world = axes.world
        # Ranks tell each other which groups they want, and there is nobody to tell; how many rows go to which expert
        # is not known, so the fullest rank gets what was reckoned.
        axes = replace(axes, world=Axis.of("world", [rank], rank, None), imbalance=1.0)
        given = {path: shapes.empty(tensor.shape, tensor.dtype) for path, tensor in batch.items()}
        with ShapeTracker(shapes):
            executor = start(replace(job), axes)  # with programs of its own, which are watched
            executor.axes = replace(axes, world=world)
            updated = sum(parameter.numel() for parameter in executor.masters.values())
            on_host = masters_on_host(executor.options.offload)
            returned = {stage: _returned_bytes(reducer) for stage, reducer in executor.reducers.items() if on_host}
            places = {stage: sum(map(_is_sent, units)) for stage, units in _sequences(executor)}
            _watch(executor, log, microbatches, on_host=on_host)
            with kernels_of(device), Kernels(log), Calls(log):
                executor.step(given)
        return Seen(
            log.phases, updated, len(executor.masters), dict(log.gradients), on_host, returned, places, log.matrices
        )

    return run_alone(program, rank, job.mesh.world, on_call=log.sent)


def _returned_bytes(reducer: Reducer) -> int:
    return sum(reducer.masters[name].nbytes for name in reducer.parameters)


def _watch(executor: Executor, log: Log, microbatches: Collection[int], *, on_host: bool) -> None:
    """Only some microbatches; no optimizer."""
    executor.actions = tuple(a for a in executor.actions if a.microbatch in (-1, *microbatches))
    executor.optimizer = None
    executor.on_action = log.begin
    for name, phase in (("_totals", TOTALS), ("_count_loads", LOADS), ("_loss", LOSS)):
        setattr(executor, name, _within(phase, getattr(executor, name), log))
    for stage, module in executor.stages.items():
        module.register_forward_hook(partial(_hand_on, log, executor.programs[stage]))
    for stage, reducer in executor.reducers.items():
        _watch_sums(reducer, stage, log)
    known: set[Unit] = set()
    for stage, store in executor.stores.items():
        action = Action("GATHER_V") if stage == VOCABULARY else Action("GATHER", stage=stage)
        for unit in (*store.roots, *(unit for unit, _ in store.sequence)):
            if unit not in known:  # a root of several stages once
                _watch_copies(unit, log, on_host=on_host, phase=str(action) if store.resident else "")
            known.add(unit)
    if executor.vocabulary is not None:
        _watch_tokens(*executor.vocabulary, executor.axes, log)
    modules = [*executor.stages.values(), *([executor.vocabulary[0]] if executor.vocabulary else [])]
    for module in modules:
        namespace = type(module).__init__.__globals__
        namespace.update(watched(namespace, log))


def _hand_on(log: Log, program: Program, _: nn.Module, given: object, made: Tensor | tuple[Tensor, ...]) -> None:
    """A gradient comes back of what a stage sends, but for what later stages only look at."""
    tensors = made if isinstance(made, tuple) else (made,)
    for tensor, sent in zip(tensors, program.sends, strict=False):  # nothing is sent of a loss
        if sent.needs_grad:
            log.used(tensor)


def _watch_tokens(module: Any, program: VocabularyProgram, axes: Axes, log: Log) -> None:
    """What enters the head has a row per token."""
    table, enter = module.get_parameter(program.weight), module.enter
    first = (axes["pp"].index * axes["tp"].size + axes["tp"].index) * program.rows

    def entering(hidden: Tensor) -> Tensor:
        entered: Tensor = enter(hidden)
        log.matrices = Matrices.of(program, table, first, len(entered))
        return entered

    module.enter = entering


def _within(phase: str, method: Callable[..., Any], log: Log) -> Callable[..., Any]:
    def called(*args: Any) -> Any:
        with log.within(phase):
            return method(*args)

    return called


def _watch_sums(reducer: Reducer, stage: int, log: Log) -> None:
    """Autograd adds to a gradient, then the reducer takes it, and sends it when it is complete."""
    sent = {parameter for bucket in reducer.buckets if bucket.per_pass for parameter in bucket.parameters}
    for parameter in reducer.parameters.values():
        node = get_gradient_edge(parameter).node
        log.keep(node)
        node.register_prehook(partial(_begins, log, stage, parameter in sent))
        node.register_hook(lambda *_: log.summed())
    _watch_method(reducer, "accumulate", stage, PUT_OFF, log, sent)
    for bucket in reducer.buckets:
        _watch_method(bucket, "start", stage, SENT if bucket.per_pass else ENDED, log)
        for name in ("settle", "reduce"):
            _watch_method(bucket, name, stage, ENDED, log)


def _begins(log: Log, stage: int, in_pass: bool, made: Sequence[Tensor | None]) -> None:
    log.summing(stage, MADE, len([x for x in made if x is not None]), in_pass=in_pass)


def _sequences(executor: Executor) -> Iterator[tuple[int, list[Unit]]]:
    yield from ((stage, [unit for unit, _ in store.sequence]) for stage, store in executor.stores.items())


def _is_sent(unit: Unit) -> bool:
    return any(copy.shard.size > 1 for copy in unit.copies)


def _watch_copies(unit: Unit, log: Log, *, on_host: bool, phase: str) -> None:
    """Copies are made of masters when the unit starts. On a CPU, which is the host as well, it casts those that lie
    there as if they didn't. What is made once a step is of its GATHER, the ``phase``, whenever that happens."""
    start, wait = unit.start, unit.wait

    def starting() -> None:
        with log.within(phase) if phase else nullcontext(), log.packing(PACKS):
            log.copy(len(unit.copies))
            if not on_host:
                with log.casting():
                    return start()
            for copy in unit.copies:
                log.fetch(copy.master, copy.whole)
            return start()

    def waiting() -> None:
        with log.within(phase) if phase else nullcontext(), log.packing(UNPACKS):
            wait()

    unit.start, unit.wait = starting, waiting  # type: ignore[method-assign]


def _watch_method(
    item: object, name: str, stage: int, place: str, log: Log, sent: Collection[Tensor] = frozenset()
) -> None:
    """``sent``: of these first arguments, gradients are sent after each backward."""
    method = getattr(item, name)

    def called(*args: Any, **kwargs: Any) -> None:
        log.summing(stage, place, int(place == PUT_OFF), in_pass=place == SENT or bool(args and args[0] in sent))
        try:
            method(*args, **kwargs)
        finally:
            log.summed()

    setattr(item, name, called)
