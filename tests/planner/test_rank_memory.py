"""State by kind against sums by hand; how a plan is held to its budget by what ranks really hold."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from autopar.cost_models.formula import Formula
from autopar.cost_models.memory import ZERO_1_BYTES, ZERO_2_BYTES, ZERO_3_BYTES
from autopar.errors import BudgetError
from autopar.graph import Meta, ParameterInfo
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.planner.budget import within_budget
from autopar.planner.rank_memory import State, Storage, parameter_state

WEIGHT = Meta((10, 3), torch.float32)


def state(meta: Meta = WEIGHT, dp: int = 1, master: torch.dtype | None = None, **options: Any) -> State:
    known = ParameterInfo("weight", meta, master=master)
    return parameter_state(known, meta, Storage(Options.of(**options), Mesh(dp=dp)))


def test_a_parameter_its_gradient_and_two_moments() -> None:
    assert state() == State(Counter(parameters=120, gradients=120, optimizer=240), Counter())
    assert state(dp=4) == state()


def test_zero_stores_rows_with_padding() -> None:
    """Of 10 rows over 4 ranks, each stores 3."""
    one, two, three = (state(dp=4, zero=level).device for level in (1, 2, 3))
    assert one == Counter(parameters=36, working=120, gradients=120, optimizer=72)
    assert two == Counter(parameters=36, working=120, gradients=36, optimizer=72)
    assert three == Counter(parameters=36, gradients=36, optimizer=72)


def test_groups_of_ranks_share_a_copy() -> None:
    assert state(dp=8, zero=3, zero_ranks=2) == state(dp=2, zero=3)


def test_narrow_copies_of_wide_masters() -> None:
    narrow = Meta((10, 3), torch.bfloat16)
    found = state(narrow, master=torch.float32, state_dtype="bfloat16").device
    assert found == Counter(parameters=120, working=60, gradients=120, optimizer=120)


def test_what_lies_on_the_host() -> None:
    found = state(offload=("optimizer",))
    assert found.device == Counter(working=120, gradients=120)
    assert found.host == Counter(parameters=120, gradients=120, optimizer=240)


@pytest.mark.parametrize("options", [{"zero": 3}, {"offload": ("parameters",)}], ids=str)
def test_rows_of_vocabulary_tables_are_there_from_step_to_step(options: dict[str, Any]) -> None:
    """Other weights are on the device only while passes use them."""
    storage, known = Storage(Options.of(**options), Mesh(pp=2, dp=4)), ParameterInfo("weight", WEIGHT)
    table, other = (parameter_state(known, WEIGHT, storage, parts).device for parts in (2, 1))
    assert table["working"] == 120 / 2
    assert not other["working"]


def test_buffers_and_frozen_parameters_have_no_state() -> None:
    for known in (ParameterInfo("b", WEIGHT, is_buffer=True), ParameterInfo("f", WEIGHT, trainable=False)):
        found = parameter_state(known, WEIGHT, Storage(Options(), Mesh()))
        assert found == State(Counter(parameters=120), Counter())


@pytest.mark.parametrize(
    ("options", "bytes_", "whole"),
    [
        ({}, 16, 16),
        ({"zero": 1}, 8 + 12 / 8, 16),
        ({"zero": 3}, 16 / 8, 16),
        ({"precision": "bf16"}, 18, 18),
        ({"precision": "bf16", "zero": 1}, 2 + 4 + 12 / 8, 18),
        ({"precision": "bf16", "zero": 2}, 2 + 16 / 8, 18),
    ],
)
def test_the_share_of_a_parameters_state(options: dict[str, Any], bytes_: float, whole: int) -> None:
    """Bytes of an element: in 16 bits, a copy beside what is trained."""
    assert Storage(Options.of(**options), Mesh(dp=8)).share == bytes_ / whole


@pytest.mark.parametrize(("level", "formula"), [(1, ZERO_1_BYTES), (2, ZERO_2_BYTES), (3, ZERO_3_BYTES)])
def test_state_is_that_of_the_printed_formulas(level: int, formula: Formula) -> None:
    """bf16 beside float32 masters, 8 rows over 4 ranks: no padding."""
    meta = Meta((8, 5), torch.bfloat16)
    found = state(meta, dp=4, master=torch.float32, zero=level).device_bytes
    sizes = {"parameters": 40, "parameter_itemsize": 4, "gradient_itemsize": 4, "moment_itemsize": 4, "shards": 4}
    assert found == formula(**sizes, **({"copy_itemsize": 2} if level < 3 else {}))


@dataclass
class Rank:
    peak_bytes: int


@dataclass
class FakePlan:
    """What within_budget reads of a plan; ``hidden`` bytes are there that no solver counts."""

    rank_plans: list[Rank]
    hidden: int
    options: Options = field(default_factory=Options)
    stage_plans: tuple[int, ...] = (0, 1)

    @property
    def peak_bytes(self) -> list[int]:
        return [rank.peak_bytes for rank in self.rank_plans]


@dataclass
class Found:
    plan: Any


def solver(budget: int, least: int, hidden: Callable[[int], int]) -> tuple[Callable[[int], Found], list[int]]:
    """Uses what it may, from ``least`` up."""
    asked: list[int] = []

    def lay_out(spared: int) -> Found:
        asked.append(spared)
        used = budget - spared
        if used < least:
            raise BudgetError("too small", least + spared)
        return Found(FakePlan([Rank(used), Rank(used // 2)], hidden(used)))

    return lay_out, asked


def exact(found: Found, enough: float) -> Found:
    """All ranks, as it may."""
    plan = found.plan
    return Found(replace(plan, rank_plans=[Rank(rank.peak_bytes + plan.hidden) for rank in plan.rank_plans]))


def test_what_solvers_do_not_count_is_spared() -> None:
    lay_out, asked = solver(100, 60, lambda used: 7)
    assert within_budget(lay_out, exact, 100).plan.peak_bytes == [100, 53]
    assert asked == [0, 7]


def test_a_little_more_is_spared_than_lacked() -> None:
    """What is hidden grows by a byte in a thousand; each round takes seconds."""
    lay_out, asked = solver(1000, 600, lambda used: 70 + (used < 1000))
    assert within_budget(lay_out, exact, 1000).plan.peak_bytes == [999, 535]
    assert asked == [0, 72]


def test_far_below_the_budget_nothing_is_measured() -> None:
    def refuse(found: Found, enough: float) -> Found:
        raise AssertionError

    plan = Found(FakePlan([Rank(50)], 0))
    assert within_budget(lambda spared: plan, refuse, 100) is plan


def test_all_ranks_are_measured_of_what_is_given_or_refused() -> None:
    """Before, it is enough to know one that holds too much: it is laid out again."""
    asked: list[float] = []

    def noted(found: Found, enough: float) -> Found:
        asked.append(enough)
        return exact(found, enough)

    within_budget(solver(100, 60, lambda used: 7)[0], noted, 100)
    within_budget(solver(100, 60, lambda used: 45 if used > 60 else 10)[0], noted, 100)
    assert asked == [100, 100, 100, math.inf]


def test_a_guess_of_what_the_leanest_needs_is_corrected() -> None:
    """With room for 50 there is none for the leanest yet, which needs 60."""
    solve, asked = solver(100, 60, lambda used: 65 if used > 60 else 10)

    def lay_out(spared: int) -> Found:
        if 100 - spared < 50:
            asked.append(spared)
            raise BudgetError("a guess", 50 + spared)
        return solve(spared)

    assert within_budget(lay_out, exact, 100).plan.peak_bytes == [70, 40]
    assert asked == [0, 65, 50, 40]


def test_the_leanest_is_measured_itself() -> None:
    """Sparing what a large choice hides leaves too little, but the leanest hides less."""
    lay_out, asked = solver(100, 60, lambda used: 45 if used > 60 else 10)
    assert within_budget(lay_out, exact, 100).plan.peak_bytes == [70, 40]
    assert asked == [0, 45, 40]


def test_what_grows_as_it_is_spared_ends_with_the_leanest() -> None:
    lay_out, asked = solver(100, 60, lambda used: 105 - used if used > 60 else 40)
    assert within_budget(lay_out, exact, 100).plan.peak_bytes == [100, 70]
    assert asked == [0, 5, 10, 100, 40]


def test_a_refusal_says_what_would_do() -> None:
    for budget in (50, 62):  # too small for what solvers count, or for the rest
        lay_out, _ = solver(budget, 60, lambda used: 10)
        with pytest.raises(BudgetError, match=r"leanest needs 70 B with everything recomputed \(70 bytes\)") as caught:
            within_budget(lay_out, exact, budget)
        assert caught.value.needed_bytes == 70
        assert caught.value.uncounted_bytes == 10
