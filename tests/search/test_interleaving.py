"""What paths of interleaved lists count, over all cuts: of units of any lengths, and of layers beside other calls."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopar.schedules.placements import looped
from autopar.search.interleaving import Counts, Interleaving
from autopar.search.wholesale import Layers, Stored, least_seconds, placed

ROUNDED = 1 + 1e-9
FREE = Stored(0.0, 0.0, 0.0)

counted = st.lists(st.tuples(*[st.floats(0.0, 4.0)] * 2), min_size=1, max_size=5)
lengths = st.lists(st.tuples(*[st.floats(0.0, 3.0)] * 2), min_size=1, max_size=7)


def counts_of(stages: list[tuple[float, float]]) -> Counts:
    return Counts(*(np.array(column) for column in zip(*stages, strict=True)))


def cuts(units: int, stages: int) -> Iterator[list[tuple[int, int]]]:
    """Where each stage begins and ends."""
    for cut in itertools.combinations(range(1, units), stages - 1):
        yield list(itertools.pairwise((0, *cut, units)))


def least(counts: Counts, units: list[tuple[float, float]]) -> float:
    """Of all cuts, by trying them."""
    each = list(zip(counts.forward, counts.backward, strict=True))
    return min(
        math.fsum(f * a + b * c for (f, b), (i, k) in zip(each, cut, strict=True) for a, c in units[i:k])
        for cut in cuts(len(units), len(each))
    )


@settings(max_examples=60)
@given(counted, lengths)
def test_no_cut_has_less(stages: list[tuple[float, float]], units: list[tuple[float, float]]) -> None:
    assume(len(stages) <= len(units))
    counts = counts_of(stages)
    assert counts.seconds(units) <= least(counts, units) * ROUNDED
    if len(stages) == len(units):
        assert counts.seconds(units) == pytest.approx(least(counts, units)), "there is one cut"


def test_a_unit_may_be_in_as_many_stages_as_there_are_units_to_spare() -> None:
    """The short one may be in the second stage, which counts double, but not in the third one."""
    units = [(1.0, 0.0), (0.5, 0.0), (1.0, 0.0), (1.0, 0.0)]
    second, third = (
        counts_of([(1.0, 0.0), *stages]) for stages in ([(2.0, 0.0), (1.0, 0.0)], [(1.0, 0.0), (2.0, 0.0)])
    )
    assert second.seconds(units) == pytest.approx(least(second, units)) == pytest.approx(3.5 + 0.5)
    assert third.seconds(units) == pytest.approx(least(third, units)) == pytest.approx(3.5 + 1.0)


@settings(max_examples=60)
@given(counted, st.integers(1, 5), st.integers(0, 3), st.integers(0, 3))
def test_no_cut_of_equal_layers_has_less(
    stages: list[tuple[float, float]], count: int, ahead: int, behind: int
) -> None:
    """Beside other calls, which take no time and may be all that there is in a stage."""
    assume(len(stages) <= ahead + count + behind)
    counts, none, passes = counts_of(stages), (0.0, 0.0), (1.0, 2.0)
    exact = least(counts, [none] * ahead + [passes] * count + [none] * behind)
    found, longer = counts.layer_seconds(count, np.array([passes, (2.0, 5.0)]), ahead, behind)
    assert found <= exact * ROUNDED
    assert longer >= 2 * found
    if len(stages) == ahead + count + behind:
        assert found == pytest.approx(exact), "each stage has one call"


def layers_of(count: int, ahead: int, behind: int) -> Layers:
    return Layers(count, ahead, behind, 1.0, 1.2, 0.8, (0.0, 0.0), np.zeros(1), np.zeros(1), 0.0)


shapes = pytest.mark.parametrize(("ranks", "chunks", "microbatches"), [(2, 2, 8), (3, 2, 9), (4, 2, 16), (2, 3, 7)])


@shapes
@pytest.mark.parametrize(("ahead", "behind", "spare"), [(0, 0, 0), (1, 1, 0), (0, 1, 1), (2, 0, 2), (1, 1, 3)])
def test_stages_that_have_a_layer_in_any_case(
    ranks: int, chunks: int, microbatches: int, ahead: int, behind: int, spare: int
) -> None:
    """Those that have one in each cut. Of ranks that wait long for others the mean is what counts, as of paths."""
    stages = ranks * chunks
    count = stages + spare - ahead - behind
    layers, kept = layers_of(count, ahead, behind), np.ones(ranks)
    counts = Interleaving().counts(ranks, chunks, microbatches, count, ends=True)
    works = placed(layers, looped(ranks, chunks), counts, microbatches, kept, ends=True)
    layer = range(ahead, ahead + count)
    having = np.array(
        [[any(i in layer for i in range(a, b)) for a, b in cut] for cut in cuts(ahead + count + behind, stages)]
    ).all(axis=0)
    must = np.zeros(stages, dtype=bool)
    for rank in range(ranks):
        must[rank::ranks] = works.must[rank]
    assert must.tolist() == having.tolist()
    assert (works.waits[1] >= -1e-9).all(), "what a rank recomputes counts no more than in any of its stages"
    (found,) = least_seconds(layers, [FREE], replace(works, idle=(100.0, 100.0)), microbatches, 1e9)
    assert found == pytest.approx(counts.layer_seconds(count, np.array([[1.0, 2.0]]), ahead, behind)[0] + 100 * 3)
