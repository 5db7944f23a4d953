"""Proof of a choice: run the op whole, run every rank's share, compare values and gradients.

Ranks are a plain loop; a form that communicates runs on simulated ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from autopar import runtime
from autopar.graph import (
    AxisRef,
    Choice,
    Info,
    Meta,
    RuntimeOp,
    aten_overload,
    info,
    op_name,
    operands,
    set_info,
)
from autopar.mesh import Mesh
from autopar.rules import lookup
from autopar.rules.base import Op, Splits, legal_choices
from autopar.runtime import local_ops
from autopar.spmd import Type, local_shape
from tests.rules.values import TOLERANCES, close, cut, join, noise, of_gradient
from tests.runtime.ranks import on_ranks


@dataclass(frozen=True)
class Example:
    """One call of an op: ``args`` with tensors in place. ``compare`` False: the values are random."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    compare: bool = True

    @cached_property
    def tensors(self) -> list[Tensor]:
        return tensors_in((self.args, self.kwargs))

    @cached_property
    def outputs(self) -> list[Tensor]:
        return tensors_in(self.target(*self.args, **self.kwargs))

    @cached_property
    def node(self) -> fx.Node:
        """The call as a node of a graph, as the compiler sees it."""
        graph = fx.Graph()
        placeholder = lambda x: set_info(graph.placeholder("x"), Info((meta_of(x),)))  # noqa: E731
        args, kwargs = replace_tensors((self.args, self.kwargs), placeholder)
        made = graph.call_function(self.target, args, kwargs)
        return set_info(made, Info(tuple(map(meta_of, self.outputs))))

    def __str__(self) -> str:
        shapes = ", ".join(str(info(n).meta) for n in operands(self.node))
        return f"{op_name(self.node)}({shapes})"


@dataclass(frozen=True)
class Step:
    """A choice on one axis."""

    axis: str
    size: int
    choice: Choice


@dataclass(frozen=True)
class Run:
    """Results of one call and the gradients of its operands."""

    outputs: list[Tensor]
    gradients: list[Tensor]


def meta_of(x: Tensor) -> Meta:
    return Meta(tuple(x.shape), x.dtype, x.requires_grad)


def tensors_in(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    replace_tensors(value, found.append)
    return found


def replace_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: replace_tensors(v, change) for key, v in value.items()}
    if isinstance(value, tuple | list):
        changed = [replace_tensors(v, change) for v in value]
        return tuple(changed) if isinstance(value, tuple) else changed
    return value


# --- choices and their local calls ----------------------------------------------------------------


def choices_of(node: fx.Node, size: int) -> list[Choice]:
    """All legal choices, with every split point up to 4 on every dim of operands and result as a seed."""
    op = Op.of(node)
    rule = lookup(op.name)

    def seed(meta: Meta) -> Splits:
        return [{outer for outer in (1, 2, 3, 4) if extent % outer == 0} for extent in meta.shape]

    inputs, output = [seed(m) for m in op.operands], seed(op.result)
    before = -1
    while before != (before := sum(len(s) for splits in (*inputs, output) for s in splits)):
        rule.link(op, inputs, output)
    return legal_choices(rule, op, size, inputs, output)


def localized(node: fx.Node, step: Step) -> fx.Node:
    """The call of one rank, with the shapes it sees."""
    op = Op.of(node)
    local = lookup(op.name).localize(op, step.choice, step.size, step.axis)
    graph = fx.Graph()
    made = {
        operand: _with_metas(graph.placeholder("x"), info(operand).outputs, kind, step.size)
        for operand, kind in zip(operands(node), step.choice.operands, strict=True)
    }
    given = fx.map_arg((node.args, node.kwargs), made.__getitem__)
    args, kwargs = local.call(*given)
    target = (aten_overload(local.target) or RuntimeOp(local.target)) if local.target else node.target
    return _with_metas(graph.call_function(target, args, kwargs), info(node).outputs, step.choice.result, step.size)


def _with_metas(node: fx.Node, metas: Sequence[Meta], kind: Type, size: int) -> fx.Node:
    shapes = [Meta(local_shape(m.shape, kind, size), m.dtype, m.needs_grad) for m in metas]
    return set_info(node, Info(tuple(shapes)))


