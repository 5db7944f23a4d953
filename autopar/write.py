"""A job as a directory that runs by itself under torchrun: plan, programs, action lists, weights, a README."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from autopar.errors import ArgumentError
from autopar.plan import Plan, spans_text
from autopar.runtime.job import Job
from autopar.runtime.optimizers import adamw

_TRAIN: Final = '''\
"""Train the written job: torchrun --nproc-per-node {world} train.py [--steps N] [--batches batches.safetensors]"""

from autopar.runtime.launch import main

main(__file__)
'''

_README: Final = """\
# {model} on {world} ranks ({mesh})

Plan `{digest}`, made by autopar. This directory runs by itself (with autopar installed):

```
torchrun --nproc-per-node {world} train.py --steps 3
```

It trains on random batches of the planned shapes; `--batches FILE` takes a safetensors file whose tensors are named
`<step>.<input>` instead. From Python, give `step` your own: `autopar.runtime.launch.open_job(directory).step(batch)`.
The optimizer is {optimizer}; `main` in `train.py` and `open_job` take `optimizer=` and `scheduler=`.

| file | what it is |
|---|---|
| `plan.json` | every decision, with its predicted cost; `autopar show plan.json` explains it |
{programs}
| `actions.txt` | what each pipeline rank does, in order (`autopar.schedules.actions` says what each stands for) |
| `{weights}` | {weights_note} |
| `job.json` | what else a rank needs: mesh, seed, clipping |
| `train.py` | the launch script |
"""


def write_directory(directory: Path, plan: Plan, job: Job) -> Path:
    """Write everything beside ``directory`` first, then move it there: all or nothing.

    Raises ArgumentError where ``directory`` exists and is not a job written before, or can't be written.
    """
    check_target(directory)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    except (OSError, ValueError) as error:
        raise _unwritable(directory, error) from error
    try:
        _write(staging, plan, job)
        staging.chmod(0o755)
        if directory.exists():
            old = staging.with_suffix(".old")
            os.replace(directory, old)
            os.replace(staging, directory)
            shutil.rmtree(old)
        else:
            os.replace(staging, directory)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return directory


def check_target(directory: Path) -> None:
    """Raises ArgumentError where ``directory`` is a file, or holds something else than a job."""
    try:
        is_file = directory.exists() and not directory.is_dir()
        is_other = directory.is_dir() and any(directory.iterdir()) and not (directory / "plan.json").exists()
    except (OSError, ValueError) as error:
        raise _unwritable(directory, error) from error
    if is_file:
        raise ArgumentError(f"{directory} is a file; name a directory to write the job to")
    if is_other:
        raise ArgumentError(f"{directory} holds something else than a job; name an empty or a new directory")


def _unwritable(directory: Path, error: Exception) -> ArgumentError:
    """Of an OSError, or of the ValueError for a path that can't be."""
    return ArgumentError(f"can't write {directory}: {getattr(error, 'strerror', None) or error}")


def _write(directory: Path, plan: Plan, job: Job) -> None:
    (directory / "plan.json").write_text(plan.to_json(), encoding="utf-8")
    for stage, text in enumerate(job.texts):
        (directory / program_file(stage)).write_text(text, encoding="utf-8")
    if job.vocabulary is not None:
        (directory / VOCABULARY_FILE).write_text(job.vocabulary, encoding="utf-8")
    (directory / "actions.txt").write_text(job.schedule.to_text(), encoding="utf-8")
    weights, note = job.source.save(directory)
    settings = {"mesh": plan.mesh.to_json(), "seed": job.seed, "clip_norm": job.clip_norm, "weights": weights}
    settings["options"] = job.options.model_dump()
    settings["own_optimizer"] = job.optimizer is not adamw or job.scheduler is not None
    (directory / "job.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    (directory / "train.py").write_text(_TRAIN.format(world=plan.mesh.world), encoding="utf-8")
    rows = [f"| `{program_file(stage)}` | {_who_runs(job, stage)} |" for stage in range(len(job.texts))]
    if job.vocabulary is not None:
        rows.append(f"| `{VOCABULARY_FILE}` | embedding and head, of which every rank has some rows |")
    text = _README.format(
        model=plan.model_name,
        world=plan.mesh.world,
        mesh=plan.mesh,
        digest=plan.digest,
        programs="\n".join(rows),
        optimizer="one of the job's own, which isn't written" if settings["own_optimizer"] else "AdamW",
        weights=weights,
        weights_note=note,
    )
    (directory / "README.md").write_text(text, encoding="utf-8")


VOCABULARY_FILE: Final = "vocabulary.py"


def program_file(stage: int) -> str:
    return f"stage_{stage}.py"


def _who_runs(job: Job, stage: int) -> str:
    ranks = [r for r in range(job.mesh.world) if stage in job.stages(r)]
    return f"the program of pipeline stage {stage}, run by rank{'s' * (len(ranks) > 1)} {spans_text(ranks)}"
