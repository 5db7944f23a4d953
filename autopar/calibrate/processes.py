"""Processes of one thread on this machine, on gloo: where no torchrun has started any."""

from __future__ import annotations

import multiprocessing
import tempfile
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from autopar.calibrate.collectives import measure_collectives
from autopar.calibrate.samples import Effort, Message
from autopar.errors import RankError
from autopar.mesh import Mesh
from autopar.runtime.axes import Axes

_TIMEOUT_SECONDS: Final = 300.0


def measure_in_processes(world: int, effort: Effort) -> list[Message]:
    """Collectives of ``world`` processes on this machine, as one node. Raises RankError where they don't finish."""
    context = multiprocessing.get_context("spawn")  # a fork after torch has started threads may hang
    with tempfile.TemporaryDirectory() as folder, context.Pool(world) as pool:
        started = pool.starmap_async(_work, [(rank, world, folder, effort) for rank in range(world)], chunksize=1)
        try:
            return started.get(_TIMEOUT_SECONDS)[0]
        except multiprocessing.TimeoutError as error:
            raise RankError(f"{world} processes on gloo didn't finish within {_TIMEOUT_SECONDS:g} s") from error


def _work(rank: int, world: int, folder: str, effort: Effort) -> list[Message]:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=_TIMEOUT_SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timeout)
    try:
        return measure_collectives(Axes.build(Mesh(dp=world), rank, "cpu"), world, effort, lambda _: None)
    finally:
        dist.destroy_process_group()
