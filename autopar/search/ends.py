"""What is likely to be left of a step's messages before its first pass and after its last: of weights that are gathered
once, and of sums of gradients."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from autopar.cost_models import step
from autopar.schedules.registry import SCHEDULES
from autopar.search.hulls import Figure
from autopar.search.space import Point, splits_head

if TYPE_CHECKING:
    from autopar.search.profiles import Profile


def most_parameters(point: Point, profile: Profile) -> float:
    """Those of the pipeline rank with the most, times the mean, if all take equally long: tables that aren't split are
    at the ends, and only some layers beside them."""
    pp, units = point.region.mesh.pp, profile.units
    if pp == 1 or splits_head(point.family) or len(units) < 3:
        return 1.0
    elements = [sum(each.values()) for each in profile.unit_parameters]
    mean, of_all, layers = sum(elements) / pp, math.fsum(unit.seconds for unit in units) / pp, len(units) - 2
    seconds, each = math.fsum(unit.seconds for unit in units[1:-1]) / layers, sum(elements[1:-1]) / layers
    row = SCHEDULES.get(point.schedule)
    ends = [(0, -1)] if row is not None and row.placement == "v" else [(0,), (-1,)]

    def held(numbers: tuple[int, ...]) -> float:
        left = of_all - math.fsum(units[number].seconds for number in numbers)
        return sum(elements[number] for number in numbers) + each * max(0.0, left) / seconds

    return max(1.0, *(held(numbers) / mean for numbers in ends)) if mean and seconds else 1.0


def left_seconds(seconds: Figure, passing: Figure, works: tuple[int, int], stages: int, units: int) -> Figure:
    """What moves of a rank's weights that take so long have left to do beside the passes of the first or the last
    microbatches, of which one takes ``passing`` on each rank: those of its last stage beside one pass of it, and the
    others meanwhile, where all microbatches of a round pass through each of several ``stages`` before the next.
    ``works``: pipeline ranks, and microbatches; all ranks have so many ``units``."""
    pp, count = works
    each = max(1, math.ceil(units / pp / stages))
    own = step.LEFT_SECONDS(sum_seconds=seconds / stages, layers=each, pass_seconds=passing / stages)
    beside = passing * (1 + (stages - 1) * min(pp, count)) / stages
    return np.maximum(own, seconds - beside)
