"""Which biases decide the choice of experts and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.api import prepare
from autopar.errors import ArgumentError
from autopar.expert_capture import combine, dispatch, grouped_linear, route
from autopar.graph import Model, info
from autopar.passes.routers import name_routers, router_calls, weights_of
from autopar.passes.selection_bias import bias_of, selection_bias

EXPERTS = 4


class Layer(nn.Module):
    """Experts chosen by biased scores, and weighted as ``how`` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.gate = nn.Linear(8, EXPERTS, bias=how == "bias of the gate")
        self.experts = nn.Parameter(torch.randn(EXPERTS, 8, 8))
        if how == "frozen parameter":
            self.bias = nn.Parameter(torch.zeros(1, EXPERTS), requires_grad=False)
        elif how == "parameter":
            self.bias = nn.Parameter(torch.zeros(EXPERTS))
        else:
            self.register_buffer("bias", torch.zeros(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).sigmoid()
        biased = scores * (1 + self.bias) if self.how == "scale" else scores + self.bias
        values, chosen = biased.topk(2)
        weights = values if self.how == "weights" else scores.gather(1, chosen)
        if self.how == "mask":  # the bias reaches the loss by numbers alone
            weights = weights * (biased.argmax(-1, keepdim=True) == 0)
        routing = route(chosen, EXPERTS)
        return x + combine(grouped_linear(dispatch(x, routing), self.experts, routing), weights, routing)


class Routed(nn.Module):
    def __init__(self, how: str, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(how) for _ in range(layers)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(x, y)


def captured(how: str) -> Model:
    return prepare(Routed(how), (torch.randn(6, 8), torch.randn(6, 8)))[0]


@pytest.mark.parametrize("how", ["buffer", "frozen parameter", "mask"])
def test_a_bias_of_the_choice_is_found_and_is_a_buffer(how: str) -> None:
    model = selection_bias(captured(how))
    names = [bias_of(model, router) for router in router_calls(model)]
    assert names == ["layers.0.bias", "layers.1.bias"]
    for name in names:
        assert model.parameters[name].is_buffer
        assert not model.parameters[name].trainable
    block = next(block for block in model.blocks if block.kind == "layer")
    assert [info(node).role for node in block.parameters if info(node).name == "bias"] == ["buffer"]


@pytest.mark.parametrize("how", ["weights", "scale"])
def test_what_changes_weights_or_is_no_bias_is_not(how: str) -> None:
    with pytest.raises(ArgumentError, match="none of its 2 routers has one"):
        selection_bias(captured(how))


def test_a_bias_of_the_scores_themselves_is_not() -> None:
    model = captured("bias of the gate")
    assert [bias_of(model, router) for router in router_calls(model)] == ["layers.0.bias", "layers.1.bias"]


def test_a_bias_that_an_optimizer_may_change_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"'layers.0.bias', the selection bias of layers.0, .*requires_grad_"):
        selection_bias(captured("parameter"))


def test_routers_are_named_by_the_module_that_chooses() -> None:
    model = captured("buffer")
    routers = list(router_calls(model))
    assert [router.layer for router in routers] == ["layers.0", "layers.1"]
    assert [list(weights_of(model, router)) for router in routers] == [["layers.0.experts"], ["layers.1.experts"]]
    name_routers(model)
    assert {router.node.kwargs["layer"] for router in routers} == {""}
