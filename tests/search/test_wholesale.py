"""Bounds of many points at once against all that ranks can do."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopar.cost_models.step import Collectives, slowed_seconds
from autopar.schedules import Costs, generate, lower, simulate_timeline
from autopar.schedules.pass_times import PassTimes
from autopar.schedules.placements import looped, v_shaped
from autopar.schedules.weight_moves import WeightMoves
from autopar.search import hulls
from autopar.search.hulls import Array
from autopar.search.interleaving import Interleaving
from autopar.search.keeping import Keeping, folded_kept, looped_kept, straight_kept
from autopar.search.wholesale import (
    Host,
    Layers,
    Ranks,
    Stored,
    folded,
    least_seconds,
    placed,
    side_by_side,
    straight,
    without_memory,
)

ROUNDED = 1 + 1e-9
SAVED, EXTRA = (4.0, 2.0, 1.0), (0.0, 0.3, 1.0)
FREE = Stored(0.0, 0.0, 0.0)


def layers_of(count: int, forward: float = 1.0, inputs: float = 1.2, weights: float = 0.8) -> Layers:
    """Nothing else beside them, and each may keep one of three amounts."""
    return Layers(count, 0, 0, forward, inputs, weights, (0.0, 0.0), np.array(SAVED), np.array(EXTRA), 0.0)


def shares_of(count: int, ranks: int) -> Iterator[tuple[int, ...]]:
    """How many layers each rank may have."""
    for cut in itertools.combinations(range(1, count), ranks - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cut, count)))


def least_extra(count: int, kept: float, room: float) -> float:
    """What so many layers recompute, each of which keeps one of three amounts."""
    ways = itertools.combinations_with_replacement(zip(SAVED, EXTRA, strict=True), count)
    return min((sum(e for _, e in way) for way in ways if kept * sum(s for s, _ in way) <= room), default=math.inf)


def shortest(layers: Layers, way: Stored, ranks: Ranks, microbatches: int, budget: float) -> float:
    """Of all cuts into one stage per rank, each of which waits for those ahead at the beginning, and at the end."""
    best = math.inf
    forward, inputs = (max(seconds, way.gathered) for seconds in (layers.forward, layers.inputs))
    latency = layers.count * (forward + inputs)  # of one microbatch
    for counts in shares_of(layers.count, ranks.count):
        step, ahead = latency, 0
        for count, kept in zip(counts, ranks.kept, strict=True):
            extra = least_extra(count, kept, budget - way.state * count)
            backward = max(count * (layers.inputs + layers.weights) + extra, count * way.gathered)
            waits = ahead * (forward + ranks.ends * max(layers.inputs + layers.weights, way.gathered))
            step = max(step, waits + microbatches * (count * forward + backward))
            ahead += count
        best = min(best, step)
    return best


@settings(max_examples=60)
@given(
    st.integers(2, 6),
    st.integers(1, 3),
    st.integers(1, 4),
    st.floats(2.0, 60.0),
    st.floats(0.0, 4.0),
    st.floats(0.0, 3.0),
    st.booleans(),
)
def test_no_cut_is_below(
    count: int, ranks: int, microbatches: int, budget: float, state: float, gathered: float, ends: bool
) -> None:
    ranks = min(ranks, count)
    layers, kept = layers_of(count), straight_kept(ranks, microbatches)
    ways = [FREE, Stored(state, gathered, 0.0)]
    every = straight(layers, ranks, microbatches, kept, ends=ends)
    found = least_seconds(layers, ways, every, microbatches, budget)
    for way, bound in zip(ways, found, strict=True):
        assert bound <= shortest(layers, way, every, microbatches, budget) * ROUNDED
    some = folded(layers, ranks, kept, ends=ends, stages=2, hops=0)  # knows less of what ranks wait for
    assert (
        least_seconds(layers, ways, some, microbatches, budget)[1]
        <= shortest(layers, ways[1], every, microbatches, budget) * ROUNDED
    )


@settings(max_examples=40)
@given(st.lists(st.tuples(st.floats(0.5, 2.0), st.floats(0.1, 1.0)), min_size=2, max_size=3), st.floats(4.0, 40.0))
def test_several_kinds_of_layers_at_once_take_what_each_takes(kinds: list[tuple[float, float]], budget: float) -> None:
    """With copies to the host, of passes and of what layers may keep, and with other numbers of ways."""
    ways = [FREE, Stored(1.0, 1.5, 0.5, 0.1, 0.2, 0.3, 0.2), Stored(0.5, 0.0, 0.0)]
    kept = straight_kept(2, 4)
    ahead = kept[None], np.zeros((1, 2))
    host = Host(2.0, math.inf, kept[None], np.ones((1, 2)), ahead, ahead, np.zeros(2))
    rows = []
    for number, (seconds, share) in enumerate(kinds, start=1):
        layers = replace(
            layers_of(6, seconds, 1.2 * seconds),
            share=share,
            working=share,
            beside=(seconds, 2 * seconds),
            sent=(9 * seconds, share),
        )
        rows.append((layers, number))
    every = replace(straight(rows[0][0], 2, 4, kept, ends=True), transient=True, passing=(1, 1))
    for away in (None, host):
        each = [least_seconds(layers, ways[:number], every, 4, budget, away) for layers, number in rows]
        both = [way for _, number in rows for way in ways[:number]]
        assert least_seconds(side_by_side(rows), both, every, 4, budget, away) == pytest.approx(np.concatenate(each))
        shares = (replace(some, saved=some.share * some.saved, extra=some.share * some.extra) for some, _ in rows)
        spelled = [least_seconds(replace(some, share=1.0), ways[:1], every, 4, budget, away) for some in shares]
        assert np.concatenate(spelled) == pytest.approx([found[0] for found in each])


def test_what_is_met() -> None:
    """By one rank, and by ranks that all have as much."""
    layers = layers_of(6)
    alone = straight(layers, 1, 4, np.ones(1), ends=False)
    assert least_seconds(layers, [FREE], alone, 4, 100.0) == pytest.approx([4 * 6 * 3.0])
    assert least_seconds(layers, [FREE], alone, 4, 24.0) == pytest.approx([72.0]), "all is kept"
    assert least_seconds(layers, [FREE], alone, 4, 12.0) == pytest.approx([4 * 6 * 3.3]), "half is, of each"
    assert np.isinf(least_seconds(layers, [FREE], alone, 4, 5.9)).all()
    assert least_seconds(layers, [Stored(1.0, 0.0, 0.0)], alone, 4, 18.0) == pytest.approx([4 * 6 * 3.3])


def test_passes_last_as_long_as_their_gathers() -> None:
    """A forward, and of backwards that are split the part before the weights' gradients."""
    layers = layers_of(6)
    alone = straight(layers, 1, 4, np.ones(1), ends=False)
    for gathered, whole, split in ((0.5, 3.0, 3.0), (1.5, 1.5 + 2.0, 1.5 + 1.5 + 0.8), (3.0, 6.0, 3.0 + 3.0 + 0.8)):
        way = [Stored(0.0, gathered, 0.0)]
        assert least_seconds(layers, way, alone, 4, 100.0) == pytest.approx([4 * 6 * whole])
        assert least_seconds(layers, way, replace(alone, puts_off=True), 4, 100.0) == pytest.approx([4 * 6 * split])


