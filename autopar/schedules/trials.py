"""Which of several orders of passes is the shortest for the times at hand: all are run, in simulated time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autopar.schedules.actions import Action
from autopar.schedules.eager import Eager, Lists, Pass, Policy
from autopar.schedules.pass_times import PassTimes

Trial = Callable[[int], Eager]
"""From the number of microbatches, a step that has run."""


@dataclass(frozen=True)
class Line:
    """The ranks of a ``placement``, what passes take on them, and whether the vocabulary is split over them."""

    placement: tuple[int, ...]
    times: PassTimes
    head: str = ""
    embedding: bool = False

    def run(self, policy: Policy, microbatches: int) -> Eager:
        """Raises ScheduleError where the policy leaves passes undone."""
        run = Eager(self.placement, microbatches, self.times, self.head, self.embedding)
        run.run(policy)
        return run

    def at_once(self) -> Line:
        """As if messages took no time."""
        return replace(self, times=self.times.at_once())


def stage_passes(run: Eager) -> Lists:
    """What its ranks have run, without the vocabulary's passes."""
    return tuple(tuple(Pass(*action[:3]) for action in row if action.kind in "FBIW") for row in run.made)


def shortest(trials: Sequence[Trial], microbatches: int, enough: int) -> tuple[tuple[Action, ...], ...]:
    """The lists of the trial with the shortest makespan, then the shortest time that the busiest rank takes from its
    first to its last pass.

    It is found with ``enough`` microbatches to fill and drain the memory: beyond that, all repeat what they did before.
    """
    probe = min(microbatches, enough) if len(trials) > 1 else microbatches
    runs = [trial(probe) for trial in trials]
    keys = [(round(run.makespan, 9), round(run.longest_span, 9)) for run in runs]
    best = keys.index(min(keys))
    return runs[best].made if probe == microbatches else trials[best](microbatches).made
