"""Activations that go to the host and come back: the same gradients, and memory that is gone in between."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar import simulate
from autopar.runtime.offload import LEAST_BYTES, ActivationOffload
from autopar.simulate.memory import MemoryTracker

aten = torch.ops.aten
ROWS, WIDTH = 64, 256  # 128 KiB in float64


class Layer(nn.Module):
    """Saves views of one memory, one tensor for several ops, a small one, a weight, and part of something large."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64) / 16)
        self.register_buffer("table", torch.rand(ROWS, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        h = aten.layer_norm(x @ self.weight, [WIDTH], None)
        left, right = (h * self.table).sigmoid().split(WIDTH // 2, dim=1)
        gate = (left * right.transpose(0, 1).reshape(ROWS, -1)).tanh()
        scale = (gate.sum(1, keepdim=True) / WIDTH).exp()
        return torch.cat([gate, gate.square()], 1) * scale


@pytest.mark.parametrize(("freed", "fetched"), [(True, True), (True, False), (False, False)])
def test_gradients_are_the_same(freed: bool, fetched: bool) -> None:
    torch.manual_seed(0)
    layer, found = Layer(), []
    for places in ([], [(0, 1)]):
        offload = ActivationOffload(places, torch.device("cpu"))
        leaf = torch.linspace(0, 1, ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH).clone().requires_grad_()
        layer.zero_grad()
        with offload.keeping((0, 1), layer):
            result = layer(leaf)
        if places:
            offload.offload((0, 1))
            assert leaf.untyped_storage().nbytes() > 0
            if freed:
                offload.free((0, 1), [leaf])
                assert leaf.untyped_storage().nbytes() == 0
            if fetched:
                offload.fetch((0, 1))
        result.square().sum().backward()
        found.append((result.detach(), leaf.grad, layer.weight.grad))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_the_devices_memory_is_let_go_of() -> None:
    """Live bytes of the device: nothing but the result and small tensors stays; all is back for the backward."""

    def program(_: int) -> list[int]:
        layer = Layer()
        x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
        offload = ActivationOffload([(0, 0)], torch.device("cpu"))
        live: list[int] = []
        with MemoryTracker() as tracker:
            for keeping in (False, True):
                before = tracker.live_bytes
                leaf = (x * 1).requires_grad_()
                with offload.keeping((0, 0) if keeping else (0, 1), layer):
                    result = layer(leaf)
                live.append(tracker.live_bytes - before)
                if keeping:
                    offload.offload((0, 0))
                    assert tracker.live_bytes - before == live[-1]
                    offload.free((0, 0), [leaf])
                    tracker.mark("away")  # it looks for what was resized
                    live.append(tracker.live_bytes - before)
                    assert tracker.host_bytes == 5 * ROWS * WIDTH * 8  # two of them are halves
                    offload.fetch((0, 0))
                    assert tracker.host_bytes == 0
                    live.append(tracker.live_bytes - before)
                del result, leaf
                assert tracker.live_bytes == before
        return live

    (live,) = simulate.run(program, 1, track_memory=False).results
    exact, kept, away, back = live
    result = ROWS * WIDTH * 8
    assert kept == exact
    assert result <= away < result + 2 * LEAST_BYTES
    assert away + LEAST_BYTES < back <= exact


def test_memory_that_others_hold_stays() -> None:
    """Neither a copy of it is made, nor is it let go of; all else of the place goes."""
    torch.manual_seed(0)
    offload, layer = ActivationOffload([(0, 0)], torch.device("cpu")), Layer()
    leaf = torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    with offload.keeping((0, 0), layer):
        result = layer(leaf)
    here = {id(memory) for memory in offload._kept[0, 0].memories}
    offload.leave((0, 0), [leaf])
    offload.leave((0, 1), [leaf])  # none of its places
    away = list(offload._kept[0, 0].memories)
    assert len(here) == len(away) + 1
    offload.offload((0, 0))
    offload.free((0, 0), [leaf])
    assert leaf.untyped_storage().nbytes() > 0
    assert all(memory.device is None for memory in away)
    offload.fetch((0, 0))
    result.square().sum().backward()
    found = leaf.grad
    assert torch.equal(found, torch.autograd.grad(layer(leaf).square().sum(), leaf)[0])


def test_memory_is_freed_as_the_backward_goes() -> None:
    """What FETCH brought back is autograd's to free, node by node, as it is without."""
    offload = ActivationOffload([(0, 0)], torch.device("cpu"))
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    lives: list[int] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: object, *grads: Tensor) -> Tensor:
            lives.append(len(kept.memories))
            return grads[0]

    with offload.keeping((0, 0), nn.Module()):
        h = x
        for _ in range(3):
            h = Look.apply(h).sin()  # type: ignore[no-untyped-call]
    kept = offload._kept[0, 0]
    offload.offload((0, 0))
    offload.free((0, 0))
    offload.fetch((0, 0))
    h.sum().backward()
    assert lives == [2, 1, 0]


def test_parameters_and_small_tensors_stay() -> None:
    layer = Layer()
    offload = ActivationOffload([(0, 0)], torch.device("cpu"))
    with offload.keeping((0, 0), layer):
        result = layer(torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True))
    memories = offload._kept[0, 0].memories
    held = {id(layer.weight.untyped_storage()), id(layer.table.untyped_storage())}  # type: ignore[operator]
    for memory in memories:
        assert memory.device is not None
        assert id(memory.device.untyped_storage()) not in held
        assert memory.device.nbytes >= LEAST_BYTES
    # x, the product, the sigmoid's result with both halves, the transposed copy, tanh's result, what scale multiplies
    assert len(memories) == 6
    assert result.requires_grad
