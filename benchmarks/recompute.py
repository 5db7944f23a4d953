"""What recomputation costs: predicted beside published figures, and measured beside torch's checkpoint by hand.

    python benchmarks/recompute.py [--rounds N] [--steps N] [--table FILE] [--json]

First table: a layer of the 22B GPT of V. Korthikanti et al. (arXiv 2205.05198, table 4: hidden 6144, 64 heads, sequence
2048, batch 4, tp 8 on A100s), by what is recomputed. The choice is the planner's own; its seconds are those of its cost
model, published ones are from ``--table`` (left out where the file isn't there).

Second table: a small GPT on one device of one thread. PyTorch trains it as it is, and with ``torch.utils.checkpoint``
around every block; autopar with ``recompute`` none, selective and full. In each round all sides train the same number
of steps in alternating order; an overhead is over the same side without recomputation, within a round. First, losses
of all sides are checked against each other.
"""

from __future__ import annotations

import csv
import json
import statistics
import sys
import time
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from models import GPT, MegatronGPT, Sizes, gpt, gpt_batch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch_jobs import adamw

import autopar

MODES = ("none", "selective", "full")
PUBLISHED = {  # experiment of the table, and the one that it is over
    "selective": ("selective + sequence", "sequence parallelism"),
    "full": ("baseline full recompute", "baseline no recompute"),
}
SIDES = ("torch", "torch checkpoint", "autopar none", "autopar selective", "autopar full")
BASE = {"torch checkpoint": "torch", "autopar selective": "autopar none", "autopar full": "autopar none"}
_TABLE = Path(__file__).parent / "measurements/korthikanti_table4_layer_times.csv"
_BATCHES = 4

app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def main(
    rounds: Annotated[int, typer.Option(min=1)] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Per side and round.")] = 2,
    table: Annotated[Path, typer.Option(help="Published layer times.")] = _TABLE,
    as_json: Annotated[bool, typer.Option("--json", help="Print figures instead of tables.")] = False,
) -> None:
    """Predict and measure what recomputation costs."""
    torch.set_num_threads(1)
    predicted = predictions(published(table))
    measured = measure(Sizes(), rounds, steps)
    if as_json:
        print(json.dumps({"predicted": predicted, "measured": measured}, indent=2))
        return
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(predicted_table(predicted))
    console.print(measured_table(measured, rounds, steps))


def published(file: Path) -> dict[str, float]:
    """Percent that a mode adds to a layer's forward and backward."""
    if not file.exists():
        return {}
    rows = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    times = {row["experiment"]: float(row["combined_ms"]) for row in csv.DictReader(rows)}
    return {mode: 100 * (times[one] / times[over] - 1) for mode, (one, over) in PUBLISHED.items()}


def predictions(known: dict[str, float]) -> dict[str, dict[str, Any]]:
    """Per mode: what a layer keeps, what that costs, and which ops run again."""
    plans = {mode: megatron(mode) for mode in MODES}
    per_layer = seconds(plans["none"]) - seconds(megatron("none", layers=1))
    found = {}
    for mode in MODES[1:]:
        layer = next(block for block in plans[mode].blocks if block.kind == "layer")
        (point,) = layer.recompute
        ops = {node.name: node.op.split(".")[-2] if "." in node.op else node.op for node in layer.nodes}
        found[mode] = {
            "regions": [" … ".join(ops[name] for name in region) for region in point.regions],
            "kept_bytes": point.saved_bytes,
            "bytes_without": layer.saved_bytes,
            "overhead_percent": 100 * point.seconds / per_layer,
            "published_percent": known.get(mode),
        }
    return found


def megatron(recompute: str, layers: int = 2) -> autopar.Plan:
    with torch.device("meta"):
        model = MegatronGPT(layers=layers, width=6144, heads=64, vocabulary=51200).half().train()
        ids = torch.zeros(4, 2048, dtype=torch.int64)
    pinned: dict[str, Any] = {"mesh": {"tp": 8}, "microbatches": 1, "head_chunks": 1, "offload": (), "zero": 0}
    return autopar.plan(model, 8, sample=(ids, ids), cluster="a100", recompute=recompute, **pinned)


