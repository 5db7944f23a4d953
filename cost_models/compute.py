"""How long one op takes on one device: a roofline whose roof bends.

Matrix products get near the peak rate only when they are large. Their rate saturates at the peak's
``achievable_fraction``, of which ``sustained_fraction`` is left for seconds of a step's work; products that the peak
rate would finish in ``ramp_seconds`` reach half of that. Their result is made in tiles, one on each multiprocessor
at a time: the last round of tiles takes as long as a full one, unless sums are cut into slices. Fused attention reaches
a share that grows with the keys. Everything else takes as long as its bytes, and its elements where a kernel loads one
at a time: torch's do where operands are broadcast or of several dtypes.

Each formula grows with the work, and a part of the work takes at least that part of the time: a bound for the whole,
divided, is one for the part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import sympy

from autopar.cluster import Device
from autopar.cost_models.formula import Formula, Quantity

_loose, _element = sympy.symbols("loose_elements element_seconds")
_flops, _bytes, _rate, _bandwidth, _launch, _fraction, _ramp, _efficiency, _made, _cores, _filled, _slice = (
    sympy.symbols(
        "flops moved_bytes flops_per_second memory_bytes_per_second launch_seconds"
        " achievable_fraction ramp_seconds efficiency made multiprocessors filled slice"
    )
)
_share, _keys, _half = sympy.symbols("longest_share keys half_keys")

_WORK: Final = {"flops": Quantity("FLOP", "floating-point operations of the matrix product")}
_RATE: Final = {"flops_per_second": Quantity("FLOP/s", "the device's peak rate for the dtype")}
_MEMORY: Final = {
    "moved_bytes": Quantity("B", "bytes of all operands and results"),
    "memory_bytes_per_second": Quantity("B/s", "what large copies reach of the bandwidth of the device's memory"),
    "launch_seconds": Quantity("s", "what an op takes beyond its work"),
}

TILES: Final = ((256 * 128, 1.0), (128 * 128, 0.9), (64 * 128, 0.75))
"""Elements of a tile of a result, and the rate of a multiprocessor on such tiles: smaller ones load more per FLOP. The
rates are typical, not measured."""

UNALIGNED: Final = 0.18
"""What is left of the rate of a product in 16 bits of whose matrices one has rows that aren't a multiple of 16 bytes:
kernels load element by element, with older instructions. On an H100 (torch 2.11, 16384 x 768 x 50257): 98 TFLOP/s
forward, 144 and 155 for the gradients, where 50304 columns reach 700."""

SLICE: Final = 1024
"""Of the dim that a product sums over: a small result of long sums, as the gradient of a convolution's weights is, is
made in several such slices at once, which are added up then."""

SLICED: Final = 0.75
"""The rate of a multiprocessor where it is so. Both are typical, not measured."""

ATTENTION: Final = (0.7, 0.6)
"""Shares of the peak rate that fused causal attention reaches on long sequences, forward and backward."""

HALF_KEYS: Final = 1500
"""Keys of a sequence on which it reaches half of that."""

_TERMS: Final = 3
"""Adding a gradient to another reads both, and writes their sum."""

ATTENTION_BACKWARD: Final = 2.5
"""FLOPs of its backward for each of the forward, since scores are made again (arXiv 2307.08691, section 4.1)."""


def _in_rounds(elements: sympy.Expr) -> list[sympy.Expr]:
    """What of the multiprocessors' time is of use, as each makes one tile after the other: by size of these."""
    return [elements * share / (sympy.ceiling(elements / (tile * _cores)) * tile * _cores) for tile, share in TILES]


FILLED: Final = Formula(
    "matmul_filled",
    "1",
    sympy.Max(*_in_rounds(_made), *(SLICED * filled for filled in _in_rounds(_flops / (2 * _slice)))),
    {
        "made": Quantity("1", "elements of the product's result"),
        "multiprocessors": Quantity("1", "of the device, each of which makes a tile of the result at a time"),
        **_WORK,
        "slice": Quantity("1", "of the dim that is summed over, where parts of it are tiles of their own"),
    },
    "wave quantization, NVIDIA, Matrix Multiplication Background User's Guide, section 4; the best of three tiles, and "
    "of these in slices (split-K: CUTLASS documentation, Efficient GEMM in CUDA, Parallelized Reductions)",
)

