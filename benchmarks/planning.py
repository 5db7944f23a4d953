"""What planning costs: Llama of 8B's width in several depths, on ``meta``, for pp 4 x dp 2 x tp 8 = 64 ranks.

    python benchmarks/planning.py [--layers 4,32,126] [--repeats N] [--json]

Capture, fold, solve and emit are timed apart, in a fresh process per depth, whose peak memory is reported.
There, ``torch.export`` alone and capture then take turns; their ratio is the median. Seconds are of CPU time,
which other programs disturb little.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import torch
import typer
from models import llama, llama_batch
from processes import in_fresh_process
from rich.console import Console
from rich.table import Table

MESH = {"pp": 4, "dp": 2, "tp": 8}
MICROBATCHES = 4
CLUSTER = "h100"
AFTER_CAPTURE = ("fold", "solve", "emit")
T = TypeVar("T")

app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def main(
    layers: Annotated[str, typer.Option(help="Depths, with commas between them.")] = "4,32,126",
    repeats: Annotated[int, typer.Option(min=1, help="Of export and capture.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print figures instead of a table.")] = False,
) -> None:
    """Time every part of planning for several depths of one model."""
    depths = [int(depth) for depth in layers.split(",")]
    figures = {depth: in_fresh_process(measure, depth, repeats) for depth in depths}
    if as_json:
        print(json.dumps({"mesh": MESH, "microbatches": MICROBATCHES, "layers": figures}, indent=2))
    else:
        Console().print(table(figures))


def measure(depth: int, repeats: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    timed_plan(4)  # imports, and what torch and the solver set up once
    seconds = timed_plan(depth)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    ratios = [capture_to_export(depth) for _ in range(repeats)]
    return {
        "cpu_seconds": seconds,
        "after_capture_cpu_seconds": sum(seconds[part] for part in AFTER_CAPTURE),
        "capture_to_export": sorted(ratios),
        "peak_bytes": peak_bytes,
    }


def timed_plan(depth: int) -> dict[str, float]:
    """CPU seconds of every part of planning Llama with ``depth`` layers."""
    from autopar.capture import capture
    from autopar.cluster import Cluster
    from autopar.codegen import emit
    from autopar.mesh import Mesh
    from autopar.passes.canonicalize import canonicalize
    from autopar.passes.fold import fold
    from autopar.passes.functionalize import functionalize
    from autopar.passes.normalize_losses import normalize_losses
    from autopar.planner.build import Request, build

    mesh = Mesh(**MESH)
    request = Request(mesh, MICROBATCHES, Cluster.load(CLUSTER), "1f1b")
    seconds: dict[str, float] = {}

    def timed(part: str, call: Callable[[], T]) -> T:
        start = time.process_time()
        result = call()
        seconds[part] = time.process_time() - start
        return result

    model, batch = llama(depth), llama_batch()
    flat = timed("capture", lambda: capture(model, batch))
    folded = timed("fold", lambda: canonicalize(fold(normalize_losses(functionalize(flat)))))
    built = timed("solve", lambda: build(folded, request))
    digest = built.plan.digest
    timed("emit", lambda: emit(built.model, built.stages, mesh, microbatches=MICROBATCHES, digest=digest))
    return seconds


def capture_to_export(depth: int) -> float:
    """CPU time of capture over that of ``torch.export`` alone, one after the other."""
    from autopar.capture import capture

    model, batch = llama(depth), llama_batch()
    start = time.process_time()
    torch.export.export(model, (), batch, strict=False)
    exported = time.process_time()
    capture(model, batch)
    return (time.process_time() - exported) / (exported - start)


def table(figures: dict[int, dict[str, Any]]) -> Table:
    mesh = " x ".join(f"{axis} {size}" for axis, size in MESH.items())
    shown = Table(title=f"planning Llama, width of 8B, for {mesh}, {MICROBATCHES} microbatches (CPU seconds)")
    shown.add_column("")
    for depth in figures:
        shown.add_column(f"{depth} layers", justify="right")
    rows = list(figures.values())
    for part in ("capture", *AFTER_CAPTURE):
        shown.add_row(part, *(f"{row['cpu_seconds'][part]:.2f}" for row in rows))
    after = [row["after_capture_cpu_seconds"] for row in rows]
    shown.add_section()
    shown.add_row("after capture", *(f"{seconds:.2f}" for seconds in after))
    shown.add_row(f"against {next(iter(figures))} layers", *(f"{seconds / after[0]:.2f}x" for seconds in after))
    ratios = [statistics.median(row["capture_to_export"]) for row in rows]
    shown.add_row("capture / torch.export", *(f"{ratio:.2f}x" for ratio in ratios))
    shown.add_row("peak memory", *(f"{row['peak_bytes'] / 1e9:.2f} GB" for row in rows))
    return shown


if __name__ == "__main__":
    app()
