"""What ``torch.autocast`` does to each op, as data: one line per policy and device type.

Names are torch's own, without ``aten.`` and without the overload where that is the default one. An op that stands
nowhere takes its operands as they come, and so do all in-place ops. Only floating-point tensors are cast, and float64
never is. Sources: ``aten/src/ATen/autocast_mode.h`` and ``.cpp`` of torch 2.13, and the "Autocast Op Reference" of its
documentation. The lists of the two device types differ: norms, softmax and powers are float32 on CUDA only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any, Final


class Policy(Enum):
    """How an op takes its floating-point operands."""

    AS_GIVEN = "as given"
    LOWER = "in the lower precision"
    FLOAT32 = "in float32"
    FLOAT32_RESULT = "as given, with a float32 result (argument dtype), unless a dtype is asked for"
    WIDEST = "in float32 if one of them is, else in the lower precision"
    REFUSED = "not at all: unsafe in the lower precision"
    INSIDE = "as given, but its own steps take theirs by policies of theirs"


_LOWER: Final = """
    _convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input prelu addmm matmul mm linalg_vecdot linear addbmm baddbmm bmm scaled_dot_product_attention
    autopar.grouped_linear autopar.grouped_bias
"""
_FLOAT32: Final = """
    cdist cosine_embedding_loss hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss mse_loss
    multi_margin_loss multilabel_margin_loss nll_loss nll_loss2d nll_loss_nd poisson_nll_loss smooth_l1_loss
    soft_margin_loss triplet_margin_loss binary_cross_entropy_with_logits cross_entropy_loss
"""

_CUDA: Final[Mapping[Policy, str]] = {
    Policy.LOWER: _LOWER
    + """
    convolution cudnn_convolution cudnn_convolution_transpose addmv addr einsum mv chain_matmul linalg_multi_dot
    _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _scaled_dot_product_flash_attention gru.input lstm.input rnn_tanh.input rnn_relu.input
    """,
    Policy.FLOAT32: _FLOAT32
    + """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
    pow.Scalar square softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm
    nuclear_norm.dim norm.Scalar norm.ScalarOpt_dim cosine_similarity dist pdist renorm logsumexp
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d
    upsample_bicubic2d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    _upsample_bilinear2d_aa _upsample_bicubic2d_aa
    """,
    Policy.FLOAT32_RESULT: """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
    """,
    Policy.WIDEST: "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add",
    Policy.REFUSED: "binary_cross_entropy",
    Policy.INSIDE: "affine_grid_generator",
}

_CPU: Final[Mapping[Policy, str]] = {
    Policy.LOWER: _LOWER
    + """
    conv1d.padding conv2d.padding conv3d.padding einsum _addmm_activation mkldnn_rnn_layer _native_multi_head_attention
    rnn_tanh.input rnn_relu.input rnn_tanh_cell rnn_relu_cell
    """,
    Policy.FLOAT32: _FLOAT32
    + """
    adaptive_avg_pool3d avg_pool3d binary_cross_entropy ctc_loss.IntList ctc_loss.Tensor
    pad grid_sampler grid_sampler_2d grid_sampler_3d _grid_sampler_2d_cpu_fallback max_pool3d max_unpool2d max_unpool3d
    multilabel_margin_loss_forward nanquantile nanquantile.scalar polar prod prod.dim_int quantile quantile.scalar
    reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d stft stft.center trace
    view_as_complex
    fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_irfft fft_irfft2 fft_irfftn fft_rfft
    fft_rfft2 fft_rfftn
    cholesky cholesky_inverse cholesky_solve geqrf inverse lu_solve orgqr ormqr pinverse qr svd triangular_solve
    linalg_cholesky linalg_cholesky_ex linalg_cond linalg_cond.p_str linalg_eig linalg_eigh linalg_eigvals
    linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex linalg_lstsq linalg_matrix_rank
    linalg_matrix_rank.atol_rtol_float linalg_matrix_rank.atol_rtol_tensor linalg_matrix_rank.tol_tensor linalg_qr
    linalg_solve linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve _lu_with_info
    fake_quantize_per_tensor_affine fractional_max_pool2d fractional_max_pool3d adaptive_max_pool3d
    """,
    Policy.WIDEST: "stack cat concat concatenate index_copy",
    Policy.INSIDE: "affine_grid_generator bilinear gru.input lstm.input gru_cell lstm_cell",
}
"""Composite ops stand where the ops that they are made of do: ``square`` is a power, ``einsum`` a batched product. On
CUDA recurrent layers are ``_cudnn_rnn`` (``aten/src/ATen/cudnn/AutocastRNN.cpp``); on the CPU they are products in the
lower precision, and what is between them isn't."""


def _by_name(lists: Mapping[Policy, str]) -> Mapping[str, Policy]:
    return MappingProxyType({name: policy for policy, names in lists.items() for name in names.split()})


POLICIES: Final[Mapping[str, Mapping[str, Policy]]] = MappingProxyType({"cuda": _by_name(_CUDA), "cpu": _by_name(_CPU)})
"""Device type -> name -> policy."""


def policy(name: str, device: str, given: Mapping[str, Any]) -> Policy:
    """Of an op by its name (:func:`autopar.graph.op_name`), on device type "cuda" or "cpu".

    ``given`` are its arguments by name: a few composite ops do one thing or another.
    """
    short = name.removeprefix("aten.").removesuffix(".default")
    if not name.startswith(("aten.", "autopar.")) or (device == "cpu" and not _ON_CPU.get(short, _always)(given)):
        return Policy.AS_GIVEN
    return POLICIES[device].get(short, Policy.AS_GIVEN)


def _always(given: Mapping[str, Any]) -> bool:
    return True


def _sums_products(given: Mapping[str, Any]) -> bool:
    """Whether an einsum runs as a batched product: a letter of two operands is summed."""
    left, arrow, right = str(given["equation"]).replace(" ", "").partition("->")
    letters = [letter for operand in left.split(",") for letter in set(operand) if letter.isalpha()]
    kept = right if arrow else {letter for letter in left if left.count(letter) == 1}
    return any(letters.count(letter) > 1 and letter not in kept for letter in letters)


_ON_CPU: Final[Mapping[str, Callable[[Mapping[str, Any]], bool]]] = {
    "einsum": _sums_products,
    "pad": lambda given: given["mode"] != "constant",
}
"""Composite ops that stand in the CPU's lists for some arguments only."""
