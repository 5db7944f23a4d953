"""What a training step costs beside the ops of its model: gradients added up over microbatches, the optimizer, and what
collectives slow down.

Forward, backward and communication are in the timeline of the action lists.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import sympy

from autopar.cluster import Device
from autopar.cost_models.formula import Formula, Quantity

_parameters, _parameter, _gradient, _moment, _bandwidth = sympy.symbols(
    "parameters parameter_itemsize gradient_itemsize moment_itemsize memory_bytes_per_second"
)
_sum, _layers, _pass = sympy.symbols("sum_seconds layers pass_seconds")
_elements, _summed, _copied = sympy.symbols("elements sum_itemsize copy_itemsize")
_beside, _share = sympy.symbols("collective_seconds held_share")
_calls, _call = sympy.symbols("calls host_call_seconds")
_element, _alone = sympy.symbols("element_seconds loaded_alone")

_COUNT: Final = {"parameters": Quantity("1", "elements of the parameters that the rank updates")}
_ELEMENTS: Final = {"elements": Quantity("1", "elements of a gradient")}
_GRADIENT: Final = {"gradient_itemsize": Quantity("B", "of one element of a gradient")}
_BANDWIDTH: Final = {
    "memory_bytes_per_second": Quantity("B/s", "what large copies reach of the bandwidth of the device's memory")
}
_UPDATED: Final = {
    "memory_bytes_per_second": Quantity("B/s", "what large copies reach of the bandwidth of the memory that it is in")
}
_ELEMENT: Final = {
    "element_seconds": Quantity("s", "what an element takes beside its bytes where kernels load one at a time")
}
_ALONE: Final = {**_ELEMENT, "loaded_alone": Quantity("1", "1 where they do, as where the result is wider; else 0")}

ADAMW_SECONDS: Final = Formula(
    "adamw_seconds",
    "s",
    _parameters * ((2 * _parameter + _gradient + 4 * _moment) / _bandwidth + _element),
    {
        **_COUNT,
        "parameter_itemsize": Quantity("B", "of one element of a parameter"),
        **_GRADIENT,
        "moment_itemsize": Quantity("B", "of one element of a moment"),
        **_UPDATED,
        **_ELEMENT,
    },
    "memory traffic: parameter and both moments read and written, gradient read; on an H100 torch's fused kernel takes "
    "11 ps an element, of which its bytes would take 9.4 (benchmarks/one_gpu.py --kinds)",
)

CLIP_SECONDS: Final = Formula(
    "clip_seconds",
    "s",
    3 * _parameters * _gradient / _bandwidth,
    {**_COUNT, **_GRADIENT, **_UPDATED},
    "memory traffic: gradient read for its norm, then read and written to scale it",
)

ADD_SECONDS: Final = Formula(
    "add_seconds",
    "s",
    _elements * ((_gradient + 2 * _summed) / _bandwidth + _alone * _element),
    {
        **_ELEMENTS,
        **_GRADIENT,
        "sum_itemsize": Quantity("B", "of one element of the sum over microbatches"),
        **_BANDWIDTH,
        **_ALONE,
    },
    "memory traffic: the gradient of one microbatch read, the sum of those before it read and written",
)

COPY_SECONDS: Final = Formula(
    "copy_seconds",
    "s",
    _elements * ((_gradient + _copied) / _bandwidth + _alone * _element),
    {
        "elements": Quantity("1", "elements of a gradient, or of a weight"),
        "gradient_itemsize": Quantity("B", "of one element of it"),
        "copy_itemsize": Quantity("B", "of one element of its copy"),
        **_BANDWIDTH,
        **_ALONE,
    },
    "memory traffic: a gradient or weight read, and written in another place or dtype",
)

LEFT_SECONDS: Final = Formula(
    "left_seconds",
    "s",
    sympy.Max(_sum / _layers, _sum - _pass * (_layers - 1) / _layers),
    {
        "sum_seconds": Quantity("s", "sum of a stage's gradients over ranks, alone"),
        "layers": Quantity("1", "parts of the stage whose gradients are summed as they are complete"),
        "pass_seconds": Quantity("s", "the pass that completes them"),
    },
    "sums of a layer run beside the backward of those before it; S. Li et al., PyTorch Distributed, VLDB 2020",
)

SLOWED_SECONDS: Final = Formula(
    "slowed_seconds",
    "s",
    _share * sympy.Min(_beside, _pass / (1 - _share)),
    {
        "collective_seconds": Quantity("s", "collectives that run beside the pass"),
        "held_share": Quantity("1", "of the device's multiprocessors, those that the collectives' kernels hold"),
        "pass_seconds": Quantity("s", "the pass, if it had all multiprocessors"),
    },
    "the pass has the other multiprocessors, as none is shared: S. Jeaugey, github.com/NVIDIA/nccl/issues/689; "
    "until the collectives end, or the pass does",
)

HOST_SECONDS: Final = Formula(
    "host_seconds",
    "s",
    _calls * _call,
    {
        "calls": Quantity(
            "1",
            "ops of the program's text, gradients that backwards make of their operands, weights' "
            "gradients added up, weights copied or updated",
        ),
        "host_call_seconds": Quantity("s", "what the host takes to issue one"),
    },
    "the host runs ahead of the device and waits for nothing, so that over many steps the slower one sets the pace: "
    "the largest cycle mean of a max-plus system, F. Baccelli et al., Synchronization and Linearity, Wiley, 1992",
)

FORMULAS: Final = (ADAMW_SECONDS, CLIP_SECONDS, ADD_SECONDS, COPY_SECONDS, LEFT_SECONDS, SLOWED_SECONDS, HOST_SECONDS)


class Collectives(NamedTuple):
    """Some collectives, one after the other: their seconds, and each one's times the share of the device's
    multiprocessors that it holds."""

    seconds: float
    held_seconds: float

    def times(self, share: float) -> Collectives:
        """That part of each."""
        return Collectives(share * self.seconds, share * self.held_seconds)


def add_seconds(elements: float, gradient_itemsize: int, sum_itemsize: int, device: Device) -> float:
    """Seconds that adding a gradient of so many elements to the sum of those of other microbatches takes."""
    return _moved(ADD_SECONDS, elements, gradient_itemsize, sum_itemsize, device)


def copy_seconds(elements: float, gradient_itemsize: int, copy_itemsize: int, device: Device) -> float:
    """Seconds of copying a gradient, or a weight, of so many elements on the device."""
    return _moved(COPY_SECONDS, elements, gradient_itemsize, copy_itemsize, device)


def _moved(formula: Formula, elements: float, given: int, made: int, device: Device) -> float:
    bandwidth = device.achievable_memory_bytes_per_second
    return formula.number(elements, given, made, bandwidth, device.element_seconds, int(made > given))


def left_seconds(sum_seconds: float, layers: int, pass_seconds: float) -> float:
    """Seconds that sums of gradients still take when the pass that makes them ends.

    Those of all ``layers`` but the first run beside it; the first layer's are complete last.
    """
    return LEFT_SECONDS.number(sum_seconds, max(1, layers), pass_seconds)


def hidden(collectives: Collectives, all_seconds: float, left: float) -> Collectives:
    """What of them runs beside a pass, where they are part of ``all_seconds`` of moves that have ``left`` so much to do
    when it ends."""
    return collectives.times(1 - left / all_seconds) if all_seconds else collectives


def slowed_seconds(beside: Sequence[Collectives], pass_seconds: float) -> float:
    """By how much a pass takes longer that would take so long if nothing ran ``beside`` it."""
    held = math.fsum(each.held_seconds for each in beside)
    if not held:
        return 0.0
    seconds = math.fsum(each.seconds for each in beside)
    return SLOWED_SECONDS.number(seconds, held / seconds, pass_seconds)


def host_seconds(calls: float, device: Device) -> float:
    """Seconds that the host takes to issue so many calls; 0 where it isn't known what one takes."""
    return HOST_SECONDS.number(calls, device.host_call_seconds)


def host_cast_seconds(bytes_: float, device: Device) -> float:
    """Seconds of casts on the host that read and write so many bytes; 0 where its memory's bandwidth isn't known."""
    return bytes_ / device.host_memory_bytes_per_second if device.host_memory_bytes_per_second else 0.0


def optimizer_seconds(
    parameters: int,
    device: Device,
    *,
    on_host: bool = False,
    clip: bool = False,
    parameter_itemsize: int = 4,
    gradient_itemsize: int = 4,
    moment_itemsize: int = 4,
) -> float:
    """Seconds of one AdamW update of ``parameters`` elements, after clipping their gradients if ``clip``, where they
    and all of its state lie ``on_host``, or on the device."""
    shared = {
        "parameters": parameters,
        "gradient_itemsize": gradient_itemsize,
        "memory_bytes_per_second": device.update_bytes_per_second(on_host=on_host),
    }
    update = ADAMW_SECONDS(
        **shared,
        parameter_itemsize=parameter_itemsize,
        moment_itemsize=moment_itemsize,
        element_seconds=0.0 if on_host else device.element_seconds,
    )
    return update + CLIP_SECONDS(**shared) if clip else update
