"""Kernels as they are chosen for another device."""

from __future__ import annotations

import torch

from autopar.runtime.attention_blocks import Call, Cpu, Efficient, Flash, Products, kernel
from autopar.runtime.stand_in import device_type, standing_for


def test_attention_in_blocks_takes_the_kernels_of_the_device_that_is_stood_for() -> None:
    """Values narrower than keys have no fused kernel on a CPU, which would hold all scores."""
    q, narrow = torch.zeros(1, 2, 4, 16, dtype=torch.bfloat16), torch.zeros(1, 2, 4, 8, dtype=torch.bfloat16)
    call = Call(1.0)
    assert isinstance(kernel(q, narrow, None, call), Products)
    assert isinstance(kernel(q, q, None, call), Cpu)
    with standing_for("cuda"):
        assert isinstance(kernel(q, narrow, None, call), Efficient)
        assert isinstance(kernel(q, q, None, call), Flash)
    assert device_type(q) == "cpu"
