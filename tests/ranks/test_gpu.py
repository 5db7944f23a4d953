"""On CUDA: a rank's program on the device against the model on one device."""

from __future__ import annotations

import copy

import pytest
import torch

from autopar.verification import train_one_device
from tests.models import make
from tests.pinned import compile_pinned
from tests.ranks.test_parity import tame_optimizer

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["gpt2", "llama", "nano_gpt", "mlp"])
def test_one_gpu_equals_one_device(name: str) -> None:
    case = make(name, batch=8, dtype=torch.float32)
    expected = train_one_device(copy.deepcopy(case.model), [case.batch], 3, case.loss, tame_optimizer, 0.5)
    job = compile_pinned(
        case.model, 1, sample=case.batch, loss=case.loss, microbatches=4, optimizer=tame_optimizer, clip_norm=0.5
    )
    losses = [float(job.step(case.batch)) for _ in range(3)]
    assert job.running.axes.device.type == "cuda"
    assert losses == pytest.approx(expected.losses, rel=2e-5)
