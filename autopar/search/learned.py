"""How far estimates of steps turn out to be off, as a search learns by laying some of them out."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from autopar.options import activations_on_host
from autopar.search.space import Point, Region, promise, splits_head, stages_of

if TYPE_CHECKING:
    from autopar.search.search import Search

SEVERAL: Final = 2
"""Points of a kind that say how far estimates of the others are off."""

_PLACED = 3  # regions that say so
_DOUBT = 0.02  # of such a ratio


class Kind(NamedTuple):
    """Of regions whose estimates are off alike: whether others with their axes are placed, they are pipelines, and
    have activations on the host."""

    is_like_others: bool
    has_pipeline: bool
    is_away: bool

    @classmethod
    def of(cls, search: Search, region: Region, offload: tuple[str, ...]) -> Kind:
        return cls(search.like(region.key) is not None, region.mesh.pp > 1, activations_on_host(offload))


@dataclass
class Learned:
    """How many times its estimate a step takes, of those that were laid out: by schedule, whether the head is split,
    and what is stored where (``known``), and of those with and without a pipeline (``times``). And how many times
    the estimate of a region the least of its points' is, once it is placed, by kind (``placed``)."""

    known: defaultdict[object, list[float]] = field(default_factory=lambda: defaultdict(list))
    placed: defaultdict[Kind, list[float]] = field(default_factory=lambda: defaultdict(list))
    times: defaultdict[bool, list[float]] = field(default_factory=lambda: defaultdict(list))
    _tried: set[tuple[object, ...]] = field(default_factory=set)

    def unplaced(self, kind: Kind, estimate: float) -> float:
        """What the least of a region's points is likely to be estimated at, if it does as well as any other, or a
        little better."""
        known = self.placed[kind]
        return estimate * max(1.0, min(known) * (1 - _DOUBT) if len(known) >= _PLACED else 1.0)

    def laid_out(self, kind: Kind, estimate: float) -> float:
        """What the best point of an unplaced region is likely to take, if it does as well as any that was laid out, or
        a little better."""
        known = self.times[kind.has_pipeline]
        times = _little_better(min(known)) if len(known) >= _PLACED else 1.0
        return self.unplaced(kind, estimate) * times

    def likely(self, point: Point, estimate: float) -> float:
        """What it takes, if it does as well as any like it, or a little better (halfway, if one is known); of what
        is on the host, if several are known, else as any that has as much there, or as what is on the device, whichever
        does better. Of what is stored as nothing yet, as others of its region."""
        kind, *others = kinds(point)
        alike = [self.known[kind]] if len(self.known[kind]) >= (SEVERAL if others else 1) else []
        if not alike:
            here = (self.known[kind] for kind in (*kinds(point._replace(offload=())), place_of(point)))
            alike = [*(self.known[kind] for kind in others), next(filter(None, here), [])]
        known = min(filter(None, alike), key=min, default=[1.0])
        off = _little_better(min(known)) - 1.0
        return estimate * (1.0 + (off if len(known) >= SEVERAL else off / 2))

    def is_tried(self, point: Point, estimate: float) -> bool:
        """Whether one was laid out, or refused, that does the same under another schedule's name: of few microbatches,
        several have the same order."""
        return _twins(point, estimate) in self._tried

    def lay_out(self, search: Search, point: Point, estimate: float) -> None:
        """Raises AutoparError where it can't run or doesn't fit."""
        self._tried.add(_twins(point, estimate))
        times = search.lay_out(point).step_seconds / estimate
        self.times[point.region.mesh.pp > 1].append(times)
        for kind in (*kinds(point), place_of(point)):
            self.known[kind].append(times)


def _little_better(times: float) -> float:
    """Than what others took; less than was estimated only where these took less."""
    return min(times, max(1.0, times * (1 - _DOUBT)))


def kinds(point: Point) -> list[tuple[object, ...]]:
    """What is like ``point``, the most alike first: what is on the host under any schedule."""
    heads = splits_head(point.family)
    found: list[tuple[object, ...]] = [(point.schedule, heads, point.zero, point.zero_ranks, point.offload)]
    return [*found, (heads, point.offload)] if point.offload else found


def _twins(point: Point, estimate: float) -> tuple[object, ...]:
    """Points of which nothing is known that tells them apart."""
    seconds = f"{estimate / promise(point):.9e}"
    return point.region, stages_of(point), point.vocabulary, point.way, point.head_chunks, seconds


def place_of(point: Point) -> tuple[object, ...]:
    return point.region, point.schedule, splits_head(point.family)
