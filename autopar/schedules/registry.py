"""The schedules by name: one row each, what it supports, and who generates it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from autopar.errors import ScheduleError
from autopar.schedules.actions import HEADS, Schedule
from autopar.schedules.dualpipe_v import dualpipe_v
from autopar.schedules.gpipe import gpipe
from autopar.schedules.interlaced import interlaced
from autopar.schedules.interleaved import interleaved
from autopar.schedules.naive import naive
from autopar.schedules.one_f_one_b import one_f_one_b, one_f_one_b_vocabulary
from autopar.schedules.pass_times import PassTimes
from autopar.schedules.pipedream import pipedream
from autopar.schedules.placements import looped, v_shaped
from autopar.schedules.v_shaped import v_half, v_min, zb_v
from autopar.schedules.vocabulary import BARRIERS, with_vocabulary
from autopar.schedules.zero_bubble import zb_h1, zb_h2, zero_bubble


@dataclass(frozen=True)
class Request:
    """What a generator is asked for: sizes that it supports, and pass times of every stage and rank."""

    ranks: int
    microbatches: int
    chunks: int
    limit: int
    times: PassTimes
    head: str
    embedding: bool


@dataclass(frozen=True)
class Row:
    """What is known of a schedule before it is generated.

    ``placement`` is ``straight`` (stage s on rank s), ``looped`` (round the ranks, once per chunk) or ``v`` (down and
    up again). ``chunks`` is how many stages a rank holds, or 0 where it is free to choose. ``heads`` are the ways to
    split the output layer over the pipeline; those of :data:`HEADS` that aren't there are refused.
    ``limited`` schedules take a limit on the microbatches in flight, ``cost_aware`` ones ask for pass times.
    ``least_per_rank`` is how many microbatches per rank are needed, 0 where one in all is enough. ``takes_turns``:
    while there are further forwards, ranks run backwards.
    """

    generate: Callable[[Request], Schedule]
    summary: str
    placement: str = "straight"
    chunks: int = 1
    splits_backward: bool = False
    heads: tuple[str, ...] = HEADS
    asynchronous: bool = False
    limited: bool = False
    cost_aware: bool = False
    least_per_rank: int = 0
    takes_turns: bool = True


def _plain(base: Callable[[Request], Schedule]) -> Callable[[Request], Schedule]:
    """A generator of the stages' passes alone, made to take the vocabulary's."""

    def generator(request: Request) -> Schedule:
        schedule = base(request)
        return with_vocabulary(schedule, request.head, request.embedding, request.times) if request.head else schedule

    return generator


def _one_f_one_b(request: Request) -> Schedule:
    if not request.head:
        return one_f_one_b(request.ranks, request.microbatches)
    return one_f_one_b_vocabulary(request.ranks, request.microbatches, request.head, request.embedding, request.times)


def _zero_bubble(per_rank: int) -> Callable[[Request], Schedule]:
    def generator(r: Request) -> Schedule:
        limit = r.limit or per_rank * r.ranks + BARRIERS[r.head]
        return zero_bubble(r.ranks, r.microbatches, limit, r.times, r.head, r.embedding)

    return generator


def _zb_v(r: Request) -> Schedule:
    return zb_v(r.ranks, r.microbatches, r.limit or r.ranks + BARRIERS[r.head], r.times, r.head, r.embedding)


SCHEDULES: Final[Mapping[str, Row]] = {
    "naive": Row(
        lambda r: naive(r.ranks, r.microbatches, r.head, r.embedding),
        "one microbatch through all stages and back before the next",
    ),
    "gpipe": Row(
        _plain(lambda r: gpipe(r.ranks, r.microbatches)), "all forwards, then all backwards", takes_turns=False
    ),
    "1f1b": Row(_one_f_one_b, "one forward, one backward; PipeDream-Flush, DAPPLE"),
    "interlaced": Row(
        lambda r: interlaced(r.ranks, r.microbatches, r.head, r.embedding),
        "1F1B with a synchronous split output layer: one and a half times the memory",
        heads=HEADS[1:],
    ),
    "pipedream": Row(
        lambda r: pipedream(r.ranks, r.microbatches),
        "1F1B that updates the weights after every backward: stale weights, another result",
        heads=("",),
        asynchronous=True,
    ),
    "interleaved": Row(
        _plain(lambda r: interleaved(r.ranks, r.microbatches, r.chunks)),
        "1F1B over several chunks per rank",
        placement="looped",
        chunks=0,
    ),
    "zb-h1": Row(
        _plain(lambda r: zb_h1(r.ranks, r.microbatches)),
        "1F1B with the backward split: memory of 1F1B, a third of its bubble",
        splits_backward=True,
    ),
    "zb-h2": Row(
        _plain(lambda r: zb_h2(r.ranks, r.microbatches)),
        "split backward, twice the memory of 1F1B, no bubble inside",
        splits_backward=True,
    ),
    "zb-1p": Row(
        _zero_bubble(1),
        "split backward, ordered by pass times in the memory of 1F1B",
        splits_backward=True,
        cost_aware=True,
    ),
    "zb-2p": Row(
        _zero_bubble(2),
        "split backward, ordered by pass times in twice the memory of 1F1B",
        splits_backward=True,
        cost_aware=True,
    ),
    "zb": Row(
        _zero_bubble(1),
        "split backward, ordered by pass times under a memory limit",
        splits_backward=True,
        limited=True,
        cost_aware=True,
    ),
    "zb-v": Row(
        _zb_v,
        "V placement, split backward: memory of 1F1B, ordered by pass times; no bubble inside",
        placement="v",
        chunks=2,
        splits_backward=True,
        limited=True,
        cost_aware=True,
    ),
    "v-half": Row(
        lambda r: v_half(r.ranks, r.microbatches, r.times, r.head, r.embedding),
        "V placement, split backward: half the memory of 1F1B, half its bubble",
        placement="v",
        chunks=2,
        splits_backward=True,
        cost_aware=True,
    ),
    "v-min": Row(
        lambda r: v_min(r.ranks, r.microbatches, r.times, r.head, r.embedding),
        "V placement, split backward: a third of the memory of 1F1B",
        placement="v",
        chunks=2,
        splits_backward=True,
        cost_aware=True,
    ),
    "dualpipe-v": Row(
        lambda r: dualpipe_v(r.ranks, r.microbatches),
        "V placement, forwards and backwards as neighbours that can overlap; for expert parallelism",
        placement="v",
        chunks=2,
        splits_backward=True,
        heads=("",),
        least_per_rank=2,
    ),
}
"""All schedules, by name."""


def placement(name: str, ranks: int, chunks: int | None = None) -> tuple[int, ...]:
    """The pipeline rank of each stage in schedule ``name``. Raises ScheduleError as :func:`generate`."""
    row = _row(name)
    count = _chunks(name, row, chunks)
    return v_shaped(ranks) if row.placement == "v" else looped(ranks, count)


def swaps_both_ways(name: str, microbatches: int) -> bool:
    """Whether activations go to the host and back at the same time, where a schedule sends any there."""
    return microbatches > 1 and (name not in SCHEDULES or SCHEDULES[name].takes_turns)


def generate(
    name: str,
    ranks: int,
    microbatches: int,
    *,
    chunks: int | None = None,
    limit: int | None = None,
    costs: PassTimes | None = None,
    head: str = "",
    embedding: bool = False,
) -> Schedule:
    """The compute actions of schedule ``name``; :func:`autopar.schedules.lower` adds the rest.

    ``chunks`` is the number of stages per rank (None: what the schedule has, 2 where that is free). ``limit`` is the
    most microbatches whose activations of a rank's whole share may be kept at once. ``costs`` are the pass times that
    cost-aware schedules order passes by (None: F, I and W take the same). ``head`` splits the output layer over the
    pipeline, ``embedding`` the input layer too.
    Raises ScheduleError for an unknown name, sizes below 1, and what the schedule doesn't have, saying what works.
    """
    row = _row(name)
    _check_sizes(name, row, ranks, microbatches)
    count = _chunks(name, row, chunks)
    _check_vocabulary(name, row, head, embedding)
    request = Request(
        ranks=ranks,
        microbatches=microbatches,
        chunks=count,
        limit=_limit(name, row, limit, head),
        times=_times(name, costs, ranks, ranks * count),
        head=head,
        embedding=embedding,
    )
    return replace(row.generate(request), name=name)


def _row(name: str) -> Row:
    row = SCHEDULES.get(name)
    if row is None:
        raise ScheduleError(f"unknown schedule {name!r}; known schedules are {', '.join(SCHEDULES)}")
    return row


def _check_sizes(name: str, row: Row, ranks: int, microbatches: int) -> None:
    for what, count in (("ranks", ranks), ("microbatches", microbatches)):
        if not _is_whole(count) or count < 1:
            raise ScheduleError(f"schedule {name!r} has {count!r} {what}; it needs at least 1, whole")
    least = row.least_per_rank * ranks
    if microbatches < least:
        raise ScheduleError(
            f"schedule {name!r} on {ranks} ranks needs at least {least} microbatches, not {microbatches}"
        )


def _chunks(name: str, row: Row, chunks: int | None) -> int:
    if chunks is None:
        return row.chunks or 2
    if not _is_whole(chunks) or chunks < 1 or chunks != (row.chunks or chunks):
        works = f"exactly {row.chunks}" if row.chunks else "at least 1, whole"
        raise ScheduleError(f"schedule {name!r} can't have {chunks!r} chunks per rank; it takes {works}")
    return chunks


def _check_vocabulary(name: str, row: Row, head: str, embedding: bool) -> None:
    if head not in row.heads:
        having = ", ".join(other for other, its in SCHEDULES.items() if head in its.heads)
        works = f"it takes {', '.join(map(repr, row.heads))}" + (f"; {head!r} works with {having}" if having else "")
        raise ScheduleError(f"schedule {name!r} can't have head {head!r}; {works}")
    if embedding and not head:
        raise ScheduleError(f"schedule {name!r}: the embedding is split with a head only; choose one of {HEADS[1:]}")


def _limit(name: str, row: Row, limit: int | None, head: str) -> int:
    """The limit, 0 where the schedule's own holds."""
    if limit is None:
        return 0
    if not row.limited:
        limited = ", ".join(other for other, its in SCHEDULES.items() if its.limited)
        raise ScheduleError(f"schedule {name!r} takes no memory limit; {limited} do")
    least = 1 + BARRIERS[head]
    if not _is_whole(limit) or limit < least:
        raise ScheduleError(
            f"schedule {name!r} can't keep to {limit!r} microbatches in flight; with head {head!r} the least is {least}"
        )
    return limit


def _times(name: str, costs: PassTimes | None, ranks: int, stages: int) -> PassTimes:
    if costs is None:
        return PassTimes.unit(stages, ranks)
    if len(costs.forward) != stages:
        raise ScheduleError(f"schedule {name!r} has {stages} stages, but costs has pass times of {len(costs.forward)}")
    for kind, seconds in costs.vocabulary.items():
        if len(seconds) != ranks:
            raise ScheduleError(f"schedule {name!r} has {ranks} ranks, but costs has {len(seconds)} times of {kind}")
    return costs


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
