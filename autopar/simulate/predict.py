"""Predicted memory of a job's ranks: each distinct pass once on fake tensors, composed along the action lists.

An action of one kind in one stage takes and leaves the same bytes for every microbatch but a few: gradients are new in
the first, may become wider when the second is added, and begin to be summed over ranks with the last. So a rank's step
with four microbatches says what each of its actions takes, and the step with all of them is their sum, in the order of
its list: what the schedule keeps in flight is not run, but added up. Where weights are gathered for a pass, or
activations are away meanwhile, that depends on an action's neighbours too, and the whole list is run.

Peers answer at once: a rank that waits for one to take a message holds that message longer than is predicted
(:func:`waiting_bytes`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from autopar.runtime.axes import Axes
from autopar.runtime.job import Job
from autopar.runtime.modules import dtype_of
from autopar.schedules import Action, Schedule
from autopar.schedules.actions import ABSENT
from autopar.simulate.measure import (
    BEGIN,
    RankMemory,
    begin,
    by_neighbours,
    measure,
    of_each_index,
    on_fake_tensors,
    record,
    warm_up,
)
from autopar.simulate.memory import MemoryTracker
from autopar.storages import Phase


def predicted_memory(job: Job, batch: Mapping[str, Tensor]) -> list[RankMemory]:
    """Of every rank; of ``batch`` only shapes and dtypes count (the tensors may be on the meta device)."""
    return of_each_index(job, lambda rank: on_fake_tensors(job, batch, rank, _predict))


def _predict(tracker: MemoryTracker, job: Job, axes: Axes, batch: Mapping[str, Tensor]) -> RankMemory:
    actions = job.schedule.lists[axes["pp"].index]
    if by_neighbours(actions):
        return measure(tracker, job, axes, batch)
    tried = {like(number, job.schedule.microbatches) for number in range(job.schedule.microbatches)}
    executor = begin(tracker, replace(job, schedule=_only(job.schedule, tried)), axes)
    warm_up(executor, batch)
    memory = record(tracker, executor, batch)
    return replace(memory, phases=tuple(_composed(memory.phases, actions, job.schedule.microbatches)))


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


def like(microbatch: int, microbatches: int) -> int:
    """The microbatch that stands for ``microbatch``: 0, 1 and the last for themselves, 2 for those between."""
    return microbatch if microbatch == microbatches - 1 else min(microbatch, 2)


def _only(schedule: Schedule, microbatches: Collection[int]) -> Schedule:
    """``schedule`` without what it does of other microbatches."""
    lists = tuple(tuple(a for a in row if a.microbatch in (ABSENT, *microbatches)) for row in schedule.lists)
    return replace(schedule, lists=lists)


def _composed(tried: Sequence[Phase], actions: Sequence[Action], microbatches: int) -> list[Phase]:
    by_label = {phase.label: phase for phase in tried}
    alike = [(str(a), str(replace(a, microbatch=like(a.microbatch, microbatches)))) for a in actions]
    found: list[Phase] = []
    now = Counter(by_label[BEGIN].start)
    for label, stand_in in [(BEGIN, BEGIN), *alike]:
        phase = by_label[stand_in]
        end = _moved(now, phase.start, phase.end)
        found.append(Phase(label, now, _moved(now, phase.start, phase.peak), end))
        now = end
    return found


def _moved(now: Counter[str], before: Mapping[str, int], after: Mapping[str, int]) -> Counter[str]:
    """``now``, changed by what changed from ``before`` to ``after``."""
    moved = Counter(now)
    for kind in before.keys() | after.keys():
        moved[kind] += after.get(kind, 0) - before.get(kind, 0)
    return moved
