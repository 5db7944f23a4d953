"""What the passes of a stage hold beside what the stage keeps, call by call: temporaries, weights and gradients.

A pass of one call holds what its block works in (:mod:`autopar.planner.working`). Where weights are gathered for each
pass, it also holds those of its own unit (a layer with the code behind it, in the order of the pass, or the code ahead
of the first layer) and of the next one, which is on its way: packed, where it is small, and with this rank's part of it
where that was cast or packed (:mod:`autopar.runtime.streaming`, :mod:`autopar.runtime.store`). Where gradients are
scattered in every backward, each waits until those are made that are sent before it or with it, and is sent as a
message that lives until two more of the rank have been (:mod:`autopar.schedules.gradient_messages`); the last two of a
backward live until the next one's. If that is another stage's, their sums stay until their own stage adds them up.

All bytes are beside what the stage keeps of the calls up to this one. What later calls keep isn't there yet in a
forward, and gone in a backward.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import nlargest
from itertools import accumulate
from typing import Final, NamedTuple

from autopar.graph import Model
from autopar.passes.hoist import parameter_sums
from autopar.passes.recompute import own_modules
from autopar.passes.vocabulary import staged_calls
from autopar.planner.alike import Alike
from autopar.planner.packing import units_of
from autopar.planner.rank_memory import StageWeights, Storage, Weight
from autopar.planner.working import Working
from autopar.schedules.gradient_messages import IN_FLIGHT, Gradient, together
from autopar.schedules.turns import Turns


@dataclass(frozen=True)
class StagePasses:
    """``beside``: by call, the most that one of its passes holds. All the time that a pass of the stage runs, there are
    ``spanning`` bytes of weights that several of its calls use, or one hands on views of; a pass begins with ``first``
    bytes of weights."""

    beside: tuple[int, ...]
    spanning: int = 0
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
    _known: dict[tuple[Hashable, tuple[Sent, ...]], StagePasses] = field(default_factory=dict)
    _left: dict[Hashable, tuple[Sent, ...]] = field(default_factory=dict)

    def of(self, calls: Sequence[int]) -> StagePasses:
        """Of the stage of these calls, in order, if its rank has no other."""
        return self._after(calls, self._leaves(calls) if self.several else ())

    def of_rank(self, stages: Sequence[Sequence[int]], turns: Sequence[Turns] | None = None) -> list[Sequence[int]]:
        """:attr:`StagePasses.beside` of each stage of a rank, with what there is for its whole pass and for others:
        weights that are on their way for the next one's pass, and messages of the backward before, of any of them where
        it isn't known by ``turns`` which that is."""
        if len(stages) == 1:
            alone = self.of(stages[0])
            return [[held + alone.spanning for held in alone.beside] if alone.spanning else alone.beside]
        left = [self._leaves(calls) for calls in stages]
        # Until a stage adds them up in its next backward; in its first one there is no sum yet.
        summed = sum(sent.part for sents in left for sent in sents) if self.several else 0
        stays = any(left) and not all(left)  # where a stage sends none, what others sent is there for longer
        there = self._largest(left) if turns is None or stays else _left_before(left, turns)
        found = []
        for calls, befores in zip(stages, there, strict=True):
            ways = [self._after(calls, tuple(map(self._flying, before))) for before in befores]
            most = tuple(map(max, zip(*(way.beside for way in ways), strict=True)))
            found.append(replace(ways[0], beside=most))
        gathered = [each.spanning + each.first for each in found]
        rows: list[Sequence[int]] = []
        for number, stage in enumerate(found):
            others = range(len(stages)) if turns is None else turns[number].after
            coming = max((gathered[other] for other in others if other != number), default=0)
            always = stage.spanning + coming + summed
            rows.append([held + always for held in stage.beside] if always else stage.beside)
        return rows

    def _largest(self, left: Sequence[Sequence[Sent]]) -> Iterator[list[tuple[Sent, ...]]]:
        """By stage of those that have ``left`` these messages, the largest that may be under way in its passes."""
        each = ((sent, number) for number, sents in enumerate(left) for sent in sents)
        largest = nlargest(2 * IN_FLIGHT, each)  # one stage leaves half of these at most
        for number in range(len(left)):
            before = [sent for sent, other in largest if self.several or other != number][:IN_FLIGHT]
            yield [tuple(reversed(before))]  # the largest are there for the longest

    def _flying(self, sent: Sent) -> Sent:
        """Without what counts as summed."""
        return Sent(sent.bytes_ - sent.part, 0) if self.several else sent

    def _after(self, calls: Sequence[int], before: tuple[Sent, ...]) -> StagePasses:
        """Of passes that begin with these messages on their way."""
        key = self.alike.key(calls), before
        if key not in self._known:
            self._known[key] = self._found(calls, before)
        return self._known[key]

    def _found(self, calls: Sequence[int], before: tuple[Sent, ...]) -> StagePasses:
        workings = [self.workings[self.model.calls[i].block] for i in calls]
        streams = self.storage.streams
        if self._is_plain(calls):
            return StagePasses(tuple(working.bytes_ for working in workings))
        weights = StageWeights.of(self.model, calls, self.storage, self._handed_on)
        layers = [i in self._readers.own for i in calls]
        nothing = [0] * len(calls), [0] * len(calls), 0
        forward, backward, first = _gathered(weights, layers) if streams else nothing
        most = self._flight(calls, weights).run(workings, before)
        there, passes = sum(sent.bytes_ for sent in before), zip(workings, forward, backward, most, strict=True)
        return StagePasses(
            beside=tuple(
                max(working.forward + gathered + there, working.forward + again, flying + again, 0)
                for working, gathered, again, flying in passes
            ),
            spanning=sum(weight.copied for weight in weights.spanning.values()) if streams else 0,
            first=first,
        )

    def _is_plain(self, calls: Sequence[int]) -> bool:
        """Whether no weights come and go in passes of that stage, no gradients go, and none has several terms."""
        names = [name for index in calls for name in dict.fromkeys(self.model.calls[index].parameters)]
        moves = self.storage.options.zero >= 2 or self.storage.streams
        return not moves and len(set(names)) == len(names)

    def _leaves(self, calls: Sequence[int]) -> tuple[Sent, ...]:
        """The messages that a backward leaves on their way."""
        if self.storage.options.zero < 2:
            return ()
        key = self.alike.key(calls)
        if key not in self._left:
            weights = StageWeights.of(self.model, calls, self.storage, self._handed_on)
            workings = [self.workings[self.model.calls[i].block] for i in calls[:_LOOKED_BACK]]
            flight = self._flight(calls, weights)
            flight.run(workings)
            self._left[key] = flight.messages
        return self._left[key]

    def _flight(self, calls: Sequence[int], weights: StageWeights) -> _Flight:
        return _Flight(weights, self._readers.messages(calls, weights) if self.storage.options.zero >= 2 else [])

    @cached_property
    def _readers(self) -> _Readers:
        return _Readers(self.model)

    @cached_property
    def _handed_on(self) -> frozenset[str]:
        return self.model.handed_on() if self.storage.streams else frozenset()