EFFICIENCY: Final = Formula(
    "matmul_efficiency",
    "1",
    _fraction * _flops / (_flops / _filled + _rate * _ramp),
    {
        **_WORK,
        **_RATE,
        "achievable_fraction": Quantity("1", "share of the peak rate that the largest products hold"),
        "filled": Quantity("1", "matmul_filled"),
        "ramp_seconds": Quantity("s", "what the peak rate would take for a product that reaches half of that share"),
    },
    "r_infinity and n_1/2 of R. W. Hockney, The Science of Computer Benchmarking, SIAM, 1996",
)

ATTENTION_SHARE: Final = Formula(
    "attention_share",
    "1",
    _share * _keys / (_keys + _half),
    {
        "longest_share": Quantity("1", "share of the peak rate that fused attention reaches on long sequences"),
        "keys": Quantity("1", "keys that a query may attend to, masked ones included"),
        "half_keys": Quantity("1", "keys on which it reaches half of that"),
    },
    "H100, causal, width 128: 400 (2k) to 640 TFLOP/s (16k) forward, 350 to 560 backward, J. Shah et al., arXiv "
    "2407.08608, figures 5 and 6; an A100 has 50 to 73 % of its peak, T. Dao, arXiv 2307.08691",
)

MATMUL_SECONDS: Final = Formula(
    "matmul_seconds",
    "s",
    sympy.Max(_flops / (_rate * _efficiency), _bytes / _bandwidth) + _launch,
    {**_WORK, **_RATE, "efficiency": Quantity("1", "matmul_efficiency"), **_MEMORY},
    "the roofline of S. Williams, A. Waterman, D. Patterson, CACM 52(4), 2009",
)

POINTWISE_SECONDS: Final = Formula(
    "pointwise_seconds",
    "s",
    _bytes / _bandwidth + _loose * _element + _launch,
    {
        **_MEMORY,
        "loose_elements": Quantity("1", "elements that kernels make one by one"),
        "element_seconds": Quantity("s", "what such an element takes beside its bytes"),
    },
    "the same roofline, where arithmetic hides behind memory traffic; loads of several elements at once need operands "
    "of one dtype and shape (torch, aten/src/ATen/native/cuda/Loops.cuh)",
)

FORMULAS: Final = (FILLED, EFFICIENCY, ATTENTION_SHARE, MATMUL_SECONDS, POINTWISE_SECONDS)


@dataclass(frozen=True)
class Work:
    """What one op does on one device.

    ``flops`` of matrix products (0: none) in ``dtype``, ``moved_bytes`` of operands, results and what is read and
    written inside. ``made`` are the elements of a product's result, ``factors`` those of each operand that has a
    gradient; ``fused``: the products are an attention's, over ``keys`` (0: very many). ``back_bytes`` are what the
    backward moves where there are no products; ``repeats`` how often the backward does the forward's work again. In
    ``pieces``, kernels whose results are added up, ``added_bytes`` each time. ``loose`` elements are made one by one,
    ``back_loose`` in the backward; ``swept_bytes`` and ``back_swept_bytes`` are moved by kernels beside those of
    products; ``is_aligned``: rows of a product's matrices begin at multiples of 16 bytes.
    """

    flops: float
    moved_bytes: float
    dtype: str
    made: float = 0.0
    factors: tuple[float, ...] = ()
    back_bytes: float = 0.0
    repeats: int = 0
    pieces: int = 1
    added_bytes: float = 0.0
    fused: bool = False
    keys: int = 0
    loose: float = 0.0
    back_loose: float = 0.0
    swept_bytes: float = 0.0
    back_swept_bytes: float = 0.0
    is_aligned: bool = True

    def attention_share(self, way: int) -> float | None:
        """The share of the peak rate of a fused attention, forward (0) or backward (1)."""
        if not self.fused:
            return None
        return ATTENTION_SHARE.number(ATTENTION[way], self.keys, HALF_KEYS) if self.keys else ATTENTION[way]


