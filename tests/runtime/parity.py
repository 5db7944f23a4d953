"""The same three training steps on one device and on ranks, and whether they agree."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from autopar.mesh import Mesh
from autopar.runtime import Axes
from autopar.spmd import parse
from tests.runtime.ranks import wholes
from tests.runtime.stages import OneDevice, make_batch, make_executor, make_program, make_weights

STEPS, CLIP = 3, 0.1


@dataclass
class Trained:
    """Losses, gradients per step (before clipping), and the weights after the last."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def train_on_one_device() -> Trained:
    model, trained = OneDevice(make_weights()), Trained()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        batch = make_batch(step)
        optimizer.zero_grad()
        loss = model(batch["ids"], batch["0.labels"], batch["scale"])
        loss.backward()
        trained.losses.append(loss.item())
        grads = {name: w.grad.clone() for name, w in model.weights.items() if w.grad is not None}
        trained.gradients.append(grads)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        assert norm > CLIP  # so that clipping is tested
        optimizer.step()
    trained.weights = {name: w.detach() for name, w in model.weights.items()}
    return trained


def train_rank(axes: Axes, microbatches: int, schedule: str) -> Trained:
    trained = Trained()

    def keep(gradients: dict[str, Tensor]) -> None:
        trained.gradients.append({name: grad.clone() for name, grad in gradients.items()})

    executor = make_executor(axes, microbatches, schedule, clip_norm=CLIP, on_gradients=keep)
    for step in range(STEPS):
        trained.losses.append(executor.step(make_batch(step)).item())
    (module,) = executor.stages.values()
    trained.weights = {name: p.detach() for name, p in module.named_parameters()}
    return trained


def gather(ranks: list[dict[str, Tensor]], mesh: Mesh) -> dict[str, Tensor]:
    """Whole tensors from the ranks' parts; all copies must be equal to the last bit."""
    found: dict[str, list[Tensor]] = {}
    for stage in range(mesh.pp):
        for spec in make_program(mesh, 1, stage, mesh.pp).parameters:
            kind = parse(spec.types.get("tp", "I"))
            for dp in range(mesh.dp):
                parts = [ranks[mesh.rank(pp=stage, dp=dp, tp=tp)].get(spec.name) for tp in range(mesh.tp)]
                there = [p for p in parts if p is not None]
                found.setdefault(spec.name, []).extend(wholes(there, kind) if there else [])
    for name, copies in found.items():
        assert all(torch.equal(copy, copies[0]) for copy in copies), name
    return {name: copies[0] for name, copies in found.items() if copies}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        error = (found[name] - tensor).abs().max() / tensor.abs().max()
        assert error.item() <= 1e-11, name


def assert_equal_to_one_device(ranks: list[Trained], mesh: Mesh) -> None:
    expected = train_on_one_device()
    for rank in ranks:
        assert rank.losses == pytest.approx(expected.losses, rel=1e-12)
    for step in range(STEPS):
        assert_same(gather([r.gradients[step] for r in ranks], mesh), expected.gradients[step])
    assert_same(gather([r.weights for r in ranks], mesh), expected.weights)
