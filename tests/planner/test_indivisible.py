"""What a batch that can't be split into microbatches is refused with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.errors import ShardingError
from tests.pinned import compile_pinned


class Ended(nn.Module):
    """A layer, and what makes a loss of its values ``[b, s, 8]``."""

    def __init__(self, end: nn.Module | Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.enter, self.end = nn.Linear(8, 8), end

    def forward(self, x: Tensor) -> Tensor:
        made = self.end(self.enter(x))
        return F.mse_loss(made[0], x) if isinstance(made, tuple) else made


def refusal(end: nn.Module | Callable[[Tensor], Tensor]) -> str:
    with pytest.raises(ShardingError) as caught:
        compile_pinned(Ended(end), 1, sample=torch.randn(4, 3, 8), microbatches=2)
    return str(caught.value)


def test_an_op_without_a_rule() -> None:
    """Norms over the whole batch: it is no sum over its rows."""
    said = refusal(lambda h: (torch.renorm(h, 2, 2, 1.0),))
    assert "aten.renorm.default" in said
    assert said.endswith("(CONTRIBUTING: a new op rule).")
    assert "statistics" not in said


def test_what_is_computed_with_a_sum_over_the_batch() -> None:
    said = refusal(lambda h: h.square().mean().sqrt())
    assert "aten.sqrt.default" in said
    assert "It computes with a sum over the batch" in said
    assert "statistics='microbatch'" in said
