"""Which activations go to the host between forward and backward: as few as fit.

A rank that keeps more than the ``free_bytes`` it has for activations sends some of its stages' to the host, those first
that wait the longest for their backwards; of one of these stages maybe only some microbatches
(:mod:`autopar.schedules.offloads`). Its list says when it waits for copies to have memory, so whether it fits doesn't
depend on how fast they are, and each rank is looked at by itself. What the copies cost the timeline says.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from autopar.cluster import Device
from autopar.errors import ArgumentError, BudgetError
from autopar.options import Options
from autopar.schedules import Costs, Schedule, Timeline
from autopar.schedules.actions import Action
from autopar.schedules.kept import kept_stages
from autopar.schedules.offloads import ALL, Away, Passes

Room = Sequence[int]
"""Bytes per pipeline rank that it has left for activations."""


def choose(schedule: Schedule, costs: Costs, free_bytes: Room) -> Away | None:
    """Of a lowered schedule; nothing of a rank that has room. None: nothing fits."""
    found: dict[int, int] = {}
    kept = kept_stages(schedule)
    for rank, (row, free) in enumerate(zip(schedule.lists, free_bytes, strict=True)):
        shares = _least_shares(Passes.of(row, rank, costs), kept, costs, free)
        if shares is None:
            return None
        found |= shares
    return Away(found, free_bytes)


def _least_shares(passes: Passes, kept: Sequence[int], costs: Costs, free: int) -> dict[int, int] | None:
    """Of a rank whose stages keep so many microbatches: as few as leave room for a copy that nothing waits for, else as
    few as fit."""
    lacks = passes.least_bytes({}) - free
    if lacks <= 0:
        return {}
    stages = _by_wait(passes.actions, costs)
    room = [0, *accumulate(kept[stage] * costs.offload_bytes[stage] for stage in stages for _ in range(ALL))]
    spare, tight = max((costs.offload_bytes[stage] for stage in stages), default=0), None
    # At least as many as make room if nothing of them stayed.
    for count in range(bisect_left(room, lacks * ALL), len(room)):
        shares = {stage: min(ALL, count - ALL * n) for n, stage in enumerate(stages) if count > ALL * n}
        least = passes.least_bytes(shares)
        if least <= free - spare:
            return shares
        if least <= free and tight is None:
            tight = shares
    return tight


def _by_wait(actions: Sequence[Action], costs: Costs) -> list[int]:
    """The stages of a rank's ``actions`` that have something to move, by how many of these lie between forwards and
    backwards."""
    waits: Counter[int] = Counter()
    for number, action in enumerate(actions):
        if action.kind in ("F", "B", "I") and costs.offload_bytes[action.stage]:
            waits[action.stage] += -number if action.kind == "F" else number
    return sorted(waits, key=lambda stage: (-waits[stage], stage))


def offloaded(schedule: Schedule, costs: Costs, free_bytes: Room, budget_bytes: int) -> Away:
    """:func:`choose`, where a rank's whole budget is ``budget_bytes``.

    Raises BudgetError, which says what the rank that lacks the most keeps with all offloaded.
    """
    found = choose(schedule, costs, free_bytes)
    if found is not None:
        return found
    all_ = dict.fromkeys(range(schedule.stages), ALL)
    leanest = [Passes.of(row, rank, costs).least_bytes(all_) for rank, row in enumerate(schedule.lists)]
    lacks = [peak - free for peak, free in zip(leanest, free_bytes, strict=True)]
    rank = lacks.index(max(lacks))
    raise BudgetError(
        f"with activations on the host, pipeline rank {rank} still keeps "
        f"{leanest[rank] / 2**20:.4g} MiB of them on the device, where "
        f"{max(0, free_bytes[rank]) / 2**20:.4g} MiB are left; give it {max(1, lacks[rank]) / 2**20:.4g} MiB more, "
        "more microbatches of fewer rows, or recompute='full'",
        budget_bytes + max(1, lacks[rank]),
    )


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


def or_host(refusal: BudgetError, host_bytes: int) -> BudgetError:
    """Where a rank's host has too little for more activations, too."""
    text = f"{refusal}; or, for more activations, host memory above each rank's {host_bytes / 2**30:.3g} GiB"
    return BudgetError(text, refusal.needed_bytes)
