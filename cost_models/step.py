"""What a training step costs beside its timeline: the optimizer, once per step on every rank.

Forward, backward and communication are in the timeline of the action lists.
"""

from __future__ import annotations

from typing import Final

import sympy

from autopar.cluster import Device
from autopar.cost_models.formula import Formula, Quantity

_parameters, _parameter, _gradient, _moment, _bandwidth = sympy.symbols(
    "parameters parameter_itemsize gradient_itemsize moment_itemsize memory_bytes_per_second"
)

_COUNT: Final = {"parameters": Quantity("1", "elements of the parameters that the rank updates")}
_GRADIENT: Final = {"gradient_itemsize": Quantity("B", "of one element of a gradient")}
_BANDWIDTH: Final = {"memory_bytes_per_second": Quantity("B/s", "bandwidth of the device's memory")}

ADAMW_SECONDS: Final = Formula(
    "adamw_seconds",
    "s",
    _parameters * (2 * _parameter + _gradient + 4 * _moment) / _bandwidth,
    {
        **_COUNT,
        "parameter_itemsize": Quantity("B", "of one element of a parameter"),
        **_GRADIENT,
        "moment_itemsize": Quantity("B", "of one element of a moment"),
        **_BANDWIDTH,
    },
    "memory traffic: parameter and both moments read and written, gradient read",
)

CLIP_SECONDS: Final = Formula(
    "clip_seconds",
    "s",
    3 * _parameters * _gradient / _bandwidth,
    {**_COUNT, **_GRADIENT, **_BANDWIDTH},
    "memory traffic: gradient read for its norm, then read and written to scale it",
)

FORMULAS: Final = (ADAMW_SECONDS, CLIP_SECONDS)


def optimizer_seconds(
    parameters: int,
    device: Device,
    *,
    clip: bool = False,
    parameter_itemsize: int = 4,
    gradient_itemsize: int = 4,
    moment_itemsize: int = 4,
) -> float:
    """Seconds of one AdamW update of ``parameters`` elements, after clipping their gradients if ``clip``."""
    shared = {
        "parameters": parameters,
        "gradient_itemsize": gradient_itemsize,
        "memory_bytes_per_second": device.memory_bytes_per_second,
    }
    update = ADAMW_SECONDS(**shared, parameter_itemsize=parameter_itemsize, moment_itemsize=moment_itemsize)
    return update + CLIP_SECONDS(**shared) if clip else update
