"""What waits in a search, and how much of it has to be looked at before more is proven."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from autopar.search.space import Family, Point, Region, Savers
from autopar.search.work import work_of

_STEP: Final = 1e-3  # by which a bound has to get better to be another one


What = Region | Family | Savers | Point


class Item(NamedTuple):
    """That of the least bound is next, since nothing more can be proven before it is looked at."""

    bound: float
    number: int
    what: What


def region_of(what: What) -> Region:
    return what if isinstance(what, Region) else what.region


def axes_of(what: What) -> object:
    """Placements with these axes say the most of each other."""
    mesh = region_of(what).mesh
    return mesh.ep, mesh.cp, mesh.tp, mesh.borrowed


def near(waiting: Iterable[Item], bound: float) -> dict[Point, float]:
    """The points that have to be laid out before much more than ``bound`` is proven, with their bounds."""
    pairs = ((item.what, item.bound) for item in waiting if item.bound < bound * (1 + _STEP))
    return {what: least for what, least in pairs if isinstance(what, Point)}


def work_beside(waiting: Iterable[Item], bound: float, length: float) -> float:
    """Of laying out all points whose bounds are nearly ``bound``, of a model of such a ``length``."""
    return sum(work_of(point, length) for point in near(waiting, bound))
