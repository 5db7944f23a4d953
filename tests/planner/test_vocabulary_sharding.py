"""Whatever things cost: what a split vocabulary leaves the solver to choose."""

from __future__ import annotations

import pytest

from autopar.graph import Model, info
from autopar.mesh import Mesh
from autopar.passes.hoist import hoist_parameter_sums
from autopar.passes.split_vocabulary import split_vocabulary
from autopar.passes.vocabulary import head_of, vocabulary_calls, vocabulary_dims
from autopar.spmd import I, R, S
from tests import vocabulary_models
from tests.codegen.programs import folded, place_at_random

MESH = Mesh(pp=2, dp=2, tp=2)


def solved(name: str, seed: int, mesh: Mesh = MESH) -> Model:
    model = split_vocabulary(folded(vocabulary_models.case(name, batch=8)), mesh.pp, mesh.tp)
    place_at_random(model, mesh, 2, seed)
    return model


@pytest.mark.parametrize("name", ["soft_capped", "masked", "smoothed"])
@pytest.mark.parametrize("seed", range(3))
def test_tables_are_split_by_rows_and_logits_by_classes(name: str, seed: int) -> None:
    model = solved(name, seed)
    calls = vocabulary_calls(model)
    assert calls is not None
    assert calls.embedding is not None
    for index in (calls.embedding, calls.head):
        block = model.block_of(model.calls[index])
        for parameter, dim in vocabulary_dims(block).items():
            types = info(parameter).types()
            assert (types["mb"], types["dp"], types["tp"]) == (R, I, S(dim))
    head = head_of(model.block_of(model.calls[calls.head]))
    for node in head.path:
        types = info(node).types()
        assert (types["mb"], types["dp"], types["tp"]) == (S(0), S(0), S(1))
    assert info(head.entropy).choices["tp"].form == "cross_entropy_sharded"
    assert info(head.entropy).types()["tp"] == I


@pytest.mark.parametrize("seed", range(6))
def test_logits_without_positions_stay_as_their_product_makes_them(seed: int) -> None:
    """Where a sequence is split: passes of a rank take as many rows of logits as of what they are made of."""
    model = solved("classified", seed, Mesh(pp=2, cp=2))
    calls = vocabulary_calls(model)
    assert calls is not None
    head = head_of(model.block_of(model.calls[calls.head]))
    assert len({info(node).types()["cp"] for node in head.path}) == 1


@pytest.mark.parametrize("seed", range(3))
def test_gradients_of_tables_are_summed_over_dp_once_a_step(seed: int) -> None:
    """Tied tables too, whose two uses must agree."""
    _, reduce = hoist_parameter_sums(solved("masked", seed))
    assert reduce["embed.weight"] == ("dp",)
