"""How long one op takes on one device: a roofline whose roof bends.

Matrix products get near the peak rate only when they are large. Their rate saturates at the peak's
``achievable_fraction``; products that the peak rate would finish in ``ramp_seconds`` reach half of that.
"""

from __future__ import annotations

from typing import Final

import sympy

from autopar.cluster import Device
from autopar.cost_models.formula import Formula, Quantity

_flops, _bytes, _rate, _bandwidth, _launch, _fraction, _ramp, _efficiency = sympy.symbols(
    "flops moved_bytes flops_per_second memory_bytes_per_second launch_seconds"
    " achievable_fraction ramp_seconds efficiency"
)

_WORK: Final = {"flops": Quantity("FLOP", "floating-point operations of the matrix product")}
_RATE: Final = {"flops_per_second": Quantity("FLOP/s", "the device's peak rate for the dtype")}
_MEMORY: Final = {
    "moved_bytes": Quantity("B", "bytes of all operands and results"),
    "memory_bytes_per_second": Quantity("B/s", "bandwidth of the device's memory"),
    "launch_seconds": Quantity("s", "what an op takes beyond its work"),
}

EFFICIENCY: Final = Formula(
    "matmul_efficiency",
    "1",
    _fraction * _flops / (_flops + _rate * _ramp),
    {
        **_WORK,
        **_RATE,
        "achievable_fraction": Quantity("1", "share of the peak rate that the largest products reach"),
        "ramp_seconds": Quantity("s", "what the peak rate would take for a product that reaches half of that share"),
    },
    "r_infinity and n_1/2 of R. W. Hockney, The Science of Computer Benchmarking, SIAM, 1996",
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
    _bytes / _bandwidth + _launch,
    _MEMORY,
    "the same roofline, where arithmetic hides behind memory traffic",
)

FORMULAS: Final = (EFFICIENCY, MATMUL_SECONDS, POINTWISE_SECONDS)


def seconds(flops: float, bytes_: float, dtype: str, device: Device) -> float:
    """Seconds of one op that does ``flops`` of matrix products in ``dtype`` and moves ``bytes_`` of memory.

    With 0 ``flops`` (anything but a matrix product) ``dtype`` doesn't matter. Raises ClusterError where the
    device has no rate for ``dtype``.
    """
    memory = {
        "moved_bytes": bytes_,
        "memory_bytes_per_second": device.memory_bytes_per_second,
        "launch_seconds": device.launch_seconds,
    }
    if not flops:
        return POINTWISE_SECONDS(**memory)
    work = {"flops": flops, "flops_per_second": device.rate(dtype)}
    efficiency = EFFICIENCY(**work, achievable_fraction=device.achievable_fraction, ramp_seconds=device.ramp_seconds)
    return MATMUL_SECONDS(**work, efficiency=efficiency, **memory)