_LOOKED_BACK: Final = 4  # calls, of which the first of a stage have sent the last messages of a backward


def _gathered(weights: StageWeights, layers: Sequence[bool]) -> tuple[list[int], list[int], int]:
    """By call, bytes of weights during its forward, and its backward; and what either begins with, at most."""
    forward, first = _of_walk(weights.own_rows, layers)
    backward, last = _of_walk(weights.own_rows[::-1], layers[::-1])
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


@dataclass(frozen=True)
class _Readers:
    """Of a ``model``, which calls read weights, and what says which of their gradients travel together."""

    model: Model

    @cached_property
    def own(self) -> frozenset[int]:
        return own_modules(self.model)

    @cached_property
    def _sums(self) -> Mapping[str, tuple[str, ...]]:
        return parameter_sums(self.model)

    @cached_property
    def _calls(self) -> Mapping[str, Sequence[int]]:
        """By weight, of all stages."""
        found: dict[str, list[int]] = defaultdict(list)
        for index in staged_calls(self.model):
            for name in self.model.calls[index].parameters:
                found[name].append(index)
        return found

    def messages(self, calls: Sequence[int], weights: StageWeights) -> list[list[str]]:
        """Names of the weights of the stage of ``calls`` whose gradients are sent in a backward, by the message."""
        units, stage, found = units_of(self.model, calls, self.own), set(calls), dict[str, Gradient]()
        for call, row, names in zip(calls, weights.rows, weights.names, strict=True):
            for weight, name in zip(row, names, strict=True):
                if weight is not None and weight.shards > 1 and name not in found:
                    found[name] = Gradient(
                        bytes_=weight.bytes_,
                        ranks=weight.shards,
                        like=(weight.along, self._sums[name], weight.master),
                        unit=units[call],
                        fits=not weight.is_padded,
                        tied="" if stage.issuperset(self._calls[name]) else name,
                    )
        names = list(found)
        return [[names[place] for place in places] for places in together(list(found.values()))]


