"""What pipeline ranks keep and wait under a schedule: read off its lists for equal passes, once for all placements.

Lists that depend on what passes take may keep other amounts: of those, bounds by memory are estimates.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np

from autopar.schedules import Action, Costs, generate, lower, simulate_timeline
from autopar.schedules.offloads import ALL, LEAST_BETWEEN, with_offloads
from autopar.schedules.pass_times import PassTimes
from autopar.schedules.registry import SCHEDULES
from autopar.search.bounds import Kept, Spill
from autopar.search.hulls import Array

_KEEPS: Final = {"F": 1, "FETCH": 1, "B": -1, "I": -1, "OFFLOAD": -1}
"""What an action does to the number of microbatches that wait for a backward; a copy to the host is over at once."""

_LATER: Final = {"I": 1, "W": -1}
"""The same of those that wait for weights' gradients."""

_PASSES: Final = 2048  # of a schedule that is generated; of fewer, no more are kept
_STEADY: Final = 2  # times the ranks: with more microbatches, no more are in flight
_NEVER: Final = 1e-9  # times that a microbatch is away
_BARRIERS: Final = {"naive": 3, "vocab-1": 2, "vocab-2": 1}
"""Of a split head (arXiv 2411.05288, section 5); for each, one microbatch more is kept."""
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
    """So many microbatches wait for a backward (``kept``): after ``forwards`` and ``backwards`` for the first time, and
    ``often`` for each microbatch of the step, over how often the same one is away then."""

    kept: float
    forwards: float
    backwards: float
    often: float


@dataclass(frozen=True)
class _Rank:
    """How many microbatches of its stages, on average, a rank keeps at most: from forward to backward, with all on the
    device (``here``) or all ``away`` on the host that can be; and from there to their weights' gradients. ``beside``:
    how many still wait for a backward, both ways, when one has left something for them: of each stage at some time."""

    here: float
    away: float
    later: float
    beside: tuple[float, float]
    levels: tuple[_Level, ...]


@dataclass
class Keeping:
    """What ranks keep, by schedule, ranks, microbatches, chunks and the split of the head; each found once."""

    _known: dict[tuple[str, int, int, int | None, str], tuple[_Rank, ...]] = field(default_factory=dict)
    _waits: dict[tuple[str, int, int, int | None, str, Ratios], tuple[float, float]] = field(default_factory=dict)
    generated: int = 0
    """Passes of the lists that were read."""

    def here(
        self, name: str, ranks: int, microbatches: int, chunks: int | None = None, head: str = ""
    ) -> tuple[Kept, ...]:
        """By rank, with all on the device."""
        return tuple(Kept(rank.here) for rank in self._ranks(name, ranks, microbatches, chunks, head))

    def away(
        self, name: str, ranks: int, microbatches: int, chunks: int | None, head: str, host_rate: float
    ) -> tuple[Kept, ...]:
        """By rank, where activations may go to the host and back at ``host_rate`` bytes/s."""
        seconds = 1 / host_rate / microbatches
        return tuple(
            Kept(rank.away, tuple(_spill(level, microbatches, seconds) for level in rank.levels))
            for rank in self._ranks(name, ranks, microbatches, chunks, head)
        )

    def most(self, name: str, ranks: int, microbatches: int, chunks: int | None, head: str) -> Array:
        """By rank, the most that waits for a backward, with all on the device."""
        if not head and name == "1f1b":
            return straight_kept(ranks, microbatches)
        if not head and name == "interleaved" and _is_whole(ranks, microbatches):
            return looped_kept(ranks, microbatches, chunks or 2)
        return np.array([rank.here for rank in self._ranks(name, ranks, microbatches, chunks, head)])

    def later(self, name: str, ranks: int, microbatches: int, chunks: int | None, head: str) -> float:
        """The most microbatches that wait for weights' gradients on any rank."""
        if ranks == 1 or not SCHEDULES[name].splits_backward:
            return 0.0
        return max(rank.later for rank in self._ranks(name, ranks, microbatches, chunks, head))

    def beside(
        self, name: str, ranks: int, microbatches: int, chunks: int | None, head: str, *, away: bool
    ) -> Array | None:
        """By rank, how many microbatches wait for a backward while what another one left for weights' gradients is
        there, for each stage at some time at least; with all ``away`` that can be. None where backwards leave
        nothing."""
        if not SCHEDULES[name].splits_backward or ranks == 1:
            return None
        return np.array([rank.beside[away] for rank in self._ranks(name, ranks, microbatches, chunks, head)])

    def likely(
        self, name: str, ranks: int, microbatches: int, chunks: int | None, head: str, ratios: Ratios = EQUAL
    ) -> Likely:
        """What many ranks do is read off a few, which keep and wait in proportion; and what they do with a split head
        off what they do without, but for how long those wait whose lists are made for costs. ``ratios`` are those of a
        rank's passes."""
        row = SCHEDULES[name]
        closed = name == "1f1b" or (name == "interleaved" and _is_whole(ranks, microbatches))
        few = ranks if closed else min(ranks, _FEW)
        times = ranks / few
        asked = (name, few, max(few * row.least_per_rank, 1, round(microbatches / times)), chunks)
        whole = "" if "" in row.heads else head
        kept = times * self.most(*asked, whole)
        if few < ranks:
            kept = np.interp(np.linspace(0, 1, ranks), np.linspace(0, 1, few), kept)
        if head and not whole:
            kept = np.minimum(kept + _BARRIERS[head], max(float(kept.max()), microbatches))
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
        if not head and name == "1f1b" and microbatches >= ranks:
            return ranks - 1.0, straight_messages(ranks, microbatches)
        if not head and name == "interleaved" and microbatches % ranks == 0:
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
            return (_Rank(1.0, 1.0, 0.0, (0.0, 0.0), ()),)
        key = _key(name, ranks, microbatches, chunks, head)
        if key not in self._known:
            schedule = generate(*key[:3], chunks=chunks, head=head)
            self.generated += schedule.stages * schedule.microbatches
            self._known[key] = tuple(_rank(actions, schedule.chunks) for actions in schedule.lists)
        return self._known[key]


