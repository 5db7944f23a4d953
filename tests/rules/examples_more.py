"""Examples of the families that look up, attend, lose, make and draw."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch

from autopar.runtime import chunked_cross_entropy, cross_entropy_padded, local_ops
from tests.rules.examples import aten, b, const, f, g, i
from tests.rules.harness import Example


def lookups() -> Iterator[Example]:
    yield Example(aten.embedding.default, (g(8, 12), i(2, 4, high=8)))
    yield Example(aten.embedding.default, (g(8, 4), i(4, high=8), 5))
    yield Example(aten.embedding.default, (g(8, 4), i(4, high=8), 3, True))
    yield Example(aten.index_select.default, (g(4, 8), 1, i(2, high=8)))
    yield Example(aten.index_select.default, (g(4, 8), 1, i(high=8)))
    yield Example(aten.gather.default, (g(4, 8), -1, i(4, 2, high=8)))
    yield Example(aten.gather.default, (g(4, 8), 1, i(2, 4, high=8)))
    yield Example(aten.index.Tensor, (g(4, 8), [i(2, 4)]))
    yield Example(aten.index.Tensor, (g(2, 4, 8), [None, i(4), i(2, 1)]))
    yield Example(aten.index.Tensor, (g(4, 8, 4), [i(2), None, i(2)]))
    yield Example(aten.index.Tensor, (g(4, 2, 8, 2), [None, i(4, high=2), None, i(4, high=2)]))
    yield Example(aten.index.Tensor, (g(4, 8), [b(4)]))
    yield Example(aten.index_put.default, (g(4, 8), [torch.tensor([0, 2])], g(2, 8)))
    yield Example(aten.index_put.default, (g(4, 8), [None, i(4)], g(4), True))
    yield Example(aten.index_put.default, (g(4, 8), [b(4)], const()))
    yield Example(aten.index_put.default, (g(4, 2, 8), [None, b(2, 8)], g()))
    yield Example(aten.index_put.default, (g(4, 8), [b(4, 8)], g(1)))
    yield Example(aten.index_put.default, (g(4, 8), [torch.tensor([True, False, True, False])], g(2, 8)))
    yield Example(aten.index_copy.default, (g(4, 8), 1, torch.tensor([5, 2]), g(4, 2)))
    yield Example(aten.index_fill.int_Scalar, (g(4, 8), 1, i(2, high=8), 2.0))
    yield Example(aten.index_fill.int_Tensor, (g(4, 8), 0, i(), g()))
    yield Example(aten.index_add.default, (g(4, 8), 0, i(2), g(2, 8)), {"alpha": 2})
    distinct = torch.tensor([[1, 3], [0, 2], [7, 5], [4, 6]])
    yield Example(aten.scatter.value, (g(4, 8), 1, distinct, 0.0))
    yield Example(aten.scatter.value, (g(4, 8), 1, distinct, 1.0))
    yield Example(aten.scatter.src, (g(4, 8), 1, distinct, g(4, 2)))
    yield Example(aten.scatter.src, (g(8, 8), 1, distinct, g(4, 2)))
    yield Example(aten.scatter_add.default, (g(4, 8), 0, i(2, 8), g(2, 8)))
    yield Example(aten.masked_scatter.default, (g(4, 8), b(4, 8), g(8, 8)))
    yield Example(aten.scatter_reduce.two, (g(4, 8), 1, i(4, 2, high=8), g(4, 2), "amax"), {"include_self": False})
    yield Example(aten.scatter_reduce.two, (g(4, 8), 0, i(2, 8), g(2, 8), "mean"))
    yield Example(aten.index_reduce.default, (g(4, 8), 1, i(2, high=8), g(4, 2), "amin"))
    yield Example(aten.one_hot.default, (i(4, 2), 4))
    yield Example(aten.one_hot.default, (torch.arange(4),))


def places() -> Iterator[Example]:
    """What routers do with tokens: places, counts, sums by index."""
    yield Example(aten.cumsum.default, (g(8, 4, 2), 0))
    yield Example(aten.cumsum.default, (g(2, 16), -1), {"dtype": torch.float64})
    yield Example(aten.cumsum.default, (b(8, 4), 0))
    yield Example(aten.histc.default, (f(8, 4).detach(), 6, 0, 1))
    yield Example(aten.histc.default, (f(8).detach(), 6))
    yield Example(aten.index_add.default, (g(4, 8), 1, i(8, high=8), g(4, 8)))
    yield Example(aten.scatter_add.default, (g(4, 8), 1, i(4, 4, high=8), g(4, 4)))
    yield Example(aten.index_put.default, (g(4, 8), [i(4), i(4)], g(4), True))
    yield Example(aten.index_put.default, (g(4, 8, 2), [None, i(2, 4)], g(4, 2, 4, 2), True))
    yield Example(aten.repeat.default, (g(4, 2), [4, 1]))
    yield Example(aten.einsum.default, ("gsec,gsm->egcm", [g(2, 4, 4, 2), g(2, 4, 4)]))


def attentions() -> Iterator[Example]:
    op = aten.scaled_dot_product_attention.default
    q, k, v = (lambda n: g(2, n, 4, 8)), (lambda n: g(2, n, 2, 8)), (lambda n: g(2, n, 2, 4))
    yield Example(op, (q(4), k(4), v(4)))
    yield Example(op, (q(4), q(4), q(4), None, 0.0, True), {"scale": 0.3})
    yield Example(op, (q(8), k(4), v(4)), {"enable_gqa": True})
    yield Example(op, (q(4), k(1), v(1), None, 0.0, False), {"enable_gqa": True})
    for shape in ((4, 2), (2, 1, 4, 2), (2, 4, 1, 2), (1, 1, 4, 2), (4, 4, 2)):
        yield Example(op, (q(4), k(4), v(4), g(*shape)))
    yield Example(op, (q(4), k(4), v(4), b(2, 1, 4, 2) | True))
    yield Example(op, (g(4, 4, 8), g(4, 4, 8), g(4, 4, 8), g(4, 4), 0.0))
    yield Example(op, (q(4), k(4), v(4), None, 0.5), compare=False)


def losses() -> Iterator[Example]:
    ignored = torch.tensor([1, -100, 7, 0])
    op = aten.cross_entropy_loss.default
    yield Example(op, (g(4, 8), ignored, None, 2, -100, 0.0))
    yield Example(op, (g(4, 8), i(4, high=8), None, 2, 3, 0.1))
    yield Example(op, (g(4, 8), i(4, high=8)))
    yield Example(op, (g(4, 8), i(4, high=8), f(8).detach(), 2))
    yield Example(op, (g(4, 8), f(4, 8), None, 2))
    yield Example(op, (g(4, 8, 2), i(4, 2, high=8), None, 2))
    yield Example(op, (g(4, 8, 2), i(4, 2, high=8), None, 0))
    yield Example(op, (g(4, 8), ignored, None, 0, -100, 0.1))
    yield Example(op, (g(8), torch.tensor(3), None, 2))
    for nll in (aten.nll_loss_nd.default, aten.nll_loss.default):
        yield Example(nll, (g(4, 8), ignored, None, 2))
    yield Example(aten.nll_loss_nd.default, (g(4, 8), ignored, None, 0))
    for pointwise in (aten.mse_loss, aten.l1_loss, aten.smooth_l1_loss, aten.huber_loss, aten.kl_div):
        yield Example(pointwise.default, (f(4, 8), f(4, 8), 2))
        yield Example(pointwise.default, (f(4, 8), f(4, 8), 0))
    yield Example(aten.mse_loss.default, (f(4, 8), f(4, 8)))
    yield Example(aten.soft_margin_loss.default, (g(4, 8), f(4, 8).detach(), 2))
    yield Example(aten.binary_cross_entropy.default, (f(4, 8), f(4, 8).detach(), None, 2))
    yield Example(aten.binary_cross_entropy_with_logits.default, (g(4, 8), f(4, 8).detach(), None, f(8).detach(), 2))


def padded_losses() -> Iterator[Example]:
    ignored = torch.tensor([1, -100, 6, 0])
    yield Example(cross_entropy_padded, (g(4, 8), i(4, high=7)), {"classes": 7})
    yield Example(cross_entropy_padded, (g(4, 8), ignored), {"classes": 7, "label_smoothing": 0.1})
    yield Example(cross_entropy_padded, (g(4, 8), i(4, high=3)), {"classes": 3, "reduction": "none", "ignore_index": 2})


def chunked_losses() -> Iterator[Example]:
    op = chunked_cross_entropy
    padded = {"classes": 3, "label_smoothing": 0.1}
    yield Example(op, (g(4, 6), g(8, 6), i(4, high=3), g(8)), {"chunks": 2, **padded})
    ignored = torch.tensor([[1, -100, 7, 0], [2, 2, -100, 5]])
    yield Example(op, (g(4, 6), g(8, 6), i(4, high=8)), {"chunks": 3})
    yield Example(op, (g(2, 4, 6), g(8, 6), ignored, g(8)), {"chunks": 4, "label_smoothing": 0.1})
    yield Example(op, (g(2, 4, 6), g(6, 8), ignored), {"chunks": 2, "weight_dim": 1, "reduction": "none"})
    yield Example(op, (g(4, 6), g(8, 6), i(4, high=8), g(8)), {"chunks": 2, "logits": torch.tanh, "ignore_index": 3})


def made() -> Iterator[Example]:
    for op in (aten.zeros.default, aten.ones.default):
        yield Example(op, ([4, 8],), {"dtype": torch.float64})
    yield Example(aten.empty.memory_format, ([4, 8],), compare=False)
    yield Example(aten.full.default, ([4, 8], 2.0))
    for op in (aten.new_zeros.default, aten.new_ones.default):
        yield Example(op, (g(4, 2), [8]))
    yield Example(aten.new_empty.default, (const(4), [8]), compare=False)
    yield Example(aten.new_full.default, (const(4), [8], 3))
    for op in (aten.zeros_like.default, aten.ones_like.default):
        yield Example(op, (g(4, 8),))
    yield Example(aten.empty_like.default, (g(4, 8),), compare=False)
    yield Example(aten.full_like.default, (g(4, 8), 2.0))
    yield Example(aten.fill.Scalar, (g(4, 8), 2.0))
    yield Example(aten.scalar_tensor.default, (2.0,))
    yield Example(aten.arange.default, (8,))
    yield Example(aten.arange.start, (2, 8))
    yield Example(aten.arange.start_step, (0, 8, 2))
    yield Example(aten.linspace.default, (0, 1, 8))
    yield Example(aten.eye.default, (4,))
    yield Example(aten.eye.m, (4, 8))


def drawn() -> Iterator[Example]:
    yield Example(aten.dropout.default, (g(4, 8), 0.0, True))
    yield Example(aten.dropout.default, (g(4, 8), 0.5, True), compare=False)
    yield Example(aten.native_dropout.default, (g(4, 8), 0.5, True), compare=False)
    yield Example(aten.alpha_dropout.default, (g(4, 8), 0.5, True), compare=False)
    yield Example(aten.bernoulli.default, (f(4, 8),), compare=False)
    yield Example(aten.bernoulli.p, (f(4, 8), 0.5), compare=False)
    for op in (aten.rand_like, aten.randn_like, aten.uniform, aten.normal_functional, aten.exponential):
        yield Example(op.default, (g(4, 8),), compare=False)
    yield Example(aten.randint_like.default, (g(4, 8), 5), compare=False)
    for op in (aten.rand, aten.randn):
        yield Example(op.default, ([4, 8],), compare=False)
    yield Example(aten.randint_like.low_dtype, (g(4, 8), 2, 5), compare=False)
    for op in (aten.geometric, aten.log_normal, aten.cauchy, aten.random):
        yield Example(op.default, (const(4, 8), *([0.5] if op is aten.geometric else [])), compare=False)
    yield Example(getattr(aten.random, "from"), (const(4, 8), 1, 5), compare=False)
    yield Example(aten.random.to, (const(4, 8), 5), compare=False)
    yield Example(aten.poisson.default, (f(4, 8).detach(),), compare=False)
    yield Example(aten.normal.float_Tensor, (0.5, f(4, 8).detach()), compare=False)
    yield Example(aten.normal.Tensor_Tensor, (const(4, 8), f(4, 8).detach()), compare=False)
    yield Example(aten.binomial.default, (i(4, 8, high=9).double(), f(4, 8).detach()), compare=False)
    yield Example(aten.multinomial.default, (f(4, 8).detach(), 2), compare=False)
    yield Example(aten.randint.default, (9, [4, 8]), compare=False)
    yield Example(aten.randint.low, (2, 9, [4, 8]), compare=False)
    yield Example(aten.normal.float_float, (0.0, 1.0, [4, 8]), compare=False)


def runtime_ops() -> Iterator[Example]:
    yield Example(local_ops.mean_of_whole, (g(4, 8), [1]), {"count": 16})
    yield Example(operator.getitem, ((g(4, 8), g(4, 8)), 1))