class Sent(NamedTuple):
    """A message on its way, with this rank's ``part`` of the sum."""

    bytes_: int
    part: int


class _Flight:
    """Gradients on their way through the backwards of a stage with these ``weights``: those that ``messages`` name,
    which are sent in every one, and those of weights that several calls read, whose terms autograd adds up first."""

    def __init__(self, weights: StageWeights, messages: Sequence[Sequence[str]]) -> None:
        self._names, self._messages = weights.names, messages
        self._sends = {name for message in messages for name in message}
        waits = self._sends | weights.shared.keys()
        self._sent: deque[Sent] = deque(maxlen=IN_FLIGHT)
        self._weights: dict[str, Weight] = {}
        self._first: dict[str, int] = {}
        """Of what waits, the first call that reads it, whose backward is the last to add to its gradient."""
        for number, (row, names) in enumerate(zip(weights.rows, weights.names, strict=True)):
            for weight, name in zip(row, names, strict=True):
                if weight is not None and name in waits and name not in self._first:
                    self._weights[name], self._first[name] = weight, number

    @property
    def messages(self) -> tuple[Sent, ...]:
        """Those that are under way."""
        return tuple(self._sent)

    @property
    def bytes_(self) -> int:
        """Of these messages."""
        return sum(sent.bytes_ for sent in self._sent)

    def run(self, workings: Sequence[Working], before: Sequence[Sent] = ()) -> list[int]:
        """The most bytes of the backward of each of the first calls, all that have ``workings``, if there are messages
        from ``before``."""
        self._sent.extend(before)
        ended = {name for name, number in self._first.items() if number >= len(workings)}
        messages, begun, found = deque(self._messages), set[str](), list[int]()
        for number, working in reversed(list(enumerate(workings))):
            names, most = self._names[number], 0
            for stretch in working.backward:
                most = max(most, stretch.most + self._held(begun) + self.bytes_)
                begun.update(names[place] for place in stretch.begun if names[place] in self._first)
                is_last = stretch is working.backward[-1]
                over = names if is_last else [names[place] for place in stretch.ended]
                ended.update(name for name in over if self._first.get(name) == number)
                while messages and ended.issuperset(messages[0]):
                    most = max(most, stretch.after + self._send(messages.popleft(), begun))
                begun -= ended - self._sends
            found.append(most)
        return found[::-1]

    def _held(self, names: Iterable[str]) -> int:
        return sum(self._weights[name].bytes_ for name in names)

    def _send(self, message: Sequence[str], begun: set[str]) -> int:
        """One more; gives what all that was ``begun`` holds meanwhile."""
        weights = [self._weights[name] for name in message]
        terms, parts = sum(w.sent for w in weights), sum(w.sent // w.shards for w in weights)
        is_copied = len(weights) > 1 or weights[0].is_cast
        held = self._held(begun) + self.bytes_ + parts + (terms if is_copied else 0)
        begun.difference_update(message)
        self._sent.append(Sent(terms + parts, parts))
        return held


def _left_before(left: Sequence[Sequence[Sent]], turns: Sequence[Turns]) -> Iterator[list[tuple[Sent, ...]]]:
    """By stage, what may be under way when one of its passes begins, of what stages have ``left``."""
    for each in turns:
        sents = (tuple(sent for number in before for sent in left[number]) for before in each.before)
        yield list(dict.fromkeys(some[-IN_FLIGHT:] for some in sents))


def passing_bytes(model: Model, call: int, storage: Storage) -> tuple[int, int]:
    """Of the weights of one call: what is gathered for each pass, and what lasts of its gradients' messages."""
    alone, options = replace(model, calls=[model.calls[call]]), storage.options
    weights = StageWeights.of(alone, [0], storage)
    named = dict(zip(weights.names[0], weights.rows[0], strict=True))
    gathered = sum(weight.copied for weight in named.values() if weight is not None)
    last = deque(_Readers(alone).messages([0], weights) if options.zero >= 2 else [], maxlen=IN_FLIGHT)
    sent = sum(weight.sent for message in last for name in message if (weight := named[name]))
    return gathered if storage.streams else 0, sent


def largest(beside: Iterable[int], saved: Iterable[int]) -> int:
    """Of the calls of a stage, each of which holds so much ``beside`` what is kept up to it, and keeps so much itself:
    what the stage holds at most beside all that it keeps."""
    most = 0
    for each, kept in zip(beside, saved, strict=True):
        most = max(most - kept, each)
    return most