def test_scatters_go_one_after_the_other() -> None:
    """After the first forward through all layers, beside whatever passes there are."""
    layers = layers_of(6)
    alone = straight(layers, 1, 4, np.ones(1), ends=False)
    for scattered in (2.0, 4.0, 7.0):
        way = [Stored(0.0, 0.0, scattered)]
        found = max(4 * 6 * 3.0, 6 * 1.0 + 4 * 6 * scattered)
        for off in (False, True):
            assert least_seconds(layers, way, replace(alone, puts_off=off), 4, 100.0) == pytest.approx([found])


def held_by(held: float, gathered: float, scattered: float) -> Stored:
    """Both hold such a share of the device."""
    return Stored(0.0, gathered, scattered, gather_held=held, scatter_held=held)


def test_collectives_slow_the_passes_that_they_run_beside() -> None:
    """For as long as these last, by the formula of the cost model; the last layer's scatter runs beside none."""
    layers, held = layers_of(6), 0.5
    alone = straight(layers, 1, 4, np.ones(1), ends=False)

    def slowed(seconds: float, moved: float) -> float:
        return seconds + slowed_seconds([Collectives(moved, held * moved)], seconds)

    for gathered, scattered in ((0.5, 0.0), (0.0, 1.0), (2.9, 2.0)):
        way, beside = [held_by(held, gathered, scattered)], 5 / 6 * min(scattered, 2.0)
        whole = max(gathered, slowed(1.0, gathered)) + slowed(2.0, gathered + beside)
        stream = 2 * gathered + scattered
        assert least_seconds(layers, way, alone, 4, 100.0) == pytest.approx([4 * 6 * max(whole, stream)])
        apart = slowed(1.2, gathered), slowed(0.8, 5 / 6 * min(scattered, 0.8))
        split = max(gathered, slowed(1.0, gathered)) + max(gathered, apart[0]) + apart[1]
        if scattered <= 2 * 0.8:
            found = least_seconds(layers, way, replace(alone, puts_off=True), 4, 100.0)
            assert found == pytest.approx([4 * 6 * split])


