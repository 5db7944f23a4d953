"""What the host takes to issue a step: calls counted by hand, and what they do to a plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.cluster import Cluster
from tests.fast_cluster import FAST
from tests.models import prepared
from tests.moe_models import family
from tests.pinned import compile_pinned


def on(call_seconds: float) -> Cluster:
    return replace(FAST, device=replace(FAST.device, host_call_seconds=call_seconds))


def squares(output: Tensor, _: Any) -> Tensor:
    return output.square().mean()


def small(call_seconds: float, **options: Any) -> autopar.ParallelModel:
    """Two products with biases."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    given = {"mesh": {"dp": 1}, "cluster": on(call_seconds), **options}
    return compile_pinned(model, 1, sample=torch.randn(8, 8), loss=squares, **given)


PASSES = {
    "ops": 2 + 1 + 2 + 2,  # a product and its bias, relu, both again, square, mean
    "gradients": (1 + 2) + 1 + (2 + 2) + (1 + 1),  # the sample has none
    "sums": 4,
}


@pytest.mark.parametrize("microbatches", [1, 4])
def test_calls_are_those_of_the_text(microbatches: int) -> None:
    """Of each microbatch; and once the four weights that are updated."""
    found = small(1.0, microbatches=microbatches)
    expected = microbatches * sum(PASSES.values()) + 4
    assert found.timeline.costs.host_seconds == (expected,)
    assert found.plan.step_seconds == expected


def test_casts_and_what_is_computed_again_are_calls() -> None:
    plain, cast, again = (
        small(1.0, microbatches=1, **more).timeline.costs.host_seconds[0]
        for more in ({}, {"precision": "bf16"}, {"recompute": "full"})
    )
    assert cast > plain
    assert again > plain


def test_a_step_takes_what_is_slower() -> None:
    """The device, or the host: the rest of that is a part of its own, and nothing else changes."""
    fast, slow = (small(seconds, microbatches=2) for seconds in (1e-9, 1.0))
    assert fast.plan.step_seconds == fast.timeline.makespan_seconds == slow.timeline.makespan_seconds
    assert slow.plan.step_seconds == slow.timeline.step_seconds == slow.timeline.costs.host_seconds[0]
    parts: list[Mapping[str, tuple[float, float]]] = [
        {part.name: (part.exposed_seconds, part.hidden_seconds) for part in found.plan.cost.parts}
        for found in (fast, slow)
    ]
    without, beside = ({name: both for name, both in each.items() if name != "host"} for each in parts)
    assert without == beside
    exposed, hidden = parts[0]["host"]
    assert exposed == 0
    assert hidden == pytest.approx(fast.timeline.costs.host_seconds[0])
    assert parts[1]["host"][0] == pytest.approx(slow.plan.step_seconds - slow.timeline.makespan_seconds)
    assert "most time: host " in str(slow.plan)
    assert autopar.Plan.from_json(slow.plan.to_json()) == slow.plan


def test_passes_wait_for_the_host_where_it_reads_what_routers_chose() -> None:
    """It has no lead there: not only the step, each pass takes as long as it does."""
    case = prepared(lambda: family("mixtral", 8))
    given = {"sample": case.batch, "loss": case.loss, "mesh": {"dp": 2, "ep": 2}, "microbatches": 1}
    free, slow = (compile_pinned(case.model, 2, cluster=on(seconds), **given) for seconds in (0.0, 1.0))
    costs, plain = slow.timeline.costs, free.timeline.costs
    forward, backward = costs.forward_seconds[0], costs.backward_seconds[0]
    assert forward == round(forward) > plain.forward_seconds[0]
    assert backward == round(backward) > plain.backward_seconds[0]
    updated = len(list(case.model.parameters()))
    assert costs.host_seconds[0] == forward + backward + updated
    for found in (free, slow):
        total = math.fsum(part.exposed_seconds for part in found.plan.cost.parts)
        assert total == pytest.approx(found.plan.step_seconds, rel=1e-9)
    waited = forward + backward - plain.forward_seconds[0] - plain.backward_seconds[0]
    left = slow.plan.step_seconds - slow.timeline.makespan_seconds
    assert slow.plan.cost.exposed_seconds("host") == pytest.approx(waited + left)


def test_fewer_microbatches_are_found_where_each_is_issued_again() -> None:
    """All at once is one microbatch's calls; and no plan is proven to be below what hosts take."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    given: dict[str, Any] = {"sample": torch.randn(16, 16), "loss": squares, "cluster": on(1e-3)}
    plan = autopar.plan(model, 2, **given)
    assert plan.microbatches == 1
    assert plan.search is not None
    assert 0 < plan.search.bound_seconds <= plan.step_seconds
