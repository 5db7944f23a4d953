"""Every kind of mean loss, split over microbatches, ranks and positions, against one device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.fast_cluster import FAST
from tests.pinned import compile_pinned

BATCH, SEQUENCE, WIDTH, CLASSES = 8, 4, 8, 6
IGNORED = -100


class Scorer(nn.Module):
    """Scores of ``CLASSES`` classes for each position, and a loss of them."""

    class_weights: Tensor

    def __init__(self, loss: Callable[[Tensor, Tensor, Tensor], Tensor], *, trains: bool = False) -> None:
        super().__init__()
        self.enter, self.out = nn.Linear(WIDTH, 16), nn.Linear(16, CLASSES)
        weights = torch.rand(CLASSES) + 0.5
        if trains:
            self.class_weights = nn.Parameter(weights)
        else:
            self.register_buffer("class_weights", weights)
        self.loss = loss

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.out(self.enter(x).relu()), target, self.class_weights)


def of_classes(**options: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Cross entropy with options; with class weights, those of the model."""

    def loss(scores: Tensor, target: Tensor, weights: Tensor) -> Tensor:
        given = options | ({"weight": weights} if "weight" in options else {})
        return F.cross_entropy(scores.flatten(0, 1), target.flatten(), **given)

    return loss


CLASS_LOSSES = {
    "plain": of_classes(),
    "weighted": of_classes(weight=True),
    "weighted_smoothed": of_classes(weight=True, label_smoothing=0.1),
    "weighted_likelihood": lambda s, t, w: F.nll_loss(s.log_softmax(-1).flatten(0, 1), t.flatten(), weight=w),
    "weighted_by_hand": lambda s, t, w: F.cross_entropy(s.transpose(1, 2), t, weight=w),
}
POINTWISE: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mse": lambda s, t, w: F.mse_loss(s, t),
    "l1": lambda s, t, w: F.l1_loss(s, t),
    "smooth_l1": lambda s, t, w: F.smooth_l1_loss(s, t, beta=0.5),
    "huber": lambda s, t, w: F.huber_loss(s, t, delta=0.5),
    "divergence": lambda s, t, w: F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="batchmean"),
    "divergence_log": lambda s, t, w: torch.ops.aten.kl_div(s.log_softmax(-1), t.log_softmax(-1), log_target=True),
    "soft_margin": lambda s, t, w: F.soft_margin_loss(s, t.sign()),
    "binary": lambda s, t, w: F.binary_cross_entropy(s.sigmoid(), t.sigmoid()),
    "binary_logits": lambda s, t, w: F.binary_cross_entropy_with_logits(s, t.sigmoid(), pos_weight=w),
}
PENALIZED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "added": lambda loss, p: loss + p,
    "first": lambda loss, p: p + loss,
    "taken_from": lambda loss, p: 2 - (p - loss),
    "in_part": lambda loss, p: torch.add(p, loss, alpha=0.5) + 1,
    "less_in_part": lambda loss, p: 3 - torch.sub(p, loss, alpha=0.5),
    "taken": lambda loss, p: torch.sub(loss, p, alpha=0.1) - 1,
}
"""A number that all of the batch has once, with its loss."""
PLANS = [({"dp": 1}, 4), ({"dp": 2}, 2), ({"cp": 2}, 1)]


def check(
    loss: Callable[[Tensor, Tensor, Tensor], Tensor],
    target: Tensor,
    mesh: dict[str, int],
    count: int,
    *,
    trains: bool = False,
) -> None:
    model, x = Scorer(loss, trains=trains).double(), torch.randn(BATCH, SEQUENCE, WIDTH, dtype=torch.float64)
    batch = (x, target)
    ranks = math.prod(mesh.values())
    job = compile_pinned(model, ranks, sample=batch, mesh=mesh, microbatches=count, cluster=FAST)
    result = job.verify(batch, steps=1)
    assert result.ok, str(result)


@pytest.mark.parametrize(("mesh", "count"), [*PLANS, ({"dp": 2, "tp": 2}, 2)])
@pytest.mark.parametrize("name", PENALIZED)
def test_penalties(name: str, mesh: dict[str, int], count: int) -> None:
    """The penalty is of the class weights that the model trains here."""

    def loss(scores: Tensor, target: Tensor, weights: Tensor) -> Tensor:
        return PENALIZED[name](F.mse_loss(scores * weights, target), weights.square().sum())

    check(loss, torch.randn(BATCH, SEQUENCE, CLASSES, dtype=torch.float64), mesh, count, trains=True)


@pytest.mark.parametrize(("mesh", "count"), PLANS)
@pytest.mark.parametrize("name", CLASS_LOSSES)
def test_class_losses(name: str, mesh: dict[str, int], count: int) -> None:
    """Of rows with fewer and fewer targets, so that means of parts are no mean."""
    target = torch.randint(CLASSES, (BATCH, SEQUENCE))
    target[torch.arange(BATCH)[:, None] > torch.arange(SEQUENCE)[None] * 4] = IGNORED
    assert len({int((row != IGNORED).sum()) for row in target}) > 1
    check(CLASS_LOSSES[name], target, mesh, count)


@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise_losses(name: str) -> None:
    check(POINTWISE[name], torch.randn(BATCH, SEQUENCE, CLASSES, dtype=torch.float64), {"dp": 2}, 2)
