"""What becomes a unit, which units are one block, and what belongs to none."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from autopar.capture import capture
from autopar.graph import Block, Model, op_name
from autopar.passes.fold import fold
from autopar.passes.normalize_losses import normalize_losses
from tests.models import Case, mlp
from tests.random_models import Recipe, case_of
from tests.ranks.branching_models import u_shaped


def folded(case: Case) -> Model:
    return fold(normalize_losses(capture(case.model, case.batch)))


def units(model: Model) -> list[tuple[str, str, int]]:
    """Of each call its path, and kind and number of its block."""
    return [(call.path, model.block_of(call).kind, call.block) for call in model.calls]


def blocks_of_layers(model: Model) -> list[int]:
    return [block for path, _, block in units(model) if path.startswith("layers.")]


def ops(block: Block) -> list[str]:
    return [op_name(node) for node in block.ops]


@pytest.mark.parametrize(
    ("choices", "pattern"),
    [
        ({"layers": 4}, "AAAA"),
        ({"layers": 4, "window": 3}, "ABAB"),
        ({"layers": 4, "mixer": "mean"}, "ABAB"),
        ({"layers": 3, "uneven": True}, "ABA"),
        ({"layers": 2, "twice": 1}, "AAA"),
        ({"layers": 3, "frozen": "first"}, "ABC"),
    ],
    ids=str,
)
def test_layers_that_compute_alike_are_one_block(choices: dict[str, Any], pattern: str) -> None:
    found = blocks_of_layers(folded(case_of(Recipe(**choices))))
    names = {block: chr(ord("A") + k) for k, block in enumerate(dict.fromkeys(found))}
    assert "".join(names[block] for block in found) == pattern


def test_calls_of_a_block_have_their_own_parameters() -> None:
    model = folded(case_of(Recipe(layers=2)))
    first, second = (call for call in model.calls if call.path)
    assert first.parameters == tuple(name.replace("layers.1.", "layers.0.") for name in second.parameters)
    assert all(name.startswith("layers.0.") for name in first.parameters if name not in ("cos", "sin"))


def test_code_between_layers_belongs_to_the_one_before() -> None:
    """Residuals are added in the model's own loop: behind the last layer, too, where no other one follows."""
    model = folded(mlp(4))
    paths = [path for path, _, _ in units(model)]
    assert paths == ["", *(f"layers.{k}" for k in range(4)), ""]
    assert len(set(blocks_of_layers(model))) == 1
    layer, tail = model.block_of(model.calls[1]), model.block_of(model.calls[-1])
    assert ops(layer)[-1] == "aten.add.Tensor"
    assert ops(tail)[0] == "aten.linear.default"


def test_code_between_two_lists_belongs_to_neither() -> None:
    """Of a U: what goes into the first layer up is no part of the last one down, which is like those before it."""
    model = folded(u_shaped(4))
    down = [(path, block) for path, _, block in units(model) if path.startswith("down.")]
    assert [path for path, _ in down] == [f"down.{k}" for k in range(4)]
    assert len({block for _, block in down}) == 1
    names = {block.name for block in model.blocks if block.kind == "layer"}
    assert names == {
        "Residual",
        "Residual2",
        "Residual3",
    }  # down, up, and the last one up, behind which nothing is added


def test_tables_are_what_the_batch_alone_determines() -> None:
    """The mask and the targets' count; nothing that is made of a parameter."""
    model = folded(case_of(Recipe(batch="mask", positions="rotary", loss="ignored")))
    (tables,) = (block for block in model.blocks if block.kind == "tables")
    assert not tables.placeholders("parameter")
    assert "aten.ne.Scalar" in ops(tables)
    others = [block for block in model.blocks if block is not tables]
    assert not any("aten.ne.Scalar" in ops(block) for block in others)
    assert sum(kind == "tables" for _, kind, _ in units(model)) == 1


class Named(nn.Module):
    """Layers under names, and none in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.second(self.first(x).relu()) - y.sum(-1, keepdim=True)).square().mean()


def test_without_lists_the_model_s_own_modules_are_units() -> None:
    model = folded(Case(Named(), mlp(4).batch))
    assert [path for path, kind, _ in units(model) if kind == "layer"] == ["first", "second"]
