"""A GPT with narrow layers and a large vocabulary on two pipeline ranks: where should embedding and head be computed?

    python benchmarks/vocabulary.py [--rounds N] [--steps N] [--vocabulary N] [--width N] [--layers N] [--json]

1F1B with 4 microbatches on two gloo processes of one thread each. The sides: autopar with embedding and head on a stage
each and equal numbers of layers (``stage``), with layers moved away from the head (``redistributed``), with both tables
split over the two ranks (``vocab-1``, ``vocab-2``), and ``torch.distributed.pipelining``'s 1F1B cut by hand in the
middle. In each round all sides train the same number of steps, in alternating order. A ratio is of tokens/s within a
round, over ``autopar stage``. First, the losses of all sides are checked against one device.
"""

from __future__ import annotations

import json
import os
import statistics
from functools import partial
from typing import Annotated, Any

import typer
from models import Sizes
from rank_worker import WORLD, Options, measure
from ranks import run_pair
from rich.console import Console
from rich.table import Table

BASE = "autopar stage"
SIDES = (BASE, "autopar redistributed", "autopar vocab-1", "autopar vocab-2", "torch")

app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def main(
    rounds: Annotated[int, typer.Option(min=1)] = 6,
    steps: Annotated[int, typer.Option(min=1, help="Per side and round.")] = 2,
    vocabulary: Annotated[int, typer.Option(help="Rows of each table.")] = 65536,
    width: Annotated[int, typer.Option(help="Of the layers.")] = 128,
    layers: Annotated[int, typer.Option(help="Transformer blocks.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="Print figures instead of a table.")] = False,
) -> None:
    """Compare ways to compute a large vocabulary in a pipeline of two gloo processes."""
    sizes = Sizes(layers=layers, width=width, vocabulary=vocabulary)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler writes to stderr otherwise
    figures = run_pair(partial(measure, Options("pp", SIDES, rounds, steps, sizes)))
    if as_json:
        print(json.dumps({"sizes": vars(sizes), "rounds": rounds, "steps": steps, **figures}, indent=2))
        return
    Console().print(table(figures, sizes, rounds, steps))


def table(figures: dict[str, Any], sizes: Sizes, rounds: int, steps: int) -> Table:
    title = f"{sizes.layers} layers of width {sizes.width}, vocabulary {sizes.vocabulary:,}; pp {WORLD} over gloo"
    shown = Table(title=title, caption=f"{rounds} rounds of {steps} steps; ratios over {BASE}")
    shown.add_column("vocabulary")
    for column in ("tokens/s", "ratio min", "median", "max", "loss error"):
        shown.add_column(column, justify="right")
    base = figures["seconds"][BASE]
    for side in SIDES:
        seconds = figures["seconds"][side]
        ratios = [b / own for b, own in zip(base, seconds, strict=True)]
        spread = [f"{ratio:.2f}" for ratio in (min(ratios), statistics.median(ratios), max(ratios))]
        speed = f"{sizes.tokens / statistics.median(seconds):,.0f}"
        shown.add_row(side, speed, *spread, f"{figures['loss_errors'][side]:.0e}")
    return shown


if __name__ == "__main__":
    app()
