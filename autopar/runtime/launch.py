"""Run a written job under torchrun: what its ``train.py`` calls."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from autopar.errors import ArgumentError, AutoparError, PlanError
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.runtime.executor import Executor
from autopar.runtime.job import Job, connect, start
from autopar.runtime.loads import Load, added, save_load
from autopar.runtime.modules import dtype_of
from autopar.runtime.optimizers import GivenOptimizer, SchedulerMaker, adamw, maker
from autopar.runtime.program import Input, Program, VocabularyProgram
from autopar.runtime.weights import open_source
from autopar.schedules import Schedule, check


def open_job(
    directory: str | Path, *, optimizer: GivenOptimizer | None = None, scheduler: SchedulerMaker | None = None
) -> Executor:
    """This rank of the job written in ``directory``; call ``.step(batch)`` with global batches (path -> tensor).

    ``optimizer`` is a function from parameters, or several: there is no model here that one could be over (None:
    AdamW). Raises PlanError where a file is missing or damaged; ArgumentError where torchrun started another number of
    ranks, or the job was compiled with an optimizer of its own, which no file holds, and none is given.
    """
    if not isinstance(directory, str | Path):
        raise ArgumentError(f"{directory!r} is no path; name the directory of a written job")
    job = read_job(Path(directory))
    if optimizer is None and json.loads((Path(directory) / "job.json").read_text(encoding="utf-8")).get(
        "own_optimizer"
    ):
        raise ArgumentError(
            "the job was compiled with an optimizer or a scheduler of its own, which isn't written; give it here "
            "again: optimizer=lambda parameters: …, scheduler=… of main in train.py, or of open_job"
        )
    job = replace(job, optimizer=maker(optimizer or adamw, None), scheduler=scheduler)
    return start(job, connect(job))


def read_job(directory: Path) -> Job:
    """The job as values, with the default optimizer. Raises PlanError where files are missing, damaged, or don't fit
    each other."""
    try:
        settings = json.loads((directory / "job.json").read_text(encoding="utf-8"))
        digest = json.loads((directory / "plan.json").read_text(encoding="utf-8"))["digest"]
        mesh = Mesh.from_json(settings["mesh"])
        schedule = Schedule.from_text((directory / "actions.txt").read_text(encoding="utf-8"))
        check(schedule)
        texts = tuple((directory / f"stage_{i}.py").read_text(encoding="utf-8") for i in range(schedule.stages))
        vocabulary = (directory / "vocabulary.py").read_text(encoding="utf-8") if schedule.head else None
        source = open_source(directory / settings["weights"], settings["seed"])
        options = Options.of(**settings["options"])
        clip_norm, seed = settings["clip_norm"], settings["seed"]
        job = Job(texts, schedule, mesh, source, adamw, clip_norm, seed, vocabulary, options)
    except (OSError, KeyError, TypeError, ValueError, AutoparError) as error:
        raise PlanError(f"{directory} is not a complete job ({error}); write it again") from error
    for problem in _misfits(job, digest):
        raise PlanError(f"{directory} has files of different jobs: {problem}; write it again")
    return job


def _misfits(job: Job, digest: str) -> Iterator[str]:
    """What of the programs isn't as the plan with this ``digest``, the mesh and the lists of actions have it."""
    schedule = job.schedule
    expected = (digest, job.mesh.to_json(), schedule.stages, schedule.microbatches)
    programs: dict[str, Program | VocabularyProgram] = {
        f"stage_{number}.py": loaded.program for number, loaded in enumerate(job.programs)
    }
    if job.vocabulary_program is not None:
        programs["vocabulary.py"] = job.vocabulary_program.program
    for number, (file, program) in enumerate(programs.items()):
        found = (program.plan_digest, program.mesh, program.stages, program.microbatches)
        names = ("plan", "mesh", "stages", "microbatches")
        for name, own, wanted in zip(names, found, expected, strict=True):
            if own != wanted:
                yield f"{name} of {file} is {own}, of the others {wanted}"
        if isinstance(program, Program) and program.stage != number:
            yield f"{file} is the program of stage {program.stage}"


def main(script: str, *, optimizer: GivenOptimizer | None = None, scheduler: SchedulerMaker | None = None) -> None:
    """``train.py [--steps N] [--batches FILE] [--loads FILE]``: train on given or random batches and print the loss of
    each step. ``optimizer`` and ``scheduler`` as in :func:`open_job`, which says what is raised."""
    parser = argparse.ArgumentParser(description="Train a job that autopar wrote.")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batches", type=Path, help="safetensors file of tensors <step>.<input>")
    parser.add_argument("--loads", type=Path, help="write the slots of each expert, of all steps, here")
    arguments = parser.parse_args()
    directory = Path(script).resolve().parent
    executor = open_job(directory, optimizer=optimizer, scheduler=scheduler)
    inputs = _all_inputs(directory)
    load: Load = {}
    for step, batch in enumerate(_batches(inputs, arguments.steps, arguments.batches)):
        loss = float(executor.step(batch))
        load = added([load, executor.expert_load]) if arguments.loads is not None else load
        if executor.axes.rank == 0:
            sys.stdout.write(f"step {step}: loss {loss:.6f}\n")
            sys.stdout.flush()
    if arguments.loads is not None and executor.axes.rank == 0:
        save_load(arguments.loads, load)


def _all_inputs(directory: Path) -> list[Input]:
    plan = json.loads((directory / "plan.json").read_text(encoding="utf-8"))
    return [Input(i["name"], i["path"], tuple(i["shape"]), i["dtype"], i["batch_dim"]) for i in plan["inputs"]]


def _batches(inputs: list[Input], steps: int, file: Path | None) -> Iterator[dict[str, Tensor]]:
    if file is None:
        for step in range(steps):
            generator = torch.Generator().manual_seed(step)
            yield {item.path: _random(item, generator) for item in inputs}
        return
    with safe_open(file, "pt") as tensors:
        names = set(tensors.keys())
        for step in range(steps):
            missing = [f"{step}.{i.path}" for i in inputs if f"{step}.{i.path}" not in names]
            if missing:
                raise ArgumentError(f"{file} has no tensors {missing}; give {len(inputs)} per step, or fewer --steps")
            yield {item.path: tensors.get_tensor(f"{step}.{item.path}") for item in inputs}


def _random(item: Input, generator: torch.Generator) -> Tensor:
    """Random numbers of the planned shape; integers are 0 or 1, valid for any table."""
    dtype = dtype_of(item.dtype)
    if dtype.is_floating_point:
        return torch.randn(item.shape, generator=generator, dtype=dtype)
    return torch.randint(0, 2, item.shape, generator=generator, dtype=torch.int64).to(dtype)
