"""What a stage does beside its calls, each microbatch: changes of type between calls, tables, and messages to others.

The emitted stage has them as code of its own (:mod:`autopar.passes.edges`), so no call costs them: a value that a layer
takes in another type than it was made in is changed there, once for all that take it so; and what only depends on the
batch (masks, rotary tables) is computed in every stage that uses it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from autopar.cost_models import collective, compute
from autopar.graph import INPUT_CALL, Meta, Model, Value, info
from autopar.mesh import Mesh
from autopar.passes.edges import Edge, Wire, changed_meta, edge, least_sent_bytes, needed_tables, wires
from autopar.passes.vocabulary import vocabulary_calls
from autopar.planner.block_costs import BlockCost, Both, Machine, calls_of
from autopar.planner.block_costs import Wire as Exchange
from autopar.spmd import transition


@dataclass(frozen=True)
class Between:
    """Seconds of a stage: added to its forward and backward, and of what it sends to the next stage and to the one
    before, for a microbatch."""

    forward_seconds: float
    backward_seconds: float
    send_forward_seconds: float
    send_backward_seconds: float
    wires: Mapping[Exchange, Both]
    """What of the passes is sent, as :attr:`autopar.planner.block_costs.BlockCost.wires`."""
    calls: tuple[int, int] = (0, 0)
    """What the host issues in the forward and in the backward."""


@dataclass(frozen=True)
class BetweenCalls:
    """Of cuts of one ``model``, whose blocks cost as much; each found once, whatever its calls recompute."""

    model: Model
    costs: Sequence[BlockCost]
    machine: Machine
    _known: dict[tuple[object, ...], list[Between]] = field(default_factory=dict)

    def of(self, stages: Sequence[Sequence[int]], placement: Sequence[int]) -> list[Between]:
        """:func:`between` of these."""
        key = tuple(map(tuple, stages)), tuple(placement)
        if key not in self._known:
            self._known[key] = between(self.model, stages, self.costs, self.machine, placement)
        return self._known[key]


def between(
    model: Model,
    stages: Sequence[Sequence[int]],
    costs: Sequence[BlockCost],
    machine: Machine,
    placement: Sequence[int],
) -> list[Between]:
    """Of each stage of ``model``, which is local on all axes but pp. Neighbours on one rank send nothing."""
    places = _places(model, stages)
    edges = {
        (call, position): edge(model, machine.mesh, call, position)
        for call in places
        for position in range(len(model.calls[call].operands))
    }
    crossing = wires(model, machine.mesh, places, edges)
    found = []
    for number, stage in enumerate(stages):
        made = [w for w in crossing if w.first == number]
        taken = {Edge(w.value, w.changes): w for w in crossing if w.first < number <= w.last}
        wanted = [edges[call, k] for call in stage for k in range(len(model.calls[call].operands))]
        wanted += [Edge(w.value, w.changes) for w in made]
        known = set(taken)
        needed = tables_of(model, wanted)
        passes = changes_sent(model, [*table_edges(model, machine, needed), *wanted], known, machine)
        changed = known.difference(taken)
        uses = Counter(edges[call, k] for call in stage for k in _trained_inputs(model, call, costs))
        uses.update(Edge(step.value, step.changes[:-1]) for step in changed)
        tables, _ = calls_of(node for _, node in _table_ops(needed))
        there = number + 1 < len(stages) and placement[number + 1] != placement[number]
        back = number > 0 and placement[number - 1] != placement[number]
        sent = [w for w in crossing if w.first <= number < w.last]
        uses.update(Edge(w.value, w.changes) for w in sent)
        found.append(
            Between(
                math.fsum(there for there, _ in passes.values()) + tables_seconds(model, needed, costs),
                math.fsum(back for _, back in passes.values()) + _sums(model, uses, machine),
                _message(sent, machine) if there else 0.0,
                _message([w for w in taken.values() if w.meta.needs_grad], machine) if back else 0.0,
                passes,
                (len(changed) + tables, sum(_meta(model, step.value).needs_grad for step in changed)),
            )
        )
    return found


def _trained_inputs(model: Model, call: int, costs: Sequence[BlockCost]) -> Iterator[int]:
    """Positions of the inputs to which a call gives a gradient."""
    idle = costs[model.calls[call].block].idle
    yield from (k for k, node in enumerate(model.block_of(model.calls[call]).inputs) if node not in idle)


def least_message(model: Model, mesh: Mesh, calls: Sequence[int]) -> tuple[int, int]:
    """Bytes that a cut between any two of ``calls`` sends at least of a microbatch: to the next stage, and back."""
    places = {call: place for place, call in enumerate(calls)}
    alike: dict[tuple[int, int, int, int], Edge] = {}  # what equal layers take of equal layers
    edges: dict[tuple[int, int], Edge] = {}
    for call in calls:
        for position, value in enumerate(model.calls[call].operands):
            if value.call in places:
                kind = model.calls[value.call].block, value.output, model.calls[call].block, position
                if kind not in alike:
                    alike[kind] = edge(model, mesh, call, position)
                edges[call, position] = replace(alike[kind], value=value)
    return least_sent_bytes(model, mesh, places, edges)


def _places(model: Model, stages: Sequence[Sequence[int]]) -> dict[int, int]:
    """Call -> stage; a vocabulary that is split over all ranks stands before the first and after the last."""
    places = {call: number for number, stage in enumerate(stages) for call in stage}
    split = vocabulary_calls(model)
    if split is not None:
        places[split.head] = len(stages)
        if split.embedding is not None:
            places[split.embedding] = -1
    return places


def changes_sent(model: Model, wanted: Sequence[Edge], known: set[Edge], machine: Machine) -> dict[Exchange, Both]:
    """What is sent in the transitions that lead to all ``wanted`` edges, each once; those ``known`` are made already,
    and all that were met are among them afterwards."""
    found: dict[Exchange, list[Both]] = defaultdict(list)
    for into in wanted:
        for done in range(len(into.changes)):
            step = Edge(into.value, into.changes[: done + 1])
            if into.total_axes is not None or step in known:
                continue
            known.add(step)
            for way, (kind, seconds) in enumerate(_transition(model, step, machine)):
                if kind:
                    found[step.changes[done].axis, kind].append((0.0, seconds) if way else (seconds, 0.0))
    return {
        wire: (math.fsum(f for f, _ in both), math.fsum(b for _, b in both)) for wire, both in sorted(found.items())
    }


def _transition(model: Model, step: Edge, machine: Machine) -> list[tuple[str, float]]:
    """Kinds ("": none) and seconds of the last change of ``step``, forward and backward."""
    meta = _meta(model, step.value)
    for change in step.changes[:-1]:
        meta = changed_meta(meta, change, machine.mesh)
    change = step.changes[-1]
    after, way = changed_meta(meta, change, machine.mesh), transition(change.src, change.dst)
    assert way is not None
    size, link = machine.sizes[change.axis], machine.links[change.axis]
    bytes_ = way.sent_bytes(meta.bytes, after.bytes, size)
    kinds = (way.forward, way.backward if meta.needs_grad else None)
    return [(kind or "", collective.seconds(kind, bytes_, size, link) if kind else 0.0) for kind in kinds]


def _sums(model: Model, uses: Mapping[Edge, int], machine: Machine) -> float:
    """Of gradients of what calls, changes of type and the next stage use so many times: each gives it one."""
    found = []
    for into, count in uses.items():
        if count < 2 or into.total_axes is not None or not _meta(model, into.value).needs_grad:
            continue
        meta = _meta(model, into.value)
        for change in into.changes:
            meta = changed_meta(meta, change, machine.mesh)
        found.append((count - 1) * compute.adding_seconds(meta.bytes, machine.device))
    return math.fsum(found)


def _meta(model: Model, value: Value) -> Meta:
    if value.call == INPUT_CALL:
        return model.inputs[value.output].meta
    return info(model.block_of(model.calls[value.call]).outputs[value.output]).meta


Tables = Mapping[int, frozenset[fx.Node]]
"""By call, nodes of what depends on the batch alone."""


def tables_of(model: Model, wanted: Sequence[Edge]) -> Tables:
    """What is computed for ``wanted``."""
    return needed_tables(model, [into.value for into in wanted if into.total_axes is None])


def tables_seconds(model: Model, needed: Tables, costs: Sequence[BlockCost]) -> float:
    """Of computing what is ``needed``."""
    return math.fsum(costs[model.calls[call].block].op_seconds.get(node, 0.0) for call, node in _table_ops(needed))


def table_edges(model: Model, machine: Machine, needed: Tables) -> Iterator[Edge]:
    """What these ops are given."""
    for call, nodes in needed.items():
        inputs = model.block_of(model.calls[call]).inputs
        yield from (edge(model, machine.mesh, call, k) for k, node in enumerate(inputs) if node in nodes)


def _table_ops(needed: Tables) -> list[tuple[int, fx.Node]]:
    """These ops, each with its call."""
    return [(call, node) for call, nodes in needed.items() for node in nodes if node.op == "call_function"]


def _message(crossing: Sequence[Wire], machine: Machine) -> float:
    bytes_ = sum(w.meta.bytes for w in crossing)
    return collective.seconds("send", bytes_, 2, machine.links["pp"]) if bytes_ else 0.0
