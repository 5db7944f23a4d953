"""shifted_losses: equal loss and gradients, and no cut of the logits is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from autopar.capture import Flat, capture
from autopar.graph import info, op_name
from autopar.passes.functionalize import functionalize
from autopar.passes.normalize_losses import normalize_losses
from autopar.passes.shifted_losses import shifted_losses

ROWS, LENGTH, VOCABULARY, WIDTH = 2, 6, 11, 4
Loss = Callable[[Tensor, dict[str, Tensor]], Tensor]


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, **others: Tensor) -> Tensor:
        return self.head(self.table(ids))


def batch() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=random)
    labels = ids.clone()
    labels[0, 2:4] = -100
    weights = torch.rand(ROWS, LENGTH, generator=random, dtype=torch.float64)
    return {"ids": ids, "labels": labels, "weights": weights}


def cross_entropy(x: Tensor, given: dict[str, Tensor], **options: Any) -> Tensor:
    return F.cross_entropy(x[:, :-1].reshape(-1, VOCABULARY), given["labels"][:, 1:].reshape(-1), **options)


def by_rows(x: Tensor, given: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(x[:, :-1, :].transpose(1, 2), given["labels"][:, 1:])


def summed(x: Tensor, given: dict[str, Tensor]) -> Tensor:
    return cross_entropy(x, given, reduction="sum", ignore_index=-100, label_smoothing=0.1)


def two_ahead(x: Tensor, given: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(x[:, 1:-2].flatten(0, 1), given["labels"][:, 3:].flatten())


def weighted(x: Tensor, given: dict[str, Tensor]) -> Tensor:
    """Every token with its own weight, divided by their sum."""
    each = cross_entropy(x, given, reduction="none").view(ROWS, LENGTH - 1)
    weights = given["weights"][:, 1:]
    return (each * weights / weights.sqrt()).sum() / weights.sum()


def log_likelihood(x: Tensor, given: dict[str, Tensor]) -> Tensor:
    """Written out: log softmax, what the next token has, a mask."""
    targets = given["ids"][:, 1:]
    found = x[:, :-1].log_softmax(-1).gather(2, targets.unsqueeze(-1)).squeeze(-1)
    return -(found * (given["labels"][:, 1:] != -100)).sum() / ROWS


def with_z_loss(x: Tensor, given: dict[str, Tensor]) -> Tensor:
    shifted = x[:, :-1].float()
    z = shifted.logsumexp(-1)
    return F.cross_entropy(shifted.flatten(0, 1), given["labels"][:, 1:].flatten()) + 1e-2 * (z**2).mean()


LOSSES: dict[str, Loss] = {
    f.__name__: f for f in (cross_entropy, by_rows, summed, two_ahead, weighted, log_likelihood, with_z_loss)
}


def captured(model: nn.Module, loss: Loss) -> Flat:
    return normalize_losses(functionalize(capture(model, batch(), loss=loss)))


def run(model: nn.Module, flat: Flat) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and every gradient that the graph computes."""
    parameters = dict(model.named_parameters())
    given = {item.path: item for item in flat.inputs}
    values: dict[fx.Node, Any] = {}
    tensors = batch()
    for node in flat.graph.nodes:
        if node.op == "placeholder":
            data = info(node)
            values[node] = parameters[data.name] if data.role == "parameter" else tensors[given[data.name].path]
    for node in flat.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        assert tuple(values[node].shape) == info(node).meta.shape, node
    found = values[flat.loss]
    return found.detach(), dict(zip(parameters, torch.autograd.grad(found, list(parameters.values())), strict=True))


def cuts(flat: Flat) -> list[int]:
    """How many numbers each cut of the positions of a tensor with a gradient keeps."""
    slices = [n for n in flat.nodes if op_name(n) == "aten.slice.Tensor" and info(n).meta.needs_grad]
    return [info(n).meta.numel for n in slices if info(n).meta.shape != info(n.all_input_nodes[0]).meta.shape]


@pytest.mark.parametrize("name", LOSSES)
def test_equal_loss_and_gradients(name: str) -> None:
    torch.manual_seed(0)
    model = Head().double()
    before = captured(model, LOSSES[name])
    assert max(cuts(before)) > ROWS * LENGTH
    wanted = run(model, before)
    flat = shifted_losses(captured(model, LOSSES[name]))
    loss, gradients = run(model, flat)
    torch.testing.assert_close(loss, wanted[0], rtol=0, atol=1e-12)
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[1][key], rtol=0, atol=1e-12)
    assert all(count <= ROWS * LENGTH for count in cuts(flat))


def across_positions(x: Tensor, given: dict[str, Tensor]) -> Tensor:
    return x[:, :-1].softmax(1).square().sum()


def through_dropout(x: Tensor, given: dict[str, Tensor]) -> Tensor:
    """At all positions, dropout would draw other numbers."""
    return F.cross_entropy(F.dropout(x[:, :-1], 0.5).flatten(0, 1), given["labels"][:, 1:].flatten())


@pytest.mark.parametrize("loss", [across_positions, through_dropout])
def test_a_cut_that_may_not_move_stays(loss: Loss) -> None:
    model = Head().double()
    before = captured(model, loss)
    names = [n.name for n in before.nodes]
    assert [n.name for n in shifted_losses(before).nodes] == names


def test_without_sequences_nothing_moves() -> None:
    before = normalize_losses(functionalize(capture(Head().double(), batch(), loss=cross_entropy, seq_dim=2)))
    names = [n.name for n in before.nodes]
    assert [n.name for n in shifted_losses(before).nodes] == names
