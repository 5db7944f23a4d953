"""Published training runs whose configuration is known, each planned as it ran: what the plan predicts of its step.

A :class:`Run` is a row of a measurement file: a model's published sizes and what the row pins (degrees, microbatch,
schedule, recomputation, ZeRO). :func:`predictions` captures that model, plans it and gives step time and peak memory.
Layers of these models are equal: a few are captured, and the call of the middle one is repeated (:func:`deepened`), so
that the plan is that of the full depth.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from processes import in_fork
from published_gpt import GptSizes, gpt_tokens, published_gpt
from published_llama import LlamaSizes, published_llama

from autopar.api import prepare
from autopar.cluster import Cluster
from autopar.graph import Call, Model, Value
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.plan import Plan
from autopar.planner.build import Request, build
from autopar.planner.pipeline import Wanted

Sizes = GptSizes | LlamaSizes

CAPTURED_LAYERS = 4
UNBOUNDED_BYTES = 10**12
"""A budget under which nothing is refused or recomputed beyond what the row did."""


@dataclass(frozen=True)
class Run:
    """One row: where and how it ran, and what was measured (``peak_bytes`` None: not published, or of other stages)."""

    name: str
    cluster: str
    sizes: Sizes
    degrees: Mapping[str, int] = field(hash=False)
    microbatch: int
    batch: int
    seconds: float
    schedule: str = "1f1b"
    chunks: int | None = None
    vocabulary: str = "redistributed"
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    peak_bytes: float | None = None
    others: tuple[int, ...] = ()
    """Rows of a microbatch that it may have had as well, where that isn't published: the fastest that fits counts."""

    @property
    def mesh(self) -> Mesh:
        return Mesh.of(self.degrees, math.prod(self.degrees.values()))

    @property
    def request(self) -> Request:
        mesh = self.mesh
        options = {"precision": "bf16", "recompute": "none", "budget_bytes": UNBOUNDED_BYTES, **self.options}
        wanted = Wanted(self.schedule, self.vocabulary, self.chunks)
        count = self.batch // (mesh.replicas * self.microbatch)
        return Request(mesh, count, Cluster.load(self.cluster), wanted, Options.of(**options))


def captured(sizes: Sizes, batch: int) -> Model:
    """The model that planning starts from."""
    few = replace(sizes, layers=CAPTURED_LAYERS)
    model = published_gpt(few) if isinstance(few, GptSizes) else published_llama(few)
    flat = prepare(model, gpt_tokens(batch, sizes.sequence), device="cuda", precision="bf16")[0]
    return deepened(flat, sizes.layers - CAPTURED_LAYERS)


def deepened(model: Model, more: int) -> Model:
    """With the middle one of three equal layers ``more`` times again."""
    kinds = [call.block for call in model.calls]
    middle = next(i for i in range(1, len(kinds) - 1) if kinds[i - 1] == kinds[i] == kinds[i + 1])
    original = model.calls[middle]
    calls = list(model.calls[: middle + 1])
    parameters = dict(model.parameters)
    for number in range(more):
        names = tuple(_again(name, original.path, number) for name in original.parameters)
        for name, old in zip(names, original.parameters, strict=True):
            parameters[name] = replace(model.parameters[old], name=name)
        operands = tuple(_moved(value, middle - 1, number + 1) for value in original.operands)
        calls.append(Call(original.block, f"{original.path}+{number}", names, operands))
    for call in model.calls[middle + 1 :]:
        calls.append(replace(call, operands=tuple(_moved(value, middle, more) for value in call.operands)))
    return replace(model, calls=calls, parameters=parameters, loss=_moved(model.loss, middle, more))


def _again(name: str, path: str, number: int) -> str:
    return name.replace(path, f"{path}+{number}", 1) if name.startswith(path) else name


def _moved(value: Value, at: int, by: int) -> Value:
    return replace(value, call=value.call + by) if value.call >= at else value


@dataclass(frozen=True)
class Predicted:
    """A run, and the plan made of its configuration."""

    run: Run
    plan: Plan

    @property
    def seconds(self) -> float:
        return self.plan.cost.step_seconds

    @property
    def peak_bytes(self) -> int:
        return max(self.plan.peak_bytes)

    @property
    def error(self) -> float:
        """Of the step; above 0, the run was faster than predicted."""
        return self.seconds / self.run.seconds - 1

    @property
    def memory_error(self) -> float | None:
        """Of the largest rank's peak."""
        return self.peak_bytes / self.run.peak_bytes - 1 if self.run.peak_bytes else None


def predictions(runs: Iterable[Run]) -> Iterator[Predicted]:
    """One after another; runs of one model and batch are captured once, wherever they stand."""
    groups: dict[tuple[Sizes, int], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.sizes, run.batch), []).append(run)
    for (sizes, batch), same in groups.items():
        model = captured(sizes, batch)
        for run in same:
            yield Predicted(run, in_fork(partial(_plan, model, run)))


def _plan(model: Model, run: Run) -> Plan:
    plans = [build(model.copy(), tried.request).plan for tried in _tried(run)]
    room = Cluster.load(run.cluster).device.memory_bytes
    fitting = [plan for plan in plans if max(plan.peak_bytes) <= room]
    return min(fitting or plans[:1], key=lambda plan: plan.cost.step_seconds)


def _tried(run: Run) -> Iterator[Run]:
    share = run.batch // run.mesh.replicas
    pp = run.degrees.get("pp", 1)
    yield run
    for rows in run.others:
        if share % rows == 0 and (run.chunks is None or share // rows % pp == 0):
            yield replace(run, microbatch=rows)
