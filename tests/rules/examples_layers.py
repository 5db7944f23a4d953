"""Calls of ops that layers in space and time are made of, of losses by row, and of functions of matrices."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tests.rules.examples import const, f, g, i
from tests.rules.harness import Example

aten = torch.ops.aten
POSITIONS = {1: (6,), 2: (6, 4), 3: (4, 4, 6)}


def pools() -> Iterator[Example]:
    for d, positions in POSITIONS.items():
        for kind in ("avg_pool", "max_pool"):
            yield Example(getattr(aten, f"{kind}{d}d").default, (g(4, 8, *positions), [2] * d))
        yield Example(getattr(aten, f"max_pool{d}d_with_indices").default, (g(4, 8, *positions), [2] * d))
        for kind in ("adaptive_avg_pool", "adaptive_max_pool"):
            yield Example(getattr(aten, f"{kind}{d}d").default, (g(4, 8, *positions), [3] * d))
    yield Example(aten.avg_pool2d.default, (g(8, 6, 4), [2, 2]))


def resolutions() -> Iterator[Example]:
    for d, positions in POSITIONS.items():
        x, size = g(4, 8, *positions), [2 * extent for extent in positions]
        for kind in ("upsample_nearest", "_upsample_nearest_exact"):
            op = getattr(aten, f"{kind}{d}d").vec
            yield Example(op, (x, size, None))
            yield Example(op, (x, None, [2.0] * d))
    linear = {1: aten.upsample_linear1d, 2: aten.upsample_bilinear2d, 3: aten.upsample_trilinear3d}
    for d, op in linear.items():
        yield Example(op.vec, (g(4, 8, *POSITIONS[d]), None, False, [2.0] * d))
    for op in (aten.upsample_bicubic2d, aten._upsample_bilinear2d_aa, aten._upsample_bicubic2d_aa):
        yield Example(op.vec, (g(4, 8, 6, 4), [3, 5], True, None))


def shuffles() -> Iterator[Example]:
    yield Example(aten.pixel_shuffle.default, (g(4, 8, 4, 2), 2))
    yield Example(aten.pixel_unshuffle.default, (g(4, 8, 4, 2), 2))
    yield Example(aten.channel_shuffle.default, (g(4, 8, 4, 2), 2))
    yield Example(aten.im2col.default, (g(4, 8, 4, 4), [2, 2], [1, 1], [0, 0], [2, 2]))
    yield Example(aten.col2im.default, (g(4, 8, 4), [4, 4], [2, 2], [1, 1], [0, 0], [2, 2]))


def samples() -> Iterator[Example]:
    yield Example(aten.grid_sampler.default, (g(4, 8, 4, 4), f(4, 8, 4, 2), 0, 0, False))
    yield Example(aten.grid_sampler.default, (g(4, 8, 4, 4, 2), f(4, 8, 4, 4, 3), 0, 1, True))
    yield Example(aten.affine_grid_generator.default, (g(4, 2, 3), [4, 8, 4, 8], False))
    yield Example(aten.affine_grid_generator.default, (g(4, 3, 4), [4, 8, 4, 4, 4], True))


def instances() -> Iterator[Example]:
    op, rest = aten.instance_norm.default, (None, None, True, 0.1, 1e-5, False)
    yield Example(op, (g(4, 8, 6), g(8), g(8), *rest))
    yield Example(op, (g(4, 8, 6, 2), None, None, *rest))


def batches() -> Iterator[Example]:
    op = aten.batch_norm.default
    for learns in (False, True):
        yield Example(op, (g(4, 8, 6), g(8), g(8), const(8), const(8).abs(), learns, 0.0, 1e-5, False))
    yield Example(op, (g(4, 8, 2, 2), None, None, const(8), const(8).abs(), False, 0.1, 1e-5, False))
    yield Example(op, (g(8, 4), g(4), g(4), None, None, True, 0.1, 1e-5, False))


def transposed() -> Iterator[Example]:
    yield Example(aten.conv_transpose1d.default, (g(4, 8, 6), g(8, 4, 3)))
    yield Example(aten.conv_transpose2d.input, (g(4, 8, 4, 4), g(8, 4, 3, 3), g(4), [2, 2], [1, 1], [1, 1]))
    yield Example(aten.conv_transpose2d.input, (g(4, 8, 4, 4), g(8, 4, 3, 3), g(8), [1, 1], [0, 0], [0, 0], 2))
    yield Example(aten.conv_transpose3d.input, (g(8, 2, 3, 3), g(8, 4, 2, 2, 2)))
    for d, positions in POSITIONS.items():
        yield Example(getattr(aten, f"conv{d}d").padding, (g(4, 8, *positions), g(4, 8, *[3] * d), g(4), [1], "same"))
    yield Example(aten.conv1d.padding, (g(4, 8, 6), g(8, 1, 3), None, [1], "valid", [1], 8))
    yield Example(aten.bilinear.default, (g(4, 2, 8), g(4, 2, 6), g(4, 8, 6), g(4)))


def recurrent() -> Iterator[Example]:
    for kind, gates in {"gru": 3, "lstm": 4, "rnn_tanh": 1, "rnn_relu": 1}.items():
        states = [g(1, 8, 4) for _ in range(2 if kind == "lstm" else 1)]
        given = states if kind == "lstm" else states[0]
        weights = [g(4 * gates, 6), g(4 * gates, 4), g(4 * gates), g(4 * gates)]
        rest = (True, 1, 0.0, True, False, False)
        yield Example(getattr(aten, kind).input, (g(4, 8, 6), given, weights, *rest))
        given = [state[0] for state in states] if kind == "lstm" else states[0][0]
        yield Example(getattr(aten, f"{kind}_cell").default, (g(8, 6), detached(given), *weights))
    weights = [w for inputs in (6, 6, 8, 8) for w in (g(12, inputs), g(12, 4))]
    yield Example(aten.gru.input, (g(4, 8, 6), g(4, 8, 4), weights, False, 2, 0.0, True, True, False))


def detached(given: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
    """States as leaves of their own."""
    if isinstance(given, Tensor):
        return given.detach().requires_grad_()
    return [state.detach().requires_grad_() for state in given]


def row_losses() -> Iterator[Example]:
    signs = torch.tensor([1, -1, 1, 1])
    for reduction in (0, 2):
        yield Example(aten.poisson_nll_loss.default, (g(4, 8), f(4, 8).detach(), True, True, 1e-8, reduction))
        yield Example(aten.hinge_embedding_loss.default, (g(4, 8), const(4, 8).sign(), 1.0, reduction))
        yield Example(aten.margin_ranking_loss.default, (g(4, 8), g(4, 8), const(4, 8).sign(), 0.1, reduction))
        yield Example(aten.cosine_embedding_loss.default, (g(4, 8), g(4, 8), signs, 0.1, reduction))
        yield Example(aten.triplet_margin_loss.default, (g(4, 8), g(4, 8), g(4, 8), 1.0, 2.0, 1e-6, True, reduction))
        yield Example(aten.multi_margin_loss.default, (g(4, 8), i(4, high=8), 1, 1, f(8).detach(), reduction))
        yield Example(aten.multilabel_margin_loss.default, (g(4, 8), labels(), reduction))
    yield Example(aten.multi_margin_loss.default, (g(8), torch.tensor(3), 2, 1, None, 2))
    yield Example(aten.triplet_margin_loss.default, (g(4, 8), g(4, 8), g(4, 8)))


def labels() -> Tensor:
    """Classes of each of four rows of eight, ended by -1."""
    ends = torch.full((4, 8), -1)
    ends[:, :2] = torch.tensor([[0, 3], [7, 1], [2, 4], [5, 6]])
    return ends


def distances() -> Iterator[Example]:
    yield Example(aten.pairwise_distance.default, (g(4, 2, 8), g(4, 2, 8)))
    yield Example(aten.pairwise_distance.default, (g(4, 8), g(8), 1.0, 1e-6, True))
    yield Example(aten.cosine_similarity.default, (g(4, 8, 2), g(4, 8, 2)))
    yield Example(aten.cosine_similarity.default, (g(4, 8, 2), g(8, 2), -2))
    yield Example(aten.cdist.default, (g(2, 4, 6), g(2, 8, 6)))
    yield Example(aten.linalg_cross.default, (g(4, 3), g(4, 3)))


def along_dims() -> Iterator[Example]:
    for op in (aten.logcumsumexp, aten.cummax, aten.cummin):
        yield Example(op.default, (g(4, 8), -1))
    for op in (aten.fft_fft, aten.fft_ifft, aten.fft_rfft):
        yield Example(op.default, (g(4, 8, 6),))
        yield Example(op.default, (g(4, 8, 6), 4, 1))
    yield Example(aten.fft_irfft.default, (torch.randn(4, 8, 4, dtype=torch.complex128, requires_grad=True),))
    yield Example(aten.fft_fftn.default, (g(4, 8, 6), None, [0, 2]))
    yield Example(aten.fft_ifftn.default, (g(4, 8, 6), [4]))
    yield Example(aten.fft_rfftn.default, (g(4, 8, 6), None, [1, 2]))
    for op in (aten.fft_fft2, aten.fft_ifft2, aten.fft_rfft2):
        yield Example(op.default, (g(4, 8, 6),))
    for op in (aten.fft_irfft2, aten.fft_irfftn):
        spectrum = torch.randn(4, 8, 4, dtype=torch.complex128, requires_grad=True)
        yield Example(op.default, (spectrum, None, [1, 2]))
    for op in (aten.real, aten.imag):
        yield Example(op.default, (torch.randn(4, 8, dtype=torch.complex128, requires_grad=True),))
    for op in (aten.median.dim, aten.nanmedian.dim, aten.var_mean.dim, aten.std_mean.dim):
        yield Example(op, (g(4, 8, 6), -1))
    for op in (aten.var_mean.correction, aten.std_mean.correction):
        yield Example(op, (g(4, 8, 6), [1]), {"correction": 1, "keepdim": True})
    yield Example(aten.mode.default, (i(4, 8, 6).double().requires_grad_(),))
    yield Example(aten.kthvalue.default, (g(4, 8, 6), 2, 1, True))
    yield Example(aten.quantile.scalar, (g(4, 8, 6), 0.3, -1))
    yield Example(aten.aminmax.default, (g(4, 8, 6),), {"dim": 1})
    yield Example(aten.nansum.default, (g(4, 8, 6), [2]))


def square() -> Tensor:
    return (const(4, 2, 3, 3) + 4 * torch.eye(3)).requires_grad_()


def matrices() -> Iterator[Example]:
    for op in (aten.linalg_inv, aten.linalg_qr, aten.matrix_exp, aten.mH, aten.linalg_det, aten.linalg_slogdet):
        yield Example(op.default, (square(),))
    symmetric = square().detach()
    positive = (symmetric @ symmetric.mT).requires_grad_()
    for op in (aten.linalg_cholesky, aten.logdet, aten.linalg_eigvalsh, aten.linalg_svdvals):
        yield Example(op.default, (positive,))
    yield Example(aten.linalg_eigh.default, (positive,), compare=False)
    yield Example(aten.linalg_solve.default, (square(), g(4, 2, 3, 5)))


def further() -> Iterator[Example]:
    yield Example(aten.complex.default, (g(4, 8), g(8)))
    yield Example(aten.prelu.default, (g(4, 8, 2), g(8)))
    yield Example(aten.prelu.default, (g(4, 8), g(1)))
    yield Example(aten.glu.default, (g(4, 8),))
    yield Example(aten.glu.default, (g(8, 4), 0))
    yield Example(aten.bucketize.Tensor, (const(4, 8), torch.linspace(-1, 1, 5, dtype=torch.float64)))
    for op in (aten.feature_dropout, aten.feature_alpha_dropout):
        yield Example(op.default, (g(4, 8, 2), 0.5, True), compare=False)
    yield Example(aten.rrelu.default, (g(4, 8), 0.1, 0.3, True), compare=False)
    yield Example(aten.normal.Tensor_float, (const(4, 8),), compare=False)
