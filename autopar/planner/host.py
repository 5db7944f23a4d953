"""What the host takes to issue a step, where it isn't the one that computes it: calls, each of the same seconds.

A *call* is an op of the emitted text (views, casts and collectives are some), once more where a backward runs it again;
in the backward, a gradient that an op makes of one of its operands, and a weight's that is added up; a weight that is
cast or gathered; a weight that is updated. What moves rows of experts is as many calls as it has kernels and messages
(:mod:`autopar.rules.issued`). Not counted are messages to other pipeline ranks, sums of gradients over
ranks and passes of a split vocabulary: few ops, and large ones. So a step has more calls rather than fewer.

The host runs ahead of the device and waits for nothing. Then a step takes what the device does, or what the host does,
whichever is longer: no lead is lost from one step to the next (:data:`autopar.cost_models.step.HOST_SECONDS`).
But where tokens go to experts, it reads how many rows each one gets, and until then has nothing to issue: in each
forward it loses its lead. So a pass of such a stage takes as long as the host needs for it, at least.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from torch import fx

from autopar.cost_models import step
from autopar.graph import Model
from autopar.planner.activations import Alternative
from autopar.planner.between import Between
from autopar.planner.block_costs import BlockCost
from autopar.planner.zero import MoveCosts


class Waited(NamedTuple):
    """Seconds that passes of a stage wait for the host: forward, backward, and a backward that is ``whole`` where
    others are two passes (else the same)."""

    forward: float
    backward: float
    whole: float


@dataclass(frozen=True)
class Issued:
    """Calls, by stage: of the ``passes`` of a microbatch, forward and backward; how many weights are copied ``once`` a
    step; whether the host ``waits`` for what routers chose. By pipeline rank: weights that are ``updated``."""

    moves: MoveCosts
    passes: tuple[tuple[int, int], ...]
    once: tuple[int, ...]
    waits: tuple[bool, ...]
    updated: tuple[int, ...]

    @classmethod
    def of(
        cls,
        moves: MoveCosts,
        costs: Sequence[BlockCost],
        beside: Sequence[Between],
        chosen: Mapping[int, Alternative],
        tables: Sequence[int],
        *,
        split: bool,
    ) -> Issued:
        """``beside`` is what stages do between their calls, ``chosen`` what these recompute; each rank has rows of
        ``tables``; ``split``: backwards are two passes."""
        model, passes = moves.model, list[tuple[int, int]]()
        copied = tuple(map(moves.copied, moves.stages))
        for stage, between, copies in zip(moves.stages, beside, copied, strict=True):
            blocks = [costs[model.calls[i].block] for i in stage]
            own = [cost.passes(split=split) for cost in blocks]
            idle = frozenset[fx.Node]().union(*(cost.idle for cost in blocks))
            forward, backward = (sum(ways) for ways in zip(between.calls, *own, strict=True))
            again = sum(chosen[i].rerun_calls(split=split) for i in stage)
            summed = sum(node not in idle for _, node in moves.trained(stage, borrowed=True))
            gathered = copies if moves.streams else 0
            passes.append((forward + gathered, backward + again + summed + gathered))
        updated = []
        for rank in range(max(moves.placement) + 1):
            mine = [stage for home, stage in zip(moves.placement, moves.stages, strict=True) if home == rank]
            updated.append(_trained(model, [*tables, *chain.from_iterable(mine)]))
        waits = tuple(any(costs[model.calls[i].block].reads_counts for i in stage) for stage in moves.stages)
        once = copied if not moves.streams else (0,) * len(copied)
        return cls(moves, tuple(passes), once, waits, tuple(updated))

    def step_seconds(self, microbatches: int, updates: int) -> tuple[float, ...]:
        """By pipeline rank, of a step of so many microbatches, and ``updates`` of the weights."""
        calls = [updates * count for count in self.updated]
        for home, each, once in zip(self.moves.placement, self.passes, self.once, strict=True):
            calls[home] += microbatches * sum(each) + once
        return tuple(step.host_seconds(count, self.moves.machine.device) for count in calls)

    def waited(self, stage: int, forward: float, backward: float, whole: float) -> Waited:
        """How much longer than so many seconds a stage's passes take because the host has no lead."""
        if not self.waits[stage]:
            return Waited(0.0, 0.0, 0.0)
        ahead, back = (step.host_seconds(calls, self.moves.machine.device) for calls in self.passes[stage])
        return Waited(*(max(0.0, host - own) for host, own in ((ahead, forward), (back, backward), (back, whole))))


def _trained(model: Model, calls: Sequence[int]) -> int:
    """How many trained parameters ``calls`` read, each once."""
    names = {name for call in calls for name in model.calls[call].parameters}
    known = (model.parameters[name] for name in names)
    return sum(parameter.trainable and not parameter.is_buffer for parameter in known)
