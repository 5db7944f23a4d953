"""What pipeline ranks keep and wait under a schedule: read off its lists for equal passes, once for all placements.

Stages of one rank needn't have as many layers: those that keep the fewest microbatches may have the most. So what is
proven of memory counts as many as every stage keeps at the same time; what is likely, the average of stages. Lists that
depend on what passes take may keep other amounts: of those, bounds by memory are estimates.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from autopar.schedules import Action, Costs, Schedule, generate, lower, placement, simulate_timeline
from autopar.schedules.offloads import ALL, LEAST_BETWEEN, with_offloads
from autopar.schedules.pass_times import PassTimes
from autopar.schedules.registry import SCHEDULES
from autopar.schedules.vocabulary import BARRIERS
from autopar.search.bounds import Kept, Spill
from autopar.search.hulls import Array

_KEEPS: Final = {"F": 1, "FETCH": 1, "B": -1, "I": -1, "OFFLOAD": -1}
"""What an action does to the number of microbatches that wait for a backward; a copy to the host is over at once."""

_LATER: Final = {"I": 1, "W": -1}
"""The same of those that wait for weights' gradients."""

_PASSES: Final = 2048  # of a schedule that is generated; of fewer, no more are kept
_STEADY: Final = 2  # times the ranks: with more microbatches, no more are in flight
_NEVER: Final = 1e-9  # times that a microbatch is away
_ROUNDED: Final = 1e-9
_SHORT: Final = 1e-3  # of a forward: a message
_TINY: Final = 1e-30
_LONGEST: Final = 5.0  # backward, times a forward
_TIMES: Final = 5  # that ratios of passes are told apart by: fifths,
_SHARES: Final = 10  # and shares of them: tenths
_FEW: Final = 4  # ranks of a schedule that is generated to say what more ranks are likely to do


class Likely(NamedTuple):
    """Of a schedule, more or less: by rank the most microbatches that wait for a backward, the most that wait for
    weights' gradients on any; and how long ranks wait in a step, in passes of a microbatch through one of them and in
    messages to the next rank or back."""

    kept: Array
    later: float
    waits: float
    messages: float


ListsKey: TypeAlias = tuple[str, int, int, int | None, str]
"""Of a schedule's lists: its name, ranks, microbatches, chunks, and the split of the head."""


class Ratios(NamedTuple):
    """What a backward takes, times a forward, and its weights' gradients, as a share of it."""

    backward: float
    weights: float

    @classmethod
    def of(cls, forward: float, backward: float, weights: float) -> Ratios:
        """Rounded, so that few lists have to be read."""
        times, share = backward / max(forward, _TINY), weights / max(backward, _TINY)
        return cls(round(min(times, _LONGEST) * _TIMES) / _TIMES, round(share * _SHARES) / _SHARES)


EQUAL: Final = Ratios(2.0, 0.5)
"""Both parts of a backward take as long as a forward."""


class _Level(NamedTuple):
    """So many microbatches wait for a backward (``kept``): for the first time after ``forwards`` and ``backwards``, of
    the stage with the fewest and of that with the most, and ``often`` for each microbatch of the step, over how often
    the same one is away then."""

    kept: float
    forwards: tuple[float, float]
    backwards: tuple[float, float]
    often: float


@dataclass(frozen=True)
class _Waiting:
    """How many microbatches of a rank wait for a backward: of its stages on average, as if these were as long
    (``even``), or of each of them at least, at the same time, however long they are. At most, with all on the device
    (``here``) or all ``away`` on the host that can be; at some ``levels``; and ``beside``, both ways, what one of each
    stage has left for its weights' gradients, at some time."""

    rank: _Rank
    even: bool

    @cached_property
    def here(self) -> float:
        return self.rank.here.most(self.even)

    @cached_property
    def away(self) -> float:
        return self.rank.away.most(self.even)

    @cached_property
    def levels(self) -> tuple[_Level, ...]:
        return tuple(_levels(self.rank.here, even=self.even))

    def beside(self, *, away: bool) -> float:
        return (self.rank.away if away else self.rank.here).beside(self.even)