def test_what_a_rank_moves_goes_one_after_the_other() -> None:
    """Of four layers in two stages; gradients after all layers' first forward, and ten forwards' gathers."""
    layers, none, four = layers_of(8), np.ones(2), 4
    for off in (False, True):
        works = replace(folded(layers, 2, none, ends=not off, stages=2, hops=2), puts_off=off)
        for way, seconds in (
            (Stored(0.0, 3.0, 0.0), 12 * four * 6.0),
            (Stored(0.0, 0.0, 9.0), 8 * 1.0 + 12 * four * 9.0),
            (Stored(0.0, 0.1, 9.0), 8 * 1.0 + 10 * four * 0.1 + 12 * four * 9.0),
            (Stored(0.0, 3.0, 9.0), 12 * four * (6.0 + 9.0)),
        ):
            assert least_seconds(layers, [way], works, 12, 1e9) == pytest.approx([seconds])


def test_the_first_gather_is_over_when_a_rank_begins() -> None:
    """Of two layers on each rank, the first forwards need 1 instead of 1.5 seconds; the second rank waits for those of
    the first one."""
    layers = layers_of(4)
    works = straight(layers, 2, 12, straight_kept(2, 12), ends=True)
    found = least_seconds(layers, [Stored(0.0, 1.5, 0.0)], works, 12, 1e9)
    passes = 12 * 2 * 3.5 - 2 * (1.5 - 1.0)
    assert found == pytest.approx([works.share @ (passes, passes + 2 * 3.0)])


def test_a_layer_that_a_stage_has_in_any_case_is_no_other_one() -> None:
    """Two ranks with two stages, and room for four layers: the fifth recomputes, with the others of its rank."""
    none = np.zeros((2, 2))
    works = Ranks(
        np.full(2, 0.5), (none, none), none == 0, (100.0, 100.0), np.zeros(2), True, False, np.ones(2), True, 2
    )
    extra = float(np.interp(-8 / 3, [-4.0, -2.0], [0.0, 0.3]))
    found = least_seconds(layers_of(5), [FREE], works, 4, 8.0)
    assert found == pytest.approx([4 * (5 * 3.0 + 3 * extra) / 2 + 100 * 3.0])


def test_ranks_wait_for_each_other() -> None:
    """With one microbatch, everything runs one after the other; with many, half of the bubble counts at least."""
    layers = layers_of(8)
    one = straight(layers, 4, 1, straight_kept(4, 1), ends=True)
    assert least_seconds(layers, [FREE], one, 1, 100.0) == pytest.approx([8 * 3.0])
    many = straight(layers, 4, 16, straight_kept(4, 16), ends=True)
    bubble = 3 * 2 * 3.0
    (found,) = least_seconds(layers, [FREE], many, 16, 1e9)
    assert 16 * 6.0 + 0.4 * bubble < found <= 16 * 6.0 + bubble
    counts = Interleaving().counts(4, 2, 16, 8, ends=True)
    sending = replace(layers, sent=(0.5, 0.25))
    (later,) = least_seconds(sending, [FREE], one, 1, 100.0)
    assert later == pytest.approx(8 * 3.0 + 3 * 0.75), "each rank sends to the next, and back"
    single = Interleaving().counts(4, 2, 1, 8, ends=True)
    for works, hops in (
        (placed(layers, looped(4, 2), single, 1, np.ones(4), ends=True), 7),
        (folded(layers, 4, np.ones(4), ends=True, stages=2, hops=6), 6),
    ):
        (later,) = least_seconds(sending, [FREE], works, 1, 100.0)
        assert later == pytest.approx(8 * 3.0 + hops * 0.75), "one microbatch crosses all of them"
    rounds = placed(layers, looped(4, 2), counts, 16, looped_kept(4, 16, 2), ends=True)
    (found,) = least_seconds(layers, [FREE], rounds, 16, 1e9)
    assert found == pytest.approx(16 * 6.0 + bubble / 2), "each stage has one layer"
    idle = replace(rounds, idle=(100.0, 100.0))  # the mean is what counts
    (before,), (later,) = (least_seconds(each, [FREE], idle, 16, 1e9) for each in (layers, sending))
    assert later == pytest.approx(before + counts.sent(sending.sent))
    assert counts.sent(sending.sent) > 2 * 0.75
    few = replace(layers_of(4), sent=(0.5, 0.25))
    (slowest,) = least_seconds(few, [FREE], straight(few, 4, 8, straight_kept(4, 8), ends=True), 8, 1e9)
    assert slowest == pytest.approx((8 + 3) * 3.0 + 3 * 0.75), "the last rank waits for all others"


