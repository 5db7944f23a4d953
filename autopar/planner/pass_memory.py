"""What the passes of a stage hold beside what the stage keeps, call by call: temporaries, weights and gradients.

A pass of one call holds what its block works in (:mod:`autopar.planner.working`). Where weights are gathered for each
pass, it also holds those of its own unit (a layer with the code behind it, in the order of the pass, or the code ahead
of the first layer) and of the next one, which is on its way: packed, where it is small, and with this rank's part of it
where that was cast or packed (:mod:`autopar.runtime.streaming`, :mod:`autopar.runtime.store`). Where gradients are
scattered in every backward, each waits until those are made that are sent before it or with it, and is sent as a
message that lives until two more have been (:mod:`autopar.runtime.grads`); the last two of a backward live until the
next one's.

All bytes are beside what the stage keeps of the calls up to this one. What later calls keep isn't there yet in a
forward, and gone in a backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, NamedTuple

from autopar.graph import Model
from autopar.options import weights_streamed
from autopar.passes.recompute import own_modules
from autopar.planner.alike import Alike
from autopar.planner.rank_memory import StageWeights, Storage, Weight
from autopar.planner.working import Working
from autopar.schedules.weight_moves import MESSAGES

IN_FLIGHT: Final = 2
"""Messages of one stage's gradients that may be under way when another one is made."""


@dataclass(frozen=True)
class StagePasses:
    """``beside``: by call, the most that one of its passes holds. All the time that a pass of the stage runs, there are
    ``spanning`` bytes of weights that several of its calls use; between passes there are the ``lasting`` messages of a
    backward; a pass begins with ``first`` bytes of weights."""

    beside: tuple[int, ...]
    spanning: int = 0
    lasting: int = 0
    first: int = 0


