"""In how many messages weights of a layer travel, against what the runtime sends."""

from __future__ import annotations

import math
from random import Random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.graph import Meta, ParameterInfo
from autopar.planner.rank_memory import stored_elements
from autopar.schedules.gradient_messages import Gradient, together
from autopar.schedules.weight_moves import MESSAGES
from autopar.search.layers import LayerWeight, Messages

PART = MESSAGES.part_bytes // 4  # elements of float32


def weight(rows: int, columns: int) -> LayerWeight:
    meta = Meta((rows, columns), torch.float32)
    return LayerWeight((), ParameterInfo("weight", meta), meta)


@settings(max_examples=80)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12 * PART)), min_size=1, max_size=9),
    st.sampled_from([2, 4, 64]),
    st.randoms(use_true_random=False),
)
def test_no_order_sends_gradients_in_fewer(sizes: list[tuple[int, int]], ranks: int, random: Random) -> None:
    """Some of whose rows ranks can't share evenly."""
    weights = [weight(rows, columns) for rows, columns in sizes]
    least = Messages.of(weights, ranks)
    shuffled = random.sample(weights, len(weights))
    fit = [ranks * stored_elements(each.known, each.meta.shape, ranks) == each.meta.numel for each in shuffled]
    pairs = zip(shuffled, fit, strict=True)
    gradients = [Gradient(each.meta.bytes, ranks, "alike", unit=0, fits=fits) for each, fits in pairs]
    assert least.scatters <= len(list(together(gradients)))
    assert least.gathers == sum(each.is_large(ranks) for each in weights)


def test_what_is_large_travels_by_itself() -> None:
    large, small = weight(64, PART), weight(8, 16)
    assert large.is_large(64)
    assert not weight(63, 2 * PART + 1).is_large(64), "its rows aren't shared evenly"
    assert Messages.of([large] * 3, 64) == (3, 3)
    assert Messages.of([large, small], 64) == (1, 2)
    many = MESSAGES.of_pass(64) // small.meta.bytes
    assert Messages.of([small] * (2 * many), 64).scatters == math.ceil(
        2 * many * small.meta.bytes / (MESSAGES.of_pass(64) + small.meta.bytes)
    )
