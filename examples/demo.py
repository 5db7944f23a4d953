"""Train an unmodified GPT-2 of transformers in parallel on 4 processes of this machine, beside one device.

Degrees and schedule are pinned, so that there is a pipeline to see on one machine; what isn't pinned is searched for.
What you see: the loss of both side by side, the plan, the pipeline, and where the program is that did it.
Run it with ``make demo``; it takes about a minute on two cores.
"""

from __future__ import annotations

import argparse
import os
import pydoc_data.topics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.live import Live
from rich.syntax import Syntax
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import autopar
from autopar.runtime.optimizers import adamw
from autopar.schedules import render

BATCH, SEQUENCE, BYTES = 8, 64, 256
MESH, SCHEDULE = {"pp": 2, "tp": 2}, "1f1b"
CLIP_NORM = 1.0


def build_model() -> GPT2LMHeadModel:
    """GPT-2 as transformers writes it, over bytes; dropout off, so that both curves can be compared."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=BYTES,
        n_positions=SEQUENCE,
        n_embd=256,
        n_layer=4,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # which is what it takes anyway, with a warning that its class doesn't name one
    return model


def batches(steps: int) -> list[dict[str, Tensor]]:
    """Random windows of Python's own documentation, which comes with every Python."""
    text = "\n".join(pydoc_data.topics.topics.values()).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(steps):
        starts = torch.randint(0, len(data) - SEQUENCE, (BATCH,), generator=generator)
        tokens = torch.stack([data[s : s + SEQUENCE] for s in starts.tolist()])
        found.append({"input_ids": tokens, "labels": tokens.clone()})
    return found


def train_one_device(model: GPT2LMHeadModel, data: list[dict[str, Tensor]]) -> Iterator[float]:
    """The ordinary training loop."""
    optimizer = adamw(model.parameters())
    for batch in data:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        yield float(loss.detach())


def train_ranks(directory: Path, steps: int) -> Iterator[float]:
    """Launch the written job with torchrun and read the losses that its rank 0 prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command += [str(directory / "train.py"), "--steps", str(steps), "--batches", str(directory / "batches.safetensors")]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes: dict[str, int] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=one_thread, text=True, **pipes) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            if line.startswith("step "):
                yield float(line.rsplit(" ", 1)[1])
        errors = process.stderr.read()
    if process.returncode:
        raise SystemExit(f"the ranks failed:\n{errors}")


def curve(one: list[float], ranks: list[float], every: int) -> Table:
    table = Table(title="loss", title_justify="left")
    for column in ("step", "one device", "4 ranks", "difference"):
        table.add_column(column, justify="right")
    for step in range(0, len(one), every):
        there = f"{ranks[step]:.4f}" if step < len(ranks) else ""
        gap = f"{abs(ranks[step] - one[step]):.1e}" if step < len(ranks) else ""
        table.add_row(str(step), f"{one[step]:.4f}", there, gap)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--directory", type=Path, default=Path("demo-output/plan"))
    arguments = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 110)
    torch.set_num_threads(1)  # as each rank has
    began = time.perf_counter()

    model, data = build_model(), batches(arguments.steps)
    size = sum(p.numel() for p in model.parameters()) / 1e6
    console.rule(f"an unmodified {type(model).__name__}, {size:.1f} M parameters, on pp 2 x tp 2")
    job = autopar.compile(model, gpus=4, sample=data[0], mesh=MESH, schedule=SCHEDULE, clip_norm=CLIP_NORM)
    directory = job.write(arguments.directory)
    save_file({f"{i}.{k}": v for i, b in enumerate(data) for k, v in b.items()}, directory / "batches.safetensors")
    console.print(f"planned and written in {time.perf_counter() - began:.1f} s\n")

    one: list[float] = []
    ranks: list[float] = []
    every = max(1, arguments.steps // 10)
    with Live(curve(one, ranks, every), console=console, refresh_per_second=4) as live:
        for loss in train_one_device(model, data):
            one.append(loss)
            live.update(curve(one, ranks, every))
        for loss in train_ranks(directory, arguments.steps):
            ranks.append(loss)
            live.update(curve(one, ranks, every))
    console.print()
    worst = max(abs(a - b) for a, b in zip(one, ranks, strict=True))
    console.print(f"largest difference of a loss over {arguments.steps} steps: {worst:.1e} (float32)\n")

    console.rule("the plan")
    console.print(job.plan.summary(), highlight=False, markup=False)
    console.print()
    console.print("the pipeline as predicted; a row is what all tp ranks of a pipeline rank do", highlight=False)
    console.print(render(job.timeline, width=min(console.width, 110)))
    console.rule("a layer of the program that rank 0 runs")
    code = layer_text(job.source(0))
    widest = max(map(len, code.splitlines()))  # the terminal may break lines, but nothing is cut off
    console.print(Syntax(code, "python", background_color="default", code_width=widest), soft_wrap=True)
    programs = ", ".join(sorted(path.name for path in directory.glob("*.py")))
    console.print(f"everything is in {directory}/: plan.json, {programs}, actions.txt, README.md")
    console.print(f"done in {time.perf_counter() - began:.0f} s")


def layer_text(source: str) -> str:
    """The forward of the decoder layer."""
    body = source[source.index("class GPT2Block") :]
    return body[body.index("    def forward") : body.index("\nclass Stage")].rstrip()


if __name__ == "__main__":
    main()
