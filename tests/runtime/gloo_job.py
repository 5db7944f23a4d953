"""What one process of the real run does; torchrun starts it: ``gloo_job.py <folder for results>``."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from autopar.mesh import Mesh
from autopar.runtime import Axes
from tests.runtime.parity import train_rank

MESHES = (Mesh(pp=2, tp=2), Mesh(dp=2, tp=2), Mesh(pp=2, dp=2))


def main(folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    trained = [asdict(train_rank(Axes.build(mesh, rank, "cpu"), 4, "1f1b")) for mesh in MESHES]
    torch.save(trained, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
