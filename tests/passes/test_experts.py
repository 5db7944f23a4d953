"""Expert layers in a capture: transformers' registry, routers that give the wrong shapes, loops over who was chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.errors import CaptureError
from autopar.graph import Model, info, op_name
from autopar.passes.captured_loops import check_loops
from autopar.passes.functionalize import functionalize
from tests.models import Case, Float64, prepared
from tests.moe_models import experts_of, family
from tests.shared_captures import graph_of

FIVE = ["route", "dispatch", "grouped_linear", "grouped_linear", "combine"]


@pytest.fixture(scope="module")
def mixtral() -> Case:
    return prepared(lambda: family("mixtral", 2, experts=4, layers=1))


def captured(case: Case) -> Model:
    with Float64():
        return graph_of(case.model, case.batch)


def expert_ops(model: Model) -> list[str]:
    named = (op_name(node) for block in model.blocks for node in block.ops)
    return [name for name in named if name in {*FIVE, "grouped_bias"}]


# --- what is captured ------------------------------------------------------------------------------


def test_five_operations_stand_for_an_expert_layer(mixtral: Case) -> None:
    model = captured(mixtral)
    assert expert_ops(model) == FIVE
    routings = [n for block in model.blocks for n in block.ops if op_name(n) == "route"]
    assert all(info(routing).is_object for routing in routings)
    assert [info(routing).source.partition(":")[0] for routing in routings] == ["modeling_mixtral.py"]


@pytest.mark.parametrize("form", ["batched_mm", "grouped_mm"])
def test_the_form_that_a_config_names_makes_no_difference(mixtral: Case, form: str) -> None:
    before = captured(mixtral).fingerprint
    mixtral.model.set_experts_implementation(form)
    assert captured(mixtral).fingerprint == before
    mixtral.model.set_experts_implementation("eager")


def test_biases_and_transposed_weights_are_told_apart() -> None:
    model = captured(prepared(lambda: family("gpt_oss", 2, experts=4, layers=1)))
    product = ["grouped_linear", "grouped_bias"]
    assert expert_ops(model) == ["route", "dispatch", *product, *product, "combine"]
    products = [n for block in model.blocks for n in block.ops if op_name(n) == "grouped_linear"]
    assert [n.kwargs for n in products] == [{"transposed": True}] * 2


def test_neither_the_model_nor_the_registry_is_changed(mixtral: Case) -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    before = sorted(ALL_EXPERTS_FUNCTIONS)
    captured(mixtral)
    with pytest.raises(CaptureError):
        capture(mixtral.model, mixtral.batch, loss=lambda output, batch: output.logits)
    assert sorted(ALL_EXPERTS_FUNCTIONS) == before
    assert {m.config._experts_implementation for m in experts_of(mixtral.model)} == {"eager"}


# --- routers ---------------------------------------------------------------------------------------


def _flat_index(weights: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    return weights, index.reshape(-1)


def _one_weight(weights: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    return weights[:, :1], index


def _real_index(weights: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    return weights, index.to(weights.dtype)


@pytest.mark.parametrize("change", [_flat_index, _one_weight, _real_index])
def test_a_router_that_gives_something_else_is_refused(change: Callable[..., Any]) -> None:
    case = prepared(lambda: family("mixtral", 2, experts=4, layers=1))
    router = next(m for m in case.model.modules() if type(m).__name__ == "MixtralTopKRouter")
    router.register_forward_hook(lambda module, args, made: (made[0], *change(*made[1:])))
    with pytest.raises(CaptureError, match=r"the router gives MixtralExperts (.|\n)*modeling_mixtral\.py:\d+"):
        captured(case)


# --- loops over the experts that some token chose --------------------------------------------------


class Looped(nn.Module):
    """Experts of one matrix each, in a loop that ``body`` is in."""

    def __init__(self, found: Callable[[Tensor], Any], body: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6, 6))
        self.gate = nn.Linear(6, 4)
        self.found, self.body = found, body

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.gate(x).softmax(-1).topk(2)
        mask = F.one_hot(index, 4).permute(2, 1, 0)
        out = torch.zeros_like(x)
        for e in self.found(mask):
            out = self.body(self, out, x, mask, weights, e)
        return out.pow(2).sum()


def _rows(self: Looped, out: Tensor, x: Tensor, mask: Tensor, weights: Tensor, e: Tensor) -> Tensor:
    e = e.reshape(-1)[0]
    slot, token = torch.where(mask[e])
    return out.index_add(0, token, (x[token] @ self.weight[e]) * weights[token, slot, None])


def _something(self: Looped, out: Tensor, x: Tensor, mask: Tensor, weights: Tensor, e: Tensor) -> Tensor:
    return out + x @ self.weight[e.reshape(-1)[0]]


def _of_another_mask(self: Looped, out: Tensor, x: Tensor, mask: Tensor, weights: Tensor, e: Tensor) -> Tensor:
    return _rows(self, out, x, mask.roll(1, 0), weights, e)


def _chosen(mask: Tensor) -> Tensor:
    return (mask.sum(dim=(-1, -2)) > 0).nonzero()


CHOSEN: list[Callable[[Tensor], Any]] = [
    _chosen,
    lambda mask: torch.nonzero(mask.sum(dim=(1, 2)) > 0).squeeze(-1),
    lambda mask: torch.where(mask.bool().any(-1).any(-1) if mask.dim() == 1 else mask.sum((1, 2)) != 0)[0],
    lambda mask: torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero(as_tuple=True)[0],
]


def looped(found: Callable[[Tensor], Any], body: Callable[..., Tensor]) -> Case:
    x = torch.randn(6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return Case(Looped(found, body).double(), x)


@pytest.mark.parametrize("found", CHOSEN)
def test_a_loop_over_chosen_experts_runs_over_all(found: Callable[[Tensor], Any]) -> None:
    assert "route" in expert_ops(captured(looped(found, _rows)))


REFUSED = [
    (_chosen, _something),
    (_chosen, _of_another_mask),
    (lambda mask: (mask.sum(dim=(-1, -2)) > 1).nonzero(), _rows),
    (lambda mask: (mask.sum(dim=(-1, -2)) == 0).nonzero(), _rows),
    (lambda mask: mask[:, 0].sum(dim=-1).nonzero(), _rows),
]


@pytest.mark.parametrize(("found", "body"), REFUSED)
def test_a_loop_that_leaves_out_what_it_would_do_is_refused(found: Callable[..., Any], body: Any) -> None:
    """Over numbers that have a body of their own, or over fewer than all that have rows."""
    case = looped(found, body)
    with pytest.raises(CaptureError, match=r"the loop at test_experts\.py:\d+ goes over indices that nonzero"):
        check_loops(functionalize(capture(case.model, case.batch)))


def test_all_numbers_at_once_are_refused() -> None:
    case = looped(lambda mask: _chosen(mask).flatten().tolist(), _rows)
    with pytest.raises(CaptureError, match=r"test_experts\.py:\d+"):
        capture(case.model, case.batch)
