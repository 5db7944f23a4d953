"""Any legal placement: planned under random prices, emitted, run on simulated ranks, equal to the model."""

from __future__ import annotations

import pytest

from autopar.codegen import emit
from autopar.mesh import Mesh
from tests.codegen.programs import assert_equal, cut, expected, folded, place_at_random, simulated
from tests.models import make

PLACES = [
    ("nano_gpt", Mesh(dp=2, tp=2), 2, 0),
    ("nano_gpt", Mesh(pp=2, tp=2), 1, 1),
    ("mlp", Mesh(pp=2, dp=2, tp=2), 2, 0),
    ("mlp", Mesh(tp=2), 4, 1),
    pytest.param("encoder", Mesh(dp=2, tp=2), 1, 0, marks=pytest.mark.slow),
    ("encoder", Mesh(pp=3, dp=2), 2, 1),
]


@pytest.mark.parametrize(("name", "mesh", "microbatches", "seed"), PLACES, ids=str)
def test_random_placements(name: str, mesh: Mesh, microbatches: int, seed: int) -> None:
    case = make(name, batch=8)
    model = folded(case)
    place_at_random(model, mesh, microbatches, seed)
    programs = emit(model, cut(model, mesh.pp), mesh, microbatches=microbatches, digest="")
    assert_equal(simulated(case, programs, mesh, microbatches), expected(case), 1e-11)


@pytest.mark.slow
def test_llama_on_all_axes() -> None:
    """Its loss is computed in float32, whatever its weights are."""
    case, mesh = make("llama_tied", batch=8), Mesh(pp=2, dp=2, tp=2)
    model = folded(case)
    place_at_random(model, mesh, 2, seed=0)
    programs = emit(model, cut(model, 2), mesh, microbatches=2, digest="")
    assert_equal(simulated(case, programs, mesh, 2), expected(case), 1e-6)


def test_emitting_leaves_the_model_as_it_was() -> None:
    model = folded(make("mlp", batch=4))
    place_at_random(model, Mesh(dp=2), 1, seed=0)
    before = str(model)
    programs = [emit(model, cut(model, 1), Mesh(dp=2), microbatches=1, digest="") for _ in range(2)]
    assert str(model) == before
    assert programs[0] == programs[1]
    assert any(p.reduce == ("dp",) for p in programs[0][0].program.parameters)
