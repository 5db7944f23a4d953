"""The same jobs on four real processes."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.verification import relative_errors, train_one_device
from tests.models import Float64, make
from tests.pinned import compile_pinned
from tests.ranks.test_parity import optimizer
from tests.ranks.worker import case_of, cluster_of

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.gloo, pytest.mark.slow]


def torchrun(*arguments: str, timeout: float = 240.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)


SPLIT = {"vocabulary": "vocab-2"}


JOBS: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "gpt2": ("gpt2", {"pp": 2, "tp": 2}, {}),
    "nano_gpt": ("nano_gpt", {"dp": 2, "tp": 2}, {}),
    "mlp": ("mlp", {"pp": 2, "dp": 2}, {}),
    "1f1b": ("llama_deep", {"pp": 4}, {"schedule": "1f1b", **SPLIT}),
    "zb-v": ("llama_deep", {"pp": 4}, {"schedule": "zb-v", **SPLIT}),
    "v-half": ("llama_deep", {"pp": 2, "tp": 2}, {"schedule": "v-half", **SPLIT}),
    "ring": ("llama", {"dp": 2, "cp": 2}, {"attention": "ring", "cp_order": "paired", "zero": 2}),
    "experts": ("moe mixtral", {"dp": 2, "tp": 2, "ep": 4}, {"zero": 1}),
    "nodes": ("moe mixtral", {"dp": 2, "tp": 2, "ep": 4}, {"dispatch": "node"}),
}


@pytest.mark.parametrize("names", [list(JOBS)[:5], list(JOBS)[5:]], ids=["dense", "more"])
def test_real_ranks_equal_one_device(names: list[str], tmp_path: Path) -> None:
    """Several in the same processes: starting them takes longer than a job."""
    jobs = {name: JOBS[name] for name in names}
    done = torchrun("-m", "tests.ranks.worker", str(tmp_path), json.dumps(jobs), timeout=480.0)
    assert done.returncode == 0, done.stderr
    for name in names:
        check_trained(name, tmp_path)


def check_trained(job_name: str, directory: Path) -> None:
    name, mesh, options = JOBS[job_name]
    results = [torch.load(directory / f"{job_name} {rank}.pt", weights_only=False) for rank in range(4)]
    with Float64():
        case = case_of(name)
        expected = train_one_device(copy.deepcopy(case.model), [case.batch], 3, case.loss, optimizer, 0.5)
        job = compile_pinned(
            case.model,
            4,
            sample=case.batch,
            loss=case.loss,
            mesh=mesh,
            microbatches=4,
            cluster=cluster_of(options),
            **options,
        )
    assert ("nodes=2" in job.source(0)) == ("dispatch" in options)
    parameters = job.job.gather(results)[1]
    assert max(relative_errors(parameters, expected.parameters).values()) <= 1e-9, job_name
    for result in results:
        assert result.losses == pytest.approx(expected.losses, rel=1e-9), job_name


def test_a_process_that_dies_ends_the_job(tmp_path: Path) -> None:
    # Torchrun stops the others when it sees that one is dead: by then they have to have seen it, too.
    seldom = "--monitor-interval", "15"
    done = torchrun(*seldom, "-m", "tests.ranks.worker", str(tmp_path), json.dumps({"mlp": JOBS["mlp"]}), "3")
    assert done.returncode != 0
    assert "DeadRankError" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [{}, {"schedule": "v-half", **SPLIT}], ids=["1f1b", "v-half"])
def test_a_written_directory_runs_by_itself(options: dict[str, Any], tmp_path: Path) -> None:
    case = make("gpt2", batch=8, dtype=torch.float32)
    job = compile_pinned(case.model, 4, sample=case.batch, mesh={"pp": 2, "tp": 2}, microbatches=2, **options)
    directory = job.write(tmp_path / "plan")
    done = torchrun(str(directory / "train.py"), "--steps", "2")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(lines) == 2
