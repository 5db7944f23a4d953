"""How pipeline ranks work under schedules: as :class:`autopar.search.wholesale.Ranks`, of which bounds are found at
once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from autopar.schedules.registry import SCHEDULES
from autopar.search.hulls import Array
from autopar.search.keeping import folded_least, looped_least, straight_kept
from autopar.search.space import Family, Point, Region, splits_head
from autopar.search.wholesale import Layers, Ranks, folded, straight

_UNEVEN: Final = 0.2  # of what the longest stage takes more than the mean, ranks wait for it
_UNEVEN_ROUND: Final = 0.5  # the same, where several of a rank come one after the other: in one of these
_CLOSE: Final = 1e-3


def kinds_of(region: Region, layers: Layers, families: Sequence[Family]) -> list[tuple[Ranks, list[int]]]:
    """How ranks work: of all schedules that are placed alike one that waits and keeps as little as any; and how many
    stages ranks of interleaved ones hold."""
    pp, count = region.mesh.pp, region.microbatches
    heads = any(splits_head(family) for family in families)
    chunks = {family.chunks or 2 for family in families if SCHEDULES[family.schedule].placement == "looped"}
    placements = {SCHEDULES[family.schedule].placement for family in families}
    found: list[tuple[Ranks, list[int]]] = []
    if "v" in placements:
        hops = _hops("v", pp, 2)
        found.append((folded(layers, pp, folded_least(pp, count), ends=False, stages=2, hops=hops), []))
    if "straight" in placements:
        naive = any(family.schedule == "naive" for family in families)
        kept = np.ones(pp) if naive else straight_kept(pp, count)
        found.append((straight(layers, pp, count, kept, ends=False), []))
    if chunks:
        least = straight_kept(pp, count) if chunks == {1} else looped_least(pp, count)
        hops = _hops("looped", pp, min(chunks))
        found.append((folded(layers, pp, least, ends=not heads, stages=max(chunks), hops=hops), sorted(chunks)))
    return [(replace(ranks, spreads_head=heads), some) for ranks, some in found]


def ranks_of(family: Family, layers: Layers, kept: Array) -> Ranks:
    row, pp, count = SCHEDULES[family.schedule], family.region.mesh.pp, family.region.microbatches
    heads = splits_head(family)
    ends = pp > 1 and not (row.splits_backward or heads)
    if row.placement == "straight":
        found = straight(layers, pp, count, kept, ends=ends)
    else:
        stages = row.chunks or family.chunks or 2
        found = folded(layers, pp, kept, ends=ends, stages=stages, hops=_hops(row.placement, pp, stages))
    return replace(found, puts_off=row.splits_backward, spreads_head=heads, last=last_rank(family))


def _hops(placement: str, pp: int, stages: int) -> int:
    """Messages of a microbatch through all stages: one of a V stays on its rank, and all of a rank alone."""
    if pp == 1:
        return 0
    return 2 * (pp - 1) if placement == "v" else stages * pp - 1


def kind_of(points: Sequence[Point]) -> tuple[object, ...]:
    """What says how ranks work, of points of one family: others may have it in common."""
    family, row = points[0].family, SCHEDULES[points[0].schedule]
    works = row.placement, row.splits_backward, row.asynchronous, row.chunks or family.chunks, splits_head(family)
    return family.region, *works, *(point.way for point in points)


def last_rank(family: Family) -> int | None:
    """The one that has the last call, if that isn't spread."""
    if splits_head(family):
        return None
    return 0 if SCHEDULES[family.schedule].placement == "v" else family.region.mesh.pp - 1


def with_last(ranks: Ranks, bytes_: Array, placement: str) -> Ranks:
    """With room for the ``bytes_`` (of each way, or of all) that the last call works in, on the rank that has it."""
    working = np.zeros((*bytes_.shape, ranks.count))
    working[..., 0 if placement == "v" else -1] = bytes_
    return replace(ranks, working=working)


def even(layers: Layers, kept: Array, waits: tuple[float, float], each: int) -> Ranks:
    """Ranks of so many stages ``each``, that all wait for so many passes of a microbatch through one of them, and for
    so many messages."""
    count, none = len(kept), np.zeros(len(kept))
    idle = waits[0] * layers.count / count
    share = np.full(count, 1 / count)
    stages = none[:, None]
    passing = min(2, math.ceil(layers.count / count / each)), min(2, each)
    ranks = Ranks(share, (stages, stages), stages > 0, (idle, idle), none, True, False, kept, spreads_head=True)
    return replace(ranks, passing=passing, transient=True, messages=(waits[1] / 2, waits[1] / 2))


def waited(ranks: int, microbatches: int, stages: int) -> float:
    """For how many passes of a microbatch through a rank each waits, which has several ``stages``: of fewer
    microbatches than ranks, until the first one is back for each."""
    return max(ranks - 1, stages * (ranks - microbatches) + microbatches - 1) / stages


def unevenness(seconds: Sequence[float], spread: float, ranks: int, chunks: int) -> float:
    """How many times as long a step is likely to take as with stages that are all as long: cut between units that take
    so many ``seconds``, beside which all ``ranks`` have the same ``spread`` to do; each has several ``chunks``."""
    total, stages = math.fsum(seconds), ranks * chunks
    if len(seconds) < stages or not total:
        return 1.0
    waited_for = min(_UNEVEN, _UNEVEN_ROUND / chunks)
    return 1 + waited_for * (stages * _shortest(seconds, stages) - total) / (total + spread)


def _shortest(seconds: Sequence[float], stages: int) -> float:
    """About the least seconds of the longest stage of any cut."""
    low, high = max(*seconds, math.fsum(seconds) / stages), math.fsum(seconds)
    while high > low * (1 + _CLOSE):
        middle = (low * high) ** 0.5
        if _fewest(seconds, middle) <= stages:
            high = middle
        else:
            low = middle
    return low


def _fewest(seconds: Sequence[float], longest: float) -> int:
    """Stages of a cut none of which takes longer."""
    stages, left = 0, 0.0
    for each in seconds:
        if each > left:
            stages, left = stages + 1, longest
        left -= each
    return stages
