"""One process of ``ranks.py`` and its like: runs the jobs of all sides in turn, and times them."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import cycle, islice
from pathlib import Path

import torch
import torch.distributed as dist
from models import Sizes, gpt, gpt_batch
from plain import PLAIN
from time_split import time_split
from torch import Tensor, nn
from torch_jobs import BASELINES, Batch, Step, adamw, loss_of

WORLD = 2
WALL = "wall"
BATCHES = 8
_TOLERANCE = 1e-4  # float32


@dataclass(frozen=True)
class Options:
    axis: str  # "dp", "tp" or "pp", of size 2; "zero3" is dp under ZeRO 3
    sides: tuple[str, ...]  # "torch", "autopar", or "autopar MODE" with a way to compute the vocabulary
    rounds: int
    steps: int  # per side and round
    sizes: Sizes

    @property
    def microbatches(self) -> int:
        return 4 if self.axis == "pp" else 1


def work(rank: int, measured: Callable[[], dict[str, object]], port: int, result: Path) -> None:
    """The body of process ``rank``; rank 0 writes what ``measured`` gives to ``result``."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    figures = measured()
    if rank == 0:
        result.write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


def measure(options: Options) -> dict[str, object]:
    """Of every side of the small GPT: see :func:`compared`."""
    batches = [gpt_batch(options.sizes, seed) for seed in range(BATCHES)]
    steps = {side: torch_step(options) if side == "torch" else autopar_step(options, side) for side in options.sides}
    expected = one_device_losses(gpt(options.sizes), batches)
    return compared(steps, batches, expected, options.rounds, options.steps)


def compared(
    steps: Mapping[str, Step], batches: Sequence[Batch], expected: Sequence[float], rounds: int, per_round: int
) -> dict[str, object]:
    """Of every side: seconds per step of each round, seconds per part of a step, and the losses' errors."""
    runs = {side: Run(step_on, batches) for side, step_on in steps.items()}
    errors = check(runs, expected)
    clocks: dict[str, list[dict[str, float]]] = {side: [] for side in runs}
    for number in range(rounds):
        for side in list(runs) if number % 2 == 0 else list(runs)[::-1]:
            clocks[side].append(runs[side].clocked(per_round))
    return {
        "loss_errors": errors,
        "seconds": {side: [row[WALL] for row in clocks[side]] for side in runs},
        "cpu_seconds": {side: medians(clocks[side]) for side in runs},
        "split_seconds": {side: runs[side].split(per_round) for side in runs},
    }


class Run:
    """One side's job, and the batches that it trains on."""

    def __init__(self, step_on: Step, batches: Iterable[Batch]) -> None:
        self.step_on = step_on
        self.batches = cycle(batches)

    def advance(self, steps: int) -> list[Tensor]:
        return [self.step_on(batch) for batch in islice(self.batches, steps)]

    def losses(self, steps: int) -> list[float]:
        shares = torch.stack([share.double() for share in self.advance(steps)])
        dist.all_reduce(shares)
        return shares.tolist()

    def clocked(self, steps: int) -> dict[str, float]:
        """Seconds per step: wall, and CPU of the main and of all other threads; means over ranks."""
        dist.barrier()
        wall, main, process = time.perf_counter(), time.thread_time(), time.process_time()
        self.advance(steps)
        main, process = time.thread_time() - main, time.process_time() - process
        dist.barrier()
        wall = time.perf_counter() - wall
        clocks = {WALL: wall, "CPU, main thread": main, "CPU, other threads": process - main}
        return mean_over_ranks({name: seconds / steps for name, seconds in clocks.items()})

    def split(self, steps: int) -> dict[str, float]:
        """Seconds per step by part: of the best of three profiles, which other work disturbed least."""
        profiles = []
        for _ in range(3):
            dist.barrier()
            parts = time_split(lambda: self.advance(steps))
            profiles.append(mean_over_ranks({part: seconds / steps for part, seconds in parts.items()}))
        return min(profiles, key=lambda parts: sum(parts.values()))


def mean_over_ranks(figures: dict[str, float]) -> dict[str, float]:
    total = torch.tensor(list(figures.values()), dtype=torch.float64)
    dist.all_reduce(total)
    return dict(zip(figures, (total / WORLD).tolist(), strict=True))


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0] if name != WALL}


def check(runs: Mapping[str, Run], expected: Sequence[float]) -> dict[str, float]:
    """The largest relative error of each side's first losses against one device.

    Raises AssertionError where one is too large: then the sides would not do the same work.
    """
    errors = {}
    for side, run in runs.items():
        losses = run.losses(len(expected))
        errors[side] = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
        assert errors[side] <= _TOLERANCE, f"{side}: losses {losses}, on one device {expected}"
    return errors


def one_device_losses(model: nn.Module, batches: Iterable[Batch]) -> list[float]:
    """Of the first step on each batch; the model gives its loss, or an output that has it."""
    optimizer = adamw(model.parameters())
    losses = []
    for batch in batches:
        loss = loss_of(model(**batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def torch_step(options: Options) -> Step:
    return BASELINES[options.axis](gpt(options.sizes), options.microbatches)


def autopar_step(options: Options, side: str) -> Step:
    import autopar

    job = autopar.compile(
        gpt(options.sizes),
        WORLD,
        sample=gpt_batch(options.sizes),
        optimizer=adamw,
        mesh={"dp" if options.axis == "zero3" else options.axis: WORLD},
        microbatches=options.microbatches,
        **{
            **PLAIN,
            "zero": 3 if options.axis == "zero3" else 0,
            "vocabulary": side.removeprefix("autopar").strip() or "redistributed",
        },
    )
    return lambda batch: job.step(batch) / WORLD  # every rank has the whole loss
