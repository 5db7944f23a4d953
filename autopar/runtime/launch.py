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

from autopar.errors import ArgumentError, PlanError
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.runtime.executor import Executor
from autopar.runtime.job import Job, connect, start
from autopar.runtime.loads import Load, added, save_load
from autopar.runtime.modules import dtype_of
from autopar.runtime.optimizers import GivenOptimizer, SchedulerMaker, adamw, maker
from autopar.runtime.program import Input
from autopar.runtime.weights import open_source
from autopar.schedules import Schedule


def open_job(
    directory: str | Path, *, optimizer: GivenOptimizer = adamw, scheduler: SchedulerMaker | None = None
) -> Executor:
    """This rank of the job written in ``directory``; call ``.step(batch)`` with global batches (path -> tensor).

    ``optimizer`` is a function from parameters, or several: there is no model here that one could be over.
    Raises PlanError where a file is missing or damaged, ArgumentError where torchrun started another number of ranks.
    """
    job = replace(read_job(Path(directory)), optimizer=maker(optimizer, None), scheduler=scheduler)
    return start(job, connect(job))


def read_job(directory: Path) -> Job:
    """The job as values. Raises PlanError."""
    try:
        settings = json.loads((directory / "job.json").read_text())
        mesh = Mesh.from_json(settings["mesh"])
        schedule = Schedule.from_text((directory / "actions.txt").read_text())
        texts = tuple((directory / f"stage_{i}.py").read_text() for i in range(schedule.stages))
        vocabulary = (directory / "vocabulary.py").read_text() if schedule.head else None
        source = open_source(directory / settings["weights"], settings["seed"])
        options = Options.of(**settings["options"])
        clip_norm, seed = settings["clip_norm"], settings["seed"]
        return Job(texts, schedule, mesh, source, adamw, clip_norm, seed, vocabulary, options)
    except (OSError, KeyError, TypeError, json.JSONDecodeError, ArgumentError) as error:
        raise PlanError(f"{directory} is not a complete job ({error}); write it again") from error


def main(script: str) -> None:
    """``train.py [--steps N] [--batches FILE] [--loads FILE]``: train on given or random batches and print the loss of
    each step."""
    parser = argparse.ArgumentParser(description="Train a job that autopar wrote.")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batches", type=Path, help="safetensors file of tensors <step>.<input>")
    parser.add_argument("--loads", type=Path, help="write the slots of each expert, of all steps, here")
    arguments = parser.parse_args()
    directory = Path(script).resolve().parent
    executor = open_job(directory)
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
    plan = json.loads((directory / "plan.json").read_text())
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
