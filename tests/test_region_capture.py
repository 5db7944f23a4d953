"""What enters a no_grad region takes no gradient; what code goes on with behind it does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fast_cluster import FAST
from tests.pinned import compile_pinned


def other(x: Tensor) -> Tensor:
    return x.view_as(x)


def same(x: Tensor) -> Tensor:
    return x.to(x.dtype)


def same_again(x: Tensor) -> Tensor:
    return F.dropout(x.contiguous(), 0.5, training=False)


def copy(x: Tensor) -> Tensor:
    return x.float().to(x.dtype)


class Chosen(nn.Module):
    """Channels are chosen without a gradient, of what ``asked`` makes of the same values; then these are used."""

    def __init__(self, asked: Callable[[Tensor], Tensor], inner: bool = False) -> None:
        super().__init__()
        self.asked, self.inner = asked, inner
        self.inward, self.chooser, self.outward = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    @torch.no_grad()
    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        asked = self.asked(x)
        if self.inner:
            with torch.no_grad():
                asked = self.asked(asked)
        return self.chooser(asked) > 0, asked

    def forward(self, x: Tensor) -> Tensor:
        x = self.inward(x)
        mask, asked = self.choose(x)
        return (self.outward(x).where(mask, x) * asked).square().mean()


@pytest.mark.parametrize("inner", [False, True], ids=["", "nested"])
@pytest.mark.parametrize("asked", [other, same, same_again, copy], ids=["view", "same", "chain", "copy"])
def test_values_that_a_region_hands_back_as_they_came_keep_their_gradient(
    asked: Callable[[Tensor], Tensor], inner: bool
) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6, 8, dtype=torch.float64)
    job = compile_pinned(Chosen(asked, inner).double(), 2, sample=x, mesh={"dp": 2}, cluster=FAST)
    result = job.verify(x, steps=1)
    assert result.ok, str(result)
