"""float8: products with weights are computed in 8 bits, where the local sizes allow the device's kernels.

Guarantees: shapes, dtypes and types stay; every product of a bfloat16 value with a trained two-dimensional parameter
whose sizes are multiples of 16 calls the runtime's ``float8_linear`` or ``float8_matmul``. Lossy: operands are scaled
to float8 one tensor at a time (Micikevicius et al., "FP8 Formats for Deep Learning", arXiv 2209.05433). A table that
is also the embedding stays as it is. Example: ``aten.linear(x, w)`` becomes ``float8_linear(x, w)``.
"""

from __future__ import annotations

from math import prod
from typing import Final

import torch
from torch import fx

from autopar.cluster import Device
from autopar.errors import ArgumentError
from autopar.graph import Model, info, operands
from autopar.options import Options
from autopar.passes.products import LINEAR, MATMUL, replace_products

DTYPE: Final = "float8_e4m3fn"
_MULTIPLE: Final = 16  # of every size of the device's kernels


def check_float8(options: Options, device: Device) -> None:
    """Raises ArgumentError where the device has no float8, or the rest isn't in bfloat16."""
    if not options.float8:
        return
    if DTYPE not in device.flops_per_second:
        raise ArgumentError(
            f"float8=True, but {device.name!r} multiplies no float8 (its cluster file gives no "
            f"flops_per_second.{DTYPE}); take a cluster that does, such as h100, or leave float8 out"
        )
    if options.precision != "bf16":
        raise ArgumentError(
            f"float8=True with precision={options.precision!r}; what isn't a product stays in bfloat16: say "
            "precision='bf16' with it"
        )


def float8(model: Model) -> Model:
    """In place, after all axes are solved and before gradients of weights are put off."""
    return replace_products(model, {LINEAR: "float8_linear", MATMUL: "float8_matmul"}, _fits)


def _fits(product: fx.Node, weight: fx.Node) -> bool:
    x = info(operands(product)[0]).meta
    sizes = (prod(x.shape[:-1]), *info(weight).meta.shape)
    return x.dtype == torch.bfloat16 and all(size % _MULTIPLE == 0 for size in sizes)
