"""What a search says of the points that weren't chosen: the next best, and those that nothing beats in both costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar.plan import PointPlan
from autopar.planner.modes import MODES
from autopar.search.costing import Outcome
from autopar.search.space import Point

if TYPE_CHECKING:
    from autopar.search.loop import Found, Search

_RUNNERS_UP = 5


def point_plan(search: Search, outcome: Outcome, why: str = "") -> PointPlan:
    point, region = outcome.point, outcome.point.region
    return PointPlan(
        gpus=region.mesh.world,
        mesh_sizes=region.mesh.to_json(),
        microbatches=region.microbatches,
        schedule=point.schedule,
        chunks=point.chunks or 1,
        vocabulary=point.vocabulary,
        options=search.costing.options_of(point),
        step_seconds=outcome.step_seconds,
        peak_bytes=outcome.peak_bytes,
        why=why,
    )


def runners_up(search: Search, found: Found, chosen: Outcome) -> list[PointPlan]:
    """The next best, each with other degrees, microbatches, schedule or vocabulary than those before it."""
    seen = {_kind(chosen.point)}
    rows = []
    for outcome in found.outcomes:
        if _kind(outcome.point) in seen:
            continue
        seen.add(_kind(outcome.point))
        rows.append(point_plan(search, outcome, why(chosen, outcome)))
        if len(rows) == _RUNNERS_UP:
            break
    return rows


def _kind(point: Point) -> tuple[object, ...]:
    return point.region, point.schedule, point.chunks, point.vocabulary


def why(chosen: Outcome, other: Outcome) -> str:
    """What makes ``other`` worse, in a few words: where its step is longer."""
    more = other.step_seconds / chosen.step_seconds - 1
    parts = sorted(
        ((other.parts[name] - chosen.parts.get(name, 0.0), name) for name in other.parts),
        key=lambda part: (-part[0], part[1]),
    )
    longer = [f"{name} +{seconds / chosen.step_seconds:.1%}" for seconds, name in parts if seconds > 0][:2]
    return f"step {more:+.1%}: {' and '.join(longer) or 'no part alone'}"


def time_and_memory(search: Search, found: Found) -> list[PointPlan]:
    """Of what was laid out, what nothing beats in both time and memory, by rising time."""
    front: list[Outcome] = []
    for outcome in found.outcomes:  # by rising time
        if not front or outcome.peak_bytes < front[-1].peak_bytes:
            front.append(outcome)
    return [point_plan(search, outcome) for outcome in front]


def differs(point: Point) -> str:
    """A point as a user would say it: ``pp 2 x dp 4 x tp 8, 16 microbatches, zb-v, ZeRO 1``."""
    parts = [str(point.region.mesh), f"{point.region.microbatches} microbatches of {point.region.rows}"]
    if point.region.mesh.pp > 1:
        parts.append(point.schedule + (f" with {point.chunks} chunks" if point.chunks else ""))
        if MODES[point.vocabulary].head:
            parts.append(f"vocabulary split ({point.vocabulary})")
    if point.zero:
        parts.append(f"ZeRO {point.zero}" + (f" over {point.zero_ranks}" if point.zero_ranks else ""))
    if point.offload:
        parts.append(f"{' and '.join(point.offload)} on the host")
    if point.head_chunks > 1:
        parts.append(f"logits in {point.head_chunks} chunks")
    return ", ".join(parts)
