"""The command line: ``autopar plan | show | simulate | memory | verify | train | timeline | calibrate``, ``--json`` for
machines"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from autopar.calibrate import calibrate
from autopar.calibrate.table import measurements, tables
from autopar.command_options import JobOptions, takes_job
from autopar.cost_models.catalogue import FORMULAS
from autopar.errors import ArgumentError, AutoparError
from autopar.plan import Plan, bytes_text
from autopar.report import (
    chrome_trace,
    compare,
    live_progress,
    load_table,
    memory_svg,
    merged_trace,
    print_explanation,
    print_section,
    read_steps,
    record,
    timeline_html,
    timeline_svg,
)
from autopar.runtime.loads import Load, added, save_load
from autopar.schedules import Costs, Timeline, generate, lower, render, simulate_timeline
from autopar.schedules import Schedule as Actions
from autopar.schedules.flow import COMPUTE, EXCHANGES, VOCABULARY_KINDS
from autopar.schedules.pass_times import PassTimes
from autopar.schedules.registry import SCHEDULES, placement
from autopar.write import check_target

_HELP = "Compile PyTorch models into parallel training programs."
app = typer.Typer(add_completion=False, no_args_is_help=True, help=_HELP)

Gpus = Annotated[int, typer.Option(help="ranks of the job")]
Steps = Annotated[int, typer.Option(min=1, help="optimizer steps")]
Json = Annotated[bool, typer.Option("--json", help="print JSON for machines")]
Loads = Annotated[Path | None, typer.Option("--loads", help="write the slots of each expert, of all steps, here")]
Html = Annotated[Path | None, typer.Option("--html", help="write the timeline as a page")]
Svg = Annotated[Path | None, typer.Option("--svg", help="write the timeline as a picture")]
Trace = Annotated[Path | None, typer.Option("--trace", help="write the timeline as a trace for ui.perfetto.dev")]


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


@app.command("plan")
@takes_job(sequence=128)
def plan_command(
    options: JobOptions,
    gpus: Gpus,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="write the plan to this file")] = None,
    write: Annotated[Path | None, typer.Option(help="write the whole job to this directory")] = None,
    html: Html = None,
    svg: Svg = None,
    trace: Trace = None,
    measured: Annotated[Path | None, typer.Option(help="compare with what train --profile wrote here")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="print everything, as autopar show does")] = False,
    fronts: Annotated[
        bool, typer.Option("--fronts", help="search with less memory and other numbers of GPUs, too")
    ] = False,
    effort: Annotated[float, typer.Option(help="times as long as the search may usually take")] = 1.0,
    json_: Json = False,
) -> None:
    """Plan a job: what isn't pinned is searched for. The model stays on the meta device unless the job is written;
    --json prints the plan."""
    _check_writable(out, html, svg, trace)
    if write is not None:
        check_target(write)
    named = options.resolved(meta=True)
    with live_progress(Console(stderr=True, quiet=json_)) as progress:
        job = options.job(named, gpus, progress, fronts=fronts, effort=effort)
    if out is not None:
        _write_atomically(out, job.plan.to_json())
    if write is not None:
        job.write(write)
    comparison = _draw(job.timeline, html, svg, trace, _traces(job.plan, measured))
    if json_:
        print(job.plan.to_json(), end="")
        return
    console = _console()
    if explain:
        print_explanation(console, job.plan.explanation())
    else:
        console.print(job.plan.summary(), highlight=False, markup=False, soft_wrap=True)
    if job.plan.mesh.pp * job.plan.chunks > 1:
        console.print()
        console.print(render(job.timeline, width=min(console.width, 120)))
    if comparison:
        print(f"\n{comparison}")


def _traces(plan: Plan, folder: Path | None) -> list[Path]:
    """Of each pipeline rank, the trace of its first data and tensor parallel rank."""
    if folder is None:
        return []
    return [folder / f"rank{plan.mesh.rank(pp=index)}.json" for index in range(plan.mesh.pp)]


def _draw(timeline: Timeline, html: Path | None, svg: Path | None, trace: Path | None, measured: list[Path]) -> str:
    """Write the pictures that were asked for; the comparison with what was measured, if anything was."""
    if html is not None:
        _write_atomically(html, timeline_html(timeline))
    if svg is not None:
        _write_atomically(svg, timeline_svg(timeline))
    ranks = read_steps(timeline.schedule, measured) if measured else ()
    if trace is not None:
        value = merged_trace(timeline, ranks) if ranks else chrome_trace(timeline)
        _write_atomically(trace, json.dumps(value, separators=(",", ":")))
    return str(compare(timeline, ranks)) if ranks else ""


def _check_writable(*paths: Path | None) -> None:
    """Raises ArgumentError where a file can't be written, before what it is for has been worked out."""
    for path in paths:
        if path is not None and not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
            raise ArgumentError(f"can't write {path}: {path.parent} is no folder that you may write to")
        if path is not None and path.is_dir():
            raise ArgumentError(f"can't write {path}: it is a folder; name a file in it")


