"""What a model keeps between steps on names of its modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import CaptureError
from tests.fast_cluster import FAST
from tests.pinned import compile_pinned

WIDTH = 8


class Keeping(nn.Module):
    def __init__(self, body: Callable[[Any, Tensor], Tensor], **kept: Any) -> None:
        super().__init__()
        self.enter, self.body = nn.Linear(WIDTH, WIDTH), body
        for name, value in kept.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.enter(x)).square().mean()


def state(model: Any, x: Tensor) -> Tensor:
    x = (x + model.state).tanh()
    model.state = x.detach().mean(0)
    return x


def state_from_nothing(model: Any, x: Tensor) -> Tensor:
    x = x if model.state is None else x + model.state
    model.state = x.detach().mean(0)
    return x


def counted(model: Any, x: Tensor) -> Tensor:
    model.steps += 1
    return x * min(1.0, model.steps / 10)


def named_first_in_the_pass(model: Any, x: Tensor) -> Tensor:
    x = x + getattr(model, "state", 0)
    model.state = x.detach()
    return x


REFUSED = {
    "tensor": lambda: Keeping(state, state=torch.zeros(WIDTH)),
    "none": lambda: Keeping(state_from_nothing, state=None),
    "absent": lambda: Keeping(named_first_in_the_pass),
    "number": lambda: Keeping(counted, steps=0),
}


@pytest.mark.filterwarnings("ignore:.*assigned during export")
@pytest.mark.parametrize("name", REFUSED)
def test_what_later_steps_compute_with_is_refused(name: str) -> None:
    model = REFUSED[name]()
    before = dict(vars(model))
    with pytest.raises(CaptureError, match=r"Keeping '' keeps '(state|steps)' for the next step and computes with it"):
        autopar.capture(model, sample=torch.randn(4, WIDTH))
    assert vars(model) == before


def looked_at(model: Any, x: Tensor) -> Tensor:
    model.calls += 1
    model.last = x.softmax(-1)
    return model.last


def table(model: Any, x: Tensor) -> Tensor:
    """Made once, for as many as there are."""
    if x.shape[1] > model.length:
        model.length = x.shape[1]
        model.table = torch.arange(model.length).to(x.dtype).cos()
    return x * model.table


@pytest.mark.filterwarnings("ignore:.*assigned during export")
@pytest.mark.parametrize(
    "make",
    [lambda: Keeping(looked_at, calls=0, last=None), lambda: Keeping(table, length=0, table=None)],
    ids=["looked_at", "table"],
)
def test_what_changes_no_later_step_is_taken(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    job = compile_pinned(make().double(), 2, sample=x, mesh={"dp": 2}, cluster=FAST, optimizer=torch.optim.SGD)
    result = job.verify(x, steps=2)
    assert result.ok, str(result)
