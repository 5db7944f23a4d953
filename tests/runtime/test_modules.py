"""The module tree of emitted code."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.errors import PlanError
from autopar.mesh import Mesh
from autopar.runtime import Axes, Container, declare
from autopar.runtime.modules import dtype_of


class Layer(nn.Module):
    def __init__(self, axes: Axes) -> None:
        super().__init__()
        self.axes = axes
        declare(self, "mlp.up.weight", (4, 2), torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.mlp.up.weight.T


class Stage(nn.Module):
    def __init__(self, axes: Axes) -> None:
        super().__init__()
        declare(self, "model.norm.weight", (2,), torch.float32, trainable=False)
        declare(self, "model.rotary.inv_freq", (3,), torch.float32, buffer=True)
        for i in range(2, 4):
            declare(self, f"model.layers.{i}", Layer(axes))


def test_the_tree_has_the_names_of_the_model() -> None:
    stage = Stage(Axes.alone(Mesh(), 0, "cpu"))
    names = ["model.norm.weight", "model.layers.2.mlp.up.weight", "model.layers.3.mlp.up.weight"]
    assert [name for name, _ in stage.named_parameters()] == names
    assert [name for name, _ in stage.named_buffers()] == ["model.rotary.inv_freq"]
    assert set(stage.state_dict()) == {*names, "model.rotary.inv_freq"}


def test_declared_tensors_have_shape_and_dtype_but_no_memory() -> None:
    stage = Stage(Axes.alone(Mesh(), 0, "cpu"))
    weight = stage.get_parameter("model.layers.2.mlp.up.weight")
    assert (weight.shape, weight.dtype, weight.device.type) == ((4, 2), torch.float64, "meta")
    assert weight.requires_grad
    assert not stage.get_parameter("model.norm.weight").requires_grad
    assert stage.get_buffer("model.rotary.inv_freq").is_meta


def test_containers_are_indexed_by_number() -> None:
    stage = Stage(Axes.alone(Mesh(), 0, "cpu"))
    assert isinstance(stage.model.layers, Container)
    assert stage.model.layers[3] is stage.get_submodule("model.layers.3")
    with pytest.raises(AttributeError):
        stage.model.layers[0]


def test_layers_of_one_class_have_their_own_scope() -> None:
    stage = Stage(Axes.alone(Mesh(), 0, "cpu"))
    assert [stage.model.layers[i].axes.scope for i in (2, 3)] == ["model.layers.2", "model.layers.3"]


def test_integers_can_be_parameters_that_do_not_train() -> None:
    module = nn.Module()
    declare(module, "table", (3,), torch.int64, trainable=False)
    assert module.get_parameter("table").dtype == torch.int64


@pytest.mark.parametrize("path", ["a.weight", "a"])
def test_a_path_is_declared_once(path: str) -> None:
    module = nn.Module()
    declare(module, "a.weight", (1,), torch.float32)
    with pytest.raises(PlanError, match=f"'{path}' is declared twice"):
        declare(module, path, (1,), torch.float32)


def test_a_path_can_not_lead_through_a_parameter() -> None:
    module = nn.Module()
    declare(module, "a", (1,), torch.float32)
    with pytest.raises(PlanError, match="'a' on the way is a Parameter"):
        declare(module, "a.weight", (1,), torch.float32)


def test_dtypes_by_name() -> None:
    assert dtype_of("bfloat16") is dtype_of("torch.bfloat16") is torch.bfloat16
    with pytest.raises(PlanError, match="'nn' is not a dtype"):
        dtype_of("nn")