@settings(max_examples=40)
@given(
    st.integers(4, 9),
    st.sampled_from([(2, 2), (2, 3), (3, 2), (4, 2)]),
    st.integers(1, 6),
    st.floats(0.0, 4.0),
    st.floats(0.0, 4.0),
    st.sampled_from(["interleaved", "1f1b", "zb-h1", "v-half", "v-min"]),
    st.tuples(st.floats(0.0, 2.0), st.floats(0.0, 2.0)),
)
def test_no_timeline_is_below(
    count: int,
    shape: tuple[int, int],
    microbatches: int,
    gathered: float,
    scattered: float,
    name: str,
    sent: tuple[float, float],
) -> None:
    """Of equal layers, cut in all ways, whose weights are gathered for each pass, and gradients scattered after it,
    with messages between ranks."""
    ranks, chunks = shape
    stages = ranks * {"interleaved": chunks, "v-half": 2, "v-min": 2}.get(name, 1)
    assume(stages <= count)
    layers, kept = replace(layers_of(count), sent=sent), np.ones(ranks)
    whole, split = name in ("interleaved", "1f1b"), name in ("zb-h1", "v-half", "v-min")
    if name == "interleaved":
        counts = Interleaving().counts(ranks, chunks, microbatches, count, ends=True)
        works = placed(layers, looped(ranks, chunks), counts, microbatches, kept, ends=True)
    elif name == "v-half":
        counts = Interleaving().on_v(ranks, microbatches, count)
        works = placed(layers, v_shaped(ranks), counts, microbatches, kept, ends=False)
    elif name == "v-min":
        works = folded(layers, ranks, kept, ends=False, stages=2, hops=2 * (ranks - 1))
    else:
        works = straight(layers, ranks, microbatches, kept, ends=whole)
    ways = [FREE, *(held_by(held, gathered, sent) for sent in (0.0, scattered) for held in (0.0, 0.2))]
    found = least_seconds(without_memory(layers), ways, replace(works, puts_off=split), microbatches, 1e9)
    for way, bound in zip(ways, found, strict=True):
        assert bound <= min(timelines(name, layers, way, stages, ranks, microbatches)) * ROUNDED


def slowed(seconds: float, beside: Sequence[float], way: Stored) -> float:
    """A pass with collectives that run beside, until it ends."""
    return seconds + way.gather_held * min(sum(beside), seconds / (1 - way.gather_held))


