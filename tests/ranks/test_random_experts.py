"""The promise for mixtures of experts and plans that nobody chose: equal to one device, or refused in words."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import autopar
from autopar.errors import RankError
from tests.fast_cluster import FAST
from tests.pinned import compile_pinned
from tests.random_experts import Mixture, case_of, random_mixture, random_sparse_plan
from tests.random_models import Recipe
from tests.ranks.test_random_models import optimizer

FAST_TIER, SLOW_TIER = (4, 5, 25, 31), range(6, 25)
LEAST_COMPILED = 0.6  # of all seeds; others draw plans that don't fit their model


def drawn(seed: int) -> tuple[Recipe, Mixture, dict[str, Any]]:
    chance = random.Random(seed)
    recipe, mixture = random_mixture(chance)
    return recipe, mixture, random_sparse_plan(chance, recipe, mixture)


def compiled(seed: int) -> bool:
    """Two steps of the model and plan of ``seed`` on simulated ranks are those of one device; False: refused."""
    recipe, mixture, plan = drawn(seed)
    torch.manual_seed(seed)
    case = case_of(recipe, mixture)
    gpus = math.prod(size for axis, size in plan["mesh"].items() if axis != "ep")
    given = {"sample": case.batch, "optimizer": optimizer, "cluster": FAST, **plan}
    try:
        job = compile_pinned(case.model, gpus, **given)
        result = job.verify(case.batch, steps=2)
    except RankError:
        raise
    except autopar.AutoparError:
        return False
    assert result.ok, f"seed {seed}: {recipe}\n{mixture}\n{plan}\n{result}"
    return True


@pytest.mark.parametrize("seeds", [FAST_TIER, pytest.param(SLOW_TIER, marks=pytest.mark.slow)], ids=str)
def test_random_experts_under_random_plans(seeds: Sequence[int]) -> None:
    count = sum(map(compiled, seeds))
    assert count >= LEAST_COMPILED * len(seeds)
