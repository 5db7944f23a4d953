"""By how much collectives slow the passes that they run beside, since their kernels hold multiprocessors.

What of a collective runs beside a pass is what :class:`autopar.planner.zero.MoveCosts` says isn't left when the pass
ends: a gather for each pass beside that pass (ZeRO 3); a scatter beside each backward, or beside the pass that makes
weights' gradients; the reduction beside the last of those, and the one gather of a step beside the first forward, which
count with their share of an update's microbatches. What is left doesn't shrink because passes take longer.

Messages between stages and copies to the host hold a few multiprocessors or none, and slow nothing. Nor is counted what
is left of a collective and runs beside a later pass, what ranks exchange for a split vocabulary, and what passes send
beside their own compute (:attr:`autopar.planner.block_costs.BlockCost.hidden`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopar.cost_models import step
from autopar.planner.zero import MoveCosts


class Slowed(NamedTuple):
    """Seconds that passes of a stage take longer, per microbatch on the average of an update: forward, backward, and of
    this the part that makes weights' gradients, where it is a pass of its own."""

    forward: float
    backward: float
    weights: float


class Passes(NamedTuple):
    """Seconds of a stage's passes of a microbatch; ``weights`` is the part of the backward that may be put off."""

    forward: float
    backward: float
    weights: float


@dataclass(frozen=True)
class Contention:
    """Of stages whose weights move as ``moves`` says, in an update of so many ``microbatches``; ``split``: their
    backwards are two passes."""

    moves: MoveCosts
    microbatches: int
    split: bool

    def slowed(self, calls: Sequence[int], passes: Passes) -> Slowed:
        """The passes of ``calls``, which would take so long with all multiprocessors."""
        moves, once = self.moves, 1 / self.microbatches
        gathered, scattered, reduced = moves.gathering(calls), moves.scattering(calls), moves.reducing(calls)
        if not gathered.held_seconds and not scattered.held_seconds and not reduced.held_seconds:
            return Slowed(0.0, 0.0, 0.0)
        completing = passes.weights if self.split else passes.backward
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
        if not self.split:
            return Slowed(forward, step.slowed_seconds([*back, *sums], passes.backward), 0.0)
        weights = step.slowed_seconds(sums, passes.weights)
        return Slowed(forward, step.slowed_seconds(back, passes.backward - passes.weights) + weights, weights)
