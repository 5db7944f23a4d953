"""What an op takes on the device beyond its work: from one tiny op to the next."""

from __future__ import annotations

import math
from statistics import median

import torch

from autopar.calibrate.clock import Clock, on_stream
from autopar.calibrate.samples import MIB

_OPS = 200
"""Fewer than a CUDA stream holds before the host waits."""
_AHEAD_SECONDS = 0.01
"""The host needs some microseconds to launch an op: _OPS of them in much less than this."""


def launch_seconds(clock: Clock) -> float:
    """On CUDA, of ops that the host has launched while the device was still busy, as it is in training."""
    one = torch.ones(1, device=clock.device)
    out = torch.empty_like(one)
    if clock.device.type == "cpu":
        return clock.seconds(lambda: torch.add(one, one, out=out))
    large = torch.empty(64 * MIB, device=clock.device)
    copies = math.ceil(_AHEAD_SECONDS / clock.seconds(large.zero_))
    times = []
    for _ in range(clock.repeats):
        for _ in range(copies):
            large.zero_()
        times.append(on_stream(lambda: torch.add(one, one, out=out), _OPS))
    return median(times)
