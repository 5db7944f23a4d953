"""Names of a model and of its batch that would be those of something else in emitted code."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import BatchError, StageError
from tests.fast_cluster import FAST
from tests.pinned import compile_pinned


class Nested(nn.Module):
    """Takes a tensor in a dict, and one whose name is as that one's path."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: dict[str, Tensor], x_y: Tensor) -> Tensor:
        return (self.a(x["y"]).sin() * self.b(x_y)).square().mean()


def test_inputs_whose_names_would_be_alike_are_told_apart() -> None:
    torch.manual_seed(0)
    batch = {"x": {"y": torch.randn(8, 8).double()}, "x_y": torch.randn(8, 8).double()}
    job = compile_pinned(Nested().double(), 2, sample=batch, mesh={"dp": 2})
    assert [item.name for item in job.plan.inputs] == ["x_y", "x_y_2"]
    result = job.verify(batch)
    assert result.ok, str(result)


def test_two_tensors_at_one_path_are_refused() -> None:
    with pytest.raises(BatchError, match=r"two tensors of the batch are called 'x.y'; give one another key"):
        compile_pinned(Nested(), 2, sample={"x": {"y": torch.randn(8, 8)}, "x.y": torch.randn(8, 8)}, mesh={"dp": 2})


def test_a_module_that_has_the_name_of_what_emitted_code_keeps_is_refused() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.axes = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.axes(x).square().mean()

    with pytest.raises(StageError, match=r"'axes' can't be emitted: class \w+ has its own 'axes'; rename"):
        compile_pinned(Named(), 2, sample=(torch.randn(8, 8),), mesh={"tp": 2}, cluster=FAST)
