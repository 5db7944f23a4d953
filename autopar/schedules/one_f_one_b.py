"""1F1B: one forward, one backward (PipeDream-Flush: Narayanan et al., arXiv 2006.09503, section 3.2).

With the vocabulary layers split over the pipeline: Yeung et al., arXiv 2411.05288, section 5 and appendix C.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from autopar.schedules.actions import Action, Schedule
from autopar.schedules.exchanges import HEAD_PASSES
from autopar.schedules.pass_times import PassTimes
from autopar.schedules.placements import looped
from autopar.schedules.vocabulary import BARRIERS


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Compute actions only; stage ``s`` on rank ``s``, which keeps at most ``ranks - s`` activations.

    With fewer microbatches than ranks the first ranks have no steady state left: they run as in GPipe.
    Raises ScheduleError for sizes below 1.
    """
    lists = tuple(_list(stage, ranks, microbatches) for stage in range(ranks))
    return Schedule("1f1b", ranks, microbatches, looped(ranks), lists)


def _list(stage: int, stages: int, microbatches: int) -> tuple[Action, ...]:
    forwards = [Action("F", microbatch, stage) for microbatch in range(microbatches)]
    backwards = [Action("B", microbatch, stage) for microbatch in range(microbatches)]
    warm_up = min(stages - stage - 1, microbatches)
    steady = chain.from_iterable(zip(forwards[warm_up:], backwards, strict=False))
    return (*forwards[:warm_up], *steady, *backwards[microbatches - warm_up :])


def one_f_one_b_vocabulary(ranks: int, microbatches: int, head: str, embedding: bool, times: PassTimes) -> Schedule:
    """1F1B with the passes of ``head`` and of a split input embedding.

    Rank ``r`` keeps ``ranks - r`` activations and one more per barrier of ``head``. All ranks run the passes of a
    microbatch in one slot per forward and backward, with the earlier microbatches' later passes first:
    ``T(j - 1) S(j)``.
    """
    slots = _slots(ranks, BARRIERS[head], times)
    lists = tuple(
        tuple(_VocabularyRow(rank, ranks, microbatches, head, embedding, slots).run()) for rank in range(ranks)
    )
    return Schedule("1f1b", ranks, microbatches, looped(ranks), lists, head, embedding)


@dataclass(frozen=True)
class _Slots:
    """Where a rank's slots lie: ``before`` its first backward that many; then one per backward, right after it
    or, if ``after_forward``, after the forward that follows."""

    before: int
    after_forward: bool


def _slots(ranks: int, barriers: int, times: PassTimes) -> list[_Slots]:
    """Per rank, so that all run a slot at about the same time, with no bubble between forward and backward.

    From the last rank up, the slot moves to earlier within its interval by a forward per rank, as long as it is at
    most a backward ahead; then a rank has it after its forward, and the next one begins anew.
    """
    forward = sum(times.forward) / ranks
    backward = (sum(times.input_gradient) + sum(times.weight_gradient)) / ranks
    found = [_Slots(barriers, False)]
    offset = 0.0
    while len(found) < ranks:
        last = found[-1]
        if last.after_forward:
            found.append(_Slots(last.before, False))
            offset += backward - forward
        elif offset - forward >= -backward:
            found.append(_Slots(last.before + 1, False))
            offset -= forward
        else:
            found.append(_Slots(last.before + 1, True))
    return found[::-1]


class _VocabularyRow:
    """One rank's list as it grows; counts what it has so far."""

    def __init__(
        self, rank: int, ranks: int, microbatches: int, head: str, embedding: bool, slots: list[_Slots]
    ) -> None:
        self.rank, self.ranks, self.microbatches, self.embedding = rank, ranks, microbatches, embedding
        self.passes, self.barriers, self.slots = HEAD_PASSES[head], BARRIERS[head], slots
        self.forwards = self.slot = self.embedded = self.scattered = 0

    def run(self) -> Iterator[Action]:
        mine = self.slots[self.rank]
        yield from self._warm_up(mine.before)
        for backward in range(self.microbatches):
            yield Action("B", backward, self.rank)
            if mine.after_forward:
                yield from self._forward()
            yield from self._slot()
            if not mine.after_forward:
                yield from self._forward()
        while self._is_left():
            yield from self._slot()

    def _is_left(self) -> bool:
        slots = self.microbatches + len(self.passes) - 1
        return self.slot < slots or (self.embedding and self.scattered < self.microbatches)

    def _warm_up(self, slots: int) -> Iterator[Action]:
        """The forwards until the first output of the last stage, then slots, with a forward per barrier between."""
        for _ in range(self.ranks - self.rank):
            yield from self._embed(self.rank + 1 + self.forwards)
            yield from self._forward()
        for slot in range(slots):
            yield from self._slot()
            if slot < self.barriers:
                yield from self._forward()

    def _forward(self) -> Iterator[Action]:
        if self.forwards < self.microbatches:
            yield Action("F", self.forwards, self.rank)
            self.forwards += 1

    def _slot(self) -> Iterator[Action]:
        for index, kind in reversed(list(enumerate(self.passes))):
            if 0 <= self.slot - index < self.microbatches:
                yield Action(kind, self.slot - index)
        yield from self._embed(self.ranks + 1 + self.slot)
        yield from self._scatter(self.slot - self.slots[0].before - 1)
        self.slot += 1

    def _embed(self, until: int) -> Iterator[Action]:
        """Embed microbatches up to ``until``: one ahead of the first stage's forward."""
        while self.embedding and self.embedded < min(until + 1, self.microbatches):
            yield Action("E", self.embedded)
            self.embedded += 1

    def _scatter(self, until: int) -> Iterator[Action]:
        """The embedding's gradients up to ``until``, which the first stage's backward has passed an interval ago."""
        while self.embedding and self.scattered < min(until + 1, self.microbatches):
            yield Action("G", self.scattered)
            self.scattered += 1
