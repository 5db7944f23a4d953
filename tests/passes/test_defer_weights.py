"""defer_weights: which products can have their weight gradients put off, and that I and W then are B."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import get_gradient_edge

from autopar import simulate
from autopar.batch import flatten
from autopar.codegen import EmittedStage, emit
from autopar.graph import (
    Block,
    Call,
    Choice,
    Info,
    Meta,
    Model,
    ParameterInfo,
    RuntimeOp,
    Value,
    info,
    set_info,
    verify,
)
from autopar.mesh import Mesh
from autopar.passes.defer_weights import defer_weights
from autopar.runtime import Axes, batches
from autopar.runtime.collectives import reduce_sum_
from autopar.runtime.grads import Reducer, reduce_groups
from autopar.runtime.later import Later, accumulate
from autopar.runtime.load import load_program
from autopar.runtime.weights import StateSource, materialize, unshard, whole
from autopar.simulate.memory import MemoryTracker
from autopar.spmd import R, S
from tests.codegen.programs import assert_equal, cut, expected, folded, load, place_at_random, weights
from tests.codegen.test_golden import without_lines
from tests.models import CASES, Case, gpt2, make

aten = torch.ops.aten
META = Meta((4, 4), torch.float32, True)
Builder = Callable[[fx.Graph, fx.Node, fx.Node], fx.Node]


def call(graph: fx.Graph, target: Any, *args: Any, meta: Meta = META, **kwargs: Any) -> fx.Node:
    return set_info(graph.call_function(target, args, kwargs), Info((meta,)))


def block(build: Builder, weight: Meta = META, role: str = "parameter") -> Block:
    """What ``build(graph, w, x)`` makes of a parameter and an input."""
    graph = fx.Graph()
    w = set_info(graph.placeholder("w"), Info((weight,), role=role, name="w"))
    x = set_info(graph.placeholder("x"), Info((META,), role="input", name="x"))
    graph.output((build(graph, w, x),))
    return Block("block", "glue", graph)


def deferred(of: Block, trainable: tuple[bool, ...] = (True,), *, is_buffer: bool = False) -> list[str]:
    """The ops afterwards, where one call for each of ``trainable`` has a parameter of its own."""
    calls = [Call(0, "", (f"w{i}",), (Value(i - 1, 0),)) for i in range(len(trainable))]
    known = {f"w{i}": ParameterInfo(f"w{i}", META, (), flag, is_buffer) for i, flag in enumerate(trainable)}
    model = Model("Test", [of], calls, known, [], Value(0, 0), 4)
    assert defer_weights(model) is model
    verify(model, "defer_weights")
    return [f"{node.target}({', '.join(str(a) for a in node.args)})" for node in of.ops]


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda g, w, x: call(g, aten.linear.default, x, w), "linear(x, w)"),
        (lambda g, w, x: call(g, aten.matmul.default, x, w), "matmul(x, w)"),
        (lambda g, w, x: call(g, aten.mm.default, x, w), "matmul(x, w)"),
        (lambda g, w, x: call(g, aten.matmul.default, x, call(g, aten.t.default, w)), "linear(x, w)"),
        (lambda g, w, x: call(g, aten.mm.default, x, call(g, aten.numpy_T.default, w)), "linear(x, w)"),
        (lambda g, w, x: call(g, aten.mm.default, x, call(g, aten.transpose.int, w, -2, -1)), "linear(x, w)"),
        (lambda g, w, x: call(g, aten.linear.default, x, call(g, aten.permute.default, w, [1, 0])), "matmul(x, w)"),
    ],
)
def test_products_with_a_parameter(build: Builder, text: str) -> None:
    assert deferred(block(build)) == [text]


@pytest.mark.parametrize(
    "build",
    [
        lambda g, w, x: call(g, aten.linear.default, x, w, w),  # a bias: canonicalize leaves none
        lambda g, w, x: call(g, aten.linear.default, w, x),
        lambda g, w, x: call(g, aten.mul.Tensor, x, w),
        lambda g, w, x: call(g, aten.linear.default, x, call(g, aten.relu.default, w)),
        lambda g, w, x: call(g, aten.linear.default, x, call(g, aten.permute.default, w, [0, 1])),
        lambda g, w, x: call(g, aten.linear.default, x, call(g, aten.t.default, x)),
        lambda g, w, x: call(g, aten.linear.default, x, call(g, RuntimeOp("all_gather"), w)),
    ],
)
def test_other_ops_stay(build: Builder) -> None:
    one = block(build)
    before = str(one.graph)
    deferred(one)
    assert str(one.graph) == before


def product(graph: fx.Graph, w: fx.Node, x: fx.Node) -> fx.Node:
    return call(graph, aten.linear.default, x, w)


@pytest.mark.parametrize("weight", [Meta((4,), torch.float32), Meta((2, 4, 4), torch.float32)])
def test_weights_that_are_no_matrix_stay(weight: Meta) -> None:
    assert deferred(block(product, weight)) == ["aten.linear.default(x, w)"]


def test_complex_weights_stay() -> None:
    assert deferred(block(product, Meta((4, 4), torch.complex64))) == ["aten.linear.default(x, w)"]


def test_a_block_with_frozen_weights_stays_unless_some_call_trains_them() -> None:
    assert deferred(block(product), (False, False)) == ["aten.linear.default(x, w)"]
    assert deferred(block(product), (False, True)) == ["linear(x, w)"]
    assert deferred(block(product, role="buffer"), is_buffer=True) == ["aten.linear.default(x, w)"]


def test_a_transposition_that_something_else_reads_stays_too() -> None:
    def build(graph: fx.Graph, w: fx.Node, x: fx.Node) -> fx.Node:
        turned = call(graph, aten.t.default, w)
        return call(graph, aten.add.Tensor, call(graph, aten.mm.default, x, turned), turned)

    assert deferred(block(build)) == ["aten.t.default(w)", "linear(x, w)", "aten.add.Tensor(mm_default, t_default)"]


def test_types_are_those_of_the_operands_taken() -> None:
    def build(graph: fx.Graph, w: fx.Node, x: fx.Node) -> fx.Node:
        turned = call(graph, aten.t.default, w)
        info(turned).choices["tp"] = Choice((S(0),), S(1))
        made = call(graph, aten.mm.default, x, turned)
        info(made).choices["tp"] = Choice((R, S(1)), S(1))
        return made

    one = block(build)
    assert deferred(one) == ["linear(x, w)"]
    assert info(one.ops[0]).choices == {"tp": Choice((R, S(0)), S(1))}


@cache
def prepared(name: str) -> tuple[Case, Model]:
    case = make(name, batch=4)
    return case, folded(case)


def programs(name: str, stages: list[list[int]]) -> tuple[EmittedStage, ...]:
    model = prepared(name)[1]
    return emit(model, stages, Mesh(pp=len(stages)), microbatches=1, digest="", split_backward=True)


def later_of(stage: nn.Module) -> Later:
    return next(found for m in stage.modules() if isinstance(found := getattr(m, "axes", None), Axes)).later


@pytest.mark.parametrize("name", CASES)
def test_split_backwards_of_all_stages_equal_that_of_the_model(name: str) -> None:
    """Two stages: I of the second, I of the first, then W of the first before W of the second."""
    case, model = prepared(name)
    emitted = programs(name, cut(model, 2))
    batch, _ = flatten(case.batch)
    first, second = (load(one, case.model) for one in emitted)
    inputs = [[batch[i.path] for i in one.program.inputs] for one in emitted]
    sent = first(*inputs[0])
    received = [t.detach().requires_grad_(t.requires_grad) for t in sent]
    loss = second(*received, *inputs[1])
    with later_of(second).putting_off((1, 0)):
        loss.backward()
    flowing = [(t, r.grad) for t, r in zip(sent, received, strict=True) if t.requires_grad]
    with later_of(first).putting_off((0, 0)):
        torch.autograd.backward([t for t, _ in flowing], [g for _, g in flowing])
    assert later_of(first).parameters((0, 0))
    assert later_of(second).parameters((1, 0))
    later_of(first).run((0, 0), accumulate)
    later_of(second).run((1, 0), accumulate)

    found: dict[str, Tensor] = {}
    for stage in (first, second):
        for path, parameter in stage.named_parameters():
            if parameter.grad is not None:
                found[path] = found[path] + parameter.grad if path in found else parameter.grad
    assert_equal((float(loss.detach()), found), expected(case), 1e-12)


@pytest.mark.parametrize("name", CASES)
def test_every_matrix_but_embeddings_is_put_off(name: str) -> None:
    case, model = prepared(name)
    (one,) = programs(name, cut(model, 1))
    stage = load(one, case.model)
    batch, _ = flatten(case.batch)
    loss = stage(*(batch[i.path] for i in one.program.inputs))
    with later_of(stage).putting_off((0, 0)):
        loss.backward()
    matrices = {n for n, p in stage.named_parameters() if p.dim() == 2 and p.grad is None}
    waiting = {id(parameter) for parameter in later_of(stage).parameters((0, 0))}
    assert waiting >= {id(stage.get_parameter(n)) for n in matrices}
    computed = {n for n, p in stage.named_parameters() if p.dim() == 2 and id(p) not in waiting}
    assert all("emb" in n or "wpe" in n or "wte" in n for n in computed), computed
    assert len(matrices) >= 8


MESH, MICROBATCHES = Mesh(dp=2, tp=2), 2


def test_on_ranks_under_any_placement() -> None:
    """Each rank runs I of both of its microbatches, then W of both; sums over ranks as a reducer makes them."""
    case = make("mlp", batch=8)
    model = folded(case)
    place_at_random(model, MESH, MICROBATCHES, seed=0)
    (one,) = emit(model, cut(model, 1), MESH, microbatches=MICROBATCHES, digest="", split_backward=True)
    spec, source = one.program, StateSource(weights(case.model))
    batch, _ = flatten(case.batch)

    def program(rank: int) -> dict[str, Tensor]:
        axes = Axes.build(MESH, rank, "cpu")
        module = load_program(one.text, filename="stage_0.py").stage(axes)
        materialize(module, spec, whole(source, axes, axes.device))
        reducer = Reducer(module, spec, reduce_groups([spec], axes, (0,)), axes, (0,))
        parts = [batches.parts(batch, spec, m, axes) for m in range(MICROBATCHES)]
        totals = batch_totals(module, one, parts, axes)
        for microbatch, inputs in enumerate(parts):
            with axes.later.putting_off((0, microbatch)):
                module(*inputs, *totals).backward()
        for microbatch in range(MICROBATCHES):
            if microbatch == MICROBATCHES - 1:
                reducer.expect_products(axes.later.parameters((0, microbatch)), last=True)
            axes.later.run((0, microbatch), reducer.accumulate)
        reducer.launch()
        reducer.wait()
        return {n: g.clone() for n, g in reducer.gradients().items()}

    ranks = simulate.run(program, MESH.world).results
    found = {
        p.name: unshard(p, [(MESH.coordinates(rank), ranks[rank][p.name]) for rank in range(MESH.world)])
        for p in spec.parameters
        if p.name in ranks[0]
    }
    loss, wanted = expected(case)
    assert_equal((loss, found), (loss, wanted), 1e-11)


def batch_totals(module: nn.Module, one: EmittedStage, parts: list[Any], axes: Axes) -> tuple[Tensor, ...]:
    """The scalars of the whole batch that the stage divides by."""
    if not one.program.totals:
        return ()
    each = [module.totals(*inputs) for inputs in parts]  # type: ignore[operator]
    sums = tuple(torch.stack(values).sum(0) for values in zip(*each, strict=True))
    for total, value in zip(one.program.totals, sums, strict=True):
        for axis in total.axes:
            reduce_sum_(value, axes[axis])
    return sums


def kept(name: str) -> tuple[int, int]:
    """Bytes alive after the forward of a stage of two layers, and between its I and its W.

    The stage's input counts, as it is kept for the backward; what the stage sends does not, nor do gradients
    of parameters, nor what was made for an earlier microbatch.
    """
    case, model = prepared(name)
    layers = [i for i, c in enumerate(model.calls) if model.block_of(c).kind == "layer"]
    middle = [i for i in layers if model.calls[i].path.rsplit(".", 1)[-1] in ("1", "2")]
    units = [i for i, c in enumerate(model.calls) if model.block_of(c).kind != "tables"]
    stages = [[i for i in units if i < middle[0]], middle, [i for i in units if i > middle[-1]]]
    one = programs(name, stages)[1]
    stage, batch = load(one, case.model), flatten(case.batch)[0]
    inputs = [batch[i.path] for i in one.program.inputs]
    with MemoryTracker() as tracker:
        for microbatch in range(2):
            before = tracker.live_bytes
            received = [
                torch.randn(t.shape, dtype=torch.float64, requires_grad=t.needs_grad) for t in one.program.receives
            ]
            sent = stage(*received, *inputs)
            edges = [get_gradient_edge(t) for t in sent if t.requires_grad]
            given = [torch.randn_like(t) for t in sent if t.requires_grad]
            held = sum(g.numel() * g.element_size() for g in given)
            del sent
            forward = tracker.live_bytes - before - held
            with later_of(stage).putting_off((1, microbatch)):
                torch.autograd.backward(edges, given)
            del edges, given, received
            between = tracker.live_bytes - before
            later_of(stage).run((1, microbatch), accumulate)
        assert tracker.live_bytes == before
    return forward, between


@pytest.mark.parametrize("name", ["llama", "gpt2", "nano_gpt"])
def test_no_more_is_kept_for_w_than_for_the_backward(name: str) -> None:
    forward, between = kept(name)
    assert 0.4 * forward < between <= forward


def test_text(golden: Callable[[str, str], None]) -> None:
    model = folded(gpt2(4))
    _, last = emit(model, cut(model, 2), Mesh(pp=2), microbatches=1, digest="3f9a", split_backward=True)
    classes, _, _ = last.text.partition("\n\n\nPROGRAM = ")
    golden("codegen/gpt2_split_backward_stage_1_of_2.py.txt", without_lines(classes))
