"""Bandwidth of the device's memory, of the host's, and of copies between them."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from autopar.calibrate.clock import Clock
from autopar.calibrate.samples import Effort

_TOUCHES = 7
"""How often AdamW reads or writes an element: parameter and both moments both ways, the gradient once."""


def memory_bytes_per_second(clock: Clock, effort: Effort) -> float:
    """Of a large copy; what it reads and what it writes both count."""
    source = torch.ones(effort.copied_bytes // 4, device=clock.device)
    target = torch.empty_like(source)
    return 2 * effort.copied_bytes / clock.seconds(lambda: target.copy_(source))


def element_seconds(clock: Clock, effort: Effort, bytes_per_second: float) -> float:
    """What an element takes beside its bytes in kernels that load one at a time: a cast to a wider dtype is one."""
    count = effort.copied_bytes // 4
    narrow = torch.ones(count, dtype=torch.bfloat16, device=clock.device)
    wide = torch.empty(count, device=clock.device)
    seconds = clock.seconds(lambda: wide.copy_(narrow))
    return max(0.0, seconds / count - (narrow.itemsize + wide.itemsize) / bytes_per_second)


def host_bytes_per_second(clock: Clock, effort: Effort) -> float:
    """Of copies to the device or from it, whichever is slower; on a CPU, where both are one memory, of any copy."""
    if clock.device.type == "cpu":
        return memory_bytes_per_second(clock, effort) / 2
    count = effort.copied_bytes // 4
    here, there = torch.empty(count, pin_memory=True), torch.empty(count, device=clock.device)
    to_device = clock.seconds(lambda: there.copy_(here, non_blocking=True))
    to_host = clock.seconds(lambda: here.copy_(there, non_blocking=True))
    return effort.copied_bytes / max(to_device, to_host)


def host_duplex_bytes_per_second(clock: Clock, effort: Effort) -> float:
    """Of copies from a GPU and to it at the same time, each way."""
    count, device = effort.copied_bytes // 4, clock.device
    hosts = [torch.empty(count, pin_memory=True) for _ in range(2)]
    there = [torch.empty(count, device=device) for _ in range(2)]
    beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def both() -> None:
        beside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(beside):
            hosts[0].copy_(there[0], non_blocking=True)
        there[1].copy_(hosts[1], non_blocking=True)
        torch.cuda.current_stream(device).wait_stream(beside)

    return effort.copied_bytes / clock.seconds(both)


def host_memory_bytes_per_second(clock: Clock, effort: Effort, processes: int) -> float:
    """Of an AdamW update on the host by its share of the cores, of which as many ``processes`` as this one measure at
    the same time: what it reads and writes of parameters, gradients and both moments, all in float32."""
    parameter = torch.nn.Parameter(torch.ones(effort.copied_bytes // 4))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, cores() // processes))
    try:
        seconds = replace(clock, device=torch.device("cpu")).seconds(optimizer.step)
    finally:
        torch.set_num_threads(threads)
    return _TOUCHES * parameter.nbytes / seconds


def cores() -> int:
    """Of this machine: those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine_bytes() -> int:
    """All memory of the machine; 0 where the system doesn't say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 0