@dataclass(frozen=True)
class _Rank:
    """What a rank keeps, by its ``actions`` with so many stages: found when it is asked for."""

    actions: Sequence[Action]
    chunks: int

    @cached_property
    def here(self) -> _Counts:
        """With all on the device."""
        return _Counts.of(self.actions, self.chunks)

    @cached_property
    def away(self) -> _Counts:
        """With all on the host that can be."""
        shares = dict.fromkeys((action.stage for action in self.actions), ALL)
        return _Counts.of(list(with_offloads(self.actions, shares)), self.chunks)

    @cached_property
    def average(self) -> _Waiting:
        return _Waiting(self, even=True)

    @cached_property
    def least(self) -> _Waiting:
        return _Waiting(self, even=False)

    @cached_property
    def later(self) -> float:
        """How many wait for weights' gradients at most, on average of its stages."""
        return max(accumulate((_LATER.get(action.kind, 0) for action in self.actions), initial=0)) / self.chunks


@dataclass
class Keeping:
    """What ranks keep, by lists; each found once."""

    _known: dict[ListsKey, tuple[_Rank, ...]] = field(default_factory=dict)
    _waits: dict[tuple[str, int, int, int | None, str, Ratios], tuple[float, float]] = field(default_factory=dict)
    _counted: set[ListsKey] = field(default_factory=set)
    read: int = 0
    """Passes of the lists that were asked for."""

    def here(
        self, name: str, ranks: int, microbatches: int, chunks: int | None = None, head: str = ""
    ) -> tuple[Kept, ...]:
        """By rank, with all on the device: of every stage at least."""
        return tuple(Kept(rank.least.here) for rank in self._ranks(name, ranks, microbatches, chunks, head))

    def away(
        self,
        name: str,
        ranks: int,
        microbatches: int,
        chunks: int | None,
        head: str,
        host_rate: float,
        *,
        even: bool = False,
    ) -> tuple[Kept, ...]:
        """By rank, where activations may go to the host and back at ``host_rate`` bytes/s: of every stage at least, or
        as if these were ``even``."""
        seconds = 1 / host_rate / microbatches
        each = self._ranks(name, ranks, microbatches, chunks, head)
        return tuple(
            Kept(waiting.away, tuple(_spill(level, microbatches, seconds) for level in waiting.levels))
            for waiting in (rank.average if even else rank.least for rank in each)
        )

    def least(self, name: str, ranks: int, microbatches: int, chunks: int | None, head: str) -> Array:
        """By rank, the most that waits for a backward of every stage at the same time, with all on the device."""
        if not head and is_straight(name, chunks):
            return straight_kept(ranks, microbatches)
        if not head and name == "interleaved":
            return looped_least(ranks, microbatches)
        return np.array([rank.least.here for rank in self._ranks(name, ranks, microbatches, chunks, head)])

    def average(self, name: str, ranks: int, microbatches: int, chunks: int | None, head: str) -> Array:
        """By rank, the most that waits for a backward, with all on the device, if its stages are as long."""
        if not head and is_straight(name, chunks):
            return straight_kept(ranks, microbatches)
        if not head and name == "interleaved" and _is_whole(ranks, microbatches):
            return looped_kept(ranks, microbatches, chunks or 2)
        return np.array([rank.average.here for rank in self._ranks(name, ranks, microbatches, chunks, head)])

    def later(self, name: str, ranks: int, microbatches: int, chunks: int | None, head: str) -> float:
        """The most microbatches that wait for weights' gradients on any rank."""
        if ranks == 1 or not SCHEDULES[name].splits_backward:
            return 0.0
        return max(rank.later for rank in self._ranks(name, ranks, microbatches, chunks, head))

    def beside(
        self, name: str, ranks: int, microbatches: int, chunks: int | None, head: str, *, away: bool
    ) -> Array | None:
        """By rank, how many microbatches of every stage wait for a backward while what another one left for weights'
        gradients is there, for each stage at some time at least; with all ``away`` that can be. None where backwards
        leave nothing."""
        if not SCHEDULES[name].splits_backward or ranks == 1:
            return None
        return np.array([rank.least.beside(away=away) for rank in self._ranks(name, ranks, microbatches, chunks, head)])

    def likely(
        self, name: str, ranks: int, microbatches: int, chunks: int | None, head: str, ratios: Ratios = EQUAL
    ) -> Likely:
        """What many ranks do is read off a few, which keep and wait in proportion; and what they do with a split head
        off what they do without, but for how long those wait whose lists are made for costs. ``ratios`` are those of a
        rank's passes."""
        row = SCHEDULES[name]
        closed = is_straight(name, chunks) or (name == "interleaved" and _is_whole(ranks, microbatches))
        few = ranks if closed else min(ranks, _FEW)
        times = ranks / few
        asked = (name, few, max(few * row.least_per_rank, 1, round(microbatches / times)), chunks)
        whole = "" if "" in row.heads else head
        kept = times * self.average(*asked, whole)
        if few < ranks:
            kept = np.interp(np.linspace(0, 1, ranks), np.linspace(0, 1, few), kept)
        if head and not whole:
            # Of each barrier, one microbatch more is kept (arXiv 2411.05288, section 5).
            kept = np.minimum(kept + BARRIERS[head], max(float(kept.max()), microbatches))
        more = times if few == 1 else (ranks - 1) / (few - 1)
        waits, messages = (more * each for each in self.waits(*asked, head if row.cost_aware else whole, ratios))
        return Likely(kept, times * self.later(*asked, whole), waits, messages)

    def waits(
        self, name: str, ranks: int, microbatches: int, chunks: int | None, head: str, ratios: Ratios = EQUAL
    ) -> tuple[float, float]:
        """How long ranks wait in a step: in passes of a microbatch through one rank, and in messages. Read off lists of
        two microbatches for each rank at most, and of three where there are more, which say how both go on growing."""
        if ranks == 1:
            return 0.0, 0.0
        if not head and is_straight(name, chunks) and microbatches >= ranks:
            return ranks - 1.0, straight_messages(ranks, microbatches)
        if not head and name == "interleaved" and chunks != 1 and microbatches % ranks == 0:
            return (ranks - 1) / (chunks or 2), looped_messages(ranks, chunks or 2)
        key = _key(name, ranks, microbatches, chunks, head)
        ratios = ratios if SCHEDULES[name].splits_backward else EQUAL
        passes, messages = self._read_waits(*key, ratios)
        if more := microbatches - key[2]:
            longer = self._read_waits(name, ranks, key[2] + min(more, ranks), chunks, head, ratios)
            times = more / min(more, ranks)
            passes, messages = passes + times * (longer[0] - passes), messages + times * (longer[1] - messages)
        return passes, messages

    def _read_waits(
        self, name: str, ranks: int, microbatches: int, chunks: int | None, head: str, ratios: Ratios
    ) -> tuple[float, float]:
        key = name, ranks, microbatches, chunks, head, ratios
        if key not in self._waits:
            self._waits[key] = _waited(*key)
        return self._waits[key]

    def _ranks(self, name: str, ranks: int, microbatches: int, chunks: int | None, head: str) -> tuple[_Rank, ...]:
        if ranks == 1 and (SCHEDULES[name].chunks or chunks or 2) == 1:
            microbatches = 1  # others come one after the other
        key = _key(name, ranks, microbatches, chunks, head)
        if key not in self._known:
            schedule = generate(*key[:3], chunks=chunks, head=head)
            self._known[key] = tuple(_Rank(actions, schedule.chunks) for actions in schedule.lists)
        if key not in self._counted:
            self._counted.add(key)
            self.read += sum(rank.chunks for rank in self._known[key]) * key[2]
        return self._known[key]

    def aside(self) -> Keeping:
        """With the same lists, of which none was asked for yet."""
        return Keeping(self._known, self._waits)


