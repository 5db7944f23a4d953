"""When weights are gathered and gradients scattered, where a rank doesn't store what it computes with.

A *master* is what the optimizer updates: maybe this rank's rows of a weight (ZeRO: Rajbhandari et al., "ZeRO",
SC 2020), in another dtype, or on the host. Passes compute with *working copies* of it. Two ways to make these:

* per step: ``GATHER@k`` once, before everything else; they stay until the next step;
* per pass: layer by layer, one ahead of the compute, each freed after its use. ``GATHER_F3@1`` starts that one
  compute action ahead of ``F3@1``. Between two passes of one stage that follow each other it isn't needed: the last
  layers of a forward are still there for its backward, and a pass goes on to gather the first layers of the next.

All ranks that share masters run one list on one program, so they start the same collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from autopar.schedules.actions import Action, Schedule

PASSES: Final = ("F", "B", "I")
"""The passes that compute with weights; ``W`` and ``UPDATE`` don't read them."""

GATHERS: Final = ("GATHER", "GATHER_V", "GATHER_F", "GATHER_B")

LARGE_BYTES: Final = 2**20
"""A weight of so many bytes travels by itself, without a copy; smaller ones of a layer are packed."""

BUCKET_BYTES: Final = 25 * 2**20
"""Gradients that travel together are sent once there are so many bytes of them."""

BUCKETS: Final = 8
"""So many buckets a stage has at least, of what is sent at the end of a step, or no sum could begin before it."""


@dataclass(frozen=True)
class WeightMoves:
    """What moves between masters and working copies.

    ``gathers``: when working copies are made of masters (``""``: never, they are the same). ``scatters``: whether
    gradients are reduce-scattered after each backward (ZeRO 2 and 3), instead of once per step.
    """

    gathers: Literal["", "step", "pass"] = ""
    scatters: bool = False


def moves_of(schedule: Schedule) -> WeightMoves:
    """What a lowered schedule was made for, as its actions say."""
    kinds = {action.kind for row in schedule.lists for action in row}
    per_pass = kinds & {"GATHER_F", "GATHER_B"}
    return WeightMoves("pass" if per_pass else "step" if kinds & {"GATHER", "GATHER_V"} else "", "SCATTER" in kinds)


def followers(row: Sequence[Action]) -> dict[Action, Action | None]:
    """For each pass of one rank's list that computes with weights: the next one, if it is of the same stage."""
    passes = [action for action in row if action.kind in PASSES]
    pairs = zip(passes, [*passes[1:], None], strict=False)  # a rank may have no stage, and so no pass
    return {a: b if b is not None and b.stage == a.stage else None for a, b in pairs}


def gather_of(action: Action) -> Action:
    """The action that starts the gathers of a pass."""
    return Action("GATHER_F" if action.kind == "F" else "GATHER_B", action.microbatch, action.stage)


def gathers_of(schedule: Schedule, rank: int, moves: WeightMoves) -> Iterator[Action]:
    """All gathers that ``rank`` must have."""
    row = schedule.lists[rank]
    if moves.gathers and schedule.head:
        yield Action("GATHER_V")  # its passes wait for all of it, those of stages for one layer at a time
    if moves.gathers == "step":
        yield from (Action("GATHER", stage=stage) for stage, home in enumerate(schedule.placement) if home == rank)
    if moves.gathers == "pass":
        still_there = {follower for follower in followers(row).values() if follower is not None}
        yield from (gather_of(action) for action in row if action.kind in PASSES and action not in still_there)


def gather_posts(schedule: Schedule, rank: int, moves: WeightMoves) -> dict[int, list[Action]]:
    """Index in ``rank``'s list of compute actions -> the gathers right before it."""
    row = schedule.lists[rank]
    index_of = {action: index for index, action in enumerate(row)}
    posts: dict[int, list[Action]] = {}
    for gather in gathers_of(schedule, rank, moves):
        posts.setdefault(max(0, _used_at(gather, index_of) - 1), []).append(gather)
    return posts


def _used_at(gather: Action, index_of: dict[Action, int]) -> int:
    kinds = {"GATHER_F": ("F",), "GATHER_B": ("B", "I")}.get(gather.kind, ())
    passes = (Action(kind, gather.microbatch, gather.stage) for kind in kinds)
    return next((index_of[action] for action in passes if action in index_of), 0)


def scatters(action: Action) -> bool:
    """Whether a SCATTER follows ``action``: it completes gradients of weights."""
    return action.kind in ("B", "W")


def scatter_of(action: Action) -> Action:
    return Action("SCATTER", action.microbatch, action.stage)
