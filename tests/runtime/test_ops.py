"""Special forms against torch's own ops on one device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar import simulate
from autopar.errors import ShardingError
from autopar.mesh import Mesh
from autopar.runtime import Axes, cross_entropy_sharded, embedding_rows, embedding_sharded
from autopar.spmd import I, P, S
from tests.runtime.ranks import on_ranks, part, wholes

CLASSES, TOKENS = 12, 10


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("padding", [-1, 0, 5, 11])
def test_embedding(size: int, padding: int) -> None:
    weight = torch.randn(CLASSES, 3, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(0, CLASSES, (4, 6))
    ids[0, :4] = torch.tensor([0, 5, 11, 6])
    grad = torch.randn(4, 6, 3, dtype=torch.float64)
    expected = F.embedding(ids, weight, padding_idx=padding if padding >= 0 else None)
    expected.backward(grad)

    def program(axes: Axes) -> tuple[Tensor, Tensor]:
        own = part(weight.detach(), S(0), axes.rank, size).requires_grad_()
        found = embedding_sharded(own, ids, axes["tp"], padding)
        found.backward(grad)
        assert own.grad is not None
        return found.detach(), own.grad

    results = on_ranks(Mesh(tp=size), program)
    assert weight.grad is not None
    assert torch.equal(wholes([r[0] for r in results], P)[0], expected)
    assert torch.equal(wholes([r[1] for r in results], S(0))[0], weight.grad)


@pytest.mark.parametrize("bad", [-1, CLASSES, CLASSES + 3])
def test_an_id_outside_of_the_table_fails_on_every_rank(bad: int) -> None:
    def program(axes: Axes) -> None:
        with pytest.raises(IndexError, match="out of range"):
            embedding_sharded(torch.ones(CLASSES // 2, 3), torch.tensor([1, bad]), axes["tp"])

    on_ranks(Mesh(tp=2), program)


ROWS = 14  # of which pp 2 x tp 2 ranks hold 4 each: two are padding


@pytest.mark.parametrize("padding", [-1, 0, 5, 13])
def test_embedding_over_the_pipeline(padding: int) -> None:
    weight = torch.randn(ROWS, 3, dtype=torch.float64, requires_grad=True)
    ids = torch.cat([torch.arange(ROWS), torch.tensor([0, 5, 13, 5])]).view(3, 6)
    grad = torch.randn(3, 6, 3, dtype=torch.float64)
    expected = F.embedding(ids, weight, padding_idx=padding if padding >= 0 else None)
    expected.backward(grad)
    padded = F.pad(weight.detach(), (0, 0, 0, 2), value=7.0)  # what padding holds must not matter

    def program(axes: Axes) -> tuple[Tensor, Tensor]:
        first = 4 * (2 * axes["pp"].index + axes["tp"].index)
        own = padded[first : first + 4].clone().requires_grad_()
        found = embedding_rows(own, ids, ROWS, padding, axes)
        found.backward(grad)
        assert own.grad is not None
        return found.detach(), own.grad

    results = on_ranks(Mesh(pp=2, tp=2), program)
    assert weight.grad is not None
    assert torch.equal(sum(r[0] for r in results), expected)
    gradients = torch.cat([r[1] for r in results])
    assert torch.equal(gradients[:ROWS], weight.grad)
    assert not gradients[ROWS:].any()


@pytest.mark.parametrize("bad", [-1, ROWS, ROWS + 1, ROWS + 9])
def test_an_id_of_padding_or_outside_fails_on_every_rank(bad: int) -> None:
    def program(axes: Axes) -> None:
        with pytest.raises(IndexError, match="out of range"):
            embedding_rows(torch.ones(4, 3), torch.tensor([1, bad]), ROWS, -1, axes)

    on_ranks(Mesh(pp=2, tp=2), program)


def sharded_loss(
    logits: Tensor, target: Tensor, size: int, scale: float = 1.0, **options: float
) -> tuple[list[Tensor], Tensor]:
    """The loss of every rank, and the gradient of the whole logits."""
    classes = S(min(1, logits.dim() - 1))

    def program(axes: Axes) -> tuple[Tensor, Tensor]:
        own = part(logits, classes, axes.rank, size).requires_grad_()
        loss = cross_entropy_sharded(own, target, axes["tp"], **options)  # type: ignore[arg-type]
        (loss * scale).backward()
        assert own.grad is not None
        return loss.detach(), own.grad

    results = on_ranks(Mesh(tp=size), program)
    return wholes([r[0] for r in results], I), wholes([r[1] for r in results], classes)[0]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("shape", [(TOKENS, CLASSES), (2, CLASSES, 5), (CLASSES,)])
def test_cross_entropy(size: int, smoothing: float, shape: tuple[int, ...]) -> None:
    logits = (20 * torch.randn(shape, dtype=torch.float64)).requires_grad_()
    target = torch.randint(0, CLASSES, (*shape[:1], *shape[2:]) if len(shape) > 1 else ())
    if target.dim():
        target.view(-1)[::3] = -100
    expected = F.cross_entropy(logits, target, reduction="sum", label_smoothing=smoothing)
    (expected * 0.7).backward()

    losses, grad = sharded_loss(logits.detach(), target, size, scale=0.7, label_smoothing=smoothing)
    for loss in losses:
        assert torch.equal(loss, losses[0])
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(grad, logits.grad, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("shape", [(TOKENS, CLASSES), (2, CLASSES, 5), (CLASSES,)])
def test_a_cross_entropy_per_token(smoothing: float, shape: tuple[int, ...]) -> None:
    logits = (20 * torch.randn(shape, dtype=torch.float64)).requires_grad_()
    target = torch.randint(0, CLASSES, (*shape[:1], *shape[2:]) if len(shape) > 1 else ())
    if target.dim():
        target.view(-1)[::3] = -100
    weights = torch.randn(target.shape, dtype=torch.float64)
    expected = F.cross_entropy(logits, target, reduction="none", label_smoothing=smoothing)
    (expected * weights).sum().backward()
    classes = S(min(1, logits.dim() - 1))

    def program(axes: Axes) -> tuple[Tensor, Tensor]:
        own = part(logits.detach(), classes, axes.rank, 2).requires_grad_()
        loss = cross_entropy_sharded(own, target, axes["tp"], label_smoothing=smoothing, reduction="none")
        (loss * weights).sum().backward()
        assert own.grad is not None
        return loss.detach(), own.grad

    results = on_ranks(Mesh(tp=2), program)
    for loss, _ in results:
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(wholes([r[1] for r in results], classes)[0], logits.grad, rtol=1e-13, atol=1e-14)


def test_any_index_can_be_the_ignored_one() -> None:
    logits, target = torch.randn(TOKENS, CLASSES, dtype=torch.float64), torch.arange(TOKENS)
    expected = F.cross_entropy(logits, target, reduction="sum", ignore_index=3)
    torch.testing.assert_close(sharded_loss(logits, target, 2, ignore_index=3)[0][1], expected)


def test_no_token_counts() -> None:
    losses, grad = sharded_loss(torch.randn(3, CLASSES), torch.full((3,), -100), 2)
    assert [loss.item() for loss in losses] == [0, 0]
    assert not grad.any()


def test_large_logits_neither_overflow_nor_vanish() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0, 1e4]], dtype=torch.float64)
    losses, grad = sharded_loss(logits, torch.tensor([3]), 2)
    assert losses[0].item() == pytest.approx(0.6931471805599453, abs=1e-15)
    assert grad.tolist() == [[0.5, 0.0, 0.0, -0.5]]


def test_bfloat16_is_computed_in_float32() -> None:
    dtype = torch.bfloat16
    logits = (3 * torch.randn(64, 32)).to(dtype)
    target = torch.randint(0, 32, (64,))
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, target, reduction="sum")
    expected.backward()
    losses, grad = sharded_loss(logits, target, 4)
    half_step = torch.finfo(dtype).eps / 2
    assert losses[0].dtype == grad.dtype == dtype
    assert losses[0].item() == pytest.approx(expected.item(), rel=1.5 * half_step)
    assert exact.grad is not None
    error = (grad.double() - exact.grad).abs()
    at_target = F.one_hot(target, 32).bool()
    assert (error / exact.grad.abs())[~at_target].max() <= 2.5 * half_step  # rounded twice, as is exp / sum
    assert error[at_target].max() <= 2.5 * half_step


def test_one_large_buffer_serves_loss_and_gradient() -> None:
    """Beside the logits: for the exponentials, then, in place, for the gradient."""
    logits_bytes = 64 * 4096 * 4

    def program(rank: int) -> None:
        logits = torch.randn(64, 4096, requires_grad=True)
        axes = Axes.alone(Mesh(), 0, "cpu")
        cross_entropy_sharded(logits, torch.arange(64), axes["tp"], label_smoothing=0.1).backward()

    assert simulate.run(program, 1).peak_bytes[0] < 2.1 * logits_bytes


@pytest.mark.parametrize("bad", [-1, CLASSES])
def test_a_target_that_is_no_class_fails_on_every_rank(bad: int) -> None:
    def program(axes: Axes) -> None:
        with pytest.raises(RuntimeError, match="out of bounds"):
            cross_entropy_sharded(torch.ones(2, CLASSES // 2), torch.tensor([0, bad]), axes["tp"])

    on_ranks(Mesh(tp=2), program)


def test_class_probabilities_are_refused() -> None:
    axes = Axes.alone(Mesh(), 0, "cpu")
    with pytest.raises(ShardingError, match=r"need a target of shape \(2,\), not \(2, 4\)"):
        cross_entropy_sharded(torch.ones(2, 4), torch.ones(2, 4), axes["tp"])
