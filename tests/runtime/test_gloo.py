"""The same steps on real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.runtime.gloo_job import MESHES
from tests.runtime.parity import Trained, assert_equal_to_one_device

ROOT = Path(__file__).parents[2]


@pytest.mark.gloo
@pytest.mark.slow
def test_four_processes_equal_one_device(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command += ["-m", "tests.runtime.gloo_job", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(4)]
    for i, mesh in enumerate(MESHES):
        assert_equal_to_one_device([Trained(**rank[i]) for rank in ranks], mesh)
