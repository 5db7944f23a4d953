"""By how much collectives slow the passes that they run beside, since their kernels hold multiprocessors.

What of a collective runs beside a pass is what :class:`autopar.planner.zero.MoveCosts` says isn't left when the pass
ends: a gather for each pass beside that pass (ZeRO 3); a scatter beside each backward, or beside the pass that makes
weights' gradients; the reduction beside the last of those, and the one gather of a step beside the first forward, which
count with their share of an update's microbatches. What is left doesn't shrink because passes take longer.

Rows of experts that travel within a pass, beside others' compute, slow that pass as long
(:attr:`autopar.planner.block_costs.BlockCost.hidden`).

Messages between stages, around rings, and copies to the host hold a few multiprocessors or none, and slow nothing. Nor
is counted what is left of a collective and runs beside a later pass, and what ranks exchange for a split vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.cost_models import step
from autopar.planner.block_costs import BlockCost, Both, Machine
from autopar.planner.zero import MoveCosts
from autopar.rules.experts import ACROSS
from autopar.schedules.backwards import Backwards


class Slowed(NamedTuple):
    """Seconds that passes of a stage take longer, per microbatch on the average of an update: forward, backward, and of
    this the part that makes weights' gradients, where it is a pass of its own; and a backward that is ``whole`` where
    others aren't (else the same)."""

    forward: float
    backward: float
    weights: float
    whole: float


class Passes(NamedTuple):
    """Seconds of a stage's passes of a microbatch; ``weights`` is the part of the backward that may be put off, and
    ``whole`` a backward that is one pass."""

    forward: float
    backward: float
    weights: float
    whole: float


@dataclass(frozen=True)
class Contention:
    """Of stages whose weights move as ``moves`` says, in an update of so many ``microbatches``."""

    moves: MoveCosts
    microbatches: int

    def slowed(self, calls: Sequence[int], passes: Passes, costs: Iterable[BlockCost], backwards: Backwards) -> Slowed:
        """The passes of ``calls``, which would take so long with all multiprocessors; ``costs`` are those of each.
        Sums are what is left, and beside, of the kind of backward that is the last; each of either kind has a share."""
        forward, backward = _exchanges(costs, self.moves.machine)
        moved = self._by_moves(calls, passes, backwards)
        return Slowed(forward + moved.forward, backward + moved.backward, moved.weights, backward + moved.whole)

    def _by_moves(self, calls: Sequence[int], passes: Passes, backwards: Backwards) -> Slowed:
        """Of weights and gradients."""
        moves, once = self.moves, 1 / self.microbatches
        gathered, scattered, reduced = moves.gathering(calls), moves.scattering(calls), moves.reducing(calls)
        if not gathered.held_seconds and not scattered.held_seconds and not reduced.held_seconds:
            return Slowed(0.0, 0.0, 0.0, 0.0)
        completing = passes.weights if backwards.ends_split else passes.whole
        sums = [
            step.hidden(scattered, moves.scatter_seconds(calls), moves.left_to_scatter(calls, completing)),
            step.hidden(reduced, moves.reduce_seconds(calls), moves.left_to_reduce(calls, completing)).times(once),
        ]
        if moves.streams:
            before, back = gathered, [gathered]
        else:
            left = moves.first_gathered(calls, passes.forward)
            before, back = step.hidden(gathered, moves.gather_seconds(calls), left).times(once), []
        forward = step.slowed_seconds([before], passes.forward)
        whole = step.slowed_seconds([*back, *sums], passes.whole)
        if not backwards.split:
            return Slowed(forward, whole, 0.0, whole)
        weights = step.slowed_seconds(sums, passes.weights)
        backward = step.slowed_seconds(back, passes.backward - passes.weights) + weights
        return Slowed(forward, backward, weights, whole if backwards.whole else backward)


def _exchanges(costs: Iterable[BlockCost], machine: Machine) -> Both:
    """Of rows that travel to experts beside what the same pass computes, which takes as long or longer."""
    found: list[Both] = []
    for cost in costs:
        for (axes, kind), (forward, backward) in cost.hidden.items():
            share = machine.held_share(axes.split("+"), kind) if kind in ("all_to_all", ACROSS) else 0.0
            found.append((share * forward, share * backward))
    return math.fsum(f for f, _ in found), math.fsum(b for _, b in found)