def is_straight(name: str, chunks: int | None) -> bool:
    """Whether it is 1F1B, as interleaved 1F1B of one stage on each rank is, too."""
    return name == "1f1b" or (name == "interleaved" and chunks == 1)


def _is_whole(ranks: int, microbatches: int) -> bool:
    """Whether each round of microbatches of an interleaved schedule has as many as there are ranks, or all of them."""
    return microbatches <= ranks or microbatches % ranks == 0


def straight_kept(ranks: int, microbatches: int) -> Array:
    """Of 1F1B: no schedule with one stage on each rank that fills it keeps less."""
    return np.minimum(float(microbatches), ranks - np.arange(ranks))


def looped_kept(ranks: int, microbatches: int, chunks: int) -> Array:
    """Of interleaved 1F1B (arXiv 2104.04473, section 2.2), if the last round of microbatches has as many as there are
    ranks; else it may keep more. Of ``chunks`` stages on each rank, several."""
    ahead = 2 * (ranks - 1 - np.arange(ranks)) + (chunks - 1) * min(ranks, microbatches) + 1
    return np.minimum(float(microbatches), ahead / chunks)


def looped_least(ranks: int, microbatches: int) -> Array:
    """Of every stage at the same time, of any number of several: when its first backward begins, the last stage has run
    so many forwards, and all others as many of that round at least."""
    ahead = 2 * (ranks - 1 - np.arange(ranks)) + 1
    return np.minimum(float(min(microbatches, ranks)), ahead)


