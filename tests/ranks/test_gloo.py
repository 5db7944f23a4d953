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


@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("gpt2", {"pp": 2, "tp": 2}, {}),
        ("nano_gpt", {"dp": 2, "tp": 2}, {}),
        ("mlp", {"pp": 2, "dp": 2}, {}),
        ("llama_deep", {"pp": 4}, {"schedule": "1f1b", **SPLIT}),
        ("llama_deep", {"pp": 4}, {"schedule": "zb-v", **SPLIT}),
        ("llama_deep", {"pp": 2, "tp": 2}, {"schedule": "v-half", **SPLIT}),
        ("llama", {"dp": 2, "cp": 2}, {"attention": "ring", "cp_order": "paired", "zero": 2}),
        ("moe mixtral", {"dp": 2, "tp": 2, "ep": 4}, {"zero": 1}),
        ("moe mixtral", {"dp": 2, "tp": 2, "ep": 4}, {"dispatch": "node"}),
    ],
    ids=["gpt2", "nano_gpt", "mlp", "1f1b", "zb-v", "v-half", "ring", "experts", "nodes"],
)
def test_real_ranks_equal_one_device(name: str, mesh: dict[str, int], options: dict[str, Any], tmp_path: Path) -> None:
    done = torchrun("-m", "tests.ranks.worker", name, json.dumps(mesh), str(tmp_path), json.dumps(options))
    assert done.returncode == 0, done.stderr
    results = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(4)]
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
    assert max(relative_errors(parameters, expected.parameters).values()) <= 1e-9
    for result in results:
        assert result.losses == pytest.approx(expected.losses, rel=1e-9)


def test_a_process_that_dies_ends_the_job(tmp_path: Path) -> None:
    # Torchrun stops the others when it sees that one is dead: by then they have to have seen it, too.
    seldom = "--monitor-interval", "15"
    done = torchrun(*seldom, "-m", "tests.ranks.worker", "mlp", '{"pp": 2, "dp": 2}', str(tmp_path), "{}", "3")
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
