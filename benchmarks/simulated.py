"""What simulated ranks take with and without their memory counted, interleaved: ``verify`` does without.

    python benchmarks/simulated.py [--rounds N] [--steps N] [--json]

A small Llama in float32 on 8 simulated ranks (pp 2 x dp 2 x tp 2, 4 microbatches), one thread. CPU seconds are of this
process; a ratio is of one round, above 1: counting takes longer.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Annotated

import torch
import typer
from plain import PLAIN
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import autopar

app = typer.Typer(pretty_exceptions_enable=False)

MESH = {"pp": 2, "dp": 2, "tp": 2}


@app.command()
def main(
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Per side and round.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print figures instead of a table.")] = False,
) -> None:
    """Time simulated steps with and without memory counted."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    job, batch = small_job()
    job.simulate(batch, 1)  # what is made once
    figures: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds):
        for tracked in (True, False) if number % 2 == 0 else (False, True):
            begun = time.process_time()
            job.simulate(batch, steps, track_memory=tracked)
            figures[tracked].append((time.process_time() - begun) / steps)
    ratios = [a / b for a, b in zip(figures[True], figures[False], strict=True)]
    if as_json:
        print(json.dumps({"counted": figures[True], "not_counted": figures[False], "ratios": ratios}))
        return
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table(figures, ratios, steps))


def small_job() -> tuple[autopar.ParallelModel, dict[str, torch.Tensor]]:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    tokens = torch.randint(64, (8, 16))
    batch = {"input_ids": tokens, "labels": tokens}
    job = autopar.compile(LlamaForCausalLM(config), 8, sample=batch, **{**PLAIN, "mesh": MESH, "microbatches": 4})
    return job, batch


def table(figures: dict[bool, list[float]], ratios: list[float], steps: int) -> Table:
    found = Table(title=f"8 simulated ranks, medians of {len(ratios)} rounds of {steps} steps")
    found.add_column("memory")
    found.add_column("CPU s per step", justify="right")
    for tracked, name in ((True, "counted"), (False, "not counted")):
        found.add_row(name, f"{statistics.median(figures[tracked]):.2f}")
    found.add_row("ratio", f"{statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})")
    return found


if __name__ == "__main__":
    app()
