"""Tensors without values against torch's own fake ones: the same shapes, the same memory, at the same moments."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils.checkpoint import checkpoint

from autopar.errors import PlanError
from autopar.shapes import Shapes, ShapeTensor
from autopar.simulate.memory import MemoryTracker, ShapeTracker
from autopar.storages import Phase


def attention(x: Tensor, w: Tensor) -> Tensor:
    q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in (x @ w).chunk(3, -1))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.dropout(y.transpose(1, 2).flatten(2), 0.1).float().square().mean()


def rotation(x: Tensor, w: Tensor) -> Tensor:
    """Complex numbers: the gradient of a product is one of a conjugate."""
    turned = torch.view_as_complex((x @ w).float().unflatten(-1, (-1, 2)))
    angles = torch.polar(torch.ones(turned.shape[-1]), torch.arange(float(turned.shape[-1])))
    return torch.view_as_real(turned * angles * torch.tensor(0.5)).flatten(-2).sum()


def in_place(x: Tensor, w: Tensor) -> Tensor:
    y = torch.zeros(x.shape[0], x.shape[1], w.shape[1], dtype=x.dtype)
    y[:, 1:].copy_((x @ w)[:, :-1])
    y.mul_(2).add_(x.new_ones(()), alpha=3)
    values, order = y.topk(2, dim=-1)
    return values.sum() + y.gather(-1, order).logsumexp(-1).mean()


def again(x: Tensor, w: Tensor) -> Tensor:
    kept: Tensor = checkpoint(lambda x: (x @ w).relu() @ w.t(), x, use_reentrant=False)
    labels = torch.zeros(kept.shape[:2], dtype=torch.int64)
    return F.cross_entropy(kept.flatten(0, 1).float(), labels.flatten())


def trained(loss_of: Callable[[Tensor, Tensor], Tensor]) -> list[Phase]:
    """Two steps of AdamW, pass by pass; the tracker is the innermost mode."""
    w = torch.empty(8, 48, dtype=torch.bfloat16).requires_grad_()
    optimizer = torch.optim.AdamW([w], weight_decay=0.1)
    tracker = next(m for m in torch.utils._python_dispatch._get_current_dispatch_mode_stack() if hasattr(m, "mark"))
    for step in range(2):
        tracker.mark(f"forward {step}", "saved")
        loss = loss_of(torch.empty(2, 6, 8, dtype=torch.bfloat16), w)
        tracker.mark(f"backward {step}", "gradients")
        loss.backward()
        tracker.mark(f"update {step}")
        optimizer.step()
        optimizer.zero_grad()
    tracker.mark("")
    phases: list[Phase] = tracker.phases
    return phases


@pytest.mark.parametrize("loss_of", [attention, rotation, in_place, again])
def test_memory_is_that_of_fake_tensors(loss_of: Callable[[Tensor, Tensor], Tensor]) -> None:
    with FakeTensorMode(), MemoryTracker(fake=True):
        expected = trained(loss_of)
    with ShapeTracker(shapes := Shapes()):
        assert trained(loss_of) == expected
    with ShapeTracker(shapes):  # which now knows all of it
        assert trained(loss_of) == expected


def described(tensor: Tensor) -> tuple[object, ...]:
    offset = tensor.storage_offset()
    return tuple(tensor.shape), tensor.stride(), offset, tensor.dtype, tensor.device, tensor.is_conj()


@pytest.mark.parametrize(
    "views",
    [
        lambda x: x[1:, ::2].t(),
        lambda x: x.detach().as_strided((2, 3), (1, 2), 4),
        lambda x: x.view(-1)[5:].split([2, 9], 0)[1],
        lambda x: x.to(torch.complex64).t().conj()[0],
        lambda x: x.unbind(1)[2].expand(3, 4),
    ],
)
def test_views_share_memory_and_know_their_place(views: Callable[[Tensor], Tensor]) -> None:
    with FakeTensorMode():
        expected = views(torch.empty(4, 4))
    with ShapeTracker(Shapes()):
        found = views(torch.empty(4, 4))
        assert described(found) == described(expected)
        assert found.untyped_storage().nbytes() == expected.untyped_storage().nbytes()
        assert found[:1].untyped_storage() is found.untyped_storage()


def test_a_call_is_told_from_others_by_types_of_numbers() -> None:
    with ShapeTracker(Shapes()):
        x = torch.empty(3, dtype=torch.int64)
        assert [(x + n).dtype for n in (1, 1.0, True)] == [torch.int64, torch.float32, torch.int64]


def test_memory_can_be_given_back_and_taken_again() -> None:
    with ShapeTracker(Shapes()) as tracker:
        weight = torch.empty(1000)
        kept = weight[10:]
        weight.untyped_storage().resize_(0)
        assert (tracker.live_bytes, tracker.peak_bytes) == (0, 4000)
        kept.untyped_storage().resize_(4000)
        assert tracker.live_bytes == 4000
        del weight, kept
        assert tracker.live_bytes == 0


def test_constants_keep_their_values() -> None:
    with ShapeTracker(Shapes()) as tracker:
        steps = torch.tensor(2.0)
        steps += 1
        assert steps.item() == 3.0
        assert isinstance(torch.empty(2) * steps, ShapeTensor)
        assert tracker.live_bytes == steps.nbytes


def test_what_depends_on_values_is_refused() -> None:
    with ShapeTracker(Shapes()):
        x = torch.empty(3)
        with pytest.raises(DataDependentOutputException):
            x.sum().item()
        with pytest.raises(PlanError, match="in place"):
            x.unsqueeze_(0)


def test_dims_with_one_value_may_be_laid_out_in_place() -> None:
    """As pooling to one value does, of what has its channels last."""
    with ShapeTracker(Shapes()) as tracker:
        image = torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last)
        pooled = F.adaptive_avg_pool2d(image, 1)
        assert pooled.shape == (2, 3, 1, 1)
        assert tracker.live_bytes == image.nbytes + pooled.nbytes
        assert pooled.as_strided_((2, 3, 1, 1), (3, 1, 7, 7)) is pooled
        for shape, strides, offset in (((3, 2, 1, 1), (2, 1, 1, 1), 0), ((2, 3, 1, 1), (1, 2, 1, 1), 0)):
            with pytest.raises(PlanError, match="in place"):
                pooled.as_strided_(shape, strides, offset)
        with pytest.raises(PlanError, match="in place"):
            pooled[1:].as_strided_((1, 3, 1, 1), (3, 1, 1, 1), 0)