def straight_messages(ranks: int, microbatches: int) -> float:
    """Of 1F1B: it keeps as few microbatches as fill the ranks, so each way back and forth of one is waited for."""
    return 2 * (ranks - 1) / ranks * max(ranks, microbatches) + 2 * (ranks - 2)


def looped_messages(ranks: int, chunks: int) -> float:
    """Of interleaved 1F1B: rounds of microbatches wait for the first of them to come back from the last rank."""
    return 2.0 * (ranks * chunks - 1)


def folded_kept(ranks: int, microbatches: int) -> Array:
    """Of V-Min, a third of 1F1B's first rank (arXiv 2405.15362, section 4.2), with fewer microbatches half of these at
    least: no schedule with this placement keeps less."""
    return np.full(ranks, min((microbatches + 1) / 2, float((ranks + 4) // 3)))


def folded_least(ranks: int, microbatches: int) -> Array:
    """Of both of its stages at the same time, of any schedule on a V: V-Min, which keeps the least of them, keeps one
    microbatch of its second stage on the first rank, and one more on every third."""
    return np.minimum(float(microbatches), (np.arange(ranks) + 1) // 3 + 1)


def _key(name: str, ranks: int, microbatches: int, chunks: int | None, head: str) -> ListsKey:
    """Of as few microbatches as keep as much."""
    row = SCHEDULES[name]
    most = _PASSES // (ranks * (chunks or row.chunks or 2))
    return name, ranks, min(microbatches, _STEADY * ranks, max(ranks * max(1, row.least_per_rank), most)), chunks, head


def _waited(
    name: str, ranks: int, microbatches: int, chunks: int | None, head: str, ratios: Ratios
) -> tuple[float, float]:
    """Of stages that are all as long, and of short messages between them."""
    homes = placement(name, ranks, chunks)
    sizes = Schedule(name, len(homes), microbatches, homes, ((),) * ranks)
    costs = [
        Costs.uniform(
            sizes,
            forward_seconds=1.0,
            backward_seconds=ratios.backward,
            weight_seconds=ratios.backward * ratios.weights,
            send_seconds=sent,
        )
        for sent in (0.0, _SHORT)
    ]
    times = PassTimes.of(costs[0]) if SCHEDULES[name].cost_aware else None
    schedule = generate(name, ranks, microbatches, chunks=chunks, head=head, costs=times)
    lowered = lower(schedule, costs[0].seconds)
    without, with_them = (simulate_timeline(lowered, each, trusted=True).makespan_seconds for each in costs)
    passes = without / (1.0 + ratios.backward) / schedule.chunks
    return passes - microbatches, (with_them - without) / _SHORT


def _spill(level: _Level, microbatches: int, seconds: float) -> Spill:
    times = level.often * microbatches
    return Spill(level.kept, *level.forwards, *level.backwards, times, seconds, microbatches)


@dataclass(frozen=True)
class _Counts:
    """Of a rank's actions, after each: ``[action, stage]`` of the microbatches whose forwards and backwards are over,
    and of those that wait for a backward on the device."""

    actions: Sequence[Action]
    forwards: Array
    backwards: Array
    waiting: Array

    @classmethod
    def of(cls, actions: Sequence[Action], chunks: int) -> _Counts:
        stages = sorted({action.stage for action in actions if action.kind == "F"})
        place = {stage: number for number, stage in enumerate(stages)}
        known = [(n, place[a.stage], a.kind) for n, a in enumerate(actions) if a.kind in _KEEPS]
        rows, columns, kinds = (list(each) for each in zip(*known, strict=True))
        found = np.zeros((3, len(actions), chunks))
        found[0, rows, columns] = [kind == "F" for kind in kinds]
        found[1, rows, columns] = [kind in ("B", "I") for kind in kinds]
        found[2, rows, columns] = [_KEEPS[kind] for kind in kinds]
        return cls(actions, *found.cumsum(axis=1))

    def kept(self, even: bool) -> Array:
        """After each action, of all stages on average (``even``) or of each at least."""
        found: Array = self.waiting.mean(axis=1) if even else self.waiting.min(axis=1)
        return found

    def most(self, even: bool) -> float:
        """Of all those."""
        return float(self.kept(even).max(initial=0.0))

    def beside(self, even: bool) -> float:
        """After one of their backwards that leaves something, for each stage at some time at least."""
        most, kept = dict[int, float](), self.kept(even)
        for number, action in enumerate(self.actions):
            if action.kind in ("F", "I"):
                waiting = float(kept[number]) if action.kind == "I" else 0.0
                most[action.stage] = max(waiting, most.get(action.stage, 0.0))
        return min(most.values(), default=0.0)


def _levels(counts: _Counts, *, even: bool) -> Iterator[_Level]:
    """For some numbers of microbatches that wait for a backward, up to the most."""
    begun: dict[tuple[int, int], int] = {}
    spans: list[tuple[int, int]] = []
    after: list[int] = []  # forwards
    for number, action in enumerate(counts.actions):
        place = action.microbatch, action.stage
        if action.kind == "F":
            begun[place] = number
            after.append(number)
        elif action.kind in ("B", "I"):
            spans.append((begun.pop(place), number))
    kept, chunks = counts.kept(even), counts.waiting.shape[1]
    parts = chunks if even else 1
    most = round(float(kept[after].max()) * parts)
    for level in sorted({-(-most * quarters // 4) / parts for quarters in range(1, 5)} - {0.0}):
        times = [number for number in after if kept[number] >= level - _ROUNDED]
        away = max(bisect_right(times, end - LEAST_BETWEEN) - bisect_right(times, start) for start, end in spans)
        passes = (each[times[0]] for each in (counts.forwards, counts.backwards))
        forwards, backwards = (
            (float(each.mean()), float(each.mean())) if even else (float(each.min()), float(each.max()))
            for each in passes
        )
        often = len(times) / max(_NEVER, away) * chunks / len(after)
        yield _Level(level, forwards, backwards, often)
