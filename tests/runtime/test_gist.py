"""Compressed saved activations: the same values and gradients, and how much is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from autopar.mesh import Mesh
from autopar.runtime import Axes, rng
from autopar.runtime.gist import (
    EightBits,
    dropout_replayed,
    hardtanh_kept_as_bits,
    kept_in_8_bits,
    leaky_relu_kept_as_bits,
    max_pool2d_kept_as_places,
    pack_bits,
    relu6_kept_as_bits,
    relu_kept_as_bits,
    threshold_kept_as_bits,
    unpack_bits,
)

aten = torch.ops.aten


@contextmanager
def counting() -> Iterator[list[Tensor]]:
    """What autograd keeps within."""
    kept: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        kept.append(x.detach())
        return kept[-1]

    with saved_tensors_hooks(pack, lambda x: x):
        yield kept


def edges() -> Tensor:
    """Every comparison's own number, its neighbours, infinities and NaN, and noise."""
    special = [0.0, -0.0, 1.0, -1.0, 6.0, 0.5, 1e-300, -1e-300, float("inf"), -float("inf"), float("nan")]
    noise = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.cat([torch.tensor(special, dtype=torch.float64), noise * 4])


PAIRS: list[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
    (relu_kept_as_bits, aten.relu),
    (relu6_kept_as_bits, aten.relu6),
    (leaky_relu_kept_as_bits, aten.leaky_relu),
    (lambda x: leaky_relu_kept_as_bits(x, 0.2), lambda x: aten.leaky_relu(x, 0.2)),
    (hardtanh_kept_as_bits, aten.hardtanh),
    (lambda x: hardtanh_kept_as_bits(x, -0.5, 1.0), lambda x: aten.hardtanh(x, -0.5, 1.0)),
    (lambda x: threshold_kept_as_bits(x, 0.5, -3.0), lambda x: aten.threshold(x, 0.5, -3.0)),
]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_ops_like_relu_keep_a_bit_per_element(
    ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor]
) -> None:
    found = []
    for function in (ours, theirs):
        x = edges().requires_grad_()
        with counting() as kept:
            y = function(x)
        y.backward(torch.linspace(1, 2, x.numel(), dtype=x.dtype))
        found.append((y.detach(), x.grad, sum(t.nbytes for t in kept)))
    (y, grad, bytes_), (expected, expected_grad, _) = found
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(grad, expected_grad, rtol=0, atol=0, equal_nan=True)
    assert bytes_ == -(-61 // 8)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (8,), (3, 5, 3)])
def test_bits_there_and_back(shape: tuple[int, ...]) -> None:
    mask = torch.rand(shape) < 0.5
    packed = pack_bits(mask)
    assert packed.dtype == torch.uint8
    assert packed.numel() == -(-mask.numel() // 8)
    assert torch.equal(unpack_bits(packed, mask.shape), mask)


@pytest.mark.parametrize("layout", [lambda x: x, lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[1:]])
def test_dropout_is_replayed(layout: Callable[[Tensor], Tensor]) -> None:
    axes = Axes.alone(Mesh(), 0, "cpu")
    base = torch.randn(6, 8, dtype=torch.float64)
    found = []
    for function in (lambda x: aten.dropout(x, 0.4, True), lambda x: dropout_replayed(x, 0.4, True, axes)):
        x = layout(base).detach().requires_grad_()
        with counting() as kept, rng(axes, 3, ()):
            y = function(x)
        torch.rand(3)  # what is drawn between has no influence
        state = torch.get_rng_state()
        y.backward(torch.arange(y.numel(), dtype=torch.float64).view_as(y))
        assert torch.equal(torch.get_rng_state(), state)
        found.append((y.detach(), x.grad, len(kept)))
    (expected, expected_grad, _), (y, grad, kept_tensors) = found
    assert torch.equal(y, expected)
    assert torch.equal(grad, expected_grad)
    assert kept_tensors == 0


POOLS = [
    ([3, 3], [2, 2], [1, 1], [1, 1], False),
    ([2, 3], [], 0, 1, True),
    ([3, 2], [1, 2], [1, 0], [2, 3], False),
    ([17, 16], [1, 1], 0, 1, False),
]


@pytest.mark.parametrize("arguments", POOLS)
def test_max_pooling_keeps_places(arguments: tuple[list[int], list[int], list[int], list[int], bool]) -> None:
    found = []
    for function in (max_pool2d_kept_as_places, aten.max_pool2d):
        random = torch.Generator().manual_seed(0)
        x = torch.randn(2, 3, 18, 19, generator=random, dtype=torch.float64).requires_grad_()
        with counting() as kept:
            y = function(x, *arguments)
        y.backward(torch.arange(y.numel(), dtype=torch.float64).view_as(y))
        found.append((y.detach(), x.grad, kept))
    (y, grad, kept), (expected, expected_grad, _) = found
    assert torch.equal(y, expected)
    assert torch.equal(grad, expected_grad)
    assert [t.nbytes for t in kept] == [y.numel() * (2 if arguments[0] == [17, 16] else 1)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_eight_bits_are_within_half_a_unit(dtype: torch.dtype) -> None:
    x = (torch.randn(1000) * torch.logspace(-3, 3, 1000)).to(dtype)
    x[256:512] = 0
    found = EightBits.of(x).numbers()
    assert found.dtype == dtype
    for block in range(0, 1000, 256):
        part = x[block : block + 256].double()
        slack = torch.finfo(dtype).eps * part.abs().max()
        assert (found[block : block + 256].double() - part).abs().max() <= part.abs().max() / 254 * 1.0001 + slack


def test_what_is_not_finite_stays_so() -> None:
    x = torch.ones(512)
    x[3] = float("nan")
    found = EightBits.of(x).numbers()
    assert found[:256].isnan().all()
    assert torch.equal(found[256:], x[256:])


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)
        self.scale = nn.Parameter(torch.ones(64))

    def exact(self, x: Tensor, table: Tensor) -> Tensor:
        h = aten.layer_norm(x, [64], self.scale)
        h = aten.gelu(h @ self.weight) * table
        return x + h.flatten(0, 1).view_as(x).tanh() @ self.weight

    forward = kept_in_8_bits(exact)


def test_a_layer_in_8_bits_keeps_less_and_computes_nearly_the_same() -> None:
    torch.manual_seed(0)
    layer, x, table = Layer(), torch.randn(4, 32, 64), torch.rand(32, 64)
    codes: list[int] = []
    gradients = []
    of = EightBits.of
    for function in (layer.exact, layer.forward):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        EightBits.of = classmethod(lambda cls, t: codes.append(t.numel()) or of(t))  # type: ignore[assignment,method-assign]
        try:
            y = function(leaf * 1, table)
        finally:
            EightBits.of = of  # type: ignore[method-assign]
        y.square().sum().backward()
        gradients.append((y.detach(), leaf.grad, layer.weight.grad, layer.scale.grad))
    exact, lossy = gradients
    assert torch.equal(exact[0], lossy[0])  # the forward is the same
    for a, b in zip(exact[1:], lossy[1:], strict=True):
        assert a is not None
        assert b is not None
        relative = float((a - b).norm() / a.norm())
        assert 0 < relative < 0.02
    # x, the norm's result, the product before gelu, tanh's result for two; no table, weight, statistic
    assert codes == [4 * 32 * 64] * 4


@pytest.mark.filterwarnings("ignore")  # the tracer's own
def test_compiled() -> None:
    def run(x: Tensor) -> Tensor:
        return leaky_relu_kept_as_bits(relu_kept_as_bits(x) - 1, 0.2)

    found = []
    for function in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        x = edges()[:10].requires_grad_()
        y = function(x)
        y.sum().backward()
        found.append((y.detach(), x.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])  # type: ignore[arg-type]
