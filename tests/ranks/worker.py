"""One rank of a real job, under torchrun: trains a test model and saves what it holds.

``worker.py MODEL MESH DIRECTORY OPTIONS [DYING_RANK]``: ``OPTIONS`` are keywords of ``compile`` as JSON; a dying rank
ends without a word in the middle of the second step.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from autopar import Cluster
from autopar.runtime.job import RankResult
from tests.fast_cluster import FAST, SLOW_NETWORK
from tests.models import Case, Float64, make, prepared
from tests.moe_models import family
from tests.pinned import compile_pinned
from tests.ranks.test_parity import optimizer


def case_of(name: str) -> Case:
    """A test model, or ``moe FAMILY``: one with experts."""
    kind, _, family_name = name.partition(" ")
    if kind == "moe":
        return prepared(lambda: family(family_name, 8, output_router_logits=False))
    return make(name, batch=8)


def cluster_of(options: Mapping[str, Any]) -> Cluster:
    return SLOW_NETWORK if options.get("dispatch") == "node" else FAST


def main() -> None:
    name, mesh, directory, options, *dying = sys.argv[1:]
    rank, given = int(os.environ["RANK"]), json.loads(options)
    torch.set_num_threads(1)
    with Float64():
        case = case_of(name)
        job = compile_pinned(
            case.model,
            4,
            sample=case.batch,
            loss=case.loss,
            mesh=json.loads(mesh),
            microbatches=4,
            optimizer=optimizer,
            clip_norm=0.5,
            cluster=cluster_of(given),
            **given,
        )
    losses = [float(job.step(case.batch))]
    if dying and int(dying[0]) == rank:
        os._exit(3)
    losses += [float(job.step(case.batch)) for _ in range(2)]
    parameters = {n: p.detach() for n, p in job.running.named_parameters().items()}
    torch.save(RankResult(losses=losses, gradients={}, parameters=parameters), Path(directory) / f"{rank}.pt")


if __name__ == "__main__":
    main()
