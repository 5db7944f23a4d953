"""Emitted stages compute what the model computes: whole, cut, compiled; and their text is clean."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache

import pytest
import torch

from autopar.codegen import EmittedStage, emit
from autopar.errors import StageError
from autopar.graph import Model
from autopar.mesh import Mesh
from autopar.runtime import Axes, Program
from autopar.runtime.load import load_program
from tests.codegen.programs import assert_equal, cut, emit_alone, expected, folded, run
from tests.models import CASES, Case, gpt2, llama, make


@cache
def prepared(name: str) -> tuple[Case, Model]:
    case = make(name, batch=4)
    return case, folded(case)


def programs(name: str, stages: int = 1) -> tuple[EmittedStage, ...]:
    return emit_alone(prepared(name)[1], stages)


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_stages_compute_loss_and_gradients_of_the_model(name: str, stages: int) -> None:
    case, _ = prepared(name)
    assert_equal(run(case, programs(name, stages)), expected(case), 1e-12)


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_a_compiled_stage_computes_the_same(name: str) -> None:
    case, _ = prepared(name)
    compiled = run(case, programs(name), lambda stage: torch.compile(stage, backend="aot_eager", fullgraph=True))
    assert_equal(compiled, expected(case), 1e-12)


@pytest.mark.parametrize("name", CASES)
def test_the_program_literal_is_the_program(name: str) -> None:
    for one in programs(name, 2):
        assert load_program(one.text, filename=f"stage_{one.stage}.py").program == one.program


@pytest.mark.parametrize("name", CASES)
def test_the_text_imports_torch_and_the_runtime_only(name: str) -> None:
    for one in programs(name, 2):
        modules = set()
        for node in ast.walk(ast.parse(one.text)):
            if isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                modules.add(node.module)
        assert modules == {"torch", "autopar.runtime"}


@pytest.mark.parametrize("name", CASES)
def test_lines_are_short_and_nothing_is_unused(name: str) -> None:
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F,E9,I,W", "-"]
    for one in programs(name, 2):
        assert max(map(len, one.text.splitlines())) <= 120
        checked = subprocess.run(command, input=one.text, text=True, capture_output=True, check=False)
        assert checked.returncode == 0, checked.stdout


def test_depth_is_a_loop() -> None:
    """The text doesn't grow with the number of layers."""
    lengths = {emit_alone(folded(llama(4, layers=layers)))[0].text.count("\n") for layers in (2, 5)}
    assert len(lengths) == 1


def test_lines_of_a_layer_are_of_a_call_of_its_stage() -> None:
    model = folded(llama(4, layers=4))
    stages = cut(model, 2)
    found = emit_alone(model, 2)
    assert [{origin.call for origin in one.lines.values()} & set(stages[1 - one.stage]) for one in found] == [set()] * 2
    assert all(len(one.lines) > 20 for one in found)


def test_random_ops_repeat_for_a_place_and_differ_between_layers() -> None:
    torch.manual_seed(0)
    case = gpt2(4, dropout=0.5)
    text = emit_alone(folded(case))[0].text
    assert "with rng(self.axes, 0, ()):" in text
    loaded = load_program(text, filename="stage_0.py")
    stage = loaded.stage(Axes.build(Mesh(), 0, "cpu"))
    state = dict(case.model.named_parameters())
    stage.load_state_dict({p.name: state[p.name] for p in loaded.program.parameters}, assign=True)
    inputs = [case.batch[i.path] for i in loaded.program.inputs]
    assert torch.equal(stage(*inputs), stage(*inputs))
    layers = stage.transformer.h
    hidden = torch.randn(4, 16, 32)
    layers[1].load_state_dict(layers[0].state_dict())
    assert not torch.equal(layers[0](hidden), layers[1](hidden))


def test_tied_weights_name_all_stages_that_hold_them() -> None:
    first, middle, last = (one.program for one in programs("gpt2", 3))

    def shared(program: Program) -> dict[str, tuple[int, ...]]:
        return {p.name: p.shared_stages for p in program.parameters if p.shared_stages}

    assert shared(first) == shared(last) == {"transformer.wte.weight": (0, 2)}
    assert shared(middle) == {}
    assert first.parameters[0].aliases == ("lm_head.weight",)


def test_what_crosses_a_cut_is_sent_once_and_tables_never() -> None:
    first, middle, last = (one.program for one in programs("llama", 3))
    assert [t.name for t in first.sends] == [t.name for t in middle.receives] == ["h"]
    assert first.sends == middle.receives
    assert middle.sends == last.receives
    assert [i.name for i in last.inputs] == ["labels"]
    assert "model.rotary_emb.inv_freq" in {p.name for p in middle.parameters}


@pytest.mark.parametrize("stages", [[[1, 2], [4, 5]], [[2, 1], [3, 4, 5]], [[], [1, 2, 3, 4, 5]]])
def test_a_cut_that_misses_or_reorders_calls_is_refused(stages: list[list[int]]) -> None:
    with pytest.raises(StageError, match="are not the calls"):
        emit(prepared("llama")[1], stages, Mesh(pp=2), microbatches=1, digest="")


def test_stages_and_pipeline_ranks_must_be_equally_many() -> None:
    model = prepared("llama")[1]
    with pytest.raises(StageError, match="2 stages can't run on 4 pipeline ranks"):
        emit(model, cut(model, 2), Mesh(pp=4), microbatches=1, digest="")


def test_the_header_names_the_ranks_of_the_stage() -> None:
    """Of a pipeline in the form of a V; by default, stages go around."""
    _, model = prepared("gpt2")
    stages, mesh = cut(model, 4), Mesh(pp=2, dp=3)
    for placement, homes in (((0, 1, 1, 0), (0, 1, 1, 0)), ((), (0, 1, 0, 1))):
        made = emit(model, stages, mesh, microbatches=1, digest="", placement=placement)
        lines = [next(line for line in one.text.splitlines() if line.startswith("Ranks")) for one in made]
        ranks = {0: "0 … 2 (pp 0, dp 0 … 2, tp 0)", 1: "3 … 5 (pp 1, dp 0 … 2, tp 0)"}
        assert lines == [f"Ranks  {ranks[home]} of mesh pp 2 x dp 3 x tp 1" for home in homes]