def timelines(name: str, layers: Layers, way: Stored, stages: int, ranks: int, microbatches: int) -> Iterator[float]:
    """Seconds of all cuts."""
    chunks = stages // ranks if name == "interleaved" else None
    split = name in ("zb-h1", "v-half", "v-min")
    for cut in shares_of(layers.count, stages):
        forward = [slowed(n * layers.forward, [n * way.gathered], way) for n in cut]
        sent = [way.scattered * n for n in cut]
        completing = [n * (layers.weights + (0.0 if split else layers.inputs)) for n in cut]
        left = [max(s / n, s - c * (n - 1) / n) for s, c, n in zip(sent, completing, cut, strict=True)]
        hidden = [s - rest for s, rest in zip(sent, left, strict=True)]
        if split:
            weights = [slowed(c, [h], way) for c, h in zip(completing, hidden, strict=True)]
            inputs = [slowed(n * layers.inputs, [n * way.gathered], way) for n in cut]
            backward = [i + w for i, w in zip(inputs, weights, strict=True)]
        else:
            beside = [[n * way.gathered, h] for n, h in zip(cut, hidden, strict=True)]
            backward = [slowed(c, some, way) for c, some in zip(completing, beside, strict=True)]
            weights = [n * layers.weights for n in cut]
        costs = Costs(
            forward_seconds=tuple(forward),
            backward_seconds=tuple(backward),
            weight_seconds=tuple(weights),
            send_forward_seconds=(layers.sent[0],) * stages,
            send_backward_seconds=(layers.sent[1],) * stages,
            reduce_seconds=(0.0,) * stages,
            activation_bytes=(0,) * stages,
            step_seconds=(0.0,) * ranks,
            gather_seconds=tuple(n * way.gathered for n in cut),
            scatter_seconds=tuple(left),
            scattering_seconds=tuple(sent),
        )
        made = generate(name, ranks, microbatches, chunks=chunks, costs=PassTimes.of(costs))
        moves = WeightMoves("pass" if way.gathered else "", scatters=bool(way.scattered))
        yield simulate_timeline(lower(made, costs.seconds, moves), costs).makespan_seconds


def test_what_lies_beside_the_layers() -> None:
    layers = replace(layers_of(4), beside=(2.0, 3.0))
    ranks = straight(layers, 2, 8, straight_kept(2, 8), ends=True)
    (without,) = least_seconds(layers_of(4), [FREE], ranks, 8, 100.0)
    (somewhere,) = least_seconds(layers, [FREE], ranks, 8, 100.0)
    (split,) = least_seconds(layers, [FREE], replace(ranks, spreads_head=True), 8, 100.0)
    assert split == pytest.approx(without + 8 * 5.0 / 2)
    assert split <= somewhere


@settings(max_examples=60)
@given(st.integers(2, 9), st.integers(1, 4), st.floats(0.0, 9.0), st.sampled_from(["straight", "v"]), st.booleans())
def test_the_rank_of_the_last_call_has_fewer_layers(
    count: int, ranks: int, last: float, placement: str, ends: bool
) -> None:
    """Of all ways to share whole layers, the best takes no less, and as much if no rank waits for others."""
    layers = replace(layers_of(count), beside=(last, 0.0), last=(last, 0.0))
    kept, home = np.ones(ranks), 0 if placement == "v" else ranks - 1
    if placement == "v":
        works = folded(layers, ranks, kept, ends=ends, stages=2, hops=2 * (ranks - 1))
    else:
        works = straight(layers, ranks, 4, kept, ends=ends)
    (found,) = least_seconds(layers, [FREE], replace(works, last=home), 4, 1e9)
    slowest = min(
        max(4 * (3.0 * n + (last if rank == home else 0.0)) for rank, n in enumerate(shares))
        for shares in itertools.product(range(count + 1), repeat=ranks)
        if sum(shares) == count
    )
    (unknown,) = least_seconds(layers, [FREE], works, 4, 1e9)
    assert unknown <= found
    idle = replace(works, idle=(0.0, 0.0), ahead=np.zeros(ranks), waits=(np.zeros((ranks, 1)),) * 2)
    (least,) = least_seconds(layers, [FREE], replace(idle, share=np.full(ranks, 1 / ranks), last=home), 4, 1e9)
    latency = count * (1.0 + (2.0 if ends else 1.2)) + last
    assert max(slowest, latency) == pytest.approx(least)


def test_a_split_head_may_be_computed_where_ranks_wait() -> None:
    """Which paths by way of the last backwards count already."""
    layers, none = replace(layers_of(4), beside=(2.0, 3.0)), np.ones(2)
    counts = Interleaving().counts(2, 2, 8, 4, ends=True)
    works = replace(placed(layers, looped(2, 2), counts, 8, none, ends=True), spreads_head=True)
    (without,) = least_seconds(layers_of(4), [FREE], works, 8, 1e9)
    (beside,) = least_seconds(layers, [FREE], works, 8, 1e9)
    (meanwhile,) = least_seconds(layers, [FREE], replace(works, skips_head=True), 8, 1e9)
    assert meanwhile == pytest.approx(without)
    assert beside > without


