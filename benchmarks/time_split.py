"""Where the time of a training step goes, as its main thread sees it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from torch.autograd.profiler import profile, record_function
from torch.autograd.profiler_util import FunctionEvent

FORWARD, BACKWARD, OPTIMIZER = "forward ops", "backward ops", "optimizer ops"
BETWEEN, WAITING = "between ops", "waiting"
_ROOT = "time_split"
_SCHEDULER = Path("/proc/thread-self/schedstat")  # Linux


def time_split(run: Callable[[], object]) -> dict[str, float]:
    """Seconds of ``run`` under the profiler (which slows it down), by part.

    Ops are the kernels alone. Waiting is for messages. Between ops is the rest: Python, DTensor, autograd's
    engine, starting communication. Where other programs want the core too, kernels look longer than they are.
    """
    with profile() as profiler, record_function(_ROOT):
        wall, busy = time.perf_counter(), busy_seconds()
        run()
        wall, busy = time.perf_counter() - wall, busy_seconds() - busy
    events = profiler.function_events or []
    main = next(event.thread for event in events if event.name == _ROOT)
    seconds = dict.fromkeys((FORWARD, BACKWARD, OPTIMIZER), 0.0)
    for event in events:
        if event.thread == main and event.name.startswith("aten::"):
            seconds[_part(event)] += 1e-6 * event.self_cpu_time_total
    waiting = max(0.0, wall - busy)
    between = max(0.0, wall - waiting - sum(seconds.values()))
    return seconds | {BETWEEN: between, WAITING: waiting}


def busy_seconds() -> float:
    """Seconds that this thread ran, or could have run had a core been free (known on Linux only)."""
    queued = int(_SCHEDULER.read_text().split()[1]) if _SCHEDULER.exists() else 0
    return time.thread_time() + 1e-9 * queued


def _part(event: FunctionEvent) -> str:
    above: FunctionEvent | None = event
    while above is not None:
        if above.name.startswith("Optimizer.step"):
            return OPTIMIZER
        if above.name.startswith("autograd::engine::evaluate_function"):
            return BACKWARD
        above = above.cpu_parent
    return FORWARD
