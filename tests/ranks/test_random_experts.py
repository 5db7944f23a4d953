"""The promise for mixtures of experts and plans that nobody chose: equal to one device, or refused in words."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from autopar.errors import ShardingError
from tests.fast_cluster import FAST
from tests.pinned import compile_pinned
from tests.random_experts import LOOPS, Mixture, case_of, random_mixture, random_sparse_plan
from tests.random_models import Recipe
from tests.ranks.test_random_models import agrees

FAST_TIER, SLOW_TIER = (4, 5, 25, 31), range(6, 16)
LEAST_COMPILED = 0.6  # of all seeds; others draw plans that don't fit their model


def drawn(seed: int) -> tuple[Recipe, Mixture, dict[str, Any]]:
    chance = random.Random(seed)
    recipe, mixture = random_mixture(chance)
    return recipe, mixture, random_sparse_plan(chance, recipe, mixture)


def compiled(seed: int) -> bool:
    """Whether the model of ``seed`` runs under its plan."""
    recipe, mixture, plan = drawn(seed)
    torch.manual_seed(seed)
    return agrees(case_of(recipe, mixture), plan, f"seed {seed}: {recipe}\n{mixture}\n{plan}")


@pytest.mark.parametrize("seeds", [FAST_TIER, pytest.param(SLOW_TIER, marks=pytest.mark.slow)], ids=str)
def test_random_experts_under_random_plans(seeds: Sequence[int]) -> None:
    count = sum(map(compiled, seeds))
    assert count >= LEAST_COMPILED * len(seeds)


@pytest.mark.parametrize("form", LOOPS)
def test_rows_are_multiplied_by_weights_of_several_choices_before_experts(form: str) -> None:
    torch.manual_seed(0)
    case = case_of(Recipe(layers=1, mlp="experts"), Mixture(form=form, expert="plain", weighted="before"))
    plan = {"mesh": {"dp": 2, "ep": 2}, "microbatches": 2}
    assert agrees(case, plan, form)
    given = {"sample": case.batch, "cluster": FAST, "mesh": {"cp": 2, "ep": 2}}
    with pytest.raises(ShardingError, match=r"grouped_bias in .* Use an ep without cp, or multiply what experts give"):
        compile_pinned(case.model, 2, **given)