def seconds(plan: autopar.Plan) -> float:
    (stage,) = plan.stage_plans
    return stage.forward_seconds + stage.backward_seconds


class Checkpointed(GPT):
    """The same model, every block under torch's checkpoint."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
        logits = self.head(self.norm(x))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def measure(sizes: Sizes, rounds: int, steps: int) -> dict[str, Any]:
    """Per side: seconds per step of each round, and losses of the first steps."""
    jobs = {side: trainer(side, sizes) for side in SIDES}
    losses = {side: [float(job(gpt_batch(sizes, seed))) for seed in range(_BATCHES)] for side, job in jobs.items()}
    for side, found in losses.items():
        torch.testing.assert_close(found, losses["torch"], rtol=1e-4, atol=0.0, msg=side)
    batches = cycle([gpt_batch(sizes, seed) for seed in range(_BATCHES)])
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in range(rounds):
        for side in SIDES if number % 2 == 0 else SIDES[::-1]:
            start = time.perf_counter()
            for batch in islice(batches, steps):
                jobs[side](batch)
            times[side].append((time.perf_counter() - start) / steps)
    return {"tokens": sizes.tokens, "seconds": times}


def trainer(side: str, sizes: Sizes) -> Callable[[dict[str, Tensor]], Tensor]:
    if side.startswith("autopar"):
        pinned: dict[str, Any] = {"mesh": {"dp": 1}, "microbatches": 1, "head_chunks": 1, "offload": (), "zero": 0}
        pinned["recompute"] = side.split()[1]
        job = autopar.compile(gpt(sizes), 1, sample=gpt_batch(sizes), optimizer=adamw, cluster="cpu", **pinned)
        return job.step
    model = gpt(sizes)
    if side == "torch checkpoint":
        model.__class__ = Checkpointed
    optimizer = adamw(model.parameters())

    def step(batch: dict[str, Tensor]) -> Tensor:
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def predicted_table(figures: dict[str, dict[str, Any]]) -> Table:
    made = Table(title="22B GPT, one layer, tp 8 on A100: predicted / published")
    for column in ("recompute", "runs again"):
        made.add_column(column)
    for column in ("keeps MiB", "instead of", "overhead", "published", "apart by"):
        made.add_column(column, justify="right")
    for mode, row in figures.items():
        known = row["published_percent"]
        shown = ["–", "–"] if known is None else [f"{known:.1f} %", f"{row['overhead_percent'] - known:+.1f}"]
        kept, without = (f"{row[name] / 2**20:.0f}" for name in ("kept_bytes", "bytes_without"))
        made.add_row(mode, ", ".join(row["regions"]), kept, without, f"{row['overhead_percent']:.1f} %", *shown)
    return made


def measured_table(figures: dict[str, Any], rounds: int, steps: int) -> Table:
    made = Table(title=f"one device, one thread; {rounds} rounds of {steps} steps")
    made.add_column("side")
    for column in ("tokens/s", "overhead min", "median", "max"):
        made.add_column(column, justify="right")
    times = figures["seconds"]
    for side in SIDES:
        speed = f"{figures['tokens'] / statistics.median(times[side]):,.0f}"
        spread = ["–"] * 3
        if side in BASE:
            over = [100 * (a / b - 1) for a, b in zip(times[side], times[BASE[side]], strict=True)]
            spread = [f"{value:.0f} %" for value in (min(over), statistics.median(over), max(over))]
        made.add_row(side, speed, *spread)
    ratios = [b / a for a, b in zip(times["autopar full"], times["torch checkpoint"], strict=True)]
    made.caption = f"tokens/s of autopar full over torch checkpoint: {statistics.median(ratios):.2f} (median)"
    return made


if __name__ == "__main__":
    app()
