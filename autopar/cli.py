"""``autopar plan | show | simulate | verify | train``: the command line, each with ``--json`` for machines."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from autopar.api import ParallelModel, compile
from autopar.cost_models.catalogue import FORMULAS
from autopar.errors import ArgumentError, AutoparError
from autopar.model_names import Named, resolve
from autopar.plan import Plan, bytes_text
from autopar.schedules import render

_HELP = "Compile PyTorch models into parallel training programs."
app = typer.Typer(add_completion=False, no_args_is_help=True, help=_HELP)

Model = Annotated[str, typer.Argument(help="hf:path/to/config.json or package.module:factory")]
Gpus = Annotated[int, typer.Option(help="ranks of the job")]
MeshText = Annotated[str, typer.Option("--mesh", help="degrees, e.g. pp=2,dp=2,tp=2 (default: all dp)")]
Microbatches = Annotated[int | None, typer.Option(help="microbatches per step (default: up to 4 per stage)")]
ClusterName = Annotated[str | None, typer.Option("--cluster", help="h100, cpu, or a TOML file")]
Schedule = Annotated[str, typer.Option(help="1f1b or gpipe")]
Batch = Annotated[int, typer.Option(help="global batch of an hf: model")]
Sequence = Annotated[int, typer.Option(help="sequence length of an hf: model")]
Dtype = Annotated[str, typer.Option(help="dtype of an hf: model")]
Steps = Annotated[int, typer.Option(help="optimizer steps")]
Clip = Annotated[float | None, typer.Option("--clip-norm", help="clip the global gradient norm")]
Json = Annotated[bool, typer.Option("--json", help="print JSON for machines")]
PlanFile = Annotated[Path | None, typer.Option("--plan", help="take the decisions of this plan.json")]


def main() -> None:
    """Run the command line; a refusal prints one message and exits with 2."""
    try:
        app()
    except AutoparError as error:
        Console(stderr=True).print(f"[bold red]{type(error).__name__}[/]: {_escaped(str(error))}", highlight=False)
        sys.exit(2)


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 120)


def _sizes(text: str) -> dict[str, int] | None:
    if not text:
        return None
    try:
        return {name.strip(): int(size) for name, size in (part.split("=") for part in text.split(","))}
    except ValueError as error:
        raise ArgumentError(f"--mesh {text!r} doesn't read as pp=2,dp=2,tp=2") from error


def _job(named: Named, gpus: int, mesh: str, plan: Path | None, **options: Any) -> ParallelModel:
    loaded = Plan.load(plan) if plan is not None else None
    return compile(named.model, gpus, sample=named.sample, loss=named.loss, mesh=_sizes(mesh), plan=loaded, **options)


@app.command("plan")
def plan_command(
    model: Model,
    gpus: Gpus,
    mesh: MeshText = "",
    microbatches: Microbatches = None,
    cluster: ClusterName = None,
    schedule: Schedule = "1f1b",
    batch: Batch = 8,
    sequence: Sequence = 128,
    dtype: Dtype = "float32",
    clip_norm: Clip = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="write the plan to this file")] = None,
    write: Annotated[Path | None, typer.Option(help="write the whole job to this directory")] = None,
    json_: Json = False,
) -> None:
    """Plan a job; the model stays on the meta device unless the job is written."""
    named = resolve(model, batch=batch, sequence=sequence, dtype=dtype, meta=True)
    options = {"microbatches": microbatches, "cluster": cluster, "schedule": schedule, "clip_norm": clip_norm}
    job = _job(named, gpus, mesh, None, **options)
    if out is not None:
        _write_atomically(out, job.plan.to_json())
    if write is not None:
        job.write(write)
    if json_:
        print(job.plan.to_json(), end="")
        return
    _show(_console(), job.plan, job)


def _write_atomically(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text)
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ArgumentError(f"can't write {path}: {error.strerror or error}") from error


@app.command("show")
def show_command(
    plan: Annotated[Path | None, typer.Argument(help="plan.json, or the directory of a written job")] = None,
    other: Annotated[Path | None, typer.Option("--diff", help="show what differs in this other plan")] = None,
    formula: Annotated[bool, typer.Option("--formula", help="print the cost formulas")] = False,
    json_: Json = False,
) -> None:
    """Explain a plan, compare two, or print the cost models."""
    if formula:
        if json_:
            print(json.dumps({f.name: str(f) for f in FORMULAS}, indent=1))
        else:
            for item in FORMULAS:
                print(item, end="\n\n")
        return
    if plan is None:
        raise ArgumentError("name a plan.json to show, or use --formula")
    loaded = Plan.load(plan)
    if other is not None:
        difference = loaded.diff(Plan.load(other))
        print(json.dumps(difference.splitlines()) if json_ else difference or "the plans are equal")
        return
    print(loaded.to_json(), end="") if json_ else _show(_console(), loaded, None)


def _show(console: Console, plan: Plan, job: ParallelModel | None) -> None:
    console.print(plan.explain(), highlight=False, markup=False, soft_wrap=True)
    if job is not None and plan.mesh.pp > 1:
        console.print()
        console.print(render(job.timeline, width=min(console.width, 120)))


@app.command("simulate")
def simulate_command(
    model: Model,
    gpus: Gpus,
    mesh: MeshText = "",
    microbatches: Microbatches = None,
    cluster: ClusterName = None,
    schedule: Schedule = "1f1b",
    batch: Batch = 8,
    sequence: Sequence = 32,
    dtype: Dtype = "float32",
    steps: Steps = 3,
    clip_norm: Clip = None,
    plan: PlanFile = None,
    json_: Json = False,
) -> None:
    """Train on simulated ranks in this process: losses, peak memory and bytes sent per rank."""
    named = resolve(model, batch=batch, sequence=sequence, dtype=dtype, meta=False)
    options = {"microbatches": microbatches, "cluster": cluster, "schedule": schedule, "clip_norm": clip_norm}
    job = _job(named, gpus, mesh, plan, **options)
    result = job.simulate(named.sample, steps)
    if json_:
        print(json.dumps({"losses": result.losses, "peak_bytes": result.peak_bytes, "sent_bytes": result.sent_bytes}))
        return
    console = _console()
    console.print("loss per step: " + ", ".join(f"{loss:.6f}" for loss in result.losses), highlight=False)
    table = Table("rank", "predicted peak", "simulated peak", "sent")
    for rank, (predicted, peak, sent) in enumerate(
        zip(job.plan.peak_bytes, result.peak_bytes, result.sent_bytes, strict=True)
    ):
        moved = ", ".join(f"{axis} {bytes_text(count)}" for axis, count in sorted(sent.items())) or "nothing"
        table.add_row(str(rank), bytes_text(predicted), bytes_text(peak), moved)
    console.print(table)


@app.command("verify")
def verify_command(
    model: Model,
    gpus: Gpus,
    mesh: MeshText = "",
    microbatches: Microbatches = None,
    cluster: ClusterName = None,
    schedule: Schedule = "1f1b",
    batch: Batch = 8,
    sequence: Sequence = 32,
    dtype: Dtype = "float64",
    steps: Steps = 3,
    clip_norm: Clip = 1.0,
    plan: PlanFile = None,
    json_: Json = False,
) -> None:
    """Compare with the one-device model; exits with 1 where they differ. Dropout is off (the model is in eval mode)."""
    named = resolve(model, batch=batch, sequence=sequence, dtype=dtype, meta=False)
    named.model.eval()
    options = {"microbatches": microbatches, "cluster": cluster, "schedule": schedule, "clip_norm": clip_norm}
    result = _job(named, gpus, mesh, plan, **options).verify(named.sample, steps)
    if json_:
        fields = ("ok", "tolerance", "loss_error", "gradient_errors", "parameter_errors", "divergence")
        print(json.dumps({name: getattr(result, name) for name in fields}))
    else:
        _console().print(result.table())
    raise typer.Exit(0 if result.ok else 1)


@app.command("train")
def train_command(
    model: Model,
    mesh: MeshText = "",
    microbatches: Microbatches = None,
    cluster: ClusterName = None,
    schedule: Schedule = "1f1b",
    batch: Batch = 8,
    sequence: Sequence = 32,
    dtype: Dtype = "float32",
    steps: Steps = 3,
    clip_norm: Clip = None,
    plan: PlanFile = None,
    json_: Json = False,
) -> None:
    """Train under torchrun on the sample batch: ``torchrun --nproc-per-node 4 -m autopar train MODEL``."""
    gpus = int(os.environ.get("WORLD_SIZE", "1"))
    named = resolve(model, batch=batch, sequence=sequence, dtype=dtype, meta=False)
    options = {"microbatches": microbatches, "cluster": cluster, "schedule": schedule, "clip_norm": clip_norm}
    job = _job(named, gpus, mesh, plan, **options)
    losses = [float(job.step(named.sample)) for _ in range(steps)]
    if int(os.environ.get("RANK", "0")) == 0:
        text = ", ".join(f"{loss:.6f}" for loss in losses)
        print(json.dumps({"losses": losses}) if json_ else f"loss per step: {text}")