def _is_whole(ranks: int, microbatches: int) -> bool:
    """Whether each round of microbatches of an interleaved schedule has as many as there are ranks, or all of them."""
    return microbatches <= ranks or microbatches % ranks == 0


def straight_kept(ranks: int, microbatches: int) -> Array:
    """Of 1F1B: no schedule with one stage on each rank that fills it keeps less."""
    return np.minimum(float(microbatches), ranks - np.arange(ranks))


def looped_kept(ranks: int, microbatches: int, chunks: int) -> Array:
    """Of interleaved 1F1B (arXiv 2104.04473, section 2.2), if the last round of microbatches has as many as there are
    ranks; else it may keep more."""
    ahead = 2 * (ranks - 1 - np.arange(ranks)) + (chunks - 1) * min(ranks, microbatches) + 1
    return np.minimum(float(microbatches), ahead / chunks)


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


def _key(
    name: str, ranks: int, microbatches: int, chunks: int | None, head: str
) -> tuple[str, int, int, int | None, str]:
    """Of as few microbatches as keep as much."""
    row = SCHEDULES[name]
    most = _PASSES // (ranks * (chunks or row.chunks or 2))
    return name, ranks, min(microbatches, _STEADY * ranks, max(ranks * max(1, row.least_per_rank), most)), chunks, head


def _waited(
    name: str, ranks: int, microbatches: int, chunks: int | None, head: str, ratios: Ratios
) -> tuple[float, float]:
    """Of stages that are all as long, and of short messages between them."""
    schedule = generate(name, ranks, microbatches, chunks=chunks, head=head)
    weights = ratios.backward * ratios.weights
    costs = [
        Costs.uniform(
            schedule,
            forward_seconds=1.0,
            backward_seconds=ratios.backward,
            weight_seconds=weights,
            send_seconds=sent,
        )
        for sent in (0.0, _SHORT)
    ]
    if SCHEDULES[name].cost_aware:
        schedule = generate(name, ranks, microbatches, chunks=chunks, head=head, costs=PassTimes.of(costs[0]))
    lowered = lower(schedule, costs[0].seconds)
    without, with_them = (simulate_timeline(lowered, each, trusted=True).makespan_seconds for each in costs)
    passes = without / (1.0 + ratios.backward) / schedule.chunks
    return passes - microbatches, (with_them - without) / _SHORT


def _spill(level: _Level, microbatches: int, seconds: float) -> Spill:
    times = level.often * microbatches
    return Spill(level.kept, level.forwards, level.backwards, times, seconds, microbatches)


def _rank(actions: Sequence[Action], chunks: int) -> _Rank:
    away = list(with_offloads(actions, dict.fromkeys((action.stage for action in actions), ALL)))
    here, rest, later = (_most(*each) / chunks for each in ((actions, _KEEPS), (away, _KEEPS), (actions, _LATER)))
    beside = _beside(actions) / chunks, _beside(away) / chunks
    return _Rank(here, rest, later, beside, tuple(_levels(actions, chunks)))


def _most(actions: Iterable[Action], changes: Mapping[str, int]) -> int:
    """Of what actions change by so much, the most at any time."""
    return max(accumulate((changes.get(action.kind, 0) for action in actions), initial=0))


def _beside(actions: Iterable[Action]) -> int:
    """How many wait for a backward after one of theirs, for each stage at some time at least."""
    waiting, most = 0, dict[int, int]()
    for action in actions:
        waiting += _KEEPS.get(action.kind, 0)
        if action.kind in ("F", "I"):
            most[action.stage] = max(waiting * (action.kind == "I"), most.get(action.stage, 0))
    return min(most.values(), default=0)


def _levels(actions: Sequence[Action], chunks: int) -> Iterator[_Level]:
    """For some numbers of microbatches that wait for a backward, up to the most."""
    begun: dict[tuple[int, int], int] = {}
    counts: list[tuple[int, int]] = []  # after a forward: the number of actions before, and of those that wait
    spans: list[tuple[int, int]] = []
    for number, action in enumerate(actions):
        place = action.microbatch, action.stage
        if action.kind == "F":
            begun[place] = number
            counts.append((number, len(begun)))
        elif action.kind in ("B", "I"):
            spans.append((begun.pop(place), number))
    most = max(count for _, count in counts)
    for level in sorted({-(-most * quarters // 4) for quarters in range(1, 5)}):
        times = [number for number, count in counts if count >= level]
        away = max(bisect_right(times, end - LEAST_BETWEEN) - bisect_right(times, start) for start, end in spans)
        ends = sum(end <= times[0] for _, end in spans)
        often = len(times) / max(_NEVER, away) * chunks / len(counts)
        yield _Level(level / chunks, (level + ends) / chunks, ends / chunks, often)
