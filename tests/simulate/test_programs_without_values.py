"""Whole programs on tensors without values and on torch's own fake ones: the same memory after each operation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.runtime.axes import Axes, Axis
from autopar.runtime.job import Job
from autopar.shapes import Shapes
from autopar.simulate.alone import run_alone
from autopar.simulate.measure import RankMemory, begin, record, without_values
from autopar.simulate.memory import MemoryTracker, ShapeTracker
from tests.fast_cluster import FAST
from tests.models import make
from tests.pinned import compile_pinned

Log = list[tuple[str, int]]


class Logged(MemoryTracker):
    """Notes the bytes that live after each operation that changed them."""

    def __init__(self) -> None:
        super().__init__(fake=True)
        self.log: Log = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        note(self, func)
        return result


class LoggedShapes(ShapeTracker):
    """The same."""

    def __init__(self) -> None:
        super().__init__(Shapes())
        self.log: Log = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        note(self, func)
        return result


def note(tracker: Logged | LoggedShapes, func: Any) -> None:
    if func.namespace == "aten" and (not tracker.log or tracker.log[-1][1] != tracker.live_bytes):
        tracker.log.append((str(func), tracker.live_bytes))


@contextmanager
def on_fake_tensors() -> Iterator[Logged]:
    with FakeTensorMode(), Logged() as tracker:
        yield tracker


def alone(
    job: Job, batch: Mapping[str, Tensor], tracked: Callable[[], AbstractContextManager[Logged | LoggedShapes]]
) -> tuple[RankMemory, Log]:
    """Rank 0's step."""

    def program() -> tuple[RankMemory, Log]:
        axes = Axes.build(job.mesh, 0, "cpu", job.seed, job.options.zero_ranks, own=True)
        axes = replace(axes, world=Axis.of("world", [0], 0, None), imbalance=1.0)
        with tracked() as tracker:
            given = {path: torch.empty(t.shape, dtype=t.dtype) for path, t in batch.items()}
            executor = begin(tracker, without_values(job), axes)
            executor.step(given)
            tracker.log.clear()
            return record(tracker, executor, given), tracker.log

    return run_alone(program, 0, job.mesh.world)


CASES = [
    pytest.param("gpt2", {"dp": 2}, {"zero": 3}, marks=pytest.mark.slow),
    pytest.param("llama", {"pp": 2, "tp": 2}, {"precision": "bf16", "recompute": "full"}, marks=pytest.mark.slow),
    pytest.param("llama_tied", {"pp": 2}, {"vocabulary": "vocab-2", "offload": ("activations",)}),
    pytest.param("nano_gpt", {"pp": 2, "dp": 2}, {"zero": 3, "precision": "bf16", "microbatches": 4}),
    pytest.param("encoder", {"dp": 2}, {"offload": ("parameters",)}, marks=pytest.mark.slow),
    pytest.param("mlp", {"pp": 2}, {"schedule": "zb-h1", "microbatches": 4}),
]


@pytest.mark.parametrize(("name", "mesh", "options"), CASES, ids=str)
def test_memory_after_each_operation(name: str, mesh: dict[str, int], options: dict[str, Any]) -> None:
    case = make(name, 8, torch.float32)
    given = {"sample": case.batch, "loss": case.loss, "mesh": mesh, "microbatches": 2, "cluster": FAST, **options}
    compiled = compile_pinned(case.model, math.prod(mesh.values()), **given)
    values = list(case.batch.values() if isinstance(case.batch, dict) else case.batch)
    batch = {item.path: value for item, value in zip(compiled.plan.inputs, values, strict=True)}
    expected, operations = alone(compiled.job, batch, on_fake_tensors)
    found, others = alone(compiled.job, batch, LoggedShapes)
    assert others == operations
    assert found == expected
