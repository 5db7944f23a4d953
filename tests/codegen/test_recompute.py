"""Regions that are recomputed: what their text is, and that it computes the same."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from autopar.codegen import emit
from autopar.errors import GraphError
from autopar.graph import Model
from autopar.mesh import Mesh
from autopar.passes.recompute import Region, groups, own_modules
from autopar.runtime.later import Later, accumulate
from benchmarks.models import MegatronGPT
from tests.codegen.programs import assert_equal, cut, emit_alone, folded, load, run
from tests.codegen.test_golden import without_lines
from tests.models import CASES, Case, make, prepared, tokens

Regions = dict[int, tuple[Region, ...]]


def megatron(layers: int = 2) -> Case:
    model = MegatronGPT(layers=layers, width=32, heads=4, vocabulary=48)
    return Case(model, (tokens(4), tokens(4).roll(-1, 1)))


def emitted(model: Model, recompute: Regions, **options: Any) -> Any:
    return emit(model, cut(model, 1), Mesh(), microbatches=1, digest="3f9a", recompute=recompute, **options)


def between(model: Model, index: int, first: str, last: str, note: str = "") -> Region:
    """The region of a call from the first op with a part of this name to the last one."""
    names = [group[0].name for group in groups(model.block_of(model.calls[index]))]
    return Region(next(n for n in names if first in n), [n for n in names if last in n][-1], note)


def test_the_text_of_a_layer_that_recomputes_its_attention(golden: Callable[[str, str], None]) -> None:
    """Two layers do, one doesn't: two classes, and loops over each."""
    torch.manual_seed(0)
    model = folded(megatron(3))
    layers = sorted(own_modules(model))
    note = "the layer keeps 100 KiB instead of 250 KiB"
    text = emitted(model, {i: (between(model, i, "matmul", "matmul", note),) for i in layers[:2]})[0].text
    golden("codegen/recomputed_attention.py.txt", without_lines(text))


def regions_at_random(model: Model, seed: int) -> Regions:
    """Of every layer up to two, anywhere."""
    draw, found = random.Random(seed), {}
    for index in own_modules(model):
        names = [group[0].name for group in groups(model.block_of(model.calls[index]))]
        ends = sorted(draw.choices(range(len(names)), k=4))
        pairs = [ends[:2], ends[2:]] if ends[1] < ends[2] else [[ends[0], ends[3]]]
        found[index] = tuple(Region(names[a], names[b]) for a, b in pairs)
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", [*CASES, "dropout"])
def test_any_regions_compute_the_same(name: str, seed: int) -> None:
    case = make(name, 4) if name in CASES else prepared(megatron)
    model = folded(case)
    assert_equal(run(case, emitted(model, regions_at_random(model, seed))), run(case, emit_alone(model)), 1e-13)


def test_products_are_put_off_inside_of_regions_too() -> None:
    """The backward runs the region again, and still leaves the gradients of its weights to W."""
    case = prepared(megatron)
    model = folded(case)
    regions = {i: (between(model, i, "layer_norm", "dropout"),) for i in own_modules(model)}
    (program,) = emitted(model, regions, split_backward=True)
    stage, later = load(program, case.model), Later()
    for layer in stage.layers.children():
        layer.axes = replace(layer.axes, later=later)
    loss = stage(*case.batch)
    with later.putting_off((0, 0)):
        loss.backward()
    put_off = [name for name, parameter in stage.named_parameters() if parameter.grad is None]
    assert "layers.0.up.weight" in put_off
    later.run((0, 0), accumulate)
    found = {name: parameter.grad for name, parameter in stage.named_parameters()}
    assert_equal((float(loss.detach()), found), run(case, emit_alone(model)), 1e-13)


@pytest.mark.filterwarnings("ignore")  # the tracer's own
def test_a_compiled_stage_recomputes_the_same() -> None:
    case = make("nano_gpt", 4)
    model = folded(case)
    program = emitted(model, regions_at_random(model, 1))
    compiled = run(case, program, lambda stage: torch.compile(stage, backend="aot_eager", fullgraph=True))
    assert_equal(compiled, run(case, emit_alone(model)), 1e-12)


def test_regions_of_another_model_are_refused() -> None:
    model = folded(make("mlp", 4))
    with pytest.raises(GraphError, match="has no run of ops from 'nothing' to 'here'"):
        emitted(model, {min(own_modules(model)): (Region("nothing", "here"),)})
