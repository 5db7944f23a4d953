"""What one process of the profiled run does; torchrun starts it: ``profile_job.py <folder for traces>``."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from autopar.mesh import Mesh
from autopar.report import record
from autopar.runtime import Axes
from tests.runtime.stages import make_batch, make_executor


def main(folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    axes = Axes.build(Mesh(pp=2), dist.get_rank(), "cpu")
    executor = make_executor(axes, 4, "1f1b")
    executor.step(make_batch(0))
    with record(axes, folder):
        for step in range(2):
            executor.step(make_batch(step))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
