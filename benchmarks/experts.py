"""A small mixture of experts on two gloo processes: experts split over both, against DDP and FSDP2, interleaved.

    python benchmarks/experts.py [--rounds N] [--steps N] [--experts N] [--json]

``transformers``' Mixtral, unmodified, float32, top-2, without its auxiliary loss. autopar has dp 2 of which ep 2: each
process half of the rows and half of every layer's experts, tokens travel by all-to-all. The others have all experts:
DistributedDataParallel whole, ``fully_shard`` of each layer in halves that are gathered. In each round all sides train
the same number of steps in the same two processes, of one thread each, in alternating order. A ratio is of tokens/s
within a round: above 1, autopar is faster. Memory is the most that one step and what it needs allocate on a process
(weights, gradients, optimizer, activations), in processes of their own. First, all losses are checked against one
device.
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
import typer
from plain import PLAIN
from rank_worker import BATCHES, WORLD, compared, one_device_losses
from ranks import run_pair
from rich.console import Console
from rich.table import Table
from side_memory import peak_bytes
from side_table import side_table
from torch import Tensor, nn
from torch_jobs import Step, adamw, data_parallel, fully_sharded

OURS = "autopar ep"
SIDES = (OURS, "DDP", "FSDP2")

app = typer.Typer(pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Sizes:
    """Of the model and its global batch."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    expert_width: int = 256
    experts: int = 8
    vocabulary: int = 2048
    sequence: int = 64
    batch: int = 8

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence


@dataclass(frozen=True)
class Options:
    sizes: Sizes
    rounds: int
    steps: int  # per side and round


@app.command()
def main(
    rounds: Annotated[int, typer.Option(min=1)] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Per side and round.")] = 4,
    experts: Annotated[int, typer.Option(help="Of each layer.")] = 8,
    width: Annotated[int, typer.Option(help="Of the hidden states.")] = 128,
    expert_width: Annotated[int, typer.Option(help="Of each expert, inside.")] = 256,
    as_json: Annotated[bool, typer.Option("--json", help="Print figures instead of a table.")] = False,
) -> None:
    """Compare expert parallelism with PyTorch's data parallelism on two gloo processes."""
    options = Options(Sizes(experts=experts, width=width, expert_width=expert_width), rounds, steps)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler writes to stderr otherwise
    figures = run_pair(partial(measure, options))
    figures["peak_bytes"] = {side: run_pair(partial(memory, options, side))["peak_bytes"] for side in SIDES}
    if as_json:
        print(json.dumps({"sizes": vars(options.sizes), "rounds": rounds, "steps": steps, **figures}, indent=2))
        return
    Console(width=None if sys.stdout.isatty() else 120).print(table(figures, options))


def mixtral(sizes: Sizes) -> nn.Module:
    """Equal weights at every call."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=sizes.width,
        intermediate_size=sizes.expert_width,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads,
        num_local_experts=sizes.experts,
        num_experts_per_tok=2,
        vocab_size=sizes.vocabulary,
        max_position_embeddings=sizes.sequence,
        use_cache=False,
    )
    return MixtralForCausalLM(config).train()


def batch_of(sizes: Sizes, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(sizes.vocabulary, (sizes.batch, sizes.sequence), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def step_of(side: str, sizes: Sizes) -> Step:
    model = mixtral(sizes)
    if side == "DDP":
        return data_parallel(model)
    if side == "FSDP2":
        return fully_sharded(model, blocks=model.model.layers)  # type: ignore[union-attr, arg-type]
    return autopar_step(model, sizes)


def autopar_step(model: nn.Module, sizes: Sizes) -> Step:
    import autopar

    mesh = {"dp": WORLD, "ep": WORLD}
    job = autopar.compile(model, WORLD, sample=batch_of(sizes), optimizer=adamw, mesh=mesh, microbatches=1, **PLAIN)
    return lambda batch: job.step(batch) / WORLD  # every rank has the whole loss


def measure(options: Options) -> dict[str, object]:
    """Of every side: seconds of a step, and the losses' errors."""
    sizes = options.sizes
    batches = [batch_of(sizes, seed) for seed in range(BATCHES)]
    steps = {side: step_of(side, sizes) for side in SIDES}
    return compared(steps, batches, one_device_losses(mixtral(sizes), batches), options.rounds, options.steps)


def memory(options: Options, side: str) -> dict[str, object]:
    """The larger of both processes' peaks over what a side makes and two steps of it.

    What compiling takes is not counted: it makes programs once, and the model that it reads may be on ``meta``.
    """
    sizes = options.sizes
    made: list[Step] = [step_of(side, sizes)] if side == OURS else []

    def run() -> None:
        step = made[0] if made else step_of(side, sizes)
        for seed in range(2):
            step(batch_of(sizes, seed))

    peak = torch.tensor(peak_bytes(run))
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return {"peak_bytes": int(peak)}


def table(figures: dict[str, Any], options: Options) -> Table:
    sizes = options.sizes
    title = f"Mixtral, {sizes.layers} layers of width {sizes.width}, {sizes.experts} experts; {WORLD} gloo processes"
    caption = f"{options.rounds} rounds of {options.steps} steps; autopar over the side"
    seconds = figures["seconds"]
    ratios = {side: [theirs / own for own, theirs in zip(seconds[OURS], seconds[side], strict=True)] for side in SIDES}
    return side_table(title, caption, figures, ratios, sizes.tokens)


if __name__ == "__main__":
    app()
