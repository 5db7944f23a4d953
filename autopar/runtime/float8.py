"""Products in float8 through torchao, which is needed for them alone (``pip install autopar[float8]``).

Both operands, and in the backward the gradient of the result, are scaled by their largest value, tensor by tensor.
On a CPU, which has no such products, torchao emulates them: the same numbers, slower.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

from torch import Tensor

from autopar.errors import ArgumentError


def float8_linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x [..., k]`` times ``weight [n, k]`` transposed: ``[..., n]`` in the dtype of ``x``.

    Raises ArgumentError where torchao isn't installed.
    """
    return _product(x, weight.t())


def float8_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """``x [..., k]`` times ``weight [k, n]``: ``[..., n]``; otherwise as :func:`float8_linear`."""
    return _product(x, weight)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    function, kernels, config = _torchao(x.device.type == "cpu")
    return cast(Tensor, function.apply(x, weight, kernels, config))


@cache
def _torchao(emulate: bool) -> tuple[Any, Any, Any]:
    """The autograd function, the kernels' options and the scaling recipe (one scale per tensor)."""
    try:
        from torchao.float8 import Float8LinearConfig
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
        from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig
    except ImportError as error:
        raise ArgumentError(
            f"float8=True needs torchao ({error}): pip install 'autopar[float8]', or leave float8 out"
        ) from error
    config = Float8LinearConfig(emulate=emulate)
    gemms = (config.gemm_config_output, config.gemm_config_grad_input, config.gemm_config_grad_weight)
    kernels = LinearMMConfig(*(ScaledMMConfig(emulate, gemm.use_fast_accum, False, False) for gemm in gemms))
    return matmul_with_hp_or_float8_args, kernels, config