def host_of(ranks: Ranks, microbatches: int, rate: float) -> Host:
    none = np.zeros(ranks.count)
    times, ahead = (microbatches / ranks.kept)[None], (ranks.kept[None], none[None])
    return Host(rate, math.inf, ranks.kept[None], times, ahead, ahead, none)


def test_copies_to_the_host_are_as_fast_as_they_are() -> None:
    """Instead of what would be recomputed: for nothing, at some price, or not at all."""
    layers, microbatches = layers_of(8), 8
    ranks = straight(layers, 4, microbatches, straight_kept(4, microbatches), ends=True)
    (roomy,) = least_seconds(layers, [FREE], ranks, microbatches, 1e9)
    (tight,) = least_seconds(layers, [FREE], ranks, microbatches, 10.0)
    found = [
        float(least_seconds(layers, [FREE], ranks, microbatches, 10.0, host_of(ranks, microbatches, rate))[0])
        for rate in (1e9, 0.7, 1e-9)
    ]
    assert roomy < tight
    assert found[0] == pytest.approx(roomy, rel=0.02), "between two amounts, the better of both counts"
    assert found[0] < found[1] < found[2]


def test_what_is_copied_and_recomputed_is_no_more_than_between_two_amounts(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, microbatches = layers_of(8), 8
    ranks = straight(layers, 4, microbatches, straight_kept(4, microbatches), ends=True)
    host = host_of(ranks, microbatches, 0.7)
    (found,) = least_seconds(layers, [FREE], ranks, microbatches, 10.0, host)
    (rough,) = least_seconds(layers, [FREE], ranks, microbatches, 10.0, host._replace(roughly=True))
    with monkeypatch.context() as patched:
        patched.setattr(hulls, "_EVEN", 5000)
        (exact,) = least_seconds(layers, [FREE], ranks, microbatches, 10.0, host)
    assert found != rough
    assert all(0.98 * exact < each < exact for each in (found, rough))


def test_without_memory_the_passes_count_alone() -> None:
    layers = layers_of(8)
    ranks = straight(layers, 4, 8, straight_kept(4, 8), ends=True)
    bound = least_seconds(without_memory(layers), [Stored(1.0, 0.0, 0.0)], ranks, 8, 1e30)
    assert bound == pytest.approx(least_seconds(layers, [FREE], ranks, 8, 1e9))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 8, 16])
def test_what_is_kept_without_reading_lists(ranks: int, microbatches: int) -> None:
    """As the lists say, or less."""
    keeping = Keeping()

    def listed(name: str, chunks: int | None = None) -> Array:
        return np.array([rank.average.here for rank in keeping._ranks(name, ranks, microbatches, chunks, "")])

    assert straight_kept(ranks, microbatches) == pytest.approx(listed("1f1b"))
    assert (folded_kept(ranks, microbatches) <= listed("v-min") + 1e-9).all()
    for chunks in (2, 4):
        assert (looped_kept(ranks, microbatches, chunks) <= listed("interleaved", chunks) + 1e-9).all()
        average = keeping.average("interleaved", ranks, microbatches, chunks, "")
        assert average == pytest.approx(listed("interleaved", chunks))


def test_waits_of_common_schedules() -> None:
    """A bubble of one pass through all other ranks, of a part of it, and of a third."""
    keeping = Keeping()
    assert keeping.waits("1f1b", 4, 8, None, "")[0] == pytest.approx(3)
    assert keeping.waits("interleaved", 4, 8, 2, "")[0] == pytest.approx(3 / 2)
    assert keeping.waits("zb-h1", 4, 8, None, "")[0] == pytest.approx(1)
    assert keeping.later("zb-h1", 4, 8, None, "") > 0 == keeping.later("1f1b", 4, 8, None, "")


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (2, 8), (4, 4), (4, 12), (8, 16)])
@pytest.mark.parametrize(("name", "chunks"), [("1f1b", None), ("interleaved", 2), ("interleaved", 3)])
def test_messages_that_common_schedules_wait_for(name: str, chunks: int | None, ranks: int, microbatches: int) -> None:
    """As the timeline has them."""
    schedule, sent = generate(name, ranks, microbatches, chunks=chunks), 1e-3
    costs = [
        Costs.uniform(schedule, forward_seconds=1.0, backward_seconds=2.0, send_seconds=each) for each in (0, sent)
    ]
    without, with_them = (simulate_timeline(lower(schedule, each.seconds), each).makespan_seconds for each in costs)
    assert Keeping().waits(name, ranks, microbatches, chunks, "")[1] == pytest.approx((with_them - without) / sent)


