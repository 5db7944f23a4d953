"""Interlaced: the split output layer as one synchronous step of all ranks (Lin et al., "nnScaler", OSDI 2024; as the
baseline of Yeung et al., arXiv 2411.05288, section 6.1).

Time goes in intervals. In each, a rank runs a forward, a backward, and then, at the same time as all others, every
vocabulary pass of one microbatch with its exchanges in between, which nothing hides. Ranks take the forward first or
the backward first in turn: so a microbatch gets two ranks down per interval, and one up.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.schedules.actions import Action, Schedule
from autopar.schedules.exchanges import HEAD_PASSES
from autopar.schedules.placements import looped


def interlaced(ranks: int, microbatches: int, head: str, embedding: bool = False) -> Schedule:
    """Compute actions only; stage ``s`` on rank ``s``. Rank 0 keeps ``ranks + (ranks + 1) // 2`` activations.

    Raises ScheduleError for sizes below 1.
    """
    lists = tuple(tuple(_row(rank, ranks, microbatches, head, embedding)) for rank in range(ranks))
    return Schedule("interlaced", ranks, microbatches, looped(ranks), lists, head, embedding)


def _row(rank: int, ranks: int, microbatches: int, head: str, embedding: bool) -> Iterator[Action]:
    bottom = (ranks - 1) // 2  # the interval in which microbatch 0 gets to the last rank
    top = bottom + ranks  # and that in which it is back on the first
    if embedding:
        yield Action("E", 0)
    for interval in range(top + microbatches):
        pair = [("F", interval - rank // 2), ("B", interval - top + rank)]
        for kind, microbatch in pair if rank % 2 == 0 else reversed(pair):
            if 0 <= microbatch < microbatches:
                yield Action(kind, microbatch, rank)
        slot = [(kind, interval - bottom) for kind in HEAD_PASSES[head]]
        if embedding:
            slot += [("E", interval + 1), ("G", interval - top)]
        yield from (Action(kind, microbatch) for kind, microbatch in slot if 0 <= microbatch < microbatches)
