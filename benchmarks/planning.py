"""What planning costs with nothing pinned: published models on the clusters that they were trained on, on ``meta``.

    python benchmarks/planning.py [--model NAME]... [--gpus N] [--audit] [--json]
    python benchmarks/planning.py --depths 4,32,126

The first form compiles each model (:data:`models.TRAININGS`) in a fresh process, whose peak memory is reported with
that of the largest that helped it: what ``autopar.compile`` does is timed part by part, as it tells its progress, and
nothing is warmed up; CPU time is that of all processes, with capture. With --audit, costs are then read off the
programs (:mod:`autopar.audit`): by how much the planner's differ at most. With --gpus, it is on another number of them:
few have little memory. The second has degrees pinned, on one model of several depths: planning takes no longer where
layers are alike. There, ``torch.export`` alone and capture then take turns, and seconds are of CPU time, which other
programs disturb little.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Final

import torch
import typer
from models import TRAININGS, Training, llama, llama_batch
from processes import in_fresh_process
from rich.console import Console
from rich.table import Table
from torch import nn

from autopar.plan import bytes_text, percent_text, seconds_text
from autopar.report.search_progress import SearchProgress

PARTS: Final = ("capture", "passes", "place", "lay out", "build")
"""What is timed: tracing; what comes before the search; its phases, of which the last takes in what the ranks' programs
hold, their text, and waiting for a proof that isn't over by then."""

MESH: Final = {"pp": 4, "dp": 2, "tp": 8}
"""Of the second form."""

OTHERS: Final = """\
For scale, on a machine of two cores, as reported for other planners (not measured here): AutoParallel, one given mesh
and no pipeline: Llama-3-8B on 8 x 8 152 s of CPU time and 4.2 GB, Llama-3-70B on 32 x 8 367 s and 13.4 GB, one layer of
Llama on a mesh of 3 axes unfinished after 16 minutes. nnScaler: a Llama of 26M parameters and 32 layers on 4 ranks 95 s
and 6 GB."""

app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def main(
    model: Annotated[list[str] | None, typer.Option(help=f"Any of {', '.join(TRAININGS)}; all if not given.")] = None,
    depths: Annotated[str, typer.Option(help="The second form, for these numbers of layers.")] = "",
    gpus: Annotated[int | None, typer.Option(min=1, help="Instead of those that it was trained on.")] = None,
    audit: Annotated[bool, typer.Option("--audit", help="Compare costs with those of the programs, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print figures instead of a table.")] = False,
) -> None:
    """Time every part of planning."""
    names = model or list(TRAININGS)
    if unknown := set(names) - set(TRAININGS):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: models are {', '.join(TRAININGS)}")
    console = Console(width=None if sys.stdout.isatty() else 160)
    if depths:
        figures = {layers: in_fresh_process(measure_depth, int(layers)) for layers in depths.split(",")}
        shown = depth_table(figures)
    else:
        figures = {name: in_fresh_process(measure, name, gpus, audit) for name in names}
        shown = table(figures)
    if as_json:
        print(json.dumps(figures, indent=2))
        return
    console.print(shown)
    if not depths:
        for name, row in figures.items():
            console.print(f"{name}: {row['plan']}", highlight=False)
        console.print(OTHERS, highlight=False)


class Laps:
    """Seconds by part, by a ``clock``: each takes until the next one begins. Made to be told how a search goes, whose
    phases are parts."""

    def __init__(self, first: str, clock: Callable[[], float]) -> None:
        self.seconds: Counter[str] = Counter()
        self._clock = clock
        self._part, self._start = first, clock()

    def begin(self, part: str) -> None:
        now = self._clock()
        self.seconds[self._part] += now - self._start
        self._part, self._start = part, now

    def __call__(self, progress: SearchProgress) -> None:
        self.begin(progress.phase)


def timed_compile(
    model: nn.Module,
    gpus: int,
    sample: Any,
    precision: str = "model",
    clock: Callable[[], float] = time.perf_counter,
    **arguments: Any,
) -> tuple[Any, dict[str, float]]:
    """What ``autopar.compile`` returns, and seconds of its parts."""
    import autopar

    laps = Laps("capture", clock)
    captured = autopar.capture(model, sample=sample, precision=precision)
    laps.begin("passes")
    compiled = autopar.compile(captured, gpus, progress=laps, **arguments)
    laps.begin("")
    return compiled, {part: laps.seconds[part] for part in PARTS}


