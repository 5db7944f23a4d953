"""One call or more of every op that has a rule, small, with dims that 2 and 4 ranks divide."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from autopar.graph import aten_overload
from autopar.rules.pointwise import BINARY, UNARY
from tests.rules.harness import Example

aten = torch.ops.aten
NO_GRADIENT = {"bitwise_not", "logical_not"}
ALL = sys.maxsize


def f(*shape: int) -> Tensor:
    """A differentiable tensor, positive and below 1, so that every function is smooth there."""
    return (torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1).requires_grad_()


def g(*shape: int) -> Tensor:
    """A differentiable tensor of either sign."""
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def const(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def i(*shape: int, high: int = 4) -> Tensor:
    return torch.randint(0, high, shape)


def b(*shape: int) -> Tensor:
    return torch.rand(shape) > 0.5


def unary() -> Iterator[Example]:
    extra = {"threshold": (0.5, 0.0), "clamp": (0.3, 0.6), "clamp_max": (0.5,), "clamp_min": (0.5,)}
    for name in UNARY:
        op = getattr(aten, name).default
        if name == "bitwise_not":
            yield Example(op, (i(4, 8),))
        else:
            x = f(4, 8).detach() + 1.1 if name == "acosh" else f(4, 8).detach()
            yield Example(op, (x.requires_grad_(), *extra.get(name, ())))
    yield Example(aten.logical_not.default, (b(4, 8),))
    yield Example(aten.relu.default, (g(8),))
    yield Example(aten.gelu.default, (g(2, 4),), {"approximate": "tanh"})


_INTEGERS = ("bitwise_", "__")
_THREE = {
    "clamp.Tensor": lambda: (f(4, 8), f(8), f(4, 1)),
    "addcmul.default": lambda: (f(4, 8), f(4, 8), f(8)),
    "addcdiv.default": lambda: (f(4, 8), f(4, 1), f(4, 8)),
    "lerp.Scalar": lambda: (f(4, 8), f(4, 8), 0.3),
    "lerp.Tensor": lambda: (f(4, 8), f(4, 8), f(8)),
    "where.Scalar": lambda: (b(4, 8), 1.0, 0.0),
    "pow.Scalar": lambda: (2.0, f(4, 8)),
    "pow.Tensor_Scalar": lambda: (f(4, 8), 3),
}


def binary() -> Iterator[Example]:
    for name in BINARY:
        op = aten_overload(f"aten.{name}")
        if name in _THREE:
            yield Example(op, _THREE[name]())
        elif name.startswith(("__", "bitwise", "floor_divide")):
            other = 3 if name.endswith("Scalar") else i(8) + 1
            yield Example(op, (i(4, 8), other))
        else:
            yield Example(op, (f(4, 8), 0.5 if name.endswith("Scalar") else f(8)))


def arithmetic() -> Iterator[Example]:
    yield Example(aten.add.Tensor, (g(4, 8), g(4, 8)), {"alpha": 2})
    yield Example(aten.add.Tensor, (g(4, 8), g(8)))
    yield Example(aten.add.Tensor, (g(4, 8), 1.0))
    yield Example(aten.add.Tensor, (i(4, 8), i(4, 1)))
    yield Example(aten.sub.Tensor, (g(2, 4, 8), g(4, 1)))
    yield Example(aten.mul.Tensor, (g(4, 8), g(1, 8)))
    yield Example(aten.mul.Tensor, (g(4, 8), 0.5))
    yield Example(aten.mul.Tensor, (g(4, 8), const(4, 1)))
    yield Example(aten.mul.Scalar, (g(4, 8), 3.0))
    yield Example(aten.div.Tensor, (g(4, 8), f(8)))
    yield Example(aten.div.Tensor, (g(), f().detach()))
    yield Example(aten.div.Scalar, (g(4, 8), 3.0))
    yield Example(aten.div.Tensor_mode, (g(4, 8), f(4, 8)), {"rounding_mode": "floor"})
    yield Example(aten.div.Tensor_mode, (g(4, 8), f(4, 8)), {"rounding_mode": None})
    yield Example(aten.div.Scalar_mode, (g(4, 8), 0.3), {"rounding_mode": "trunc"})
    yield Example(aten.neg.default, (g(4, 8),))
    yield Example(aten.where.self, (b(4, 8), g(4, 8), g(8)))
    yield Example(aten.where.ScalarOther, (b(4, 8), g(4, 8), 0.0))
    yield Example(aten.where.ScalarOther, (b(4, 8), g(4, 8), 1.0))
    yield Example(aten.where.ScalarSelf, (b(4, 8), 0.0, g(4, 8)))
    yield Example(aten.where.ScalarSelf, (b(4, 8), -1.0, g(4, 8)))
    yield Example(aten.masked_fill.Scalar, (g(4, 8), b(8), 0.0))
    yield Example(aten.masked_fill.Scalar, (g(4, 8), b(4, 8), float("-inf")))
    yield Example(aten.masked_fill.Tensor, (g(4, 8), b(4, 1), g()))
    yield Example(aten.copy.default, (const(4, 8), const(8)))


def casts() -> Iterator[Example]:
    yield Example(aten.to.dtype, (g(4, 8), torch.float32))
    yield Example(aten.to.dtype, (g(4, 8), torch.int64))
    yield Example(aten.to.dtype, (b(4, 8), torch.float64))
    yield Example(aten.to.dtype_layout, (i(4, 8),), {"dtype": torch.int32, "layout": torch.strided})
    yield Example(aten.to.device, (g(4, 8), torch.device("cpu"), torch.float32))
    yield Example(aten._to_copy.default, (g(4, 8),), {"dtype": torch.float32})
    yield Example(aten.to.other, (g(4, 8), const(2, 4).float()))
    yield Example(aten.type_as.default, (g(4, 8), g(2)))
    for op in (aten.alias, aten.clone, aten.contiguous, aten.detach):
        yield Example(op.default, (g(4, 8),))
    yield Example(aten.lift_fresh_copy.default, (const(4, 8),))
    yield Example(aten.view_as_real.default, (torch.randn(4, 8, dtype=torch.complex128, requires_grad=True),))
    yield Example(aten.view_as_complex.default, (g(4, 8, 2),))


def products() -> Iterator[Example]:
    yield Example(aten.mm.default, (g(4, 8), g(8, 12)))
    yield Example(aten.bmm.default, (g(4, 2, 8), g(4, 8, 12)))
    yield Example(aten.mv.default, (g(4, 8), g(8)))
    yield Example(aten.dot.default, (g(8), g(8)))
    yield Example(aten.outer.default, (g(4), g(8)))
    for left, right in (
        [(8,), (8,)],
        [(4, 8), (8,)],
        [(8,), (8, 4)],
        [(2, 4, 8), (8, 12)],
        [(2, 4, 8), (8,)],
    ):
        yield Example(aten.matmul.default, (g(*left), g(*right)))
    yield Example(aten.matmul.default, (g(2, 1, 4, 8), g(4, 8, 12)))
    yield Example(aten.matmul.default, (g(8), g(2, 8, 4)))
    yield Example(aten.linear.default, (g(2, 4, 8), g(12, 8)))
    yield Example(aten.linear.default, (g(4, 8), g(12, 8), g(12)))
    yield Example(aten.linear.default, (g(8), g(12, 8)))
    yield Example(aten.linear.default, (const(4, 8), g(12, 8), g(12)))
    yield Example(aten.addmm.default, (g(12), g(4, 8), g(8, 12)))
    yield Example(aten.addmm.default, (g(4, 12), g(4, 8), g(8, 12)), {"alpha": 2, "beta": 3})
    yield Example(aten.addmm.default, (g(1, 12), g(4, 8), g(8, 12)))
    yield Example(aten.baddbmm.default, (g(2, 4, 12), g(2, 4, 8), g(2, 8, 12)), {"beta": 0.5})


def einsums() -> Iterator[Example]:
    op = aten.einsum.default
    yield Example(op, ("bij,bjk->bik", [g(2, 4, 8), g(2, 8, 12)]))
    yield Example(op, ("ij, jk", [g(4, 8), g(8, 2)]))
    yield Example(op, ("...ij,...kj->...ik", [g(2, 4, 8), g(2, 2, 8)]))
    yield Example(op, ("ii->i", [g(4, 4)]))
    yield Example(op, ("bi,bj,bk->ij", [g(4, 2), g(4, 8), g(4, 2)]))
    yield Example(op, ("bhn,h->bn", [g(2, 4, 8), g(4)]))
    yield Example(op, ("ba,b->", [g(4, 8), g(4)]))


def convolutions() -> Iterator[Example]:
    yield Example(aten.conv1d.default, (g(4, 8, 6), g(12, 8, 3)))
    yield Example(aten.conv1d.default, (g(4, 8, 6), g(12, 8, 3), g(12), [2], [1]))
    yield Example(aten.conv1d.default, (g(4, 8, 6), g(8, 1, 3), g(8), [1], [2], [1], 8))
    yield Example(aten.conv1d.default, (g(4, 8, 6), g(16, 2, 3), None, [1], [2], [1], 4))
    yield Example(aten.conv1d.default, (g(8, 6), g(12, 8, 3)))
    yield Example(aten.conv2d.default, (g(4, 4, 6, 6), g(8, 4, 3, 3)))
    yield Example(aten.conv2d.default, (g(2, 8, 4, 4), g(8, 1, 2, 2)), {"groups": 8})
    yield Example(aten.conv3d.default, (g(2, 4, 3, 3, 3), g(4, 4, 2, 2, 2)))


def reshapes() -> Iterator[Example]:
    for op in (aten.view.default, aten.reshape.default, aten._unsafe_view.default):
        yield Example(op, (g(2, 4, 8), [8, 8]))
    op = aten.reshape.default
    yield Example(op, (g(8, 24), [8, 3, 4, 2]))
    yield Example(op, (g(8, 3, 8), [-1, 24]))
    yield Example(op, (g(4, 4, 8), [1, 16, 2, -1]))
    yield Example(op, (g(4, 6), [3, 8]))
    yield Example(op, (g(2, 8, 4).transpose(0, 1).detach().requires_grad_(), [8, 8]))
    yield Example(op, (i(4, 8), [32]))
    yield Example(aten.view_as.default, (g(4, 8), g(2, 2, 8)))
    yield Example(aten.reshape_as.default, (g(4, 8), g(32)))
    yield Example(aten.flatten.using_ints, (g(2, 4, 8), 0, 1))
    yield Example(aten.flatten.using_ints, (g(2, 4, 8), 1))
    yield Example(aten.unflatten.int, (g(4, 24), -1, [3, 8]))
    yield Example(aten.unflatten.int, (g(16, 3), 0, [-1, 4]))
    yield Example(aten.unsqueeze.default, (g(4, 8), -1))
    yield Example(aten.unsqueeze.default, (g(4, 8), 0))
    yield Example(aten.squeeze.default, (g(4, 1, 2),))
    yield Example(aten.squeeze.dim, (g(4, 1, 8), -2))
    yield Example(aten.squeeze.dim, (g(4, 2), 1))
    yield Example(aten.squeeze.dims, (g(1, 4, 1, 8), [0, 2]))


def orders() -> Iterator[Example]:
    yield Example(aten.transpose.int, (g(2, 4, 8), 1, -1))
    yield Example(aten.swapaxes.default, (g(2, 4, 8), 0, 1))
    yield Example(aten.permute.default, (g(2, 4, 8), [2, 0, -2]))
    yield Example(aten.movedim.int, (g(2, 4, 8), 0, -1))
    yield Example(aten.movedim.intlist, (g(2, 4, 8), [0, 1], [2, 0]))
    yield Example(aten.t.default, (g(4, 8),))
    yield Example(aten.t.default, (g(8),))
    yield Example(aten.numpy_T.default, (g(2, 4, 8),))
    yield Example(aten.mT.default, (g(2, 4, 8),))
    yield Example(aten.expand.default, (g(1, 8), [4, -1]))
    yield Example(aten.expand.default, (g(2, 1, 8), [4, 2, 4, 8]))
    yield Example(aten.expand_as.default, (g(4, 1), g(4, 8)))
    yield Example(aten.select.int, (g(3, 4, 8), 0, 1))
    yield Example(aten.select.int, (g(4, 8), 1, -1))
    yield Example(aten.unbind.int, (g(3, 4, 8),))
    yield Example(aten.unbind.int, (g(4, 2), -1))
    yield Example(aten.diagonal.default, (g(4, 4, 8),))
    yield Example(aten.diagonal.default, (g(2, 4, 4), 1, -2, -1))
    yield Example(aten.flip.default, (g(4, 8), [-1]))
    yield Example(aten.roll.default, (g(4, 8), [1], [0]))
    yield Example(aten.roll.default, (g(4, 8), [3]))
    yield Example(aten.tril.default, (g(4, 4, 8), -1))
    yield Example(aten.triu.default, (g(4, 2, 8),))
    yield Example(aten.pad.default, (g(4, 8), [0, 1]))
    yield Example(aten.pad.default, (i(4, 8), [0, 1], "constant", -100.0))
    yield Example(aten.pad.default, (g(4, 2, 8), [1, 1], "replicate"))
    yield Example(aten.constant_pad_nd.default, (g(4, 8), [0, 0, 2, 0]))
    yield Example(aten.constant_pad_nd.default, (g(4, 8), [1, 0], 1.0))
    yield Example(aten.unfold.default, (g(4, 8), 1, 4, 2))


def cuts() -> Iterator[Example]:
    yield Example(aten.slice.Tensor, (g(4, 8), 1, 0, 4))
    yield Example(aten.slice.Tensor, (g(4, 16), -1, 8, ALL))
    yield Example(aten.slice.Tensor, (g(4, 24), 1, 8, 16))
    yield Example(aten.slice.Tensor, (g(4, 8), 1, 1, ALL))
    yield Example(aten.slice.Tensor, (g(4, 8), 1, 2, 6))
    yield Example(aten.slice.Tensor, (g(4, 12), 1, 0, 8))
    yield Example(aten.slice.Tensor, (g(4, 8), 1, -4, -2))
    yield Example(aten.slice.Tensor, (g(4, 8), 1, 0, ALL, 2))
    yield Example(aten.slice.Tensor, (g(4, 8),), {"dim": 0, "start": 2, "end": 4})
    yield Example(aten.narrow.default, (g(4, 16), 1, 8, 4))
    yield Example(aten.split.Tensor, (g(4, 24), 8, 1))
    yield Example(aten.split.Tensor, (g(4, 8), 3, -1))
    yield Example(aten.split.Tensor, (g(4, 8), 2))
    yield Example(aten.split_with_sizes.default, (g(4, 12), [4, 4, 4], 1))
    yield Example(aten.split_with_sizes.default, (g(4, 12), [8, 2, 2], 1))
    yield Example(aten.chunk.default, (g(4, 24), 3, -1))
    yield Example(aten.chunk.default, (g(4, 7), 2, 1))
    for op in (aten.cat, aten.concat, aten.concatenate):
        yield Example(op.default, ([g(4, 8), g(4, 8)], -1))
    yield Example(aten.cat.default, ([g(4, 8), g(4, 16), g(4, 8)], 1))
    yield Example(aten.cat.default, ([g(4, 8), g(2, 8)],))
    yield Example(aten.cat.default, ([g(4, 3), g(4, 5)], 1))
    yield Example(aten.cat.default, ([g(4, 8), g(0, 8)],))
    yield Example(aten.stack.default, ([g(4, 8), g(4, 8)], 1))
    yield Example(aten.stack.default, ([g(4, 8), g(4, 8)], -1))
    yield Example(aten.slice_scatter.default, (g(4, 8), g(4, 4), 1, 2, 6))
    yield Example(aten.slice_scatter.default, (g(4, 8), g(2, 8), 0, 0, ALL, 2))
    yield Example(aten.slice_scatter.default, (const(4, 8), g(4, 7), -1, 1))
    yield Example(aten.slice_scatter.default, (i(4, 8), i(4, 4)), {"dim": 1, "start": 4})
    yield Example(aten.select_scatter.default, (g(4, 8, 2), g(4, 2), 1, -1))
    yield Example(aten.select_scatter.default, (g(4, 8), const(8), 0, 2))
    yield Example(aten.diagonal_scatter.default, (g(4, 4, 8), g(8, 4)))
    yield Example(aten.diagonal_scatter.default, (g(2, 4, 4), g(2, 3), 1, -2, -1))
    yield Example(aten.repeat.default, (g(4, 2), [2, 1, 4]))
    yield Example(aten.repeat.default, (g(1, 8), [4, 2]))
    yield Example(aten.repeat_interleave.self_int, (g(4, 8), 3, 1))
    yield Example(aten.repeat_interleave.self_int, (g(4, 8), 2, 0), {"output_size": 8})
    yield Example(aten.repeat_interleave.self_int, (g(4, 8), 2))
    yield Example(aten.repeat_interleave.self_int, (g(8), 2))


def reductions() -> Iterator[Example]:
    yield Example(aten.sum.default, (g(4, 8),))
    yield Example(aten.sum.default, (b(4, 8),))
    yield Example(aten.sum.dim_IntList, (g(2, 4, 8), [-1, 0]))
    yield Example(aten.sum.dim_IntList, (g(2, 4, 8), [1], True))
    yield Example(aten.sum.dim_IntList, (g(4, 8), None), {"dtype": torch.float32})
    yield Example(aten.mean.default, (g(4, 8),))
    yield Example(aten.mean.dim, (g(2, 4, 8), [-1], True))
    yield Example(aten.mean.dim, (g(2, 4, 8), [0, 1]))
    yield Example(aten.mean.dim, (g(4, 8), [1]), {"keepdim": True, "dtype": torch.float32})
    for op in (aten.amax, aten.amin):
        yield Example(op.default, (g(4, 8), [1]))
        yield Example(op.default, (g(4, 8),))
    for op in (aten.max, aten.min):
        yield Example(op.default, (g(4, 8),))
        yield Example(op.dim, (g(4, 8), 0, True))
    for op in (aten.argmax, aten.argmin):
        yield Example(op.default, (g(4, 8), -1))
    for op in (aten.any, aten.all):
        yield Example(op.dim, (b(4, 8), 1))
        yield Example(op.default, (b(4, 8),))
    yield Example(aten.prod.dim_int, (g(4, 8), 1))
    for op in (aten.var, aten.std):
        yield Example(op.dim, (g(4, 8), [-1], True, True))
        yield Example(op.correction, (g(4, 8), [1]), {"correction": 0, "keepdim": True})
    yield Example(aten.logsumexp.default, (g(4, 8), [1]))
    yield Example(aten.linalg_vector_norm.default, (g(4, 8), 2, [-1], True))
    yield Example(aten.softmax.int, (g(4, 8), -1))
    yield Example(aten.log_softmax.int, (g(4, 8), 0))
    yield Example(aten.cumsum.default, (g(4, 8), 1))
    yield Example(aten.diff.default, (g(4, 8), 1, -1, g(4, 1)))
    yield Example(aten.diff.default, (g(8, 4), 2, 0, g(1, 4), g(2, 4)))
    yield Example(aten.cumprod.default, (g(4, 8), 1))
    yield Example(aten.sort.default, (g(4, 8), 1, True))
    yield Example(aten.sort.stable, (g(4, 8),), {"stable": True, "dim": 0})
    yield Example(aten.argsort.default, (g(4, 8),))
    yield Example(aten.topk.default, (g(4, 8), 2))
    yield Example(aten.topk.default, (g(4, 8), 2, 0))


def norms() -> Iterator[Example]:
    yield Example(aten.layer_norm.default, (g(2, 4, 8), [8], g(8), g(8), 1e-5))
    yield Example(aten.layer_norm.default, (g(2, 4, 8), [4, 8], g(4, 8)))
    yield Example(aten.layer_norm.default, (g(4, 8), [8]))
    yield Example(aten.rms_norm.default, (g(2, 4, 8), [8], g(8), 1e-5))
    yield Example(aten.group_norm.default, (g(4, 8, 2, 2), 4, g(8), g(8)))
