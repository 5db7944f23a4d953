"""One process of ``ranks.py`` or ``vocabulary.py``: runs the jobs of all sides in turn, and times them."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import cycle, islice
from pathlib import Path

import torch
import torch.distributed as dist
from models import Sizes, gpt, gpt_batch
from time_split import time_split
from torch import Tensor
from torch_jobs import BASELINES, Step, adamw

WORLD = 2
WALL = "wall"
_BATCHES = 8
_CHECKED_STEPS = 8
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


def work(rank: int, options: Options, port: int, result: Path) -> None:
    """The body of process ``rank``; rank 0 writes ``result``."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    measured = measure(options)
    if rank == 0:
        result.write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


def measure(options: Options) -> dict[str, object]:
    """Of every side: seconds per step of each round, seconds per part of a step, and the losses' errors."""
    runs = {side: Run(side, options) for side in options.sides}
    errors = check(runs, options.sizes)
    rounds: dict[str, list[dict[str, float]]] = {side: [] for side in runs}
    for number in range(options.rounds):
        order = options.sides if number % 2 == 0 else options.sides[::-1]
        for side in order:
            rounds[side].append(runs[side].clocked(options.steps))
    return {
        "loss_errors": errors,
        "seconds": {side: [clocks[WALL] for clocks in rounds[side]] for side in runs},
        "cpu_seconds": {side: medians(rounds[side]) for side in runs},
        "split_seconds": {side: runs[side].split(options.steps) for side in runs},
    }


class Run:
    """One side's job, and the batches that it trains on."""

    def __init__(self, side: str, options: Options) -> None:
        self.step_on = torch_step(options) if side == "torch" else autopar_step(options, side)
        self.batches = cycle([gpt_batch(options.sizes, seed) for seed in range(_BATCHES)])

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


def check(runs: Mapping[str, Run], sizes: Sizes) -> dict[str, float]:
    """The largest relative error of each side's first losses against one device.

    Raises AssertionError where one is too large: then the sides would not do the same work.
    """
    expected = one_device_losses(sizes)
    errors = {}
    for side, run in runs.items():
        losses = run.losses(_CHECKED_STEPS)
        errors[side] = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
        assert errors[side] <= _TOLERANCE, f"{side}: losses {losses}, on one device {expected}"
    return errors


def one_device_losses(sizes: Sizes) -> list[float]:
    model = gpt(sizes)
    optimizer = adamw(model.parameters())
    losses = []
    for seed in range(_CHECKED_STEPS):
        loss = model(**gpt_batch(sizes, seed))
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
        zero=3 if options.axis == "zero3" else 0,
        microbatches=options.microbatches,
        vocabulary=side.removeprefix("autopar").strip() or "redistributed",
    )
    return lambda batch: job.step(batch) / WORLD  # every rank has the whole loss
