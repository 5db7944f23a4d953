"""How much memory a training job takes, whoever allocates it: what torch's CPU allocator says while a step runs."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile


def peak_bytes(run: Callable[[], object]) -> int:
    """The most that was allocated at once of what ``run`` allocates: weights, gradients, optimizer and activations,
    and buckets of C++ code. Memory from before counts for nothing, nor does its release."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return max(event["args"]["Total Allocated"] for event in events if event["name"] == "[memory]")
