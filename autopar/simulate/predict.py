"""Predicted memory of a job's ranks: each distinct pass once on shapes alone, composed along the action lists.

An action of one kind in one stage takes and leaves the same bytes for every microbatch but a few
(:mod:`autopar.simulate.alike`). So a rank's step with four microbatches (more where a stage's backward is split for
some of them only, weights are gathered for passes, or stages wait for each other's gradients) says what each of its
actions takes, and the step with all of them is their sum, in the order of its list: what the schedule keeps in flight
is not run, but added up. Pipeline ranks whose code is the same but for names (:mod:`autopar.simulate.likeness`) are
run once; of others, stages whose code was run before, on this rank or another, have two microbatches, for the
gradients that they leave. Where weights change within a step, the whole list is run.

Peers answer at once: a rank that waits for them to take its messages holds these longer than is predicted
(:func:`waiting_bytes`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor

from autopar.runtime.axes import Axes
from autopar.runtime.executor import Executor
from autopar.runtime.job import Job
from autopar.runtime.modules import dtype_of
from autopar.runtime.program import Tensor as Wire
from autopar.schedules import Action
from autopar.schedules.weight_moves import followers, moves_of
from autopar.shapes import Shapes
from autopar.simulate.alike import (
    STREAMED,
    Key,
    Rest,
    after,
    again,
    enough,
    keys,
    left,
    parts_before,
    resting,
    senders,
    stand_ins,
)
from autopar.simulate.likeness import likeness
from autopar.simulate.measure import (
    BEGIN,
    RankMemory,
    begin,
    is_asynchronous,
    measure,
    of_each_index,
    on_shapes,
    record,
    warm_up,
    without_values,
)
from autopar.simulate.memory import MemoryTracker, ShapeTracker
from autopar.simulate.replay import Tapes, UnlikeError, replay_layers
from autopar.storages import Phase


@dataclass(frozen=True)
class Known:
    """What was run before, for jobs that are like others but in part: what operations make, and by all that it depends
    on, what ranks hold (``ranks``), what actions of their own took (``own``) and those of their stages (``phases``), by
    names of what is alike."""

    shapes: Shapes = field(default_factory=Shapes)
    ranks: dict[int, RankMemory] = field(default_factory=dict)
    own: dict[int, dict[Key, Phase]] = field(default_factory=lambda: defaultdict(dict))
    phases: dict[Key, Phase] = field(default_factory=dict)
    tapes: dict[Hashable, Tapes] = field(default_factory=lambda: defaultdict(Tapes))
    _names: dict[Hashable, int] = field(default_factory=dict)

    def name(self, *alike: Hashable) -> int:
        """The same number for what is ``alike``."""
        return self._names.setdefault(alike, len(self._names))

    def took(self, rank: int, key: Key) -> Phase | None:
        """What an action of ``rank`` (a name) with this key took; None where that isn't known."""
        return (self.own[rank] if key.is_of_rank else self.phases).get(key)

    def composed(self, rank: int, actions: Mapping[Action, Key]) -> RankMemory:
        """Of such a ``rank``, along its list."""
        memory = self.ranks[rank]
        begin = next(phase for phase in memory.phases if phase.label == BEGIN)
        found = {key: self.took(rank, key) for key in dict.fromkeys(actions.values())}
        changes = {key: _Change.of(phase) for key, phase in found.items() if phase is not None}
        steps = [(BEGIN, _Change.of(begin)), *((str(action), changes[key]) for action, key in actions.items())]
        phases = tuple(_composed(begin, steps))
        return replace(memory, phases=phases, host_peak_bytes=max(phase.host_bytes[1] for phase in phases))


def predicted_memory(
    job: Job, batch: Mapping[str, Tensor], known: Known | None = None, device: str = "cpu"
) -> list[RankMemory]:
    """Of every rank, on a ``device`` of this kind ("cpu" or "cuda"); of ``batch`` only shapes and dtypes count (the
    tensors may be on the meta device)."""
    return of_each_index(job, predictor(job, batch, known, device))


def predictor(
    job: Job, batch: Mapping[str, Tensor], known: Known | None = None, device: str = "cpu"
) -> Callable[[int], RankMemory]:
    """:func:`predicted_memory` of those ranks that it is asked for."""
    before, job = known or Known(), without_values(job)
    common = before.name(device, _common(job, batch))
    tapes = before.tapes[device, job.mesh, job.options.model_dump_json()]

    def tried(rank: int, actions: Sequence[Action]) -> RankMemory:
        run = partial(_try, actions=actions)
        try:
            return on_shapes(job, batch, rank, partial(run, tapes=tapes), before.shapes, device)
        except UnlikeError:
            return on_shapes(job, batch, rank, run, before.shapes, device)

    def predicted(rank: int) -> RankMemory:
        actions = job.schedule.lists[job.mesh.coordinate(rank, "pp")]
        if is_asynchronous(actions):
            return on_shapes(job, batch, rank, measure, before.shapes, device)
        texts = likeness(job, rank)
        alike = before.name(common, tuple(texts.values()))
        names = {stage: before.name(common, text) for stage, text in texts.items()}
        sending = _sending(job, rank)
        wanted = keys(actions, names, job.schedule.microbatches, sending)
        new = [action for key, action in stand_ins(wanted).items() if before.took(alike, key) is None]
        if new:
            # What is done once, or with the first microbatch, always runs.
            asked = [action for action in new if wanted[action].microbatch > 0 or not wanted[action].is_of_rank]
            also = senders(actions, set(new), sending)
            also |= {(o.stage, o.microbatch) for action, o in parts_before(actions) if o is not None and action in new}
            ran, told = enough(actions, asked, also)
            memory = tried(rank, ran)
            before.ranks.setdefault(alike, memory)
            by_label = {phase.label: phase for phase in memory.phases}
            sent, repeats = after(ran, names, sending), again(ran)  # others than among all actions
            for action in ran:
                key = wanted[action]._replace(after=sent.get(action, ()), again=action in repeats)
                if key.is_of_rank:
                    before.own[alike].setdefault(key, by_label[str(action)])
                elif action.stage in told:
                    before.phases.setdefault(key, by_label[str(action)])
        return before.composed(alike, wanted)

    return predicted


