"""From measurements to a cluster: in this process alone, with processes of its own, or as one rank under torchrun."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import torch

from autopar.calibrate.clock import Clock
from autopar.calibrate.collectives import measure_collectives
from autopar.calibrate.describe import Measured, cluster_of
from autopar.calibrate.fit import fit_products
from autopar.calibrate.host import host_call_seconds
from autopar.calibrate.launch import launch_seconds
from autopar.calibrate.memory import (
    cores,
    element_seconds,
    host_bytes_per_second,
    host_duplex_bytes_per_second,
    host_memory_bytes_per_second,
    machine_bytes,
    memory_bytes_per_second,
)
from autopar.calibrate.processes import measure_in_processes
from autopar.calibrate.products import measure_products, sustained_fraction
from autopar.calibrate.samples import Effort, Message, Product, Progress
from autopar.cluster import Cluster
from autopar.errors import ArgumentError
from autopar.mesh import Mesh
from autopar.runtime.axes import Axes
from autopar.runtime.job import join_world

_MOST_PROCESSES: Final = 4


@dataclass(frozen=True)
class Calibration:
    """A cluster, and the measurements that it was fitted to.

    ``rank``: of the process, under torchrun. ``busy_cores``: how many others kept busy before it began.
    """

    cluster: Cluster
    products: tuple[Product, ...]
    messages: tuple[Message, ...]
    rank: int = 0
    busy_cores: float = 0.0


@dataclass(frozen=True)
class _Torchrun:
    """What torchrun tells each process."""

    rank: int
    world: int
    per_node: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> _Torchrun | None:
        if not {"RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"} <= environment.keys():
            return None
        return cls(*(int(environment[key]) for key in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")))


def calibrate(
    device: str | None = None,
    *,
    quick: bool = False,
    name: str = "calibrated",
    effort: Effort | None = None,
    progress: Progress = lambda _: None,
) -> Calibration:
    """Measure this machine's devices, "cuda" or "cpu" (not given: "cuda" where there is one), one thread on a CPU.

    Under torchrun its processes measure the links between them, on NCCL or gloo; otherwise 2 to 4 processes on gloo
    are started for a CPU, and those of GPUs are not measured. ``effort`` in place of what ``quick`` chooses.
    Raises ArgumentError where there is no such device, or torchrun started a single process.
    """
    torchrun, busy = _Torchrun.of(os.environ), os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    device_type = _device_type(device, torchrun)
    effort = effort or Effort.of(device_type, quick=quick)
    axes = _join(torchrun)
    here = axes.device if axes is not None else torch.device(device_type)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        per_node = torchrun.per_node if torchrun is not None else _devices(device_type)
        measured, products = _measure_device(here, per_node, per_node if torchrun else 1, effort, progress)
        messages = _measure_links(axes, per_node, device_type, effort, progress)
    finally:
        torch.set_num_threads(threads)
    cluster = cluster_of(name, measured, messages, datetime.now(UTC).date())
    return Calibration(cluster, tuple(products), tuple(messages), 0 if axes is None else axes.rank, busy)


def _device_type(asked: str | None, torchrun: _Torchrun | None) -> str:
    has_cuda = torch.cuda.is_available()
    if asked not in (None, "cuda", "cpu"):
        raise ArgumentError(f"device is {asked!r}, but must be 'cuda' or 'cpu'")
    if asked == "cuda" and not has_cuda:
        raise ArgumentError("there is no CUDA device that torch can use; run this where there is one, or with cpu")
    if torchrun is not None and torchrun.world == 1:
        raise ArgumentError(
            "torchrun started one process, which has nobody to talk to: give --nproc-per-node the devices of a node, "
            "2 or more, or leave torchrun out, and links will not be measured"
        )
    if torchrun is not None and asked == "cpu" and has_cuda:
        raise ArgumentError("under torchrun processes with GPUs talk over NCCL: hide them with CUDA_VISIBLE_DEVICES=")
    return asked or ("cuda" if has_cuda else "cpu")


def _join(torchrun: _Torchrun | None) -> Axes | None:
    if torchrun is None:
        return None
    rank, world, device = join_world()
    return Axes.build(Mesh(dp=world), rank, device)


def _devices(device_type: str) -> int:
    """Of this machine: those that this process may use."""
    if device_type == "cuda":
        return torch.cuda.device_count()
    return cores()


def _measure_device(
    device: torch.device, per_node: int, processes: int, effort: Effort, progress: Progress
) -> tuple[Measured, list[Product]]:
    """``processes`` of the node's ``per_node`` devices are measured at the same time."""
    clock = Clock(device, effort.repeats, effort.run_seconds)
    progress("memory")
    bandwidth = memory_bytes_per_second(clock, effort)
    host_bandwidth = host_bytes_per_second(clock, effort)
    is_cuda, multiprocessors = device.type == "cuda", _multiprocessors(device)
    share = processes / per_node  # of what the host reaches for the processes that use it now
    host_memory = share * host_memory_bytes_per_second(clock, effort, processes) if is_cuda else 0.0
    progress("launches")
    launch = launch_seconds(clock)
    products = measure_products(clock, effort, progress)
    owned = machine_bytes() // per_node
    measured = Measured(
        device_name=torch.cuda.get_device_name(device) if is_cuda else f"one thread of {_processor()}",
        device_type=device.type,
        memory_bytes=torch.cuda.get_device_properties(device).total_memory if is_cuda else owned // 2,
        host_memory_bytes=owned if is_cuda else owned // 2,
        devices_per_node=per_node,
        memory_bytes_per_second=bandwidth,
        host_bytes_per_second=host_bandwidth,
        host_duplex_bytes_per_second=host_duplex_bytes_per_second(clock, effort) if is_cuda else 0.0,
        host_memory_bytes_per_second=host_memory,
        launch_seconds=launch,
        host_call_seconds=host_call_seconds(clock) if is_cuda else 0.0,
        multiprocessors=multiprocessors,
        element_seconds=element_seconds(clock, effort, bandwidth) if is_cuda else 0.0,
        sustained_fraction=sustained_fraction(clock, products) if is_cuda else 1.0,
        products=fit_products(products, launch, bandwidth, multiprocessors),
    )
    return measured, products


def _multiprocessors(device: torch.device) -> int:
    """Of NVIDIA's devices, whose tiles the cost model knows; else 0."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _processor() -> str:
    """What the processor calls itself, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "a CPU"


def _measure_links(
    axes: Axes | None, per_node: int, device_type: str, effort: Effort, progress: Progress
) -> list[Message]:
    if not effort.message_bytes:
        return []
    if axes is not None:
        return measure_collectives(axes, per_node, effort, progress)
    if device_type == "cuda":
        return []
    world = min(_MOST_PROCESSES, max(2, per_node))
    progress(f"collectives of {world} processes on gloo")
    return measure_in_processes(world, effort)
