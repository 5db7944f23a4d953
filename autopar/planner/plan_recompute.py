"""What is recomputed, as a plan says it, and back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from autopar.graph import Model
from autopar.passes.recompute import Region
from autopar.passes.vocabulary import staged_calls
from autopar.plan import Plan, RecomputePlan, bytes_text
from autopar.planner.activations import Alternative
from autopar.planner.fitting import Pins
from autopar.planner.pipeline import Pipeline
from autopar.schedules.offloads import Away


def used_alternatives(model: Model, block: int, pipeline: Pipeline) -> list[Alternative]:
    """What calls of a block recompute, without repeats: what keeps the most first."""
    found = {pipeline.chosen[i] for stage in pipeline.stages for i in stage if model.calls[i].block == block}
    return sorted((a for a in found if a.regions), key=lambda a: (-a.saved_bytes, a.seconds, a.regions))


def recompute_plan(pipeline: Pipeline, block: int, alternative: Alternative) -> RecomputePlan:
    return RecomputePlan(
        regions=[list(pair) for pair in pipeline.activations.choices[block].ends(alternative)],
        saved=sorted(node.name for node in alternative.owners),
        saved_bytes=alternative.saved_bytes,
        seconds=alternative.seconds,
        transient_bytes=alternative.transient_bytes,
    )


def points_of_call(model: Model, index: int, pipeline: Pipeline) -> int:
    """0 where a call recomputes nothing, else the place of what it recomputes in its block's list, from 1."""
    chosen = pipeline.chosen[index]
    used = used_alternatives(model, model.calls[index].block, pipeline)
    return used.index(chosen) + 1 if chosen.regions else 0


def pins_of(plan: Plan, model: Model) -> Pins:
    """What ``plan`` decided for the pipeline of ``model``."""
    starts = [0, *itertools.accumulate(len(stage.units) for stage in plan.stage_plans[:-1])]
    taken = [point for stage in plan.stage_plans for point in stage.recompute]
    calls = [model.calls[i] for i in staged_calls(model)]
    points: list[Sequence[Sequence[str]]] = []
    for call, point in itertools.zip_longest(calls, taken, fillvalue=None):
        known = plan.blocks[call.block].recompute if call is not None else []
        points.append(known[point - 1].regions if point else [])
    shares = {number: stage.offloads for number, stage in enumerate(plan.stage_plans) if stage.offloads}
    away = Away(shares, [rank.saved_bytes for rank in plan.rank_plans])
    return Pins(starts, plan.actions, points, away)


def regions_of_calls(model: Model, pipeline: Pipeline) -> dict[int, tuple[Region, ...]]:
    """What code generation takes: the regions of every call that has any, with what their text says of them."""
    found = {}
    for index, chosen in pipeline.chosen.items():
        choices = pipeline.activations.choices[model.calls[index].block]
        if chosen.regions:
            kept, all_ = bytes_text(chosen.saved_bytes), bytes_text(choices.none.saved_bytes)
            note = f"the layer keeps {kept} instead of {all_}"
            found[index] = tuple(Region(first, last, note) for first, last in choices.ends(chosen))
    return found
