"""What a step sums over ranks before its passes and after them: scalars of the whole batch, and the loads of experts.

As :class:`autopar.runtime.executor.Executor` does it, one after another, beside nothing. Before: a stage's totals of
each microbatch (:class:`autopar.runtime.program.Total`), then summed over axes on which they differ. After: how many
rows each expert got, over all ranks; the loss over its axes, where the last stage is, and then to all of the pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

from autopar.cost_models import collective
from autopar.graph import Meta, Model, Value, info
from autopar.mesh import AXES
from autopar.passes.edges import Edge, edge
from autopar.passes.routers import router_calls
from autopar.passes.vocabulary import TAIL, VOCABULARY
from autopar.planner.between import tables_of, tables_seconds
from autopar.planner.block_costs import BlockCost, Machine
from autopar.spmd import P

_LOSS_BYTES: Final = 8  # float64
_LOAD_BYTES: Final = 8  # of an expert: int64


class Scalars(NamedTuple):
    """Seconds before a step's first action and after its last, per pipeline rank."""

    begin_seconds: tuple[float, ...]
    end_seconds: tuple[float, ...]


def scalars(
    model: Model,
    stages: Sequence[Sequence[int]],
    costs: Sequence[BlockCost],
    machine: Machine,
    placement: Sequence[int],
    microbatches: int,
) -> Scalars:
    """Of ``stages`` of ``model``, which is local on all axes but pp."""
    split = [i for i, call in enumerate(model.calls) if model.block_of(call).kind in (VOCABULARY, TAIL)]
    made = {i for i, call in enumerate(model.calls) if model.block_of(call).kind == "tables"}
    sums = partial(_totals_seconds, model, made, costs, machine, microbatches)
    begin = [sums(split)] * machine.sizes["pp"]
    for home, stage in zip(placement, stages, strict=True):
        begin[home] += sums(stage)
    always = _load_seconds(model, machine) + _sent("broadcast", _LOSS_BYTES, ["pp"], machine)
    end = [always] * machine.sizes["pp"]
    end[placement[-1]] += _sent("all_reduce", _LOSS_BYTES, _loss_axes(model), machine)
    return Scalars(tuple(begin), tuple(end))


def _totals_seconds(
    model: Model,
    tables: Collection[int],
    costs: Sequence[BlockCost],
    machine: Machine,
    microbatches: int,
    calls: Iterable[int],
) -> float:
    totals = list(dict.fromkeys(_totals(model, tables, machine, calls)))
    if not totals:
        return 0.0
    counted = tables_seconds(model, tables_of(model, [Edge(total.value) for total in totals]), costs)
    summed = (_sent("all_reduce", _meta(model, total.value).bytes, total.total_axes or (), machine) for total in totals)
    return microbatches * counted + math.fsum(summed)


def _totals(model: Model, tables: Collection[int], machine: Machine, calls: Iterable[int]) -> Iterator[Edge]:
    for index in calls:
        for position, value in enumerate(model.calls[index].operands):
            if value.call in tables and not _meta(model, value).shape:
                into = edge(model, machine.mesh, index, position)
                if into.total_axes is not None:
                    yield into


def _meta(model: Model, value: Value) -> Meta:
    return info(model.block_of(model.calls[value.call]).outputs[value.output]).meta


def _loss_axes(model: Model) -> list[str]:
    loss = model.loss
    types = info(model.block_of(model.calls[loss.call]).outputs[loss.output]).types()
    return [axis for axis in AXES if types.get(axis) == P and axis != "pp"]


def _load_seconds(model: Model, machine: Machine) -> float:
    """Of all experts' loads, each layer once, in one message."""
    experts = {router.layer: router.experts for router in router_calls(model)}
    world = machine.mesh.world
    if not experts or machine.cluster is None or world == 1:
        return 0.0
    link = machine.cluster.link(world, 1, world)
    return collective.seconds("all_reduce", _LOAD_BYTES * sum(experts.values()), world, link)


def _sent(kind: str, bytes_: int, axes: Iterable[str], machine: Machine) -> float:
    """One message on each of ``axes`` that has several ranks."""
    several = [axis for axis in axes if machine.sizes[axis] > 1]
    return math.fsum(collective.seconds(kind, bytes_, machine.sizes[axis], machine.links[axis]) for axis in several)
