"""Interleaved 1F1B: several chunks per rank (Narayanan et al., arXiv 2104.04473, section 2.2)."""

from __future__ import annotations

from itertools import chain

from autopar.schedules.actions import Action, Schedule
from autopar.schedules.placements import looped


def interleaved(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Compute actions only; stage ``s`` on rank ``s % ranks``.

    Microbatches go through the chunks in groups. The paper's groups are of ``ranks`` microbatches; where that doesn't
    divide, groups are larger, as equal as they can be, so that no rank ever waits for the next chunk's input. With
    ``g`` the largest group (``ranks`` where it divides), rank 0 keeps ``(chunks - 1) g + 2 ranks - 1`` chunks'
    activations; alone, it runs forwards in turns with backwards of the microbatch before, and keeps ``chunks``. Raises
    ScheduleError for sizes below 1.
    """
    groups = groups_of(ranks, microbatches)
    lists = tuple(_list(rank, ranks, chunks, groups) for rank in range(ranks))
    return Schedule("interleaved", ranks * chunks, microbatches, looped(ranks, chunks), lists)


def groups_of(ranks: int, microbatches: int) -> list[range]:
    """The larger groups come first: they set how many forwards the warm-up needs."""
    if ranks < 1 or microbatches < 1:
        return []
    count = max(1, microbatches // ranks)
    sizes = [microbatches // count + (index < microbatches % count) for index in range(count)]
    return [range(sum(sizes[:index]), sum(sizes[: index + 1])) for index in range(count)]


def _list(rank: int, ranks: int, chunks: int, groups: list[range]) -> tuple[Action, ...]:
    stages = range(rank, ranks * chunks, ranks)
    forwards = [Action("F", m, stage) for group in groups for stage in stages for m in group]
    backwards = [Action("B", m, stage) for group in groups for stage in reversed(stages) for m in group]
    largest = len(groups[0]) if groups else 0
    warm_up = min((chunks - 1) * largest + (2 if chunks > 1 else 1) * (ranks - rank - 1), len(forwards))
    steady = chain.from_iterable(zip(forwards[warm_up:], backwards, strict=False))
    return (*forwards[:warm_up], *steady, *backwards[len(forwards) - warm_up :])
