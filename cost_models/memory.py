"""What a rank holds at its peak: parameters, gradients, optimizer state, activations in flight."""

from __future__ import annotations

from typing import Final

import sympy

from autopar.cost_models.formula import Formula, Quantity

_parameters, _parameter, _gradient, _moment, _saved, _in_flight, _working = sympy.symbols(
    "parameters parameter_itemsize gradient_itemsize moment_itemsize saved_bytes in_flight working_bytes"
)
_copy, _shards = sympy.symbols("copy_itemsize shards")

_COUNT: Final = {"parameters": Quantity("1", "elements of the parameters that the rank holds")}
_PARAMETER: Final = {"parameter_itemsize": Quantity("B", "of one element of a parameter")}
_GRADIENT: Final = {"gradient_itemsize": Quantity("B", "of one element of a gradient")}
_MOMENT: Final = {"moment_itemsize": Quantity("B", "of one element of a moment of AdamW")}
_SAVED: Final = {
    "saved_bytes": Quantity("B", "saved for the backward of one microbatch"),
    "in_flight": Quantity("1", "microbatches whose backward is still to come, at most"),
}
_WORKING: Final = {"working_bytes": Quantity("B", "largest temporary values of one op, buffers included")}
_SHARED: Final = {
    **_COUNT,
    **_PARAMETER,
    **_GRADIENT,
    **_MOMENT,
    "shards": Quantity("1", "ranks that share one copy of the state"),
}
_COPY: Final = {"copy_itemsize": Quantity("B", "of one element of the copy that is computed with")}
_STATES = "S. Rajbhandari et al., ZeRO, arXiv 1910.02054, section 3.1"

PARAMETER_BYTES: Final = Formula("parameter_bytes", "B", _parameters * _parameter, {**_COUNT, **_PARAMETER}, _STATES)
GRADIENT_BYTES: Final = Formula("gradient_bytes", "B", _parameters * _gradient, {**_COUNT, **_GRADIENT}, _STATES)
ADAMW_BYTES: Final = Formula("adamw_bytes", "B", 2 * _parameters * _moment, {**_COUNT, **_MOMENT}, _STATES)
ZERO_1_BYTES: Final = Formula(
    "zero_1_bytes",
    "B",
    _parameters * (_copy + _gradient + (_parameter + 2 * _moment) / _shards),
    {**_SHARED, **_COPY},
    _STATES,
)
ZERO_2_BYTES: Final = Formula(
    "zero_2_bytes",
    "B",
    _parameters * (_copy + (_gradient + _parameter + 2 * _moment) / _shards),
    {**_SHARED, **_COPY},
    _STATES,
)
ZERO_3_BYTES: Final = Formula(
    "zero_3_bytes", "B", _parameters * (_gradient + _parameter + 2 * _moment) / _shards, _SHARED, _STATES
)
ACTIVATION_BYTES: Final = Formula(
    "activation_bytes",
    "B",
    _saved * _in_flight,
    _SAVED,
    "V. Korthikanti et al., Reducing Activation Recomputation, arXiv 2205.05198, section 4",
)
PEAK_BYTES: Final = Formula(
    "peak_bytes",
    "B",
    _parameters * (_parameter + _gradient + 2 * _moment) + _saved * _in_flight + _working,
    {**_COUNT, **_PARAMETER, **_GRADIENT, **_MOMENT, **_SAVED, **_WORKING},
    "the sum of the above and of the working memory",
)

FORMULAS: Final = (
    *(PARAMETER_BYTES, GRADIENT_BYTES, ADAMW_BYTES),
    *(ZERO_1_BYTES, ZERO_2_BYTES, ZERO_3_BYTES),
    *(ACTIVATION_BYTES, PEAK_BYTES),
)
