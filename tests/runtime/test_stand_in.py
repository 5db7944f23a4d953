"""Kernels as they are chosen for another device."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

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


def test_the_innermost_counts_and_an_error_ends_it() -> None:
    x = torch.zeros(1)
    with standing_for("cuda"):
        with standing_for("cpu"):
            assert device_type(x) == "cpu"
        assert device_type(x) == "cuda"
        with pytest.raises(ZeroDivisionError), standing_for("cpu"):
            raise ZeroDivisionError
        assert device_type(x) == "cuda"
    assert device_type(x) == "cpu"


def test_tensors_of_other_ranks_stand_for_themselves() -> None:
    """Simulated ranks are threads."""
    found: list[str] = []
    with standing_for("cuda"):
        other = threading.Thread(target=lambda: found.append(device_type(torch.zeros(1))))
        other.start()
        other.join()
    assert found == ["cpu"]


def test_compiled_code_runs_where_its_tensors_are() -> None:
    def scaled(x: Tensor) -> Tensor:
        return x * 2 if device_type(x) == "cpu" else x * 3

    compiled = torch.compile(scaled, backend="eager", fullgraph=True)
    with standing_for("cuda"):
        assert compiled(torch.ones(1)).item() == 2
