"""Which stages' activations go to the host between forward and backward: as few as fit, where the copies cost least.

Sets: stages k, each on its pipeline rank; S the stages that offload (all of their microbatches that a list gives time
for, :mod:`autopar.schedules.offloads`). For each rank r that is over its memory without: choose S among its stages so
that the most bytes it keeps at any time of the timeline, copies on their way included, are at most ``free_bytes[r]``.
Minimise (seconds of the step, bytes moved). The timeline is the judge of both: a copy that ends before anyone waits for
it costs nothing. Up to :data:`_JOINT` choices for all such ranks together are all tried, which is exact; beyond, each
takes those of its stages whose activations wait the longest, one after the other until it fits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, chain, combinations, product
from typing import Final

from autopar.cluster import Device
from autopar.errors import ArgumentError, BudgetError
from autopar.options import Options
from autopar.schedules import Costs, Schedule, Timeline, Timelines
from autopar.schedules.kept import kept_stages

_JOINT: Final = 64

Stages = tuple[int, ...]


def choose(
    schedule: Schedule, costs: Costs, free_bytes: Sequence[int], timelines: Timelines | None = None
) -> Stages | None:
    """The stages of a lowered schedule to offload; none of a rank that has room. None: nothing fits.

    ``free_bytes`` per pipeline rank: what it has left for activations.
    """
    timelines = timelines or Timelines()
    without = timelines.of(schedule, costs)
    peaks, least = without.peak_activation_bytes, without.makespan_seconds
    ranks = [rank for rank, (peak, free) in enumerate(zip(peaks, free_bytes, strict=True)) if peak > free]
    own = {rank: _by_wait(schedule, costs, rank) for rank in ranks}
    if math.prod(2 ** len(stages) - 1 for stages in own.values()) > _JOINT:
        return _growing(schedule, costs, free_bytes, without, timelines)
    every = [tuple(chain(*some)) for some in product(*map(_subsets, own.values()))]
    return _best(schedule, costs, free_bytes, every, least, timelines)


def _growing(
    schedule: Schedule, costs: Costs, free_bytes: Sequence[int], without: Timeline, timelines: Timelines
) -> Stages | None:
    """As few stages of each rank as fit, those that wait the longest first: at first as many as would make room if
    nothing of them stayed, then by what those made room for."""
    peaks = without.peak_activation_bytes
    waiting = {rank: _by_wait(schedule, costs, rank) for rank in range(schedule.ranks)}
    counts, kept = [0] * schedule.ranks, kept_stages(schedule)
    while over := [rank for rank, (peak, free) in enumerate(zip(peaks, free_bytes, strict=True)) if peak > free]:
        if any(counts[rank] == len(waiting[rank]) for rank in over):
            return None
        for rank in over:
            lacks = peaks[rank] - free_bytes[rank]
            if counts[rank]:
                more = lacks * counts[rank] // max(1, without.peak_activation_bytes[rank] - peaks[rank])
            else:
                room = accumulate(kept[stage] * costs.offload_bytes[stage] for stage in waiting[rank])
                more = sum(bytes_ < lacks for bytes_ in room) + 1
            counts[rank] = min(len(waiting[rank]), counts[rank] + max(1, more))
        found = tuple(sorted(chain(*(waiting[rank][:count] for rank, count in enumerate(counts)))))
        peaks = timelines.offloading(schedule, found, costs).peak_activation_bytes
    return found if any(counts) else ()


def _by_wait(schedule: Schedule, costs: Costs, rank: int) -> list[int]:
    """The stages of ``rank`` that have something to move, by how many actions lie between forwards and backwards."""
    waits: Counter[int] = Counter()
    for number, action in enumerate(schedule.lists[rank]):
        if action.kind in ("F", "B", "I") and costs.offload_bytes[action.stage]:
            waits[action.stage] += -number if action.kind == "F" else number
    return sorted(waits, key=lambda stage: (-waits[stage], stage))


def offloaded_stages(
    schedule: Schedule, costs: Costs, free_bytes: Sequence[int], budget_bytes: int, timelines: Timelines
) -> Stages:
    """:func:`choose`, where a rank's whole budget is ``budget_bytes``.

    Raises BudgetError, which says what the rank that lacks the most keeps with all offloaded.
    """
    found = choose(schedule, costs, free_bytes, timelines)
    if found is not None:
        return found
    leanest = timelines.offloading(schedule, range(schedule.stages), costs)
    lacks = [peak - free for peak, free in zip(leanest.peak_activation_bytes, free_bytes, strict=True)]
    rank = lacks.index(max(lacks))
    raise BudgetError(
        f"with activations on the host, pipeline rank {rank} still keeps "
        f"{leanest.peak_activation_bytes[rank] / 2**20:.4g} MiB of them on the device, where "
        f"{free_bytes[rank] / 2**20:.4g} MiB are left; give it {max(1, lacks[rank]) / 2**20:.4g} MiB more, more "
        "microbatches of fewer rows, or recompute='full'",
        budget_bytes + max(1, lacks[rank]),
    )


def _subsets(stages: Sequence[int]) -> list[Stages]:
    """What a rank may offload: something, of what it has."""
    return [some for count in range(1, len(stages) + 1) for some in combinations(sorted(stages), count)]


def _best(
    schedule: Schedule,
    costs: Costs,
    free_bytes: Sequence[int],
    choices: Sequence[Stages],
    least_seconds: float,
    timelines: Timelines,
) -> Stages | None:
    """The best of ``choices`` with which all ranks fit. No copies make a step shorter than ``least_seconds``, that
    without any: of those that take no longer, the one that moves the least is the best."""
    found: list[tuple[float, int, Stages]] = []
    for moved, stages in sorted((sum(costs.offload_bytes[k] for k in some), tuple(sorted(some))) for some in choices):
        timeline = timelines.offloading(schedule, stages, costs)
        if all(peak <= free for peak, free in zip(timeline.peak_activation_bytes, free_bytes, strict=True)):
            found.append((timeline.makespan_seconds, moved, stages))
            if timeline.makespan_seconds <= least_seconds:
                break
    return min(found)[2] if found else None


def host_peak_bytes(timeline: Timeline, rank: int) -> int:
    """The most bytes of activations that ``rank`` has on the host."""
    change = {"OFFLOAD": 1, "FETCH": -1}
    moved = (
        change.get(action.kind, 0) * (timeline.costs.offload_bytes[action.stage] if action.stage >= 0 else 0)
        for action in timeline.schedule.lists[rank]
    )
    return max(accumulate(moved, initial=0))


def require_host(options: Options, device: Device, needed_bytes: int = 0) -> None:
    """Raise ArgumentError where ``options`` offload something, but the host has no memory, or not ``needed_bytes``."""
    there = device.host_memory_bytes if device.host_bytes_per_second else 0
    if not options.offload or there >= max(1, needed_bytes):
        return
    what = " and ".join(options.offload)
    if not there:
        raise ArgumentError(
            f"offload of {what}, but the cluster says of {device.name!r} that no host memory belongs to it; give its "
            "share of it, host_memory_bytes, and host_bytes_per_second in the cluster's [device] table, or leave "
            "offload out"
        )
    raise ArgumentError(
        f"offload of {what} needs {needed_bytes / 2**30:.3g} GiB of host memory for each rank, but the cluster says "
        f"that {device.name!r} has {device.host_memory_bytes / 2**30:.3g} GiB; offload less, use ZeRO (zero=1 to 3) to "
        "split what lies there over dp, or raise host_memory_bytes if there is more"
    )
