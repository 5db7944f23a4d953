"""What plans of models and options that nobody chose say that programs cost is what an evaluator reads off them."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from autopar.errors import AutoparError
from tests.audit.cases import PINNED
from tests.fast_cluster import BUSY, FAST, NODES
from tests.models import Case
from tests.random_experts import case_of as sparse_case
from tests.random_experts import random_mixture, random_sparse_plan
from tests.random_models import Recipe, case_of, random_plan, random_recipe
from tests.shared_captures import compile_shared


def check(case: Case, mesh: dict[str, int], options: dict[str, Any]) -> None:
    if "precision" in options:
        case.model.float()
    given = {**PINNED, "microbatches": 4 if "pp" in mesh else 2, "cluster": FAST, "loss": case.loss, **options}
    ranks = math.prod(size for axis, size in mesh.items() if axis != "ep")
    found = compile_shared(case.model, ranks, sample=case.batch, mesh=mesh, **given).audit()
    assert found.ok, f"\n{found}"


CHUNKED = {"vocabulary": "naive", "head_chunks": 2, "precision": "bf16"}
STAGES = {"schedule": "interleaved", "chunks": 2, "precision": "bf16"}


@pytest.mark.parametrize(
    ("recipe", "mesh", "options"),
    [
        (Recipe(), {"pp": 2, "cp": 2}, {"vocabulary": "vocab-2", "head_chunks": 3}),  # chunks of 2 and 3 tokens
        (Recipe(head_bias=True), {"pp": 2, "dp": 2}, CHUNKED),  # cast after the bias
        (Recipe(frozen="body"), {"pp": 2}, {"vocabulary": "vocab-1"}),  # nothing before the head is trained
        (Recipe(frozen="embedding", tied=True), {"pp": 2}, {"vocabulary": "naive", "precision": "bf16"}),
        (Recipe(layers=1), {"cp": 2, "tp": 2}, {"attention": "heads"}),  # one head a rank after an exchange
        (Recipe(twice=1), {"dp": 2}, {**STAGES, "microbatches": 1}),  # layers of several stages of a rank
        (Recipe(twice=1), {"dp": 2}, {**STAGES, "zero": 2}),
    ],
    ids=["chunks", "bias", "body", "table", "head", "layers", "scattered layers"],
)
def test_programs_of_models_of_random_parts_cost_what_plans_say(
    recipe: Recipe, mesh: dict[str, int], options: dict[str, Any]
) -> None:
    check(case_of(recipe), mesh, options)


def drawn(kind: str, seed: int) -> tuple[Case, dict[str, Any]]:
    """A model, and arguments to compile it with: a plan of tests.ranks, maybe in bf16, on one of three clusters."""
    chance = random.Random(seed)
    if kind == "experts":
        recipe, mixture = random_mixture(chance)
        plan = random_sparse_plan(chance, recipe, mixture)
    else:
        recipe, mixture = random_recipe(chance), None
        plan = random_plan(chance, recipe)
    torch.manual_seed(seed)
    case = case_of(recipe) if mixture is None else sparse_case(recipe, mixture)
    chance = random.Random(seed + 10**6)
    plan["cluster"] = chance.choice((FAST, FAST, NODES, BUSY))
    if chance.random() < 0.4:
        plan["precision"] = "bf16"
    if chance.random() < 0.2 and plan["zero"]:
        plan["zero_ranks"] = 2
    return case, plan


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        ("plain", 74),  # targets of strided rows are gathered
        ("plain", 140),  # so are masks in another order of positions
        ("plain", 124),  # what tables are given is changed first
        ("experts", 0),  # experts that are frozen, whose products are not put off
        ("plain", 54),  # a tied table that is looked up as it is stored: each backward sums what its other use gives
        pytest.param("experts", 15, marks=pytest.mark.slow),  # two dispatches under way at once
        ("experts", 12),  # two of which neither hides anything
        ("experts", 33),  # stacks that are transposed, whose gradients come as they are not stored
        ("experts", 38),  # or that an einsum transposes
        # biases of experts stay where other gradients are sent after each backward
        pytest.param("experts", 5027, marks=pytest.mark.slow),
        ("experts", 5058),  # one expert on each rank, over which an einsum sums
        *(pytest.param(kind, seed, marks=pytest.mark.slow) for kind in ("plain", "experts") for seed in range(1, 13)),
    ],
)
def test_programs_of_random_plans_cost_what_they_say(kind: str, seed: int) -> None:
    case, plan = drawn(kind, seed)
    try:
        check(case, plan.pop("mesh"), plan)
    except AutoparError:
        pytest.skip("this plan doesn't fit its model")
