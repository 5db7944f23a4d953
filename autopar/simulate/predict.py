"""Predicted memory of a job's ranks: each distinct pass once on shapes alone, composed along the action lists.

An action of one kind in one stage takes and leaves the same bytes for every microbatch but a few: gradients are new in
the first, may become wider when the second is added, and begin to be summed over ranks with the last. So a rank's step
with four microbatches (more where a stage's backward is split for some of them only) says what each of its actions
takes, and the step with all of them is their sum, in the order of its list: what the schedule keeps in flight is not
run, but added up. Pipeline ranks whose code is the same but for names (:mod:`autopar.simulate.likeness`) are run once.
Where weights are gathered for a pass, or activations are away meanwhile, that depends on an action's neighbours too,
and the whole list is run.

Peers answer at once: a rank that waits for one to take a message holds that message longer than is predicted
(:func:`waiting_bytes`).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from autopar.runtime.axes import Axes
from autopar.runtime.job import Job
from autopar.runtime.modules import dtype_of
from autopar.schedules import Action, Schedule
from autopar.schedules.actions import ABSENT
from autopar.shapes import Shapes
from autopar.simulate.likeness import likeness
from autopar.simulate.measure import (
    BEGIN,
    RankMemory,
    begin,
    by_neighbours,
    measure,
    of_each_index,
    on_fake_tensors,
    on_shapes,
    record,
    warm_up,
    without_values,
)
from autopar.simulate.memory import MemoryTracker
from autopar.storages import Phase

_Key = tuple[str, int, int]
"""Of an action: its kind, the place of its stage among those of its rank, and the microbatch that it is like."""


@dataclass(frozen=True)
class _Tried:
    """What a rank that was run holds, and what each of its actions took."""

    memory: RankMemory
    phases: Mapping[_Key, Phase]

    def composed(self, actions: Mapping[Action, _Key]) -> RankMemory:
        """Along the list of a rank whose actions took as much."""
        begin = next(phase for phase in self.memory.phases if phase.label == BEGIN)
        steps = [(BEGIN, begin), *((str(action), self.phases[key]) for action, key in actions.items())]
        return replace(self.memory, phases=tuple(_composed(steps)))


@dataclass(frozen=True)
class Known:
    """What was run before, for jobs that are like others but in part: what operations make, and what ranks took, by
    all that it depends on."""

    shapes: Shapes = field(default_factory=Shapes)
    ranks: dict[Hashable, list[_Tried]] = field(default_factory=lambda: defaultdict(list))


def predicted_memory(job: Job, batch: Mapping[str, Tensor], known: Known | None = None) -> list[RankMemory]:
    """Of every rank; of ``batch`` only shapes and dtypes count (the tensors may be on the meta device)."""
    before, job = known or Known(), without_values(job)
    common = _common(job, batch)

    def predicted(rank: int) -> RankMemory:
        actions = job.schedule.lists[job.mesh.coordinate(rank, "pp")]
        if by_neighbours(actions):
            return on_fake_tensors(job, batch, rank, measure)
        stages = job.stages(rank)
        keys = {action: _key(action, stages, job.schedule.microbatches) for action in actions}
        known = before.ranks[common, likeness(job, rank)]
        if not any(one.phases.keys() >= set(keys.values()) for one in known):
            memory = on_shapes(job, batch, rank, _try, before.shapes)
            by_label = {phase.label: phase for phase in memory.phases}
            run = [(key, by_label[str(action)]) for action, key in keys.items() if str(action) in by_label]
            known.insert(0, _Tried(memory, dict(reversed(run))))  # of those alike, the first
        found = next(one for one in known if one.phases.keys() >= set(keys.values()))
        return found.composed(keys)

    return of_each_index(job, predicted)


def _common(job: Job, batch: Mapping[str, Tensor]) -> Hashable:
    """What the memory of all ranks depends on beside their code."""
    given = tuple((path, tuple(tensor.shape), tensor.dtype) for path, tensor in batch.items())
    schedule = job.schedule
    order = schedule.name, schedule.placement, schedule.microbatches, schedule.head
    objects = _Object(job.optimizer), _Object(job.scheduler)
    return given, order, job.mesh, job.options.model_dump_json(), objects, job.clip_norm


@dataclass(frozen=True, eq=False)
class _Object:
    """Equal to itself alone, whatever it holds."""

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _try(tracker: MemoryTracker, job: Job, axes: Axes, batch: Mapping[str, Tensor]) -> RankMemory:
    """A step of this rank with the microbatches that the others are like."""
    alike = stand_ins(job.schedule.lists[axes["pp"].index], job.schedule.microbatches)
    tried = {action.microbatch for action in alike.values()}
    executor = begin(tracker, job.like(schedule=_only(job.schedule, tried)), axes)
    warm_up(executor, batch)
    return record(tracker, executor, batch)


def _key(action: Action, stages: Sequence[int], microbatches: int) -> _Key:
    place = stages.index(action.stage) if action.stage in stages else ABSENT
    last = action.microbatch == microbatches - 1
    return action.kind, place, action.microbatch if last else min(action.microbatch, 2)


def waiting_bytes(job: Job, rank: int) -> int:
    """The largest message that ``rank`` sends, which it may hold beside the next one while its peer is busy."""
    programs = [job.programs[stage].program for stage in job.stages(rank)]
    messages = [(program.sends, program.stage + 1) for program in programs if not program.is_last]
    messages += [(program.receives, program.stage - 1) for program in programs if program.stage]
    sizes = [
        sum(math.prod(tensor.shape) * dtype_of(tensor.dtype).itemsize for tensor in tensors)
        for tensors, stage in messages
        if stage not in job.stages(rank)
    ]
    return max(sizes, default=0)


def stand_ins(actions: Iterable[Action], microbatches: int) -> dict[Action, Action]:
    """Of each action, in order, the one that takes and leaves as much: those of microbatches 0, 1 and the last are
    their own, others have the first of their kind in their stage."""
    first: dict[tuple[str, int], Action] = {}
    between = [action for action in actions if 2 <= action.microbatch < microbatches - 1]
    for action in sorted(between, key=lambda action: action.microbatch):
        first.setdefault((action.kind, action.stage), action)
    others = frozenset(between)
    return {action: first[action.kind, action.stage] if action in others else action for action in actions}


def _only(schedule: Schedule, microbatches: Collection[int]) -> Schedule:
    """``schedule`` without what it does of other microbatches."""
    lists = tuple(tuple(a for a in row if a.microbatch in (ABSENT, *microbatches)) for row in schedule.lists)
    return replace(schedule, lists=lists)


def _composed(steps: Iterable[tuple[str, Phase]]) -> Iterator[Phase]:
    """A phase for each label, changed from the one before by what another phase changes."""
    now: Counter[str] | None = None
    for label, phase in steps:
        now = Counter(phase.start) if now is None else now
        end = _moved(now, phase.start, phase.end)
        yield Phase(label, now, _moved(now, phase.start, phase.peak), end)
        now = end


def _moved(now: Counter[str], before: Mapping[str, int], after: Mapping[str, int]) -> Counter[str]:
    """``now``, changed by what changed from ``before`` to ``after``."""
    moved = Counter(now)
    for kind in before.keys() | after.keys():
        moved[kind] += after.get(kind, 0) - before.get(kind, 0)
    return moved
