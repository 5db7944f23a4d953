"""Long sequences on two gloo processes: the sequence split over both, against PyTorch's context parallelism and DDP.

    python benchmarks/context.py [--rounds N] [--steps N] [--sequence N] [--json]

The small GPT of ``models.py`` on two long rows. autopar has cp 2 (each process half of the positions of both rows, in
pairs from either end), in every way to attend (``ring``, ``all_gather``, ``heads``); DDP has one whole row a process,
which is as many tokens and takes as much memory for activations. ``torch.distributed.tensor.experimental``'s
``context_parallel`` is tried first, on one attention: where it does not run on this device, the table says what it
said. In each round all sides train the same number of steps in the same two processes, of one thread each, in
alternating order. A ratio is of tokens/s within a round: above 1, autopar is faster. Memory is the most that one step
and what it needs allocate on a process, in processes of their own. First, all losses are checked against one device.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from models import Sizes, gpt, gpt_batch
from plain import PLAIN
from rank_worker import BATCHES, WORLD, compared, one_device_losses
from ranks import run_pair
from rich.console import Console
from rich.table import Table
from side_memory import peak_bytes
from side_table import side_table
from torch.distributed.device_mesh import init_device_mesh
from torch_jobs import Step, adamw, data_parallel

BASE = "DDP"
WAYS = ("ring", "all_gather", "heads")
SIDES = (BASE, *(f"autopar {way}" for way in WAYS))

app = typer.Typer(pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Options:
    sizes: Sizes
    rounds: int
    steps: int  # per side and round


@app.command()
def main(
    rounds: Annotated[int, typer.Option(min=1)] = 6,
    steps: Annotated[int, typer.Option(min=1, help="Per side and round.")] = 2,
    sequence: Annotated[int, typer.Option(help="Positions of each of the two rows.")] = 1024,
    as_json: Annotated[bool, typer.Option("--json", help="Print figures instead of a table.")] = False,
) -> None:
    """Compare context parallelism with PyTorch's, or with data parallelism over rows, on two gloo processes."""
    options = Options(Sizes(layers=2, width=128, heads=4, sequence=sequence, batch=WORLD), rounds, steps)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler writes to stderr otherwise
    said = run_pair(torch_context_parallel)["refused"]
    figures = run_pair(partial(measure, options))
    figures["peak_bytes"] = {side: run_pair(partial(memory, options, side))["peak_bytes"] for side in SIDES}
    figures["torch_context_parallel"] = said or "runs"
    if as_json:
        print(json.dumps({"sizes": vars(options.sizes), "rounds": rounds, "steps": steps, **figures}, indent=2))
        return
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table(figures, options))
    console.print(f"torch.distributed.tensor.experimental.context_parallel on this device: {said or 'runs'}")


def torch_context_parallel() -> dict[str, object]:
    """What PyTorch's own says of one causal attention, forward and backward; "" where it gives the right result."""
    from torch.distributed.tensor.experimental import context_parallel

    torch.manual_seed(0)
    whole = [torch.randn(1, 2, 32, 8) for _ in range(3)]
    expected = F.scaled_dot_product_attention(*whole, is_causal=True)
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("cp",))
    try:
        with context_parallel(mesh, buffers=whole, buffer_seq_dims=[2] * 3, no_restore_buffers=set(whole)):
            parts = [value.detach().requires_grad_() for value in whole]  # in here, whole are this rank's parts
            out = F.scaled_dot_product_attention(*parts, is_causal=True)
            out.sum().backward()
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        return {"refused": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    gathered = [torch.empty_like(out) for _ in range(WORLD)]
    dist.all_gather(gathered, out.detach().contiguous())
    # Ranks hold pairs of parts from both ends.
    ends = [part.chunk(2, 2)[0] for part in gathered] + [part.chunk(2, 2)[1] for part in reversed(gathered)]
    found = torch.cat(ends, 2)
    right = torch.allclose(found, expected, atol=1e-5)
    return {"refused": "" if right else "it attends within each rank's part only: another result"}


def step_of(side: str, sizes: Sizes) -> Step:
    return data_parallel(gpt(sizes)) if side == BASE else autopar_step(side.removeprefix("autopar "), sizes)


def autopar_step(way: str, sizes: Sizes) -> Step:
    import autopar

    mesh, sample = {"dp": 1, "cp": WORLD}, gpt_batch(sizes)
    job = autopar.compile(
        gpt(sizes), WORLD, sample=sample, optimizer=adamw, mesh=mesh, microbatches=1, attention=way, seq_dim=1, **PLAIN
    )
    return lambda batch: job.step(batch) / WORLD  # every rank has the whole loss


def measure(options: Options) -> dict[str, object]:
    """Of every side: seconds of a step, and the losses' errors."""
    sizes = options.sizes
    batches = [gpt_batch(sizes, seed) for seed in range(BATCHES)]
    steps = {side: step_of(side, sizes) for side in SIDES}
    return compared(steps, batches, one_device_losses(gpt(sizes), batches), options.rounds, options.steps)


def memory(options: Options, side: str) -> dict[str, object]:
    """The larger of both processes' peaks over what a side makes and two steps of it, compiling aside."""
    sizes = options.sizes
    made: list[Step] = [] if side == BASE else [step_of(side, sizes)]

    def run() -> None:
        step = made[0] if made else step_of(side, sizes)
        for seed in range(2):
            step(gpt_batch(sizes, seed))

    peak = torch.tensor(peak_bytes(run))
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return {"peak_bytes": int(peak)}


def table(figures: dict[str, Any], options: Options) -> Table:
    sizes = options.sizes
    title = (
        f"GPT, {sizes.layers} layers of width {sizes.width}, {sizes.batch} rows of {sizes.sequence}; {WORLD} processes"
    )
    caption = f"{options.rounds} rounds of {options.steps} steps; the side over {BASE}"
    seconds = figures["seconds"]
    ratios = {side: [base / own for own, base in zip(seconds[side], seconds[BASE], strict=True)] for side in SIDES}
    return side_table(title, caption, figures, ratios, sizes.tokens)


if __name__ == "__main__":
    app()