def test_messages_of_many_ranks_are_told_from_a_few() -> None:
    """To 15 % of what lists of as many ranks say."""
    keeping = Keeping()
    for name in ("1f1b", "v-half", "v-min"):
        for ranks, microbatches in ((8, 16), (8, 64)):
            likely = keeping.likely(name, ranks, microbatches, None, "").messages
            assert likely == pytest.approx(keeping.waits(name, ranks, microbatches, None, "")[1], rel=0.15)


@pytest.mark.parametrize("puts_off", [False, True])
def test_gradients_are_added_up_in_every_microbatch(puts_off: bool) -> None:
    layers = layers_of(6)
    alone = replace(straight(layers, 1, 4, np.ones(1), ends=False), puts_off=puts_off)
    assert least_seconds(layers, [Stored(0.0, 0.0, 0.0, 0.5)], alone, 4, 100.0) == pytest.approx([4 * 6 * 3.5])


def test_ranks_have_less_room_beside_what_they_work_in_and_what_passes() -> None:
    """The largest op of one rank; the weights of so many layers, and the messages of so many."""
    layers = layers_of(6)
    alone = straight(layers, 1, 4, np.ones(1), ends=False)
    moving = Stored(0.0, 0.0, 0.0, gathered_bytes=6.0, flying_bytes=3.0)

    def extra(room: float, ranks: Ranks, way: Stored = FREE, layers: Layers = layers) -> float:
        return float(least_seconds(layers, [way], ranks, 4, room)[0] / 24 - 3.0)

    assert extra(24.0, alone) == pytest.approx(0.0)
    assert extra(24.0, replace(alone, working=np.array([12.0]))) == pytest.approx(0.3), "half of it is kept"
    large = replace(layers, working=12.0)
    assert extra(24.0, replace(alone, working=np.array([7.0])), layers=large) == pytest.approx(0.3), "one at a time"
    assert extra(24.0, alone, moving) == pytest.approx(0.0)
    assert extra(24.0, replace(alone, passing=(2, 0)), moving) == pytest.approx(0.3)
    assert extra(24.0, replace(alone, passing=(1, 2)), moving) == pytest.approx(0.3)
    one_of_two = straight(layers, 2, 4, np.ones(2), ends=False)
    last = replace(one_of_two, working=np.array([0.0, 40.0]))
    assert least_seconds(layers, [FREE], last, 4, 41.0)[0] >= 4 * 5 * 3.0, "the last rank has room for one layer"


def test_what_is_recomputed_is_there_as_a_whole() -> None:
    """Six layers that keep 2 bytes instead of 4, and one of them all 4 while its backward runs."""
    layers = layers_of(6)
    alone = replace(straight(layers, 1, 4, np.ones(1), ends=False), transient=True)
    (found,) = least_seconds(layers, [FREE], alone, 4, 14.0)
    assert found == pytest.approx(4 * 6 * 3.3)
    assert least_seconds(layers, [FREE], alone, 4, 24.0) == pytest.approx([72.0]), "nothing is"
    assert least_seconds(layers, [FREE], alone, 4, 13.0)[0] > found
    assert np.isinf(least_seconds(layers, [FREE], alone, 4, 8.9)).all()


def test_what_weights_gradients_need_is_there_beside_other_microbatches() -> None:
    """Six layers of one stage, which leave 3 bytes each, beside one microbatch that keeps 1 to 4 of each."""
    layers = replace(layers_of(6), later=3.0)
    alone = straight(layers, 1, 4, np.ones(1), ends=False)
    after = replace(alone, beside=np.ones(1))

    def extra(room: float, ranks: Ranks, host: Host | None = None) -> float:
        return float(least_seconds(layers, [FREE], ranks, 4, room, host)[0] / 24 - 3.0)

    assert extra(24.0, alone) == pytest.approx(0.0)
    assert extra(42.0, after) == pytest.approx(0.0)
    assert extra(30.0, after) == pytest.approx(0.3), "they keep 12 bytes"
    assert extra(24.0, after) == pytest.approx(1.0)
    assert math.isinf(extra(23.9, after)), "they keep 6 at least"
    two = replace(after, stages=2, beside=np.array([0.5]))
    assert extra(24.0, two) == pytest.approx(0.0), "only one of its stages leaves something at a time"
    assert math.isinf(extra(17.9, replace(after, beside=np.zeros(1)))), "nothing else is there"
    assert extra(24.0, replace(after, working=np.array([6.0]), beside=np.zeros(1))) > 0, "in passes all count"
    assert extra(42.0, replace(after, working=np.array([6.0]))) == pytest.approx(0.0), "what they work in is free then"


