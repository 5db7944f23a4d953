"""Loops over experts: found as people write them, equal to eager, else whole with a reason or refused with the line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import CaptureError
from autopar.graph import Model, info, op_name
from tests.expert_loop_models import (
    EXPERTS,
    GUARDED,
    MIXTURES,
    REFUSED,
    ByCounts,
    ByLength,
    ByWhere,
    Mixed,
    Mixture,
    Otherwise,
    Plain,
    Selected,
    Unequal,
    looped,
)
from tests.fast_cluster import FAST
from tests.models import Case, prepared
from tests.pinned import compile_pinned
from tests.ranks.test_parity import optimizer
from tests.shared_captures import graph_of


def captured(mixture: Callable[[], nn.Module], *, layers: int = 1) -> Model:
    case = prepared(lambda: looped(mixture, 2, layers=layers))
    return graph_of(case.model, case.batch)


def slow_but(name: Any, fast: Sequence[Any]) -> Any:
    """A parameter of a test, in the slow tier if it isn't one of ``fast``."""
    return name if name in fast else pytest.param(name, marks=pytest.mark.slow)


def ops(model: Model) -> list[str]:
    return [op_name(node) for block in model.blocks for node in block.ops]


def verified(case: Case, **options: Any) -> autopar.Verification:
    job = compile_pinned(case.model, 1, sample=case.batch, cluster=FAST, **{"optimizer": optimizer, **options})
    return job.verify(case.batch, steps=2)


FAST_TIER = ("where", "shazeer", "one_tensor")


@pytest.mark.parametrize("name", [slow_but(name, FAST_TIER) for name in MIXTURES if name != "unequal"])
def test_a_loop_is_five_operations_on_stacked_parameters(name: str) -> None:
    model = captured(MIXTURES[name])
    found = ops(model)
    assert found.count("route") == found.count("combine") == 1
    assert found.count("grouped_linear") >= 2
    assert model.remarks == []
    assert not any(".experts.0." in parameter for parameter in model.parameters)
    for parameter in model.parameters.values():
        assert len(parameter.stacked) in (0, EXPERTS)
        assert bool(parameter.stacked) == ("*" in parameter.name)


def test_names_of_stacked_parameters_are_the_models() -> None:
    model = captured(ByWhere, layers=2)
    assert ops(model).count("route") == 1, "both layers are one block"
    weight = model.parameters["layers.1.moe.experts.*.w1.weight"]
    assert weight.stacked == tuple(f"layers.1.moe.experts.{e}.w1.weight" for e in range(EXPERTS))
    assert weight.meta.shape[0] == EXPERTS


@pytest.mark.parametrize("name", [slow_but(name, ("mask", "switch")) for name in MIXTURES])
def test_equal_to_eager(name: str) -> None:
    result = verified(prepared(lambda: looped(MIXTURES[name], 2, layers=1)))
    assert result.ok, str(result)


def test_experts_of_unequal_kinds_stay_whole_and_the_plan_says_why() -> None:
    case = prepared(lambda: looped(Unequal, 2, layers=1))
    job = compile_pinned(case.model, 1, sample=case.batch, cluster=FAST, optimizer=optimizer)
    assert "the 4 experts of layers.0.moe stay whole on every rank" in str(job.plan)
    assert "moe.experts.1" in job.plan.remarks[0]
    assert not any(parameter.stacked for parameter in job.lowered.parameters.values())


class UnequalByCounts(ByCounts):
    """Of two kinds, and those without tokens are passed over."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Unequal().experts


def test_the_plan_says_what_unequal_experts_without_tokens_have() -> None:
    case = prepared(lambda: looped(UnequalByCounts, 2, layers=1))
    remarks = compile_pinned(case.model, 1, sample=case.batch, mesh={"dp": 1}).plan.remarks
    assert "one that no token of a step chooses has a gradient of zeros" in "\n".join(remarks)


class Regularised(ByWhere):
    """Reads an expert's weight outside of the loop, too."""

    def mix(self, x: torch.Tensor, weights: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return super().mix(x, weights, index) + self.experts[0].w1.weight.sum() / 100


class Tied(Mixture):
    """All experts are one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([self.experts[0]] * EXPERTS)

    mix = ByWhere.mix


@pytest.mark.parametrize("mixture", [Regularised, pytest.param(Tied, marks=pytest.mark.slow)])
def test_parameters_that_are_read_elsewhere_are_never_there_twice(mixture: Callable[[], nn.Module]) -> None:
    case = prepared(lambda: looped(mixture, 2, layers=1))
    model = graph_of(case.model, case.batch)
    stacked = {name for parameter in model.parameters.values() for name in parameter.stacked}
    assert not stacked & set(model.parameters)
    assert verified(case).ok


@pytest.mark.parametrize("mixture", [slow_but(one, (ByLength, ByCounts)) for one in GUARDED])
def test_code_may_pass_over_experts_without_tokens(mixture: Callable[[], nn.Module]) -> None:
    model = captured(mixture)
    assert ops(model).count("route") == 1
    assert model.remarks == []


@pytest.mark.parametrize("mixture", [slow_but(one, (Otherwise, Mixed, Selected)) for one in REFUSED])
def test_other_code_that_depends_on_values_is_refused_by_its_line(mixture: Callable[[], nn.Module]) -> None:
    with pytest.raises(CaptureError, match=REFUSED[mixture]) as caught:
        captured(mixture)
    assert "expert_loop_models.py:" in str(caught.value)


class WideSum(ByWhere):
    """Rows of experts are added up in a wider dtype than they are in."""

    def mix(self, x: torch.Tensor, weights: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x, dtype=torch.float64)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(index == e)
            out.index_add_(0, token, (expert(x[token]) * weights[token, slot, None]).to(out.dtype))
        return out.to(x.dtype)


def test_rows_are_added_up_in_the_dtype_that_they_are_cast_to() -> None:
    case = prepared(lambda: looped(WideSum, 2, layers=1), torch.float32)
    model = graph_of(case.model, case.batch)
    nodes = [node for block in model.blocks for node in block.ops]
    (sums,) = (info(node).meta.dtype for node in nodes if "combine" in op_name(node))
    assert sums == torch.float64
    assert verified(case).ok


@pytest.mark.slow
def test_dropped_tokens_have_no_rows() -> None:
    """A choice that is no expert's number (a token dropped by its router) is in no body."""

    class Dropping(ByWhere):
        def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            weights, index = super().choose(x)
            return weights, torch.where(weights > 0.55, index, -1)

    result = verified(prepared(lambda: looped(lambda: Dropping(Plain), 2, layers=1)))
    assert result.ok, str(result)