def measure(name: str, gpus: int | None = None, audit: bool = False) -> dict[str, Any]:
    """One model of :data:`models.TRAININGS`, on its ``gpus`` or on so many, nothing pinned but the precision."""
    training: Training = replace(TRAININGS[name], gpus=gpus or TRAININGS[name].gpus)
    model, sample = training.model(), training.sample()
    begun = _cpu_seconds()
    compiled, seconds = timed_compile(model, training.gpus, sample=sample, cluster=training.cluster, precision="bf16")
    plan = compiled.plan
    search = plan.search
    assert search is not None
    return {
        "gpus": training.gpus,
        "cluster": training.cluster,
        "tokens": training.tokens,
        "seconds": seconds,
        "after_capture_seconds": sum(seconds.values()) - seconds["capture"],
        "cpu_seconds": _cpu_seconds() - begun,
        "peak_bytes": _peak_bytes() + _peak_bytes(resource.RUSAGE_CHILDREN),
        "points": search.points,
        "placed": search.placed,
        "laid_out": search.laid_out,
        "gap": max(0.0, 1 - search.bound_seconds / plan.step_seconds),
        "step_seconds": plan.step_seconds,
        "mfu": plan.mfu,
        "plan": described(plan),
        "audit": compiled.audit().largest_difference if audit else None,
    }


def described(plan: Any) -> str:
    """In one line."""
    rows = plan.batch_size // plan.microbatches // plan.mesh.replicas
    chunks = f" x {plan.chunks}" if plan.chunks > 1 else ""
    parts = [str(plan.mesh), f"{plan.microbatches} microbatches of {rows}"]
    parts += [f"{plan.schedule}{chunks}"] if plan.mesh.pp > 1 or chunks else []
    parts += [f"vocabulary {plan.vocabulary}"] if plan.vocabulary != "redistributed" else []
    parts += [text for text in (str(plan.options),) if text]
    recomputed = sum(number > 0 for stage in plan.stage_plans for number in stage.recompute)
    parts += [f"{recomputed} units recompute"] if recomputed else []
    peak = bytes_text(max(plan.peak_bytes))
    return f"{', '.join(parts)}; step {seconds_text(plan.step_seconds)}, MFU {percent_text(plan.mfu)}, {peak}"


def table(figures: Mapping[str, Mapping[str, Any]]) -> Table:
    columns = ("model", "GPUs", *PARTS, "after capture", "CPU", "points", "laid out", "gap", "peak memory", "audit")
    shown = Table(*columns, title="Planning with nothing pinned (seconds)")
    for name, row in figures.items():
        seconds = row["seconds"]
        shown.add_row(
            name,
            f"{row['gpus']:,} {row['cluster']}",
            *(f"{seconds[part]:.2f}" for part in PARTS),
            f"{row['after_capture_seconds']:.2f}",
            f"{row['cpu_seconds']:.2f}",
            f"{row['points']:,}",
            f"{row['laid_out']} of {row['placed']}",
            percent_text(row["gap"]),
            f"{row['peak_bytes'] / 1e9:.2f} GB",
            "" if row["audit"] is None else f"{row['audit']:.1e}",
        )
    return shown


def measure_depth(layers: int) -> dict[str, Any]:
    """Llama of 8B's width with so many layers, degrees pinned; and capture against ``torch.export``, in turns."""
    torch.set_num_threads(1)
    pins = {"mesh": MESH, "microbatches": 4, "schedule": "1f1b", "cluster": "h100", "clock": time.process_time}
    timed_compile(llama(4), 64, sample=llama_batch(), **pins)  # imports, and what torch and solvers set up once
    _, seconds = timed_compile(llama(layers), 64, sample=llama_batch(), **pins)
    return {
        "cpu_seconds": seconds,
        "after_capture_cpu_seconds": sum(seconds.values()) - seconds["capture"],
        "peak_bytes": _peak_bytes(),
        "capture_to_export": capture_to_export(layers),
    }


def capture_to_export(layers: int) -> float:
    """CPU time of capture over that of ``torch.export`` alone, one after the other."""
    from autopar.capture import capture

    model, batch = llama(layers), llama_batch()
    start = time.process_time()
    torch.export.export(model, (), batch, strict=False)
    exported = time.process_time()
    capture(model, batch)
    return (time.process_time() - exported) / (exported - start)


def depth_table(figures: Mapping[str, Mapping[str, Any]]) -> Table:
    mesh = " x ".join(f"{axis} {size}" for axis, size in MESH.items())
    shown = Table("", *(f"{layers} layers" for layers in figures), title=f"Llama, width of 8B, {mesh} (CPU seconds)")
    rows = list(figures.values())
    for part in PARTS:
        shown.add_row(part, *(f"{row['cpu_seconds'][part]:.2f}" for row in rows))
    shown.add_section()
    after = [row["after_capture_cpu_seconds"] for row in rows]
    shown.add_row("after capture", *(f"{seconds:.2f}" for seconds in after))
    shown.add_row(f"against {next(iter(figures))} layers", *(f"{seconds / after[0]:.2f}x" for seconds in after))
    shown.add_row("capture / torch.export", *(f"{row['capture_to_export']:.2f}x" for row in rows))
    shown.add_row("peak memory", *(f"{row['peak_bytes'] / 1e9:.2f} GB" for row in rows))
    return shown


def _peak_bytes(who: int = resource.RUSAGE_SELF) -> int:
    """Of this process, or of the largest that it started."""
    return resource.getrusage(who).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _cpu_seconds() -> float:
    """Of this process and those that it started, which are over."""
    taken = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in taken)


if __name__ == "__main__":
    app()
