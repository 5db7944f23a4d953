"""What was laid out, and what a search found: read off pipelines, compared and sorted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.errors import AutoparError
from autopar.graph import Model
from autopar.planner.block_costs import BlockCost
from autopar.planner.fitting import Layout
from autopar.planner.modes import MODES
from autopar.planner.pipeline import Pipeline
from autopar.search.profiles import Key
from autopar.search.space import BEATEN, Point


@dataclass(frozen=True)
class Outcome:
    """A point as it was laid out: seconds of its step, bytes that its fullest rank is reckoned to hold, and whether it
    recomputes anything, or may be faster with more memory (``is_tight``). ``parts`` say where its busiest rank's time
    goes; ``layout`` is how it fits, on the profile of ``key``."""

    point: Point
    step_seconds: float
    peak_bytes: int
    recomputes: bool
    is_tight: bool = True
    parts: Mapping[str, float] = field(default_factory=dict)
    layout: Layout | None = field(default=None, compare=False)
    key: Key | None = field(default=None, compare=False)


def rank(outcome: Outcome) -> tuple[object, ...]:
    """By which outcomes are sorted: shorter steps first; of equal ones what is simpler."""
    point, mesh = outcome.point, outcome.point.region.mesh
    simple = (
        *(mesh.pp, mesh.cp, mesh.tp, mesh.experts, len(point.offload), point.head_chunks, point.zero, point.zero_ranks),
        *(point.chunks or 0, list(MODES).index(point.vocabulary), point.schedule in BEATEN, point.schedule),
    )
    return (float(f"{outcome.step_seconds:.9e}"), *simple, -point.region.rows)


@dataclass(frozen=True)
class Found:
    """What a search found: ``outcomes`` that fit, the best first; nothing in a space of ``points`` is below
    ``bound_seconds``. So much was ``placed`` and ``laid_out`` for that, and it took so much ``work``. ``refusals`` are
    of what was tried and can't run or doesn't fit."""

    outcomes: list[Outcome]
    bound_seconds: float
    points: int
    placed: int
    laid_out: int
    work: float
    refusals: dict[Point, AutoparError]


def is_tight(pipeline: Pipeline) -> bool:
    """Whether it may be faster with more memory: cut otherwise, with less to recompute or to copy, or with weights'
    gradients that come as late as the schedule would have it."""
    schedule, timeline, layout = pipeline.schedule, pipeline.timeline, pipeline.layout
    later = [0] * schedule.ranks  # of the last weights' gradients that would have been early
    for home, bytes_ in zip(schedule.placement, timeline.costs.later_bytes, strict=True):
        later[home] = max(later[home], bytes_ if schedule.split else 0)
    rows = zip(timeline.peak_activation_bytes, later, pipeline.free_bytes, strict=True)
    moves = layout.away is not None and layout.away.moves
    return layout.fit.tight or moves or any(kept + more > free for kept, more, free in rows)


def parts_of(pipeline: Pipeline, costs: Sequence[BlockCost], model: Model) -> dict[str, float]:
    """Of the busiest rank: compute, what layers send by axis, recomputation, the optimizer, and waiting."""
    timeline, schedule = pipeline.timeline, pipeline.schedule
    rank = max(range(schedule.ranks), key=lambda r: (timeline.busy_seconds[r], -r))
    stages = [k for k, home in enumerate(schedule.placement) if home == rank]
    sent: dict[str, float] = {}
    for cost in (costs[model.calls[i].block] for k in stages for i in pipeline.stages[k]):
        for (axis, _), seconds in cost.wires.items():
            name = f"communication over {axis}"
            sent[name] = sent.get(name, 0.0) + schedule.microbatches * sum(seconds)
    again = schedule.microbatches * math.fsum(pipeline.recompute_seconds(k) for k in stages)
    busy, updates = timeline.busy_seconds[rank], timeline.costs.step_seconds[rank]
    found: dict[str, float] = {
        "compute": busy - updates - again - sum(sent.values()),
        **sent,
        "recomputation": again,
        "optimizer": updates,
        "waiting (bubble, transfers, gradient sums)": timeline.makespan_seconds - busy,
        "the host": timeline.step_seconds - timeline.makespan_seconds,
    }
    return {name: seconds for name, seconds in found.items() if seconds}
