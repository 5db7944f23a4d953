"""One rank of real jobs, under torchrun: trains test models, one after another, and saves what it holds of each.

``worker.py DIRECTORY JOBS [DYING_RANK]``: ``JOBS`` are ``[model, mesh, keywords of compile]`` by name, as JSON; what
this rank holds of each is ``DIRECTORY/NAME RANK.pt``. A dying rank ends without a word in the middle of a second step.
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
    directory, jobs, *dying = sys.argv[1:]
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    for name, (model, mesh, options) in json.loads(jobs).items():
        try:
            result = trained(model, mesh, options, dies=bool(dying) and int(dying[0]) == rank)
        except Exception as error:
            error.add_note(f"rank {rank}, job {name!r}")
            raise
        torch.save(result, Path(directory) / f"{name} {rank}.pt")


def trained(model: str, mesh: dict[str, int], options: dict[str, Any], *, dies: bool) -> RankResult:
    """Three steps."""
    with Float64():
        case = case_of(model)
        job = compile_pinned(
            case.model,
            4,
            sample=case.batch,
            loss=case.loss,
            mesh=mesh,
            microbatches=4,
            optimizer=optimizer,
            clip_norm=0.5,
            cluster=cluster_of(options),
            **options,
        )
    losses = [float(job.step(case.batch))]
    if dies:
        os._exit(3)
    losses += [float(job.step(case.batch)) for _ in range(2)]
    parameters = {n: p.detach() for n, p in job.running.named_parameters().items()}
    return RankResult(losses=losses, gradients={}, parameters=parameters)


if __name__ == "__main__":
    main()
