"""DualPipeV: a V of two stages per rank, forwards and backwards side by side.

DualPipe is of DeepSeek-V3 (arXiv 2412.19437, section 3.2.1); DualPipeV is the half of it with each parameter
once.

Forwards of one direction and backwards of the other are neighbours in the lists, so that an executor can overlap the
computation of one with the communication of the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import count

from autopar.schedules.actions import Action, Schedule
from autopar.schedules.placements import v_shaped


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """Compute actions only; at most ``ranks`` and a half microbatches in flight, each with both stages' activations.

    Needs ``2 * ranks`` microbatches. Raises ScheduleError for sizes below 1.
    """
    lists = tuple(tuple(_Row(rank, ranks).run(microbatches)) for rank in range(ranks))
    return Schedule("dualpipe-v", 2 * ranks, microbatches, v_shaped(ranks), lists)


class _Row:
    """One rank's list. ``0`` is its stage on the way down, ``1`` the one on the way up."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.above, self.below = rank + 1, ranks - rank - 1
        self.stages = (rank, 2 * ranks - 1 - rank)
        self.forwards = (count(), count())
        self.backwards = (count(), count())
        self.weights: deque[Action] = deque()

    def run(self, microbatches: int) -> Iterator[Action]:
        """Fill the way down; turn; both directions side by side; drain, with W kept for the gaps at the end."""
        main = microbatches - 2 * self.below - self.above
        yield from self._repeat(2 * self.below, "F0")
        yield from self._repeat(self.above, "F0 F1")
        yield from self._repeat(self.below, "I1 W F1")
        yield from self._repeat(main, "F0 B1 F1 B0")
        yield from self._repeat(self.below, "B1 F1 B0")
        yield from self._drain()
        yield from self._repeat(self.below, "W I0")
        yield from self._repeat(self.above, "W")

    def _drain(self) -> Iterator[Action]:
        """The later half of these backwards is split: what is above waits for I only."""
        for step in range(2 * self.above):
            yield from self._repeat(1, ("B" if step < self.above else "I") + "10"[step % 2])

    def _repeat(self, times: int, steps: str) -> Iterator[Action]:
        for _ in range(times):
            for step in steps.split():
                yield self._action(step[0], int(step[1:] or 0))

    def _action(self, kind: str, way: int) -> Action:
        if kind == "W":
            return self.weights.popleft()
        number = next((self.forwards if kind == "F" else self.backwards)[way])
        if kind == "I":
            self.weights.append(Action("W", number, self.stages[way]))
        return Action(kind, number, self.stages[way])
