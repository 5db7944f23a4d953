"""A small GPT on two gloo processes: autopar against PyTorch's own parallelism applied by hand, interleaved.

    python benchmarks/ranks.py [--rounds N] [--steps N] [--axis dp|zero3|tp|pp] [--only autopar|torch] [--json]

dp is against DistributedDataParallel, zero3 (ZeRO 3 on dp) against FSDP2's ``fully_shard`` of each block, tp against
``parallelize_module`` with sequence parallelism, pp against ``torch.distributed.pipelining``'s 1F1B with 4
microbatches. In each round both sides train the same number of
steps in the same two processes, of one thread each, in alternating order. A ratio is of tokens/s within a
round: above 1, autopar is faster. First, the losses of both sides are checked against one device.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import tempfile
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch.multiprocessing as mp
import typer
from models import Sizes
from rank_worker import WORLD, Options, measure, work
from rich.console import Console
from rich.table import Table

SIDES = ("autopar", "torch")
BASELINES = {
    "dp": "DistributedDataParallel",
    "zero3": "fully_shard",
    "tp": "parallelize_module + SP",
    "pp": "pipelining 1F1B",
}

Axis = StrEnum("Axis", list(BASELINES))
Side = StrEnum("Side", list(SIDES))

app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def main(
    rounds: Annotated[int, typer.Option(min=1)] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Per side and round.")] = 4,
    axis: Annotated[Axis | None, typer.Option(help="One comparison instead of all.")] = None,
    only: Annotated[Side | None, typer.Option(help="One side alone.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print figures instead of tables.")] = False,
) -> None:
    """Compare autopar with PyTorch's own parallelism on two gloo processes."""
    sizes = Sizes()
    sides = SIDES if only is None else (str(only),)
    axes = list(BASELINES) if axis is None else [str(axis)]
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler writes to stderr otherwise
    figures = {}
    for name in axes:
        figures[name] = summary(run_pair(partial(measure, Options(name, sides, rounds, steps, sizes))), sizes.tokens)
    if as_json:
        print(json.dumps({"sizes": vars(sizes), "rounds": rounds, "steps": steps, "axes": figures}, indent=2))
        return
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(speed_table(figures, sides, rounds, steps))
    console.print(split_table(figures, sides))


def run_pair(measured: Callable[[], dict[str, object]]) -> dict[str, Any]:
    """What ``measured``, which must pickle, gives on rank 0 of two gloo processes."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        mp.spawn(work, (measured, free_port(), result), nprocs=WORLD)  # raises where a process does
        return json.loads(result.read_text())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def summary(figures: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Adds tokens per second (medians over rounds) and the ratios of all rounds."""
    seconds = figures["seconds"]
    speeds = {side: tokens / statistics.median(times) for side, times in seconds.items()}
    figures = {"tokens_per_second": speeds, **figures}
    if set(seconds) == set(SIDES):
        ours, theirs = (seconds[side] for side in SIDES)
        figures["ratios"] = sorted(b / a for a, b in zip(ours, theirs, strict=True))
    return figures


def speed_table(figures: dict[str, Any], sides: tuple[str, ...], rounds: int, steps: int) -> Table:
    table = Table(title=f"tokens/s on {WORLD} gloo processes, {rounds} rounds of {steps} steps")
    for column in ("axis", "PyTorch by hand"):
        table.add_column(column)
    for column in (*sides, "ratio min", "median", "max", "loss error"):
        table.add_column(column, justify="right")
    for axis, row in figures.items():
        speeds = [f"{row['tokens_per_second'][side]:,.0f}" for side in sides]
        ratios = row.get("ratios")
        spread = [min(ratios), statistics.median(ratios), max(ratios)] if ratios else []
        shown = [f"{ratio:.2f}" for ratio in spread] or ["–"] * 3
        error = f"{max(row['loss_errors'].values()):.0e}"
        table.add_row(f"{axis} {WORLD}", BASELINES[axis], *speeds, *shown, error)
    return table


def split_table(figures: dict[str, Any], sides: tuple[str, ...]) -> Table:
    """CPU seconds are of the timed rounds; the split of the main thread is of one more round, profiled."""
    table = Table(title="where a step goes in ms, mean of the ranks (from the third row on: under the profiler)")
    table.add_column("")
    for axis in figures:
        for side in sides:
            table.add_column(f"{axis} {side}", justify="right")
    columns = [{**row["cpu_seconds"][side], **row["split_seconds"][side]} for row in figures.values() for side in sides]
    for part in columns[0]:
        table.add_row(part, *(f"{1e3 * column[part]:.1f}" for column in columns))
    return table


if __name__ == "__main__":
    app()
