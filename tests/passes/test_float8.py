"""float8: which products, that they are torchao's own, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from autopar.codegen import emit
from autopar.errors import ArgumentError
from autopar.mesh import Mesh
from autopar.options import Options
from tests.codegen.programs import cut, folded, load
from tests.models import Case
from tests.pinned import compile_pinned

torchao = pytest.importorskip("torchao.float8", reason="make float8 installs torchao and runs these")

pytestmark = pytest.mark.filterwarnings("ignore:.*register_constant.*")


class Mlp(nn.Module):
    """Of the three products, the last has a size that the kernels can't take."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32, bias=False)
        self.last = nn.Linear(32, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.down(torch.nn.functional.silu(self.up(x)))
        return self.last(hidden).float().square().mean()


def case() -> Case:
    torch.manual_seed(0)
    model = Mlp().bfloat16()
    return Case(model, (torch.randn(4, 8, 32).bfloat16(),))


def emitted(of: Case):  # type: ignore[no-untyped-def]
    model = folded(of)
    return emit(model, cut(model, 1), Mesh(), microbatches=1, digest="", options=Options(float8=True))[0]


def test_products_with_sizes_of_16_are_in_float8() -> None:
    text = emitted(case()).text
    assert text.count("float8_linear(input_0, self.weight)") == 1
    assert text.count("float8_linear(h, self.weight)") == 1
    assert text.count("aten.linear(h, self.weight)  # bf16[4, 8, 3]") == 1


def test_numbers_are_those_of_torchao() -> None:
    one = case()
    reference = copy.deepcopy(one.model)
    config = torchao.Float8LinearConfig(emulate=True)
    torchao.convert_to_float8_training(reference, config=config, module_filter_fn=lambda module, name: name != "last")
    expected = reference(*one.batch)
    expected.backward()
    stage = load(emitted(one), one.model)
    loss = stage(*one.batch)
    loss.backward()
    assert torch.equal(loss, expected)
    assert not torch.equal(loss, one.model(*one.batch))  # it is lossy
    for name, parameter in reference.named_parameters():
        assert torch.equal(stage.get_parameter(name).grad, parameter.grad), name


@pytest.mark.parametrize(
    ("cluster", "given", "message"),
    [
        ("cpu", {"precision": "bf16"}, "'.*CPU.*' multiplies no float8 .*take a cluster that does, such as h100"),
        ("h100", {}, "float8=True with precision='model'.*say precision='bf16'"),
    ],
)
def test_refusals(cluster: str, given: dict[str, str], message: str) -> None:
    one = case()
    with pytest.raises(ArgumentError, match=message):
        compile_pinned(one.model, 1, sample=one.batch, cluster=cluster, float8=True, **given)
