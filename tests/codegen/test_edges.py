"""Transitions between calls: whatever the types on dp and tp, every rank ends with what the taker wants."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import fx

from autopar.errors import GraphError
from autopar.graph import Block, Call, Choice, Info, InputInfo, Meta, Model, Value, set_info
from autopar.mesh import Mesh
from autopar.passes.edges import Change, changed_meta, edge
from autopar.spmd import I, P, R, S, Type

MESH = Mesh(dp=2, tp=2)
EXTENT = 8
Place = tuple[int, int]
Parts = dict[Place, np.ndarray]


def part(x: np.ndarray, kind: Type, index: int) -> np.ndarray:
    """Part ``index`` of two, by the definition of a strided shard."""
    if not kind.is_shard:
        return x
    before, after = x.shape[: kind.dim], x.shape[kind.dim + 1 :]
    blocks = x.reshape(*before, kind.outer, 2, -1, *after)
    return blocks.take(index, axis=kind.dim + 1).reshape(*before, -1, *after)


def whole(parts: list[np.ndarray], kind: Type) -> np.ndarray:
    """The inverse of :func:`part`."""
    if not kind.is_shard:
        np.testing.assert_array_equal(*parts)
        return parts[0]
    before, after = parts[0].shape[: kind.dim], parts[0].shape[kind.dim + 1 :]
    blocks = [p.reshape(*before, kind.outer, 1, -1, *after) for p in parts]
    return np.concatenate(blocks, axis=kind.dim + 1).reshape(*before, -1, *after)


def split(x: np.ndarray, dp: Type, tp: Type) -> Parts:
    """What every rank holds: over dp first, then each part over tp."""
    return {(d, t): part(part(x, dp, d), tp, t) for d in range(2) for t in range(2)}


def apply(parts: Parts, change: Change) -> Parts:
    """Gather and cut again along one axis, as the runtime's transitions do."""
    made: Parts = {}
    for fixed, index in itertools.product(range(2), range(2)):
        line = [(i, fixed) if change.axis == "dp" else (fixed, i) for i in range(2)]
        made[line[index]] = part(whole([parts[p] for p in line], change.src), change.dst, index)
    return made


def two_calls(made: dict[str, Type], taken: dict[str, Type], meta: Meta | None = None, kind: str = "glue") -> Model:
    """A call that makes a value, and one that takes it."""
    meta = meta or Meta((EXTENT, EXTENT), torch.float32, True)

    def block(name: str, given: dict[str, Type], result: dict[str, Type], kind: str) -> Block:
        graph = fx.Graph()
        x = set_info(graph.placeholder("x"), typed("x", meta, given, "input"))
        y = set_info(graph.call_function(torch.ops.aten.relu.default, (x,)), typed("", meta, result))
        graph.output((y,))
        return Block(name, kind, graph)

    blocks = [block("first", made, made, kind), block("second", taken, taken, "glue")]
    calls = [Call(0, "", (), (Value(-1, 0),)), Call(1, "", (), (Value(0, 0),))]
    inputs = [InputInfo("x", "x", meta, None)]
    return Model("Two", blocks, calls, {}, inputs, Value(1, 0), EXTENT)


def typed(name: str, meta: Meta, types: dict[str, Type], role: str = "") -> Info:
    choices = {axis: Choice((), kind) for axis, kind in types.items()}
    return Info((meta,), role=role, name=name, choices=choices)


KINDS = [R, S(0), S(1), S(0, 2), S(1, 2)]


@pytest.mark.parametrize("outer", [*itertools.permutations(KINDS, 2)], ids=str)
def test_every_rank_gets_the_part_that_is_taken(outer: tuple[Type, Type]) -> None:
    x = np.arange(EXTENT * EXTENT).reshape(EXTENT, EXTENT)
    for inner in itertools.product(KINDS, KINDS):
        (dp_made, dp_taken), (tp_made, tp_taken) = outer, inner
        model = two_calls({"dp": dp_made, "tp": tp_made}, {"dp": dp_taken, "tp": tp_taken})
        parts = split(x, dp_made, tp_made)
        for change in edge(model, MESH, 1, 0).changes:
            parts = apply(parts, change)
        for place, wanted in split(x, dp_taken, tp_taken).items():
            np.testing.assert_array_equal(parts[place], wanted, err_msg=f"{outer} {inner} at {place}")


def test_the_fast_axis_changes_first() -> None:
    model = two_calls({"dp": S(0), "tp": S(1)}, {"dp": R, "tp": R})
    assert edge(model, MESH, 1, 0).changes == (Change("tp", S(1), R), Change("dp", S(0), R))


def test_equal_types_need_nothing() -> None:
    model = two_calls({"dp": S(0), "tp": P}, {"dp": S(0), "tp": P})
    assert edge(model, MESH, 1, 0).changes == ()


def test_an_axis_that_was_not_solved_has_no_transition() -> None:
    model = two_calls({"tp": S(1)}, {"tp": S(1)})
    assert edge(model, Mesh(tp=2), 0, 0).changes == (Change("tp", R, S(1)),)
    assert edge(model, Mesh(tp=2), 1, 0).changes == ()


SCALAR = Meta((), torch.int64)


def test_a_pending_scalar_of_the_batch_is_a_total() -> None:
    model = two_calls({"mb": P, "dp": P, "tp": R}, {"mb": R, "dp": R, "tp": R}, SCALAR, "tables")
    assert edge(model, MESH, 1, 0).total_axes == ("dp",)


@pytest.mark.parametrize(
    ("made", "taken", "meta", "kind"),
    [
        ({"mb": P}, {"mb": R}, SCALAR, "glue"),
        ({"mb": S(0)}, {"mb": R}, None, "tables"),
        ({"tp": S(0)}, {"tp": P}, None, "glue"),
        ({"tp": R}, {"tp": I}, None, "glue"),
    ],
)
def test_what_has_no_transition_is_refused(
    made: dict[str, Type], taken: dict[str, Type], meta: Meta | None, kind: str
) -> None:
    (axis,) = made
    with pytest.raises(GraphError, match=f"a value made .* is taken .* on {axis}"):
        edge(two_calls(made, taken, meta, kind), MESH, 1, 0)


@pytest.mark.parametrize(
    ("change", "shape"),
    [
        (Change("tp", S(1), R), (4, 12)),
        (Change("tp", R, S(0)), (2, 6)),
        (Change("tp", S(0), S(1)), (8, 3)),
        (Change("tp", P, R), (4, 6)),
        (Change("dp", S(1), R), (4, 6)),
    ],
)
def test_shapes_after_a_transition(change: Change, shape: tuple[int, ...]) -> None:
    assert changed_meta(Meta((4, 6), torch.float32), change, Mesh(tp=2)).shape == shape