def call(node: fx.Node, values: Sequence[Tensor], axes: Mapping[str, Any]) -> list[Tensor]:
    """Run a node on tensors in place of its operands."""
    remaining = iter(values)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: next(remaining))
    args, kwargs = map_aggregate((args, kwargs), lambda a: axes[a.name] if isinstance(a, AxisRef) else a)
    target = node.target
    if isinstance(target, RuntimeOp):
        name = target.__name__
        target = getattr(local_ops if hasattr(local_ops, name) else runtime, name)
    assert callable(target)
    return tensors_in(target(*args, **kwargs))


# --- the proof ------------------------------------------------------------------------------------


def prove(example: Example, *steps: Step) -> None:
    """Raises AssertionError where the op under these choices, axis by axis, differs from the whole."""
    node = example.node
    for step in steps:
        node = localized(node, step)
    prove_local(example, node, steps)


def prove_local(example: Example, node: fx.Node, steps: Sequence[Step]) -> None:
    """The same for a local call that is given."""
    seeds = [noise(y) if y.requires_grad else torch.zeros(y.shape) for y in example.outputs]
    values = [spread(x.detach(), [s.choice.operands[i] for s in steps], steps) for i, x in enumerate(example.tensors)]
    gradients = [spread(seed, [of_gradient(s.choice.result) for s in steps], steps) for seed in seeds]

    def share(rank: int, axes: Mapping[str, Any]) -> Run:
        own = [v[rank].requires_grad_(x.requires_grad) for v, x in zip(values, example.tensors, strict=True)]
        outputs = call(node, own, axes)
        return differentiate(outputs, own, [g[rank] for g in gradients]) if example.compare else Run(outputs, [])

    mesh = Mesh(**{step.axis: step.size for step in steps})
    if has_axis(node):
        ranks = on_ranks(mesh, lambda axes: share(axes.rank, axes))
    else:
        ranks = [share(rank, {}) for rank in range(mesh.world)]
    for i, meta in enumerate(info(node).outputs):
        assert {tuple(run.outputs[i].shape) for run in ranks} == {meta.shape}, "the shape in the graph is another"
    if example.compare:
        compare(differentiate(example.outputs, example.tensors, seeds), ranks, example, steps)


def has_axis(node: fx.Node) -> bool:
    """Whether the call communicates."""
    found: list[Any] = []
    map_aggregate((node.args, node.kwargs), found.append)
    return any(isinstance(a, AxisRef) for a in found)


def spread(x: Tensor, kinds: Sequence[Type], steps: Sequence[Step]) -> list[Tensor]:
    """The value of every rank, the last axis fastest."""
    parts = [x]
    for kind, step in zip(kinds, steps, strict=True):
        parts = [piece for part in parts for piece in cut(part, kind, step.size)]
    return parts


def gather(parts: list[Tensor], kinds: Sequence[Type], steps: Sequence[Step]) -> Tensor:
    """Inverse of :func:`spread`."""
    for kind, step in zip(reversed(kinds), reversed(steps), strict=True):
        parts = [join(group, kind) for group in [parts[i : i + step.size] for i in range(0, len(parts), step.size)]]
    return parts[0]


def differentiate(outputs: list[Tensor], values: Sequence[Tensor], seeds: Sequence[Tensor]) -> Run:
    wanted = [x for x in values if x.requires_grad]
    made = [(y, seed) for y, seed in zip(outputs, seeds, strict=True) if y.requires_grad]
    found: Sequence[Tensor | None] = [None] * len(wanted)
    if made and wanted:
        found = torch.autograd.grad(
            [y for y, _ in made], wanted, [seed for _, seed in made], allow_unused=True, retain_graph=True
        )
    full = [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)]
    return Run([y.detach() for y in outputs], full)


def compare(whole: Run, ranks: Sequence[Run], example: Example, steps: Sequence[Step]) -> None:
    dtypes = {x.dtype for x in (*example.tensors, *whole.outputs)}
    tolerance = max(TOLERANCES.get(dtype, 0.0) for dtype in dtypes)
    for i, wanted in enumerate(whole.outputs):
        got = gather([run.outputs[i] for run in ranks], [s.choice.result for s in steps], steps)
        close(got, wanted, f"value {i}", tolerance)
    positions = [i for i, x in enumerate(example.tensors) if x.requires_grad]
    for i, (position, wanted) in enumerate(zip(positions, whole.gradients, strict=True)):
        kinds = [of_gradient(s.choice.operands[position]) for s in steps]
        close(
            gather([run.gradients[i] for run in ranks], kinds, steps),
            wanted,
            f"gradient {position}",
            tolerance,
        )