def _write_atomically(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
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
    """Explain a plan, compare two, or print the cost models; --json has all of it as raw values."""
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
        differences = loaded.differences(Plan.load(other))
        print(json.dumps(differences.to_json(), indent=1) if json_ else str(differences) or "the plans are equal")
    elif json_:
        print(json.dumps(loaded.explanation().to_json(), indent=1))
    else:
        print_explanation(_console(), loaded.explanation())


@app.command("simulate")
@takes_job()
def simulate_command(
    options: JobOptions,
    gpus: Gpus,
    steps: Steps = 3,
    loads: Loads = None,
    json_: Json = False,
) -> None:
    """Train on simulated ranks in this process: losses, peak memory, bytes sent per rank, loads of experts."""
    _check_writable(loads)
    named = options.resolved()
    job = options.job(named, gpus)
    result = job.simulate(named.sample, steps)
    load = _kept_load(result.expert_load, loads)
    if json_:
        fields = ("losses", "peak_bytes", "sent_bytes", "expert_load")
        print(json.dumps({name: getattr(result, name) for name in fields}))
        return
    console = _console()
    console.print("loss per step: " + ", ".join(f"{loss:.6f}" for loss in result.losses), highlight=False)
    table = Table("rank", "predicted peak", "simulated peak", "sent")
    predicted = job.memory().predicted
    for rank, (memory, peak, sent) in enumerate(zip(predicted, result.peak_bytes, result.sent_bytes, strict=True)):
        moved = ", ".join(f"{axis} {bytes_text(count)}" for axis, count in sorted(sent.items())) or "nothing"
        table.add_row(str(rank), bytes_text(memory.peak_bytes), bytes_text(peak), moved)
    console.print(table)
    if load:
        console.print(load_table(load, job.plan.experts))


def _kept_load(steps: Sequence[Load], path: Path | None) -> Load:
    """The loads of all steps as one, written where that was asked for. Raises ArgumentError where there are none."""
    load = added(steps)
    if path is not None:
        if not load:
            raise ArgumentError(f"--loads {path}, but the model has no layer that routes tokens to experts")
        save_load(path, load)
    return load


@app.command("memory")
@takes_job()
def memory_command(
    options: JobOptions,
    gpus: Gpus,
    measure: Annotated[str, typer.Option(help="simulate (trains a step here) or fake (any size, no arithmetic)")] = "",
    svg: Annotated[Path | None, typer.Option("--svg", help="write what ranks hold over the step as a picture")] = None,
    json_: Json = False,
) -> None:
    """What each rank holds at its peak, by kind: predicted, and beside it measured."""
    _check_writable(svg)
    named = options.resolved(meta=measure != "simulate")
    job = options.job(named, gpus)
    report = job.memory(named.sample if measure == "simulate" else None, measure=measure)
    if svg is not None:
        _write_atomically(svg, memory_svg(report))
    if json_:
        print(json.dumps(report.to_json()))
        return
    print_section(_console(), report.section())
    if experts := job.plan.explain_experts():
        print(experts)


@app.command("verify")
@takes_job(dtype="float64", clip_norm=1.0)
def verify_command(
    options: JobOptions,
    gpus: Gpus,
    steps: Steps = 3,
    json_: Json = False,
) -> None:
    """Compare with the one-device model; exits with 1 where they differ. Dropout is off (the model is in eval mode)."""
    named = options.resolved()
    named.model.eval()
    result = options.job(named, gpus).verify(named.sample, steps)
    if json_:
        fields = ("ok", "tolerance", "loss_error", "gradient_errors", "parameter_errors", "divergence")
        print(json.dumps({name: getattr(result, name) for name in fields}))
    else:
        _console().print(result.table())
    raise typer.Exit(0 if result.ok else 1)


@app.command("train")
@takes_job()
def train_command(
    options: JobOptions,
    steps: Steps = 3,
    profile: Annotated[Path | None, typer.Option(help="write a torch.profiler trace per rank here")] = None,
    loads: Loads = None,
    json_: Json = False,
) -> None:
    """Train under torchrun on the sample batch: torchrun --nproc-per-node 4 -m autopar train MODEL."""
    _check_writable(loads)
    named = options.resolved()
    job = options.job(named, int(os.environ.get("WORLD_SIZE", "1")))
    losses, steps_loads = [], []
    with record(job.running.axes, profile) if profile is not None else nullcontext():
        for _ in range(steps):
            losses.append(float(job.step(named.sample)))
            steps_loads.append(job.expert_load)
    if int(os.environ.get("RANK", "0")) == 0:
        load = _kept_load(steps_loads, loads)
        text = ", ".join(f"{loss:.6f}" for loss in losses)
        print(json.dumps({"losses": losses, "expert_load": steps_loads}) if json_ else f"loss per step: {text}")
        if load and not json_:
            _console().print(load_table(load, job.plan.experts))


@app.command("calibrate")
def calibrate_command(
    out: Annotated[Path | None, typer.Option("--out", "-o", help="write the cluster file here")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu (default: cuda where there is one)")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="fewer sizes and runs: less than a minute")] = False,
    name: Annotated[str, typer.Option(help="of the cluster (default: the file's)")] = "",
    json_: Json = False,
) -> None:
    """Measure this machine and write a cluster file. Under torchrun, on all nodes, the links between them too."""
    speaks = os.environ.get("RANK", "0") == "0"
    if speaks:
        _check_writable(out)
    chosen = name or (out.stem if out is not None else "calibrated")
    with Console(stderr=True, quiet=not speaks).status("measuring") as status:
        found = calibrate(device, quick=quick, name=chosen, progress=lambda step: status.update(f"measuring {step}"))
    if not speaks:
        return
    if out is not None:
        _write_atomically(out, str(found.cluster))
    if json_:
        print(json.dumps({"cluster": str(found.cluster), "measured": measurements(found)}))
        return
    for table in tables(found):
        _console().print(table)
    if found.busy_cores > 0.5:
        print(f"others kept {found.busy_cores:.1f} cores busy before this began: measure again on a quiet machine")
    print(f"wrote {out}; plan on it: --cluster {out}" if out is not None else f"\n{found.cluster}")


@app.command("timeline")
def timeline_command(
    schedule: Annotated[str | None, typer.Argument(help="a schedule's name; --list prints them")] = None,
    ranks: Annotated[int, typer.Option(help="pipeline ranks")] = 4,
    microbatches: Annotated[int | None, typer.Option(help="microbatches per step (default: 2 per rank)")] = None,
    chunks: Annotated[int | None, typer.Option(help="stages per rank")] = None,
    limit: Annotated[int | None, typer.Option(help="most microbatches in flight, where a schedule takes one")] = None,
    head: Annotated[str, typer.Option(help="split the output layer: naive, vocab-1 or vocab-2")] = "",
    embedding: Annotated[bool, typer.Option("--embedding", help="split the input embedding too")] = False,
    forward: Annotated[float, typer.Option(help="ms of a microbatch's forward on one rank, all its chunks")] = 1.0,
    backward: Annotated[float, typer.Option(help="the same of its backward")] = 2.0,
    weight: Annotated[float | None, typer.Option(help="the part of it for weights (default: half)")] = None,
    send: Annotated[float, typer.Option(help="ms of a message between ranks")] = 0.0,
    reduce: Annotated[float, typer.Option(help="ms of a rank's gradient reduction, all its chunks")] = 0.0,
    step: Annotated[float, typer.Option(help="ms of the optimizer step, or of an update")] = 0.0,
    passes: Annotated[str, typer.Option(help="ms of vocabulary passes and exchanges")] = "S=.5,T=.5,U=.2,E=.1,G=.1",
    activation: Annotated[float, typer.Option(help="MiB that a rank keeps of a microbatch, all its chunks")] = 0.0,
    actions: Annotated[Path | None, typer.Option(help="draw the action lists in this file")] = None,
    html: Html = None,
    svg: Svg = None,
    trace: Trace = None,
    list_: Annotated[bool, typer.Option("--list", help="print the table of schedules")] = False,
    json_: Json = False,
) -> None:
    """Draw a schedule, by name or from a file of action lists, with the pass times given."""
    _check_writable(html, svg, trace)
    if list_:
        _console().print(_schedules())
        return
    if (schedule is None) == (actions is None):
        raise ArgumentError("name one schedule to draw (--list prints them), or a file with --actions")
    times = _Times(forward, backward, weight, send, reduce, step, activation, _pass_times(passes))
    if actions is not None:
        drawn = _read_actions(actions, times)
    else:
        count = 2 * ranks if microbatches is None else microbatches
        _check_counts(ranks, count, chunks)
        drawn = _named(schedule or "", ranks, count, chunks, limit, head, embedding, times)
    timeline = simulate_timeline(drawn, times.costs(drawn))
    _draw(timeline, html, svg, trace, [])
    if json_:
        print(json.dumps({name: getattr(timeline, name) for name in _FIGURES} | {"schedule": drawn.to_json()}))
        return
    console = _console()
    console.print(render(timeline, width=min(console.width, 160)))


_FIGURES = (
    "makespan_seconds",
    "idle_share",
    "busy_seconds",
    "idle_seconds",
    "communication_overhead_seconds",
    "peak_in_flight",
    "peak_activation_bytes",
)


def _schedules() -> Table:
    table = Table("schedule", "stages per rank", "placement", "backward", "output layer split by", "what it is")
    for name, row in SCHEDULES.items():
        backward = "split" if row.splits_backward else "whole"
        heads = ", ".join(filter(None, row.heads)) or "never"
        heads = heads if "" in row.heads else f"always: {heads}"
        table.add_row(name, str(row.chunks or "any"), row.placement, backward, heads, row.summary)
    return table


@dataclass(frozen=True)
class _Times:
    """What a rank's passes take, all its chunks together, in ms; ``activation`` in MiB."""

    forward: float
    backward: float
    weight: float | None
    send: float
    reduce: float
    step: float
    activation: float
    passes: dict[str, float]

    def __post_init__(self) -> None:
        given = {f"--{name}": getattr(self, name) for name in ("forward", "backward", "send", "reduce", "step")}
        given |= {f"--passes {kind}": ms for kind, ms in self.passes.items()}
        for name, ms in given.items():
            if not 0 <= ms < math.inf:
                raise ArgumentError(f"{name} is {ms} ms; it must be finite, from 0 up")
        if self.weight is not None and not 0 <= self.weight <= self.backward:
            raise ArgumentError(f"--weight {self.weight} is part of --backward {self.backward}; give 0 up to that")
        if not 0 <= self.activation < math.inf:
            raise ArgumentError(f"--activation is {self.activation}; it must be finite, from 0 up")

    def costs(self, schedule: Actions) -> Costs:
        share = 1e-3 / schedule.chunks
        return Costs.uniform(
            schedule,
            forward_seconds=self.forward * share,
            backward_seconds=self.backward * share,
            weight_seconds=None if self.weight is None else self.weight * share,
            send_seconds=self.send * 1e-3,
            reduce_seconds=self.reduce * share,
            step_seconds=self.step * 1e-3,
            activation_bytes=round(self.activation * 2**20 / schedule.chunks),
            vocabulary_seconds={kind: ms * 1e-3 for kind, ms in self.passes.items()},
        )


def _pass_times(text: str) -> dict[str, float]:
    kinds = (*VOCABULARY_KINDS, *EXCHANGES)
    try:
        times = {kind.strip(): float(ms) for kind, ms in (part.split("=") for part in text.split(",") if part)}
    except ValueError as error:
        raise ArgumentError(f"--passes {text!r} doesn't read as S=0.5,T=0.5") from error
    if not set(times) <= set(kinds):
        raise ArgumentError(f"--passes {text!r} names other passes than {', '.join(kinds)}")
    return times


_MOST_PASSES = 2**20
"""Forwards of a schedule that is drawn: more take minutes, and nobody sees one."""


def _check_counts(ranks: int, microbatches: int, chunks: int | None) -> None:
    given = {"ranks": ranks, "microbatches": microbatches, "chunks": 1 if chunks is None else chunks}
    for name, count in given.items():
        if count < 1:
            raise ArgumentError(f"--{name} {count}; it must be a whole number of at least 1")
    if (passes := math.prod(given.values())) > _MOST_PASSES:
        raise ArgumentError(
            f"{passes} forwards are too many to draw; make --ranks x --microbatches at most {_MOST_PASSES}"
        )


def _named(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int | None,
    limit: int | None,
    head: str,
    embedding: bool,
    times: _Times,
) -> Actions:
    """The complete lists of a schedule of the registry; where pass times decide on their order, these."""
    if name == "synthesized":
        raise ArgumentError(
            "'synthesized' is made for the costs of a model; autopar plan MODEL --schedule synthesized draws it"
        )
    places = placement(name, ranks, chunks)
    sizes = Actions(name, len(places), microbatches, places, ((),) * ranks)
    costs = times.costs(sizes)
    options: dict[str, Any] = {"chunks": chunks, "limit": limit, "head": head, "embedding": embedding}
    return lower(generate(name, ranks, microbatches, costs=PassTimes.of(costs), **options), costs.seconds)


def _read_actions(path: Path, times: _Times) -> Actions:
    """The lists in a file, complete or of compute actions alone."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"can't read the action lists {path}: {error}") from error
    schedule = Actions.from_text(text)
    is_compute = all(action.kind in COMPUTE for row in schedule.lists for action in row)
    return lower(schedule, times.costs(schedule).seconds) if is_compute else schedule
