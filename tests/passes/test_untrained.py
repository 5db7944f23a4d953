"""Which weights count as frozen because no gradient reaches them."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from autopar.graph import Model
from autopar.preparation import Captured
from tests.ranks.test_uncommon_weights import (
    Early,
    Idle,
    Plain,
    Tied,
    TiedConstants,
    TiedToAConstantHead,
    TiedToAConstantTable,
    case,
)


class Borrowed(Plain):
    """A weight that several layers read, behind all of which the gradient stops."""

    def layer(self, number: int, x: Tensor) -> Tensor:
        made = super().layer(number, x)
        return (made * self.layers[3].norm.weight).detach() if number < 2 else made


def prepared(model: type[nn.Module]) -> Model:
    given = case(model)
    return Captured(given.model, given.batch, given.loss).on("cpu")[False]


def frozen(model: Model) -> set[str]:
    return {name for name, known in model.parameters.items() if not known.trainable}


@pytest.mark.parametrize("model", [Plain, Tied, TiedToAConstantTable, TiedToAConstantHead, Early, Idle, Borrowed])
def test_what_one_reader_trains_stays_trained(model: type[nn.Module]) -> None:
    """And what one call alone reads: it has no gradient on ranks either."""
    assert frozen(prepared(model)) == set()


def test_a_tied_weight_without_any_gradient_is_frozen() -> None:
    found = prepared(TiedConstants)
    assert frozen(found) == {"embedding.weight"}
    assert sum("embedding.weight" in call.parameters for call in found.calls) == 2