def test_what_weights_gradients_need_makes_more_be_copied() -> None:
    """Where three microbatches wait for a backward, two still do when one has left something."""
    layers = replace(layers_of(8), later=8.0)
    ranks = straight(layers, 2, 8, np.array([3.0, 3.0]), ends=False)
    host = host_of(ranks, 8, 0.5)._replace(times=np.full((1, 2), 4.0))
    (without,) = least_seconds(layers, [FREE], ranks, 8, 40.0, host)
    (found,) = least_seconds(layers, [FREE], replace(ranks, beside=np.zeros(2)), 8, 40.0, host)
    assert found > without
    assert least_seconds(layers, [FREE], replace(ranks, beside=np.zeros(2)), 8, 1e9, host) == pytest.approx(
        least_seconds(layers, [FREE], ranks, 8, 1e9, host)
    )


def test_what_the_host_has_no_room_for_is_recomputed() -> None:
    """One rank of eight layers, which keeps four microbatches of 1 to 4 bytes of each, and has room for the least."""
    layers, microbatches = replace(layers_of(8), extra=10 * np.array(EXTRA)), 8
    ranks = straight(layers, 1, microbatches, np.array([4.0]), ends=False)
    roomy = host_of(ranks, microbatches, 1e9)

    def found(room: float) -> float:
        return float(least_seconds(layers, [FREE], ranks, microbatches, 32.0, roomy._replace(room=room))[0])

    none, most = least_seconds(layers, [FREE], ranks, microbatches, 32.0)[0], 8 * 4 * layers.saved[0]
    assert found(math.inf) == found(most - 32.0) < found(0.6 * (most - 32.0)) < found(0.0) <= none
    assert np.isinf(least_seconds(layers, [FREE], ranks, microbatches, 31.0, roomy._replace(room=0.5))).all()
    hosted, more = FREE._replace(hosted=10.0), roomy._replace(room=8 * 10.0 + 0.6 * (most - 32.0))
    assert least_seconds(layers, [hosted], ranks, microbatches, 32.0, more) == found(0.6 * (most - 32.0))


def test_what_weights_gradients_need_may_be_of_a_stage_with_all_layers() -> None:
    """Then one of three microbatches, of four layers each, waits no longer when it leaves something."""
    layers = replace(layers_of(8), later=4.0)
    ranks = replace(straight(layers, 2, 8, np.array([3.0, 3.0]), ends=False), stages=2, beside=np.array([1.0, 1.0]))
    slow = host_of(ranks, 8, 0.01)
    (bound,) = least_seconds(layers, [FREE], ranks, 8, 48.0, slow)
    assert bound == pytest.approx(float(least_seconds(layers, [FREE], ranks, 8, 1e9, slow)[0]))
    assert least_seconds(layers, [FREE], ranks, 8, 38.0, slow)[0] > 1.01 * bound


def test_copies_keep_up_whenever_a_rank_keeps_much() -> None:
    """The tightest number of microbatches counts, and not the most alone."""
    layers, microbatches, rate = replace(layers_of(8), extra=10 * np.array(EXTRA)), 8, 0.7
    ranks = straight(layers, 4, microbatches, straight_kept(4, microbatches), ends=True)
    most = host_of(ranks, microbatches, rate)
    fewer = most._replace(kept=0.75 * most.kept, times=60 * most.times)
    both = most._replace(
        kept=np.vstack([fewer.kept, most.kept]),
        times=np.vstack([fewer.times, most.times]),
        ahead=(two := (np.vstack([most.ahead[0]] * 2), np.vstack([most.ahead[1]] * 2))),
        most=two,
    )
    bounds = [float(least_seconds(layers, [FREE], ranks, microbatches, 10.0, host)[0]) for host in (most, fewer, both)]
    assert bounds[1] > bounds[0]
    assert bounds[2] == pytest.approx(bounds[1])
