"""What a plan becomes: emitted modules, and the job that ranks are started from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autopar.codegen import EmittedStage, EmittedVocabulary, emit, emit_vocabulary
from autopar.planner.build import Built
from autopar.planner.plan_recompute import regions_of_calls
from autopar.runtime.job import Job
from autopar.runtime.optimizers import Maker, SchedulerMaker
from autopar.runtime.weights import Source

# Where weights come from, the optimizer, its scheduler, the clipping norm and the seed.
Training = tuple[Source, Maker, SchedulerMaker | None, float | None, int]


@dataclass(frozen=True)
class Programs:
    """The emitted modules: one per pipeline stage, one for vocabulary layers that all ranks have a part of."""

    stages: tuple[EmittedStage, ...]
    vocabulary: EmittedVocabulary | None

    @classmethod
    def of(cls, built: Built) -> Programs:
        plan, pipeline = built.plan, built.pipeline
        sizes: dict[str, Any] = {"microbatches": plan.microbatches, "digest": plan.digest, "options": plan.options}
        further: dict[str, Any] = {
            "split_backward": bool(pipeline.schedule.split),
            "recompute": regions_of_calls(built.model, pipeline),
            "experts": {row.layer: row for row in plan.experts},
            "placement": pipeline.schedule.placement,
        }
        return cls(
            emit(built.model, pipeline.stages, plan.mesh, **further, **sizes),
            emit_vocabulary(built.model, pipeline.stages, plan.mesh, **sizes),
        )

    def of_plan(self, digest: str) -> Programs:
        """The same, of the plan with this ``digest``."""
        vocabulary = self.vocabulary.of_plan(digest) if self.vocabulary is not None else None
        return Programs(tuple(stage.of_plan(digest) for stage in self.stages), vocabulary)

    def job(
        self,
        built: Built,
        source: Source,
        optimizer: Maker,
        scheduler: SchedulerMaker | None,
        clip_norm: float | None,
        seed: int,
    ) -> Job:
        """What ranks are started from. Raises ArgumentError where the optimizer would be wrong on them."""
        job = Job(
            texts=tuple(program.text for program in self.stages),
            schedule=built.pipeline.schedule,
            mesh=built.plan.mesh,
            source=source,
            optimizer=optimizer,
            scheduler=scheduler,
            clip_norm=clip_norm,
            seed=seed,
            vocabulary=self.vocabulary.text if self.vocabulary else None,
            options=built.plan.options,
        )
        job.check_optimizer()
        return job


@dataclass
class Emitted(Built):
    """With programs, which depend on what the plan chose, and not on what it says of memory or of other plans but for
    its digest."""

    programs: Programs
    job: Job

    @classmethod
    def of(cls, built: Built, training: Training) -> Emitted:
        """``built`` itself, where it has them already."""
        if isinstance(built, Emitted):
            return built
        programs = Programs.of(built)
        return cls(**vars(built), programs=programs, job=programs.job(built, *training))
