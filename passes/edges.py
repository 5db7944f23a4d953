"""What happens between a value's producer and a call that takes it: transitions, or a sum before the step.

Changes nothing: what calls and stages have between them follows from the types that were solved, and code is written
and costs are counted by it. A value that later stages take is sent on from stage to stage, once. It travels as it was
made, unless all that take it want the same other type and that is smaller: then the transition comes before the cut.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import fx

from autopar.errors import GraphError
from autopar.graph import INPUT_CALL, Block, Meta, Model, Value, info
from autopar.mesh import AXES, DATA, Mesh
from autopar.spmd import P, R, S, Type, local_shape, transition

MICROBATCHES = "mb"
"""The axis of microbatches, on which nothing can be exchanged."""


@dataclass(frozen=True)
class Change:
    """One transition of a value on one mesh axis."""

    axis: str
    src: Type
    dst: Type


@dataclass(frozen=True)
class Edge:
    """How a call takes a value: after ``changes``, or, where ``total_axes`` is not None, as a sum over
    microbatches and those axes.
    """

    value: Value
    changes: tuple[Change, ...] = ()
    total_axes: tuple[str, ...] | None = None


def edge(model: Model, mesh: Mesh, call_index: int, position: int) -> Edge:
    """The edge into input ``position`` of a call. Raises GraphError where no transition leads there."""
    call = model.calls[call_index]
    value = call.operands[position]
    taken = info(model.block_of(call).inputs[position]).types()
    made = {axis: kind for axis, kind in made_types(model, value).items() if axis in taken}
    differs = {axis: (kind, taken[axis]) for axis, kind in made.items() if kind != taken[axis]}
    if (
        differs
        and _from_tables(model, value)
        and set(differs.values()) == {(P, R)}
        and not info(model.block_of(call).inputs[position]).meta.shape
    ):
        return Edge(value, total_axes=tuple(a for a in AXES if a in differs))
    changes = tuple(_order(made, taken, mesh))
    for axis, (src, dst) in differs.items():
        if axis == MICROBATCHES or transition(src, dst) is None:
            raise GraphError(f"call {call_index} ({call.path or 'glue'}): a value made {src} is taken {dst} on {axis}")
    return Edge(value, changes)


def _order(made: Mapping[str, Type], taken: Mapping[str, Type], mesh: Mesh) -> Iterator[Change]:
    """The transitions in an order in which each means what it says.

    A tensor is split over dp (ep, cp), then each part over tp. So a transition on dp turns a split of the same dim on
    tp into another (:func:`_behind`), or can't have one at all. tp, with its fast links, changes first where
    that leads to what is taken; else after dp; else it is whole while dp changes.
    """
    changed = [axis for axis in DATA if made.get(axis, R) != taken.get(axis, R)]
    before, after = made.get("tp", R), taken.get("tp", R)
    if len(changed) != 1:  # of totals alone, which nothing splits: any order will do
        yield from (Change(axis, made.get(axis, R), taken.get(axis, R)) for axis in changed)
        yield from _change("tp", before, after)
        return
    axis = changed[0]
    src, dst = made.get(axis, R), taken.get(axis, R)
    outer = Change(axis, src, dst)
    size = mesh.size(axis)
    early = _behind(after, Change(axis, dst, src), size)
    late = _behind(before, outer, size)
    if early is not None:
        yield from (*_change("tp", before, early), outer)
    elif late is not None:
        yield from (outer, *_change("tp", late, after))
    else:
        yield from (*_change("tp", before, R), outer, *_change("tp", R, after))


def _change(axis: str, src: Type, dst: Type) -> Iterator[Change]:
    if src != dst:
        yield Change(axis, src, dst)


def _behind(kind: Type, change: Change, size: int) -> Type | None:
    """The type on an inner axis once ``change`` is made on an outer one; None where no type says it.

    Gathering ``[n]`` over m ranks puts their parts side by side: what was split as ``[o, n / o]`` is now
    split as ``[m o, n / o]``. Slicing is the inverse.
    """
    moved = [k for k in (change.src, change.dst) if k.is_shard and kind.is_shard and k.dim == kind.dim]
    if not moved:
        return kind
    own = moved[0].outer
    if len(moved) > 1:
        return None
    if change.src.is_shard and moved[0] == change.src:
        return S(kind.dim, kind.outer * size) if kind.outer % own == 0 else None
    return S(kind.dim, kind.outer // size) if kind.outer % (own * size) == 0 else None


def _from_tables(model: Model, value: Value) -> bool:
    return value.call != INPUT_CALL and model.block_of(model.calls[value.call]).kind == "tables"


def made_types(model: Model, value: Value) -> dict[str, Type]:
    """The types in which a value is made, on every axis that was solved."""
    if value.call != INPUT_CALL:
        call = model.calls[value.call]
        return info(model.block_of(call).outputs[value.output]).types()
    split = model.inputs[value.output].batch_dim
    batch = R if split is None else S(split)
    return {MICROBATCHES: batch, "dp": batch, "ep": batch, "cp": R, "tp": R}


def changed_types(types: Mapping[str, Type], changes: tuple[Change, ...]) -> dict[str, Type]:
    return dict(types) | {change.axis: change.dst for change in changes}


def changed_meta(meta: Meta, change: Change, mesh: Mesh) -> Meta:
    """The local shape after one transition."""
    size = mesh.size(change.axis)
    shape = list(meta.shape)
    if change.src.is_shard:
        shape[change.src.dim] *= size
    return replace(meta, shape=local_shape(tuple(shape), change.dst, size))


@dataclass(frozen=True)
class Wire:
    """A value that crosses at least one cut: made at place ``first``, last taken at ``last``; sent as ``meta``, after
    ``changes``."""

    value: Value
    first: int
    last: int
    changes: tuple[Change, ...]
    meta: Meta


def wires(model: Model, mesh: Mesh, places: Mapping[int, int], edges: Mapping[tuple[int, int], Edge]) -> list[Wire]:
    """What crosses cuts, in the order in which it is made; ``places`` are the stages of calls, ``edges`` by call and
    input position. No gradient of it goes back where none comes to it."""
    reached, ordered = _reached(model), sorted(_takers(places, edges).items(), key=lambda item: _order_of(item[0]))
    crossing = [_wire(model, mesh, places, value, found) for value, found in ordered]
    return [w if w.value in reached else replace(w, meta=replace(w.meta, needs_grad=False)) for w in crossing]


def least_sent_bytes(
    model: Model, mesh: Mesh, places: Mapping[int, int], edges: Mapping[tuple[int, int], Edge]
) -> tuple[int, int]:
    """What any cut between two of ``places`` sends at least, on to the next stage and back, wherever others are: of
    each value the smallest of what it is made and taken as."""
    reached, cuts = _reached(model), max(places.values())
    there, back = [0] * cuts, [0] * cuts
    for value, takers in _takers(places, edges).items():
        every = [_wire(model, mesh, places, value, [taker]) for taker in takers]
        bytes_, has_gradient = min(wire.meta.bytes for wire in every), value in reached and every[0].meta.needs_grad
        for cut in range(every[0].first, max(wire.last for wire in every)):
            there[cut] += bytes_
            back[cut] += bytes_ * has_gradient
    return min(there, default=0), min(back, default=0)


def _takers(places: Mapping[int, int], edges: Mapping[tuple[int, int], Edge]) -> dict[Value, list[tuple[int, Edge]]]:
    """By value, who takes it at another place than where it is made."""
    takers: dict[Value, list[tuple[int, Edge]]] = {}
    for (call, _), into in edges.items():
        if into.value.call in places and places[into.value.call] < places[call]:
            takers.setdefault(into.value, []).append((places[call], into))
    return takers


def _order_of(value: Value) -> tuple[int, int]:
    return value.call, value.output


def _reached(model: Model) -> set[Value]:
    """The values that the gradient of the loss reaches."""
    return {Value(call, output) for call, outputs in results_reached(model).items() for output in outputs}


def _inputs_reached(block: Block, outputs: Iterable[int]) -> list[int]:
    """Positions of the inputs that gradients of these outputs reach."""
    seen = gradient_paths(block, outputs)
    return [position for position, node in enumerate(block.inputs) if node in seen]


def results_reached(model: Model) -> dict[int, set[int]]:
    """Call -> positions of its results to which the gradient of the loss comes."""
    found: dict[int, set[int]] = defaultdict(set, {model.loss.call: {model.loss.output}})
    known: dict[tuple[int, frozenset[int]], list[int]] = {}  # by block and outputs: most calls are of few blocks
    for index in reversed(range(len(model.calls))):
        call = model.calls[index]
        key = call.block, frozenset(found[index])
        if key not in known:
            known[key] = _inputs_reached(model.block_of(call), key[1])
        for value in (call.operands[position] for position in known[key]):
            found[value.call].add(value.output)
    return found


def gradient_paths(block: Block, outputs: Iterable[int]) -> set[fx.Node]:
    """The nodes that gradients of these outputs reach."""
    waiting, seen = [block.outputs[output] for output in outputs], set[fx.Node]()
    while waiting:
        node = waiting.pop()
        if node not in seen and (info(node).is_object or any(meta.needs_grad for meta in info(node).outputs)):
            seen.add(node)
            waiting += node.all_input_nodes
    return seen


def _wire(model: Model, mesh: Mesh, places: Mapping[int, int], value: Value, takers: list[tuple[int, Edge]]) -> Wire:
    made = info(model.block_of(model.calls[value.call]).outputs[value.output]).meta
    changes = takers[0][1].changes
    after = made
    for change in changes:
        after = changed_meta(after, change, mesh)
    early = after.bytes < made.bytes and all(into.changes == changes for _, into in takers)
    last = max(stage for stage, _ in takers)
    return Wire(value, places[value.call], last, changes if early else (), after if early else made)


def needed_tables(model: Model, values: Iterable[Value]) -> dict[int, frozenset[fx.Node]]:
    """The ops of tables calls that ``values`` depend on, by call, in order."""
    needed: dict[int, set[fx.Node]] = {}
    waiting = [v for v in values if _from_tables(model, v)]
    while waiting:
        value = waiting.pop()
        call = model.calls[value.call]
        block = model.block_of(call)
        found = backward_slice([block.outputs[value.output]])
        needed.setdefault(value.call, set()).update(found)
        reads = [v for node, v in zip(block.inputs, call.operands, strict=True) if node in found]
        waiting += [v for v in reads if v.call != INPUT_CALL]
    return {call: frozenset(needed[call]) for call in sorted(needed)}


def backward_slice(outputs: Collection[fx.Node]) -> set[fx.Node]:
    """All nodes that ``outputs`` depend on, themselves included."""
    needed = set(outputs)
    waiting = list(outputs)
    while waiting:
        for operand in waiting.pop().all_input_nodes:
            if operand not in needed:
                needed.add(operand)
                waiting.append(operand)
    return needed
