"""Seconds per call: the median of several runs, by events on a CUDA stream, by the wall clock elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

_MOST_CALLS = 10_000
"""Of one run."""


def _same(value: float) -> float:
    return value


@dataclass(frozen=True)
class Clock:
    """Times calls on ``device``; ``repeats`` and ``run_seconds`` as in Effort.

    ``agree`` gives the longest seconds of all ranks that take part: they must call as often as each other, and one
    that has nothing to do must not decide how often.
    """

    device: torch.device
    repeats: int
    run_seconds: float
    agree: Callable[[float], float] = _same

    def seconds(self, call: Callable[[], object]) -> float:
        """Of one ``call``, which is called at least three times before: libraries choose and compile at first."""
        self.run(call, 2)
        calls = self.calls(self.run(call, 1))
        return median(self.run(call, calls) for _ in range(self.repeats))

    def calls(self, seconds: float) -> int:
        """How many calls of so many seconds make a run."""
        return math.ceil(max(1.0, min(self.run_seconds / max(self.agree(seconds), 1e-9), _MOST_CALLS)))

    def run(self, call: Callable[[], object], calls: int) -> float:
        """Seconds per call of ``calls`` calls, one after the other."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return on_stream(call, calls)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls


def on_stream(call: Callable[[], object], calls: int) -> float:
    """Seconds per call between two events on the current CUDA stream, one before the calls and one after."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3 / calls  # elapsed_time is in ms
