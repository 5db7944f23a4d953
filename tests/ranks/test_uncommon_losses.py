"""Weights and losses that torch computes in a way no graph can have: as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.ctc_loss import ctc_loss
from autopar.errors import CaptureError
from tests.fast_cluster import FAST
from tests.pinned import compile_pinned

TIME, ROWS, CLASSES, LONGEST, WIDTH = 6, 8, 5, 3, 8
TARGETS = torch.tensor([[1, 1, 2], [1, 2, 3], [4, 0, 0], [2, 3, 0]]).repeat(2, 1)
WRITTEN = torch.tensor([3, 3, 0, 2, 2, 3, 1, 2])


class Spoken(nn.Module):
    """Sounds ``[b, t, width]`` to what was said."""

    def __init__(self, reduction: str, is_normal: bool) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, CLASSES)
        self.reduction, self.is_normal = reduction, is_normal

    def forward(self, x: Tensor, targets: Tensor, lengths: Tensor, written: Tensor) -> Tensor:
        y = self.head(F.gelu(self.enter(x))).transpose(0, 1)
        y = y.log_softmax(-1) if self.is_normal else y
        loss = F.ctc_loss(y, targets, lengths, written, reduction=self.reduction, zero_infinity=True)
        return loss.square().mean()


@pytest.mark.parametrize(
    ("mesh", "options", "reduction"),
    [
        ({"dp": 2, "tp": 2}, {"microbatches": 2}, "none"),
        ({"pp": 2, "dp": 2}, {"microbatches": 2}, "none"),
        ({"dp": 4}, {"microbatches": 1}, "mean"),
        ({"tp": 2}, {"microbatches": 1, "recompute": "full"}, "sum"),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_normal", [True, False])
def test_what_is_said_is_that_of_one_device(
    mesh: dict[str, int], options: dict[str, Any], reduction: str, is_normal: bool
) -> None:
    """One of the sequences is too short for its target."""
    torch.manual_seed(0)
    lengths = torch.tensor([6, 5, 4, 6, 6, 5, 3, 2])
    batch = torch.randn(ROWS, TIME, WIDTH, dtype=torch.float64), TARGETS, lengths, WRITTEN
    model = Spoken(reduction, is_normal).double()
    ranks = int(torch.tensor(list(mesh.values())).prod())
    given = {"sample": batch, "cluster": FAST, "mesh": mesh, "optimizer": tame, **options}
    result = compile_pinned(model, ranks, **given).verify(batch, steps=2)
    assert result.ok, str(result)


def tame(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("zero_infinity", [True, False])
def test_the_loss_and_its_gradient_are_torchs(reduction: str, zero_infinity: bool) -> None:
    """Also of what doesn't add up to 1; where there is too little time for a target, the loss is."""
    for lengths in ([6] * ROWS, [6, 5, 4, 6, 6, 5, 3, 3]):
        for logits in (torch.randn(TIME, ROWS, CLASSES, dtype=torch.float64), torch.zeros(TIME, ROWS, CLASSES)):
            found = []
            for function in (F.ctc_loss, ctc_loss):
                y = logits.clone().requires_grad_()
                loss = function(y, TARGETS, torch.tensor(lengths), WRITTEN, 0, reduction, zero_infinity)
                possible = loss[loss.isfinite()]
                possible.sum().backward()  # type: ignore[no-untyped-call]
                found.append((loss.detach(), torch.zeros_like(y) if y.grad is None else y.grad))
            (wanted, slope), (loss, own) = found
            torch.testing.assert_close(loss, wanted)
            if wanted.isfinite().all():
                torch.testing.assert_close(own, slope)


def test_targets_in_one_dim_are_refused_by_line() -> None:
    class Joined(Spoken):
        def forward(self, x: Tensor, targets: Tensor, lengths: Tensor, written: Tensor) -> Tensor:
            return F.ctc_loss(self.head(self.enter(x)).transpose(0, 1), targets.flatten(), lengths, written)

    batch = torch.randn(ROWS, TIME, WIDTH), TARGETS, torch.tensor([TIME] * ROWS), torch.tensor([LONGEST] * ROWS)
    with pytest.raises(CaptureError, match=r"test_uncommon_losses.py:\d+: .*\[batch, longest target\]"):
        compile_pinned(Joined("mean", True), 2, sample=batch, cluster=FAST)


@pytest.mark.filterwarnings("ignore:The tensor attribute")  # torch says so of what is assigned
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize(("mesh", "count"), [({"dp": 2, "tp": 2}, 1), ({"pp": 2, "dp": 2}, 2)], ids=str)
def test_weights_that_hooks_compute_are_those_of_one_device(mesh: dict[str, int], count: int) -> None:
    """The model was called before: its modules keep weights that torch doesn't copy."""
    torch.manual_seed(0)
    norm = torch.nn.utils.weight_norm
    model = nn.Sequential(norm(nn.Linear(WIDTH, 2 * WIDTH)), nn.GELU(), norm(nn.Linear(2 * WIDTH, 1), dim=1)).double()
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    model(x)
    given = {"sample": (x,), "cluster": FAST, "mesh": mesh, "microbatches": count, "optimizer": tame}
    job = compile_pinned(model, 4, loss=lambda made, batch: made.square().mean(), **given)
    result = job.verify((x,), steps=2)
    assert result.ok, str(result)
