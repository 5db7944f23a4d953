"""The costs of a plan beside those of its programs, where benchmarks plan without compiling."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.audit import audit
from autopar.plan import Plan
from autopar.planner.build import Built
from autopar.planner.pipeline import Pipeline
from autopar.programs import Programs
from autopar.runtime.job import Job
from autopar.runtime.optimizers import adamw
from autopar.runtime.weights import StateSource
from autopar.schedules import Timeline


@dataclass(frozen=True)
class _Planned:
    plan: Plan
    job: Job
    timeline: Timeline


def largest_difference(built: Built, pipeline: Pipeline | None = None) -> float:
    """Of the plan's costs from those of the programs that are emitted for it, relative: the largest.

    ``pipeline``: another one of the same model, whose programs and costs count instead.
    """
    pipeline = pipeline or built.pipeline
    cost = built.plan.cost.model_copy(update={"step_seconds": pipeline.timeline.step_seconds})
    made = replace(built, plan=built.plan.model_copy(update={"cost": cost}), pipeline=pipeline)
    job = Programs.of(made).job(made, StateSource({}), adamw, None, None, 0)
    return audit(_Planned(made.plan, job, pipeline.timeline)).largest_difference
