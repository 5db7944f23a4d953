"""The promise for models and plans that nobody chose: equal to one device, or refused in words."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

import autopar
from autopar.errors import RankError
from tests.fast_cluster import FAST
from tests.models import Case
from tests.pinned import compile_pinned
from tests.random_models import Recipe, case_of, random_plan, random_recipe

FAST_TIERS = [range(5)]
SLOW_TIERS = [range(5, 10), range(10, 14), range(14, 32)]
LEAST_COMPILED = 0.7  # of all seeds; others draw plans that don't fit their model


def drawn(seed: int) -> tuple[Recipe, dict[str, Any]]:
    chance = random.Random(seed)
    recipe = random_recipe(chance)
    return recipe, random_plan(chance, recipe)


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Of an eps above rounding: a gradient that is zero but for that has no sign that counts."""
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1, eps=1e-6)


def compiled(seed: int) -> bool:
    """Whether the model of ``seed`` runs under its plan."""
    recipe, plan = drawn(seed)
    torch.manual_seed(seed)
    return agrees(case_of(recipe), plan, f"seed {seed}: {recipe}\n{plan}")


def agrees(case: Case, plan: dict[str, Any], drawn_as: str) -> bool:
    """Two steps of ``case`` on simulated ranks are those of one device; False: refused."""
    gpus = math.prod(size for axis, size in plan["mesh"].items() if axis != "ep")
    given = {"sample": case.batch, "loss": case.loss, "optimizer": optimizer, "cluster": FAST, **plan}
    try:
        job = compile_pinned(case.model, gpus, **given)
        result = job.verify(case.batch, steps=2)
    except RankError:
        raise
    except autopar.AutoparError:
        return False
    assert result.ok, f"{drawn_as}\n{result}"
    return True


@pytest.mark.parametrize(
    "seeds", [*FAST_TIERS, *(pytest.param(tier, marks=pytest.mark.slow) for tier in SLOW_TIERS)], ids=str
)
def test_random_models_under_random_plans(seeds: range) -> None:
    count = sum(map(compiled, seeds))
    assert count >= LEAST_COMPILED * len(seeds)
