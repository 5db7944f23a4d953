"""What adding up gradients takes at least, before it is known which ranks sum them."""

from __future__ import annotations

import pytest
import torch

from autopar import Cluster
from autopar.cost_models import step
from autopar.options import Options
from autopar.search.gradients import Kind, Sums, adding

DEVICE = Cluster.load("h100").device
ELEMENTS = 10**6


def seconds(kind: Kind, **changes: object) -> float:
    given = {"shards": (((), 1),), "zero": 0, "offload": (), "microbatches": 4, "split": True} | changes
    return Sums(**given).seconds({kind: ELEMENTS}, Options(zero=given["zero"]), DEVICE)  # type: ignore[arg-type]


def test_products_that_are_put_off_add_to_the_sum_themselves() -> None:
    plain = Kind((), torch.float32, torch.float32, put_off=False)
    added = 3 / 4 * step.add_seconds(ELEMENTS, 4, 4, DEVICE)
    assert seconds(plain) == pytest.approx(added)
    assert seconds(plain._replace(put_off=True)) == 0
    assert seconds(plain._replace(put_off=True), split=False) == pytest.approx(added)


def test_a_narrow_gradient_becomes_a_wide_one() -> None:
    """The first when the second is added; the sum is there, nothing is sent."""
    narrow = Kind((), torch.bfloat16, torch.float32, put_off=False)
    moved = 3 * step.add_seconds(ELEMENTS, 2, 4, DEVICE) + step.copy_seconds(ELEMENTS, 2, 4, DEVICE)
    assert seconds(narrow) == pytest.approx(moved / 4)


def test_each_rank_adds_up_its_own_rows_where_gradients_are_scattered() -> None:
    kind = Kind((), torch.float32, torch.float32, put_off=False)
    assert seconds(kind, zero=2, shards=(((), 2),)) == pytest.approx(seconds(kind) / 2)


@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 7])
def test_any_number_of_microbatches_follows_from_three(zero: int, microbatches: int) -> None:
    kind, options = Kind((), torch.bfloat16, torch.float32, put_off=False), Options(zero=zero)
    sums = Sums((((), 2),), zero, (), microbatches, split=False)
    found = adding(sums, {kind: ELEMENTS}, options, DEVICE).each(microbatches)
    assert found == pytest.approx(sums.seconds({kind: ELEMENTS}, options, DEVICE))
