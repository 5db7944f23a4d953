"""Times of matrix products, over sizes and dtypes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Final

import torch
from torch import Tensor

from autopar.calibrate.clock import Clock
from autopar.calibrate.samples import Effort, Product, Progress
from autopar.cluster import DTYPES

_FLOAT8: Final = torch.float8_e4m3fn
_TURNS: Final = 150
_TURN_SECONDS: Final = (20e-3, 10e-3)
"""Of products, and of copies: of a step that reaches half of a device's peak rate, products take two thirds."""


def measure_products(clock: Clock, effort: Effort, progress: Progress) -> list[Product]:
    """Every dtype that the device multiplies; those that it doesn't are left out."""
    found: list[Product] = []
    for name in DTYPES:
        dtype = getattr(torch, name)
        if dtype == _FLOAT8 and clock.device.type == "cpu":
            continue  # only emulated
        progress(f"products in {name}")
        try:
            found += _of_dtype(clock, effort, name, dtype)
        except (RuntimeError, ImportError, ValueError):
            continue  # no kernel: float8 before Ada and Hopper, float64 on some accelerators
    return found


def sustained_fraction(clock: Clock, products: Sequence[Product]) -> float:
    """What is left of the rate of the largest product in bfloat16 where a device reaches the limit of its power: for
    seconds it takes turns with copies, as products do in a step with all that only moves bytes."""
    largest = max(products, key=lambda product: (product.dtype == "bfloat16", product.flops))
    product = _product(largest.m, largest.n, largest.k, getattr(torch, largest.dtype), clock.device)
    source = torch.randn(largest.m * largest.n, device=clock.device)
    target = torch.empty_like(source)

    def copy() -> Tensor:
        return target.copy_(source)

    each = zip((product, copy), _TURN_SECONDS, (largest.seconds, clock.seconds(copy)), strict=True)
    turns = [(call, math.ceil(turn / seconds)) for call, turn, seconds in each]
    taken = [[clock.run(call, calls) for call, calls in turns] for _ in range(_TURNS)]
    return min(1.0, largest.seconds / median(seconds for seconds, _ in taken[_TURNS // 2 :]))


def _of_dtype(clock: Clock, effort: Effort, name: str, dtype: torch.dtype) -> Iterator[Product]:
    for m, n, k in effort.shapes:
        seconds = clock.seconds(_product(m, n, k, dtype, clock.device))
        yield Product(name, m, n, k, dtype.itemsize, seconds)
        if seconds > effort.longest_seconds:
            return


def _product(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """Random operands: constant ones draw less power, and products of them run faster than a model's."""
    a, b = (torch.randn(shape, device=device).to(dtype) for shape in ((m, k), (n, k)))
    if dtype == _FLOAT8:
        return _scaled(a, b.t())  # column by column, as the kernels want it
    b = b.t().contiguous()
    out = torch.empty(m, n, dtype=dtype, device=device)
    return lambda: torch.mm(a, b, out=out)


def _scaled(a: Tensor, b: Tensor) -> Callable[[], Tensor]:
    """One scale for each operand, as the float8 recipe of the runtime has it."""
    from torch.nn.functional import ScalingType, scaled_mm

    one, whole = torch.ones((), device=a.device), ScalingType.TensorWise
    return lambda: scaled_mm(a, b, one, whole, one, whole, output_dtype=torch.bfloat16)