def forward_seconds(work: Work, device: Device) -> float:
    """Seconds of the forward. Raises ClusterError where the device has no rate for the dtype of a product."""
    n = work.pieces
    fraction = _largest_share(work, device, 0)
    seconds = n * _product(work.flops / n, work.moved_bytes / n, work.dtype, device, work.made / n, fraction)
    seconds += work.loose * device.element_seconds + work.swept_bytes / device.achievable_memory_bytes_per_second
    return seconds + (n - 1) * _product(0, work.added_bytes, work.dtype, device, 0.0, None) if n > 1 else seconds


def backward_seconds(work: Work, device: Device) -> float:
    """Seconds of the backward of an op whose result has a gradient: of a product, one more for each factor that has
    one. Raises ClusterError."""
    again = work.repeats * forward_seconds(work, device) if work.repeats else 0.0
    again += work.back_swept_bytes / device.achievable_memory_bytes_per_second
    n = work.pieces
    if not work.flops:
        loose = work.back_loose * device.element_seconds
        return again + _product(0, work.back_bytes, work.dtype, device, 0.0, None) + loose
    moved = work.moved_bytes / n
    if work.fused:
        flops = ATTENTION_BACKWARD * work.flops / n
        return again + n * _product(flops, 2 * moved, work.dtype, device, 0.0, work.attention_share(1))
    share = _largest_share(work, device, 1)
    return again + sum(
        n * _product(work.flops / n, moved, work.dtype, device, made / n, share)
        for made in work.factors or (work.made,)
    )


def _largest_share(work: Work, device: Device, way: int) -> float | None:
    """The share of the peak rate that the largest of such products reach, forward (0) or backward (1); None: the
    device's own."""
    if work.is_aligned or not work.flops:
        return work.attention_share(way)
    return _unaligned_share(work.dtype, device)


def _unaligned_share(dtype: str, device: Device) -> float:
    return UNALIGNED * device.fraction(dtype) * device.sustained_fraction


def adding_seconds(bytes_: float, device: Device) -> float:
    """Seconds of adding a gradient of so many bytes to another, as autograd does where several ops use a tensor."""
    return _product(0, _TERMS * bytes_, "", device, 0.0, None)


def seconds(
    flops: float, bytes_: float, dtype: str, device: Device, made: float = 0.0, *, is_aligned: bool = True
) -> float:
    """Seconds of one kernel that does ``flops`` of a matrix product in ``dtype`` and moves ``bytes_`` of memory.

    ``made`` are the elements of the product's result (0: as many as fill the device); ``is_aligned`` as in
    :class:`Work`. With 0 ``flops`` (anything but a matrix product) ``dtype`` doesn't matter. Raises ClusterError where
    the device has no rate for ``dtype``.
    """
    return _product(flops, bytes_, dtype, device, made, None if is_aligned else _unaligned_share(dtype, device))


def _product(flops: float, bytes_: float, dtype: str, device: Device, made: float, fraction: float | None) -> float:
    bandwidth, launch = device.achievable_memory_bytes_per_second, device.launch_seconds
    if not flops:
        return POINTWISE_SECONDS.number(bytes_, bandwidth, launch, 0.0, device.element_seconds)
    rate = device.rate(dtype)
    if fraction is None:
        fraction = device.fraction(dtype) * device.sustained_fraction
    filled = FILLED.number(made, device.multiprocessors, flops, SLICE) if made and device.multiprocessors else 1.0
    efficiency = EFFICIENCY.number(flops, rate, fraction, filled, device.ramp(dtype))
    return MATMUL_SECONDS.number(flops, rate, efficiency, bytes_, bandwidth, launch)
