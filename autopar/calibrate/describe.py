"""What was measured and fitted as a :class:`~autopar.cluster.Cluster`, every figure with its source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from statistics import median
from typing import Final

import torch

from autopar.calibrate.fit import LinkFit, ProductFit, fit_link
from autopar.calibrate.samples import LinkName, Message
from autopar.cluster import Cluster, Device, Link

_DIGITS: Final = 4


@dataclass(frozen=True)
class Measured:
    """The figures of one device, and of the node that it is in."""

    device_name: str
    device_type: str
    memory_bytes: int
    host_memory_bytes: int
    devices_per_node: int
    memory_bytes_per_second: float
    host_bytes_per_second: float
    host_duplex_bytes_per_second: float
    host_memory_bytes_per_second: float
    launch_seconds: float
    host_call_seconds: float
    multiprocessors: int
    element_seconds: float
    sustained_fraction: float
    products: ProductFit


def cluster_of(name: str, measured: Measured, messages: Sequence[Message], day: date) -> Cluster:
    """Rates are those that were reached, so that achievable fractions are 1. A link that nothing crossed is taken from
    a preset, and its source says so."""
    origin = f"measured by autopar calibrate, {day}, torch {torch.__version__}, {measured.device_name}"
    sources = {f"device.{key}": f"{origin}: {how}" for key, how in _HOW.items()}
    if measured.device_type == "cpu":
        sources |= {f"device.{key}": how for key, how in _SHARES.items()}
    else:
        sources |= {f"device.{key}": f"{origin}: {how}" for key, how in _OF_GPUS.items()}
    for dtype in measured.products.flops_per_second:
        for table in ("flops_per_second", "ramp_seconds_by_dtype"):
            sources[f"device.{table}.{dtype}"] = f"{origin}: {_HOW['ramp_seconds']}"
    links: dict[LinkName, Link] = {}
    for part in ("intra_node", "inter_node"):
        links[part], said = _link(part, measured, [message for message in messages if message.link == part], origin)
        sources |= said
    sources["devices_per_node"] = f"{origin}: {_DEVICES[measured.device_type]}"
    return Cluster(name, measured.devices_per_node, _device(measured), **links, sources=sources)


_HOW: Final = {
    "memory_bytes": "as torch says of the device",
    "memory_bytes_per_second": "a large copy, read and written bytes counted",
    "launch_seconds": "from one op on one element to the next",
    "achievable_fraction": "the rates are measured, so they are what is achieved",
    "ramp_seconds": "matrix products of many sizes",
    "host_memory_bytes": "all memory of the machine, shared by its devices",
    "host_bytes_per_second": "half of a large copy, which reads and writes",
}
_SHARES: Final = {
    "memory_bytes": "chosen: half of this rank's share of the machine's memory",
    "host_memory_bytes": "chosen: the other half of its share",
}
_OF_GPUS: Final = {
    "host_bytes_per_second": "a large copy, pinned, to the device or from it, whichever is slower",
    "host_duplex_bytes_per_second": "one to the device and one from it at the same time",
    "host_memory_bytes_per_second": "an AdamW update on the host, its share",
    "host_call_seconds": "a step of tiny layers by its calls, issued without waiting for the device",
    "multiprocessors": "as torch says of the device",
    "element_seconds": "a cast of bfloat16 to float32, beside its bytes",
    "sustained_fraction": "large products that take turns with copies, for two thirds of the time",
}
_DEVICES: Final = {"cuda": "devices that torch sees", "cpu": "cores that this process may use, or processes started"}
_OF_LINKS: Final = ("latency_seconds", "bytes_per_second", "peer_bytes_per_second", "call_seconds")
_TYPICAL: Final = {"cuda": "h100", "cpu": "cpu"}
"""Presets from which links are taken that were not measured."""


def _device(measured: Measured) -> Device:
    ramps = measured.products.ramp_seconds
    return Device(
        name=measured.device_name,
        kind=measured.device_type,
        memory_bytes=measured.memory_bytes,
        flops_per_second={dtype: _rounded(rate) for dtype, rate in measured.products.flops_per_second.items()},
        memory_bytes_per_second=_rounded(measured.memory_bytes_per_second),
        launch_seconds=_rounded(measured.launch_seconds),
        host_call_seconds=_rounded(measured.host_call_seconds),
        achievable_fraction=1,
        sustained_fraction=_rounded(measured.sustained_fraction),
        multiprocessors=measured.multiprocessors,
        element_seconds=_rounded(measured.element_seconds),
        ramp_seconds=_rounded(median(ramps.values())),
        ramp_seconds_by_dtype={dtype: _rounded(ramp) for dtype, ramp in ramps.items()},
        host_memory_bytes=measured.host_memory_bytes,
        host_bytes_per_second=_rounded(min(measured.host_bytes_per_second, measured.memory_bytes_per_second)),
        host_duplex_bytes_per_second=_rounded(
            min(measured.host_duplex_bytes_per_second, measured.host_bytes_per_second)
        ),
        host_memory_bytes_per_second=_rounded(
            min(measured.host_memory_bytes_per_second, measured.memory_bytes_per_second)
        ),
    )


def _link(
    part: LinkName, measured: Measured, messages: Sequence[Message], origin: str
) -> tuple[Link, Mapping[str, str]]:
    """A link and the sources of its figures."""
    if not messages:
        preset = Cluster.load(_TYPICAL[measured.device_type])
        typical: Link = getattr(preset, part)
        held = _held_multiprocessors(part, measured)
        link = replace(typical, name=f"{typical.name} (not measured)", held_multiprocessors=held)
        said = {
            key.removeprefix(f"{part}."): f"not measured, as in the preset {preset.name}: {source}"
            for key, source in preset.sources.items()
            if key.startswith(f"{part}.") and (held or not key.endswith(".held_multiprocessors"))
        }
    else:
        sizes = sorted({message.size for message in messages})
        backend = {"cuda": "NCCL", "cpu": "gloo"}[measured.device_type]
        held = _held_multiprocessors(part, measured)
        link = _measured_link(f"{backend}, {part.replace('_', ' ')}", fit_link(messages), measured, held)
        how = f"{len(messages)} collectives on groups of {', '.join(map(str, sizes))}"
        said = dict.fromkeys(_OF_LINKS, f"{origin}: {how}")
        if held:
            said["held_multiprocessors"] = f"not measured, as in the preset {_TYPICAL[measured.device_type]}"
    return link, {f"{part}.{key}": text for key, text in said.items()}


def _held_multiprocessors(part: LinkName, measured: Measured) -> int:
    """Those of a preset, if the device has many more."""
    preset = Cluster.load(_TYPICAL[measured.device_type])
    most = max(
        preset.intra_node.held_multiprocessors, measured.devices_per_node * preset.inter_node.held_multiprocessors
    )
    typical: Link = getattr(preset, part)
    return typical.held_multiprocessors if 2 * most <= measured.multiprocessors else 0


def _measured_link(name: str, fit: LinkFit, measured: Measured, held: int) -> Link:
    """No faster than the memory that it reads, should the largest messages have fitted into a cache."""
    rate = min(fit.bytes_per_second, measured.memory_bytes_per_second)
    return Link(
        name,
        _rounded(fit.latency_seconds),
        _rounded(rate),
        peer_bytes_per_second=_rounded(min(fit.peer_bytes_per_second, rate)),
        call_seconds=_rounded(fit.call_seconds),
        held_multiprocessors=held,
    )


def _rounded(figure: float) -> float:
    return float(f"{figure:.{_DIGITS}g}")