@dataclass(frozen=True)
class PassMemory:
    """Of stages of a ``model``, whose blocks work as ``workings`` say; a step has ``several`` microbatches or one.

    What is found for a stage is kept for all that are alike.
    """

    model: Model
    storage: Storage
    workings: Sequence[Working]
    several: bool
    alike: Alike
    _known: dict[Hashable, StagePasses] = field(default_factory=dict)

    def of(self, calls: Sequence[int]) -> StagePasses:
        """Of the stage of these calls, in order."""
        key = self.alike.key(calls)
        if key not in self._known:
            self._known[key] = self._found(calls)
        return self._known[key]

    def of_rank(self, stages: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """:attr:`StagePasses.beside` of each stage of a rank, with what there is for its whole pass and for others:
        weights that are on their way for the next one's pass, and messages of the backwards before."""
        found = [self.of(calls) for calls in stages]
        rows: list[Sequence[int]] = []
        for number, each in enumerate(found):
            others = [*found[:number], *found[number + 1 :]]
            always = each.spanning + sum(other.lasting for other in others)
            always += max((other.spanning + other.first for other in others), default=0)
            rows.append([held + always for held in each.beside] if always else each.beside)
        return rows

    def _found(self, calls: Sequence[int]) -> StagePasses:
        workings = [self.workings[self.model.calls[i].block] for i in calls]
        if not self.storage.options.zero >= 2 and not self._streams:
            return StagePasses(tuple(working.bytes_ for working in workings))
        weights = StageWeights.of(self.model, calls, self.storage)
        own = own_modules(self.model)
        layers = [i in own for i in calls]
        forward, backward, first = _gathered(weights, layers) if self._streams else ([0] * len(calls),) * 2 + (0,)
        flights = self._flights(calls, weights, workings)
        passes = zip(workings, forward, backward, flights.most, strict=True)
        return StagePasses(
            beside=tuple(
                max(working.forward + there + flights.lasting, working.forward + again, most + again, 0)
                for working, there, again, most in passes
            ),
            spanning=sum(weight.copied for weight in weights.shared) if self._streams else 0,
            lasting=flights.lasting,
            first=first,
        )

    @property
    def _streams(self) -> bool:
        return weights_streamed(self.storage.options.zero, self.storage.options.offload)

    def _flights(self, calls: Sequence[int], weights: StageWeights, workings: Sequence[Working]) -> _Flights:
        """Of a backward that follows another one, if there are several."""
        rows = list(zip(weights.rows, workings, strict=True))[::-1]
        flight = _Flight(scatters=self.storage.options.zero >= 2)
        if self.several:
            for row, working in rows[-_LOOKED_BACK:]:
                flight.run(row, working)
        lasting = flight.bytes_ if self.several else 0
        most = [flight.run(row, working) for row, working in rows]
        return _Flights(most[::-1], lasting)


_LOOKED_BACK: Final = 4  # calls, of which the first of a stage have sent the last messages of a backward


class _Flights(NamedTuple):
    """By call, what its backward works in, with gradients on their way; and what of these lasts."""

    most: Sequence[int]
    lasting: int


def _gathered(weights: StageWeights, layers: Sequence[bool]) -> tuple[list[int], list[int], int]:
    """By call, bytes of weights during its forward, and its backward; and what either begins with, at most."""
    forward, first = _of_walk(weights.rows, layers)
    backward, last = _of_walk(weights.rows[::-1], layers[::-1])
    return forward, backward[::-1], max(first, last)


def _of_walk(rows: Sequence[Sequence[Weight | None]], layers: Sequence[bool]) -> tuple[list[int], int]:
    """Of calls in the order of a pass: each layer is reached with the code behind it, and what a pass begins with was
    there at the end of the one before, if that was the same stage's."""
    units = list(accumulate(layers, initial=0))[1:]
    there, coming = [0] * (units[-1] + 2), [0] * (units[-1] + 2)
    for unit, row in zip(units, rows, strict=True):
        for weight in filter(None, row):
            there[unit] += weight.copied
            coming[unit] += weight.coming
    found = [there[unit] + (coming[unit + 1] if unit else there[1]) for unit in units]
    return found, sum(coming[:2])


class _Flight:
    """Gradients on their way through a backward, call by call; none where nothing is sent in a pass."""

    def __init__(self, *, scatters: bool) -> None:
        self._scatters = scatters
        self._sent: deque[int] = deque(maxlen=IN_FLIGHT)

    @property
    def bytes_(self) -> int:
        return sum(self._sent)

    def run(self, row: Sequence[Weight | None], working: Working) -> int:
        """The most bytes of the backward of a call with these weights, each by its place in the block (None: it isn't
        the call's own, or isn't trained)."""
        messages = deque(_messages(row) if self._scatters else [])
        sent = {place for message in messages for place in message}
        pending, ended, most = 0, set[int](), 0
        for number, stretch in enumerate(working.backward):
            most = max(most, stretch.most + pending + self.bytes_)
            pending += sum(weight.bytes_ for place in stretch.begun if place in sent and (weight := row[place]))
            ended.update(stretch.ended if number + 1 < len(working.backward) else sent)
            while messages and ended.issuperset(messages[0]):
                weights = [weight for place in messages.popleft() if (weight := row[place])]
                made = sum(weight.bytes_ for weight in weights)
                terms, parts = sum(w.sent for w in weights), sum(w.sent // w.shards for w in weights)
                if len(weights) > 1 or weights[0].is_cast:
                    most = max(most, stretch.after + pending + self.bytes_ + terms + parts)
                else:
                    most = max(most, stretch.after + pending + self.bytes_ + parts)
                pending -= made
                self._sent.append(terms + parts)
        return most


def _messages(row: Sequence[Weight | None]) -> Iterator[list[int]]:
    """The gradients of a call that travel together, by their places, in the order in which they are sent."""
    open_: dict[int, list[int]] = {}
    for place, weight in reversed(list(enumerate(row))):
        if weight is None or weight.shards == 1:
            continue
        if weight.bytes_ >= MESSAGES.large(weight.shards):
            yield [place]
            continue
        together = open_.setdefault(weight.shards, [])
        together.append(place)
        if sum(each.bytes_ for at in together if (each := row[at])) >= MESSAGES.of_pass(weight.shards):
            yield open_.pop(weight.shards)
    yield from open_.values()


def passing_bytes(model: Model, call: int, storage: Storage) -> tuple[int, int]:
    """Of the weights of one call: what is gathered for each pass, and what lasts of its gradients' messages."""
    weights = StageWeights.of(model, [call], storage)
    (row,), options = weights.rows, storage.options
    gathered = sum(weight.copied for weight in (*filter(None, row), *weights.shared))
    last = deque(_messages(row), maxlen=IN_FLIGHT)
    sent = sum(weight.sent for message in last for place in message if (weight := row[place]))
    streams = weights_streamed(options.zero, options.offload)
    return gathered if streams else 0, sent if options.zero >= 2 else 0


def largest(beside: Iterable[int], saved: Iterable[int]) -> int:
    """Of the calls of a stage, each of which holds so much ``beside`` what is kept up to it, and keeps so much itself:
    what the stage holds at most beside all that it keeps."""
    most = 0
    for each, kept in zip(beside, saved, strict=True):
        most = max(most - kept, each)
    return most
