"""Plans on paper: DeepSeek-V3 on 2,048 H800 and Qwen3-235B-A22B on 256 H100, at the published degrees and beside them.

    python benchmarks/scale.py [--model NAME] [--layers N] [--json]

Each model is the one of ``transformers`` at its full published config, without weights, and goes the whole way of
``autopar.compile``: capture, plan, programs, and memory predicted from these. Seconds are of CPU time, peak memory is
of the fresh process in which a row is planned. "after capture" is all but ``capture``, which is timed alone. All but
recomputation is pinned; the first row of a model has the published degrees:

* DeepSeek-V3 (arXiv 2412.19437, sections 3.2 and 4.2): pp 16, ep 64, ZeRO 1, no tp; batch 15,360 sequences of 4,096.
  DualPipe there, 1F1B and DualPipeV here; products in FP8 there and bfloat16 here; multi-token prediction only there.
  180,000 GPU hours for 10^12 tokens (section 1).
* Qwen3-235B-A22B: the first row of ``megatron_moe_modelzoo.csv`` (:mod:`moe_zoo`).
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

import torch
import typer
from models import deepseek_v3, llama_batch, qwen3_235b
from processes import in_fresh_process
from rich.console import Console
from rich.table import Table
from torch import nn

from autopar.errors import AutoparError

SEQUENCE: Final = 4096
GIB: Final = 2**30
WARM_UP_LAYERS: Final = 4

app = typer.Typer(pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Published:
    """How a model was trained, and ``tokens_per_second`` of one GPU."""

    model: Callable[..., nn.Module]
    layers: int
    gpus: int
    cluster: str
    batch: int
    degrees: str
    tokens_per_second: float
    source: str


@dataclass(frozen=True)
class Case:
    """What is pinned in one row."""

    mesh: Mapping[str, int]
    schedule: str
    chunks: int | None = None
    zero: int = 1


PUBLISHED: Final[Mapping[str, Published]] = {
    "deepseek-v3": Published(
        model=deepseek_v3,
        layers=61,
        gpus=2048,
        cluster="h800",
        batch=15360,
        degrees="pp 16, ep 64, dp with ZeRO 1, no tp",
        tokens_per_second=1e12 / (180e3 * 3600),
        source="arXiv 2412.19437",
    ),
    "qwen3-235b": Published(
        model=qwen3_235b,
        layers=94,
        gpus=256,
        cluster="h100",
        batch=2048,
        degrees="pp 8 (vpp 4), tp 2, ep 32, dp 16 with ZeRO 1",
        tokens_per_second=2048 * SEQUENCE / 19.7 / 256,
        source="Megatron's MoE model zoo",
    ),
}

CASES: Final[Mapping[str, tuple[Case, ...]]] = {
    "deepseek-v3": (
        Case({"pp": 16, "dp": 128, "ep": 64}, "1f1b"),
        Case({"pp": 16, "dp": 128, "ep": 64}, "dualpipe-v"),
        Case({"pp": 16, "dp": 128, "ep": 32}, "1f1b"),
        Case({"pp": 8, "dp": 256, "ep": 64}, "1f1b"),
        Case({"pp": 16, "dp": 32, "tp": 4, "ep": 32}, "1f1b"),
    ),
    "qwen3-235b": (
        Case({"pp": 8, "dp": 16, "tp": 2, "ep": 32}, "interleaved", 4),
        Case({"pp": 8, "dp": 16, "tp": 2, "ep": 16}, "interleaved", 4),
        Case({"pp": 8, "dp": 32, "ep": 32}, "interleaved", 4),
        Case({"pp": 16, "dp": 16, "ep": 16}, "interleaved", 2),
        Case({"pp": 8, "dp": 16, "tp": 2, "ep": 32}, "dualpipe-v"),
    ),
}


UNPUBLISHED: Final[Mapping[str, Any]] = {
    "vocabulary": "redistributed",
    "zero_ranks": 0,
    "offload": (),
    "head_chunks": 1,
}
"""Pinned in all rows: what nobody says of these runs, as most train."""


@app.command()
def main(
    model: Annotated[list[str] | None, typer.Option(help=f"Any of {', '.join(CASES)}; all if not given.")] = None,
    layers: Annotated[int | None, typer.Option(help="Fewer than the model's, for a quick look.")] = None,
    cases: Annotated[int | None, typer.Option(min=1, help="Only so many rows of each model.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print figures instead of tables.")] = False,
) -> None:
    """Plan published trainings of mixtures of experts, at their degrees and others."""
    names = model or list(CASES)
    if unknown := set(names) - set(CASES):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: models are {', '.join(CASES)}")
    figures = {name: [in_fresh_process(measure, name, case, layers) for case in CASES[name][:cases]] for name in names}
    if as_json:
        print(json.dumps(figures, indent=2))
        return
    console = Console(width=None if sys.stdout.isatty() else 180)
    for name, rows in figures.items():
        console.print(table(name, rows, layers))


def measure(name: str, case: Case, layers: int | None) -> dict[str, Any]:
    """One row: what planning took, and what the plan predicts."""
    torch.set_num_threads(1)
    known = PUBLISHED[name]
    depth = layers or known.layers
    capture_seconds = captured(known, WARM_UP_LAYERS) and captured(known, depth)
    start = time.process_time()
    try:
        found = {"degrees": case.mesh, "schedule": case.schedule, **planned(known, case, depth)}
    except AutoparError as error:
        found = {"degrees": case.mesh, "schedule": case.schedule, "refused": str(error)}
    spent = time.process_time() - start
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        **found,
        "capture_cpu_seconds": capture_seconds,
        "after_capture_cpu_seconds": spent - capture_seconds,
        "planner_peak_bytes": peak_bytes,
    }


def captured(known: Published, depth: int) -> float:
    """CPU seconds of capture alone."""
    from autopar.capture import capture

    model, batch = known.model(depth), llama_batch(known.batch, SEQUENCE)
    start = time.process_time()
    capture(model, batch)
    return time.process_time() - start


def planned(known: Published, case: Case, depth: int) -> dict[str, Any]:
    """What the plan says; raises what ``autopar.plan`` does where the model doesn't fit."""
    import autopar

    plan = autopar.plan(
        known.model(depth),
        known.gpus,
        sample=llama_batch(known.batch, SEQUENCE),
        mesh=case.mesh,
        microbatch=1,
        cluster=known.cluster,
        schedule=case.schedule,
        chunks=case.chunks,
        precision="bf16",
        zero=case.zero,
        **UNPUBLISHED,
    )
    seconds = plan.cost.step_seconds
    return {
        "microbatches": plan.microbatches,
        "step_seconds": seconds,
        "bubble_seconds": plan.cost.bubble_seconds,
        "tokens_per_second_per_gpu": known.batch * SEQUENCE / seconds / known.gpus,
        "peak_bytes": max(plan.peak_bytes),
        "recomputes": sum(bool(point) for stage in plan.stage_plans for point in stage.recompute),
    }


