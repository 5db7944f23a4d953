"""Running averages move as those of torch's batch norms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.runtime import averaged, recompute


class Normalized(nn.Module):
    """A batch norm of ``[n, c]``, written as what it computes; recomputed in the backward."""

    def __init__(self, channels: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, channels + 1))
        self.register_buffer("running_mean", torch.zeros(channels, dtype=dtype))
        self.register_buffer("running_var", torch.ones(channels, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return recompute(self._normalized, x)

    def _normalized(self, x: Tensor) -> Tensor:
        x = x.float()
        mean = x.mean(0, keepdim=True)
        averaged(mean.detach(), self.running_mean, 0.1)
        centred = x - mean
        variance = centred.square().mean(0, keepdim=True)
        averaged(variance.detach(), self.running_var, 0.1, count=len(x))
        return (centred * torch.rsqrt(variance + 1e-5) * self.weight).sigmoid()


@pytest.mark.filterwarnings("ignore")  # the tracer's own
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_averages_move_once_a_forward(compiled: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ours, theirs = Normalized(4, dtype), nn.BatchNorm1d(4, dtype=dtype)
    run: Any = torch.compile(ours, backend="aot_eager", fullgraph=True) if compiled else ours
    for _ in range(3):
        x = torch.randn(8, 4).to(dtype) + 2
        run(x).sum().backward()
        theirs(x)
    for name in ("running_mean", "running_var"):
        found, expected = ours.get_buffer(name), theirs.get_buffer(name)
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected)


def test_what_is_returned_is_the_average() -> None:
    average = torch.ones(3, dtype=torch.float64)
    made = averaged(torch.full((1, 3, 1), 5.0, dtype=torch.float64, requires_grad=True), average, 0.25, count=5)
    assert not made.requires_grad
    assert torch.equal(made, torch.full((3,), 1 + 0.25 * (5 * 5 / 4 - 1), dtype=torch.float64))
    assert torch.equal(average, made)
    assert made.data_ptr() != average.data_ptr()
