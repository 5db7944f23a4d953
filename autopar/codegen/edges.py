"""What happens between a value's producer and a call that takes it: transitions, or a sum before the step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.codegen.comments import MICROBATCHES
from autopar.errors import GraphError
from autopar.graph import INPUT_CALL, Meta, Model, Value, info
from autopar.mesh import Mesh
from autopar.spmd import P, R, S, Type, local_shape, transition

_INNERMOST_FIRST = ("tp", "dp")


@dataclass(frozen=True)
class Change:
    """One transition of a value on one mesh axis."""

    axis: str
    src: Type
    dst: Type


@dataclass(frozen=True)
class Edge:
    """How a call takes a value: after ``changes``, or as a sum over microbatches and ``total_axes`` (not None)."""

    value: Value
    changes: tuple[Change, ...] = ()
    total_axes: tuple[str, ...] | None = None


def edge(model: Model, call_index: int, position: int) -> Edge:
    """The edge into input ``position`` of a call. Raises GraphError where no transition leads there."""
    call = model.calls[call_index]
    value = call.operands[position]
    made = made_types(model, value)
    taken = info(model.block_of(call).inputs[position]).types()
    differs = {a: (made[a], taken[a]) for a in taken if a in made and made[a] != taken[a]}
    if (
        differs
        and _from_tables(model, value)
        and set(differs.values()) == {(P, R)}
        and meta_of(model, value).numel == 1
    ):
        return Edge(value, total_axes=tuple(a for a in reversed(_INNERMOST_FIRST) if a in differs))
    for axis, (src, dst) in differs.items():
        if axis == MICROBATCHES or transition(src, dst) is None:
            raise GraphError(
                f"call {call_index} ({call.path or 'glue'}): a value made {src} is taken {dst} on {axis}"
            )
    return Edge(value, tuple(Change(a, *differs[a]) for a in _INNERMOST_FIRST if a in differs))


def _from_tables(model: Model, value: Value) -> bool:
    return value.call != INPUT_CALL and model.block_of(model.calls[value.call]).kind == "tables"


def made_types(model: Model, value: Value) -> dict[str, Type]:
    """The types in which a value is made, on every axis that was solved."""
    if value.call != INPUT_CALL:
        call = model.calls[value.call]
        return info(model.block_of(call).outputs[value.output]).types()
    split = model.inputs[value.output].batch_dim
    batch = R if split is None else S(split)
    return {MICROBATCHES: batch, "dp": batch, "tp": R}


def meta_of(model: Model, value: Value) -> Meta:
    """Local shape and dtype of a value that a call makes."""
    if value.call == INPUT_CALL:
        return model.inputs[value.output].meta
    return info(model.block_of(model.calls[value.call]).outputs[value.output]).meta


def changed_types(types: Mapping[str, Type], changes: tuple[Change, ...]) -> dict[str, Type]:
    return dict(types) | {change.axis: change.dst for change in changes}


def changed_meta(meta: Meta, change: Change, mesh: Mesh) -> Meta:
    """The local shape after one transition."""
    size = mesh.size(change.axis)
    shape = list(meta.shape)
    if change.src.is_shard:
        shape[change.src.dim] *= size
    return replace(meta, shape=local_shape(tuple(shape), change.dst, size))