def table(name: str, rows: list[dict[str, Any]], layers: int | None) -> Table:
    known = PUBLISHED[name]
    depth = layers or known.layers
    title = f"{name}, {depth} layers, on {known.gpus:,} x {known.cluster}; batch {known.batch:,} x {SEQUENCE}"
    caption = f"published: {known.degrees}; {known.tokens_per_second:,.0f} tokens/s and GPU ({known.source})"
    shown = Table(title=title, caption=caption)
    for column in ("mesh", "schedule"):
        shown.add_column(column)
    right = (
        "microbatches",
        "step s",
        "bubble",
        "tokens/s/GPU",
        "peak GiB",
        "recomputing",
        "capture s",
        "after s",
        "GB",
    )
    for column in right:
        shown.add_column(column, justify="right")
    for row in rows:
        mesh = " ".join(f"{axis} {size}" for axis, size in row["degrees"].items())
        shown.add_row(mesh, row["schedule"], *predicted_columns(row), *planning_columns(row))
    return shown


def predicted_columns(row: dict[str, Any]) -> tuple[str, ...]:
    if "refused" in row:
        return (row["refused"].splitlines()[0], *[""] * 5)
    return (
        str(row["microbatches"]),
        f"{row['step_seconds']:.2f}",
        f"{row['bubble_seconds'] / row['step_seconds']:.1%}",
        f"{row['tokens_per_second_per_gpu']:,.0f}",
        f"{row['peak_bytes'] / GIB:.1f}",
        f"{row['recomputes']} units",
    )


def planning_columns(row: dict[str, Any]) -> tuple[str, ...]:
    figures = (row["capture_cpu_seconds"], row["after_capture_cpu_seconds"], row["planner_peak_bytes"] / 1e9)
    return tuple(f"{figure:.1f}" for figure in figures)


if __name__ == "__main__":
    app()