def _sending(job: Job, rank: int) -> set[int]:
    """The stages of ``rank`` that send gradients in every backward, if it has several."""
    stages = job.stages(rank)
    if len(stages) == 1 or not moves_of(job.schedule).scatters:
        return set()
    of_stages = {stage: job.programs[stage].program.parameters for stage in stages}
    return {stage for stage, its in of_stages.items() if any(p.trainable and p.zero > 1 for p in its)}


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


def _try(
    tracker: ShapeTracker,
    job: Job,
    axes: Axes,
    batch: Mapping[str, Tensor],
    actions: Sequence[Action],
    tapes: Tapes | None = None,
) -> RankMemory:
    """A step of this rank, of which it does these ``actions``; equal layers run once, on ``tapes``."""
    executor = begin(tracker, job, axes)
    executor.actions = tuple(actions)
    if tapes is not None:
        replay_layers(executor, job, tapes, tracker)
    warm_up(executor, batch)
    for stream in executor.streams.values():
        stream.rest({})
    return record(tracker, executor, batch, _Resting(tracker, executor, job) if executor.streams else None)


class _Resting:
    """Between the actions that are run, have gathered what is in the rank's whole list, which others are left out of.

    ``executor`` was made for all of them: passes leave what they leave there."""

    def __init__(self, tracker: MemoryTracker, executor: Executor, job: Job) -> None:
        self._tracker, self._streams = tracker, executor.streams
        actions = job.schedule.lists[executor.axes["pp"].index]
        self._following, self._wanted = followers(actions), dict(resting(actions))
        self._now: Rest = frozenset()

    def __call__(self, action: Action) -> None:
        if action.kind not in STREAMED:
            return
        wanted = self._wanted[action]
        if wanted != self._now:
            self._tracker.mark("")
            for stage, stream in self._streams.items():
                stream.rest({item.pass_kind: item.there for item in sorted(wanted) if item.stage == stage})
        self._now = left(wanted, action, self._following)


def waiting_bytes(job: Job, rank: int) -> int:
    """What ``rank`` sends and may hold until its peers take it: the largest message to a stage behind, and to one
    ahead."""
    here = job.stages(rank)
    programs = [job.programs[stage].program for stage in here]
    on = [_bytes(program.sends) for program in programs if not program.is_last and program.stage + 1 not in here]
    back = [_bytes(program.receives) for program in programs if program.stage and program.stage - 1 not in here]
    return max(on, default=0) + max(back, default=0)


def _bytes(message: Sequence[Wire]) -> int:
    return sum(math.prod(tensor.shape) * dtype_of(tensor.dtype).itemsize for tensor in message)


@dataclass(frozen=True)
class _Change:
    """By how much a phase changes what is there until its peak, and until its end: of each kind, and on the host."""

    peak: Mapping[str, int]
    end: Mapping[str, int]
    host_bytes: tuple[int, ...]

    @classmethod
    def of(cls, phase: Phase) -> _Change:
        peak, end = _difference(phase.start, phase.peak), _difference(phase.start, phase.end)
        return cls(peak, end, tuple(bytes_ - phase.host_bytes[0] for bytes_ in phase.host_bytes))


def _difference(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    return {kind: after.get(kind, 0) - before.get(kind, 0) for kind in before.keys() | after.keys()}


def _composed(begin: Phase, steps: Sequence[tuple[str, _Change]]) -> Iterator[Phase]:
    """A phase for each label, changed from the one before; the first begins as ``begin`` did. What comes again, as in
    the steady state of a pipeline, is made once."""
    known: dict[tuple[int, int], tuple[Mapping[str, int], Mapping[str, int]]] = {}  # by the identities of both
    states: dict[tuple[tuple[str, int], ...], Mapping[str, int]] = {}
    now, host = states.setdefault(tuple(begin.start.items()), begin.start), begin.host_bytes[0]
    for label, change in steps:
        key = id(now), id(change)
        if key not in known:
            end = _moved(now, change.end)
            known[key] = _moved(now, change.peak), states.setdefault(tuple(end.items()), end)
        peak, end = known[key]
        before, most, after = (host + bytes_ for bytes_ in change.host_bytes)
        yield Phase(label, now, peak, end, (before, most, after))
        now, host = end, after


def _moved(now: Mapping[str, int], changes: Mapping[str, int]) -> Mapping[str, int]:
    """``now``, changed; itself where nothing does."""
    if not any(change or kind not in now for kind, change in changes.items()):
        return now
    return {**now, **{kind: now.get(kind, 0) + change for kind, change in changes.items()}}
