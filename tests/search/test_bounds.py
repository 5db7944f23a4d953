"""Bounds of a pipeline's passes against timelines of cuts, and of memory against all that units can do."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopar.schedules import Action, Costs, Schedule, generate, lower, simulate_timeline
from autopar.schedules.pass_times import PassTimes
from autopar.schedules.placements import looped, v_shaped
from autopar.search.bounds import Held, Kept, Spill, by_paths, folded, recomputed, scaled, shared_out, straight
from autopar.search.hulls import Array, hull
from autopar.search.interleaving import Interleaving, paths
from autopar.search.interleaving import messages as crossed
from autopar.search.profiles import Key, Unit

times = st.lists(st.tuples(*[st.floats(0.01, 3.0)] * 3), min_size=4, max_size=7)
messages = st.tuples(st.floats(0.0, 2.0), st.floats(0.0, 2.0))
Sent = tuple[float, float]
SILENT = 0.0, 0.0
ROUNDED = 1 + 1e-9


def units_of(passes: list[tuple[float, float, float]]) -> list[Unit]:
    """Backwards of the input's gradient and of the weights'."""
    return [Unit(0, forward, inputs + weights, weights) for forward, inputs, weights in passes]


def shortest(
    units: list[Unit], name: str, ranks: int, chunks: int | None, microbatches: int, sent: Sent = SILENT
) -> float:
    """Over all cuts, by the timeline; messages to the next rank and back take as long as ``sent`` says."""
    draft = generate(name, ranks, microbatches, chunks=chunks)
    cuts = itertools.combinations(range(1, len(units)), draft.stages - 1)
    return min(_seconds(units, draft, (0, *cut, len(units)), name, sent) for cut in cuts)


def _seconds(units: list[Unit], draft: Schedule, cut: tuple[int, ...], name: str, sent: Sent) -> float:
    stages = [units[a:b] for a, b in itertools.pairwise(cut)]
    costs = Costs(
        forward_seconds=tuple(sum(u.forward for u in stage) for stage in stages),
        backward_seconds=tuple(sum(u.backward for u in stage) for stage in stages),
        weight_seconds=tuple(sum(u.weights for u in stage) for stage in stages),
        send_forward_seconds=(sent[0],) * len(stages),
        send_backward_seconds=(sent[1],) * len(stages),
        reduce_seconds=(0.0,) * len(stages),
        activation_bytes=(0,) * len(stages),
        step_seconds=(0.0,) * draft.ranks,
    )
    made = generate(name, draft.ranks, draft.microbatches, chunks=draft.chunks, costs=PassTimes.of(costs))
    return simulate_timeline(lower(made, costs.seconds), costs).makespan_seconds


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
@settings(max_examples=30)
@given(times, st.integers(2, 3), st.integers(1, 4), messages)
def test_no_cut_is_below_the_straight_bound(
    name: str, passes: list[tuple[float, float, float]], ranks: int, microbatches: int, sent: Sent
) -> None:
    units = units_of(passes)
    bound = straight(units, ranks, microbatches, split=name != "1f1b", sent=sent)
    assert bound <= shortest(units, name, ranks, None, microbatches, sent) * ROUNDED


@pytest.mark.parametrize(("name", "chunks"), [("interleaved", 2), ("zb-v", None), ("v-half", None)])
@settings(max_examples=30)
@given(times, st.integers(1, 2), messages)
def test_no_cut_is_below_the_folded_bound(
    name: str, chunks: int | None, passes: list[tuple[float, float, float]], microbatches: int, sent: Sent
) -> None:
    units = units_of(passes)
    bound = folded(units, 2, 2 * microbatches, split=name != "interleaved", sent=sent)
    assert bound <= shortest(units, name, 2, chunks, 2 * microbatches, sent) * ROUNDED


@settings(max_examples=40)
@given(times, st.integers(2, 3), st.integers(2, 3), st.integers(1, 7), messages)
def test_no_cut_is_below_the_looped_bound(
    passes: list[tuple[float, float, float]], ranks: int, chunks: int, microbatches: int, sent: Sent
) -> None:
    """At both ends, and at the beginning alone; groups of microbatches may be larger than there are ranks, or fewer."""
    assume(ranks * chunks <= len(passes))
    units, paths = units_of(passes), Interleaving()
    least = shortest(units, "interleaved", ranks, chunks, microbatches, sent) * ROUNDED
    for ends in (False, True):
        assert by_paths(units, paths.counts(ranks, chunks, microbatches, len(units) - 2, ends=ends), sent) <= least


@pytest.mark.parametrize("name", ["zb-v", "v-half", "v-min"])
@settings(max_examples=30)
@given(times, st.integers(2, 3), st.integers(1, 7), messages)
def test_no_cut_is_below_the_bound_on_a_v(
    name: str, passes: list[tuple[float, float, float]], ranks: int, microbatches: int, sent: Sent
) -> None:
    assume(2 * ranks <= len(passes))
    units = units_of(passes)
    counts = Interleaving().on_v(ranks, microbatches, len(units) - 2)
    assert by_paths(units, counts, sent) <= shortest(units, name, ranks, None, microbatches, sent) * ROUNDED


def test_few_microbatches_wait_on_a_v_until_the_first_comes_back() -> None:
    """Of as many as there are ranks, each twice as long as a stage's forward: in the mean a rank idles for six of the
    eight stages' forwards, wherever the stages are cut."""
    layers, ranks = 16 * 8, 8
    none, units = Unit(0, 0.0, 0.0, 0.0), units_of([(1.0, 1.0, 1.0)] * layers)
    busy = ranks * layers * 3 / ranks
    bound = by_paths([none, *units, none], Interleaving().on_v(ranks, ranks, layers))
    assert busy + 4 * 8 < bound <= busy + 7 * 8
    assert folded(units, ranks, ranks, split=True) < busy + 8


@pytest.mark.parametrize(("ranks", "chunks", "microbatches"), [(2, 2, 2), (4, 3, 16), (4, 8, 4), (8, 2, 8)])
def test_the_looped_bound_counts_half_of_the_bubble_at_least(ranks: int, chunks: int, microbatches: int) -> None:
    """Of equal stages: more would need that units are whole."""
    layers = 6 * ranks * chunks
    counts = Interleaving().counts(ranks, chunks, microbatches, layers, ends=True)
    busy = microbatches * layers * 3 / ranks
    bubble = (ranks - 1) * layers * 3 / ranks / chunks
    none = Unit(0, 0.0, 0.0, 0.0)
    assert busy + 0.5 * bubble < by_paths([none, *units_of([(1.0, 1.0, 1.0)] * layers), none], counts) <= busy + bubble
    assert counts.layer_seconds(layers, np.array([[1.0, 2.0]]), 1, 1)[0] <= busy + bubble


def test_where_there_is_one_unit_for_each_stage_the_looped_bound_is_met() -> None:
    none = Unit(0, 0.0, 0.0, 0.0)
    units = [none, *units_of([(1.0, 1.0, 1.0)] * 6), none]
    counts = Interleaving().counts(4, 2, 8, 6, ends=True)
    assert by_paths(units, counts) == pytest.approx(shortest(units, "interleaved", 4, 2, 8))


def test_messages_that_paths_cross() -> None:
    """On a V, the two stages of the last rank send each other nothing."""
    assert crossed(looped(3, 2)).tolist() == [0, 1, 2, 3, 4, 5]
    assert crossed(v_shaped(3)).tolist() == [0, 1, 2, 2, 3, 4]
    (_, back), there = Interleaving().on_v(3, 6, 12).messages, Interleaving().counts(3, 2, 6, 12, ends=True).messages
    assert back == 0.0, "other work may be done at the end"
    assert there[0] == there[1] > 0.0
    ahead = Interleaving().counts(3, 2, 6, 12, ends=False).messages
    assert ahead[0] > 0.0 == ahead[1], "where paths would lead up again, other work may be done"


def test_messages_of_all_ranks_ahead_are_waited_for() -> None:
    """Each way, if backwards are whole; one microbatch goes down and up."""
    units, sent = units_of([(1.0, 1.0, 1.0)] * 4), (0.5, 0.25)
    for microbatches in (1, 8):
        whole = straight(units, 4, microbatches, split=False, sent=sent)
        assert whole == pytest.approx((microbatches + 3) * 3 + 3 * 0.75)
    assert straight(units, 4, 8, split=False, sent=sent) <= shortest(units, "1f1b", 4, None, 8, sent)
    assert folded(units, 2, 8, split=False, sent=sent) == pytest.approx(8 * 6 + (3 + 0.75) / 2)
    assert folded(units, 2, 8, split=True, sent=sent) == pytest.approx(8 * 6 + (1 + 0.5) / 2)
    held, kept = held_of(np.full(4, 3.0), np.zeros(4), np.array([1.0]), np.array([0.0])), [Kept(1.0)] * 4
    for bounded in (recomputed, shared_out):
        without, with_them = (bounded(held, kept, 8, 100.0, split=False, sent=each) for each in (SILENT, sent))
        assert with_them == pytest.approx(without + 3 * 0.75)


@pytest.mark.parametrize("head", ["", "vocab-1", "vocab-2"])
@pytest.mark.parametrize(("ranks", "chunks", "microbatches"), [(2, 2, 2), (3, 2, 7), (4, 3, 8), (2, 4, 1), (4, 2, 6)])
def test_paths_are_in_the_lists(ranks: int, chunks: int, microbatches: int, head: str) -> None:
    """Between a stage's first forward and its last backward a rank runs all that the path counts, with a split head
    too."""
    schedule = generate("interleaved", ranks, microbatches, chunks=chunks, head=head)
    forward, backward = paths(ranks, chunks, microbatches, ends=True)
    for stage in range(ranks * chunks):
        row = [a for a in schedule.lists[stage % ranks] if a.kind in ("F", "B")]
        first = row.index(Action("F", 0, stage))
        last = max(number for number, action in enumerate(row) if (action.kind, action.stage) == ("B", stage))
        ran = Counter((action.kind, action.stage) for action in row[first : last + 1])
        for other in range(ranks * chunks):
            chain = int(other < stage)
            assert (ran["F", other] + chain, ran["B", other] + chain) == (forward[stage, other], backward[stage, other])


def test_bounds_are_met() -> None:
    """Where all units are alike: by 1F1B, and by one rank."""
    units = units_of([(1.0, 1.0, 1.0)] * 4)
    assert straight(units, 4, 8, split=False) == pytest.approx((8 + 3) * 3)
    assert straight(units, 1, 8, split=False) == pytest.approx(8 * 12)
    assert shortest(units, "1f1b", 4, None, 8) == pytest.approx((8 + 3) * 3)


def test_waits_are_counted_where_ranks_hold_several_stages() -> None:
    """The second rank waits for one unit before its first pass, and after its last one; or only before."""
    units = units_of([(1.0, 1.0, 1.0)] * 4)
    assert folded(units, 2, 8, split=False) == pytest.approx(8 * 6 + 3 / 2)
    assert folded(units, 2, 8, split=True) == pytest.approx(8 * 6 + 1 / 2)
    held = held_of(np.full(4, 3.0), np.zeros(4), np.array([1.0]), np.array([0.0]))
    kept = [Kept(1.0)] * 2
    assert shared_out(held, kept, 1, 100.0, split=False) == pytest.approx(3 + 2 * 3), "two layers each"


def test_the_rank_of_the_last_unit_has_fewer_layers() -> None:
    """Four layers of 3 seconds and a head of 6: that rank waits, and has no time for a layer."""
    held = held_of(np.array([3.0, 3.0, 3.0, 3.0, 6.0]), np.zeros(5), np.array([1.0]), np.array([0.0]))
    held = replace(held, layers=np.array([1.0, 1.0, 1.0, 1.0, 0.0]))
    assert shared_out(held, [Kept(1.0)] * 2, 1, 100.0, split=False) == pytest.approx(12)


def test_a_stage_may_fit_with_more_units_than_another_that_does_not() -> None:
    """What the first one works in alone is too large; with a layer behind it isn't known to be there at once."""
    held = held_of(np.ones(6), np.zeros(6), np.array([1.0]), np.array([0.0]))
    held = replace(held, layers=np.array([0.0, 1, 1, 1, 1, 1]), working=np.array([99.0, 0, 0, 0, 0, 0]))
    (row, *_) = held.stage_seconds(Kept(1.0), 50.0)
    assert math.isinf(row[1])
    assert math.isfinite(row[2])
    assert recomputed(held, [Kept(1.0)] * 3, 10, 50.0, split=True) < 10 * 2.2, "two on each rank"


@pytest.mark.parametrize("taken", ["state", "working"])
def test_what_else_a_rank_holds_leaves_less_to_keep(taken: str) -> None:
    """Of 18 bytes 8 are taken, by all layers' state or while one works: each keeps 2.5 instead of 4."""
    saved, extra = np.array([4.0, 1.0]), np.array([0.0, 1.0])
    held = held_of(np.full(4, 3.0), np.zeros(4), saved, extra)
    assert recomputed(held, [Kept(1.0)], 1, 18.0, split=False) == pytest.approx(12)
    held = replace(held, **{taken: np.full(4, 2.0 if taken == "state" else 8.0)})
    assert recomputed(held, [Kept(1.0)], 1, 18.0, split=False) == pytest.approx(12 + 4 / 2)
    assert math.isinf(recomputed(held, [Kept(1.0)], 1, 11.0, split=False))


def test_hulls_leave_out_what_lies_above_a_line() -> None:
    points = [(4.0, 0.0), (2.0, 3.0), (1.0, 1.0), (1.0, 2.0), (3.0, 5.0)]
    saved, extra = hull(points)
    assert saved.tolist() == [4, 1]
    assert extra.tolist() == [0, 1]
    saved, extra = hull([(5.0, 2.0), (4.0, 0.0), (2.0, 1.0), (1.0, 4.0)])
    assert saved.tolist() == [4, 2, 1], "what is larger and takes longer is left out, too"
    assert extra.tolist() == [0, 1, 4]


saves = st.lists(st.tuples(st.floats(0.1, 2.0), st.floats(0.0, 4.0)), min_size=3, max_size=5)


@settings(max_examples=30)
@given(saves, st.integers(1, 3), st.floats(2.0, 40.0), st.integers(1, 4), st.sampled_from([1, 2]))
def test_nothing_is_below_the_bound_by_memory(
    layers: list[tuple[float, float]], ranks: int, budget: float, microbatches: int, chunks: int
) -> None:
    """Each layer keeps one of three amounts; ranks, one stage each, keep as many microbatches as there are after
    them. A bound for several stages on a rank holds for these, too."""
    ranks = min(ranks, len(layers))
    saved, extra = np.array([4.0, 2.0, 1.0]), np.array([0.0, 0.3, 1.0])
    seconds, state = (np.array(column) for column in zip(*layers, strict=True))
    held = held_of(seconds, state, saved, extra)
    kept = [float(min(microbatches, ranks - rank)) for rank in range(ranks)]
    bounded = recomputed if chunks == 1 else shared_out
    bound = bounded(held, [Kept(k) for k in kept], microbatches, budget, split=False)
    best = math.inf
    for cut in itertools.combinations(range(1, len(layers)), ranks - 1):
        stages = list(itertools.pairwise((0, *cut, len(layers))))
        taken = [_least_extra(b - a, k, budget - state[a:b].sum()) for (a, b), k in zip(stages, kept, strict=True)]
        ends = [
            seconds[:a].sum() + microbatches * (seconds[a:b].sum() + x) for (a, b), x in zip(stages, taken, strict=True)
        ]
        best = min(best, max(ends))
    assert bound <= best * ROUNDED


def held_of(seconds: Array, state: Array, saved: Array, extra: Array) -> Held:
    """Layers alone, which work in no memory."""
    none = np.zeros(len(seconds))
    return Held(seconds, seconds / 3, state, none, none + 1, none, saved, extra)


def test_copies_to_the_host_take_time() -> None:
    """Of 16 bytes that wait for a backward 6 are too many: they are copied during the forwards, or recomputed."""
    seconds, none = np.full(4, 3.0), np.zeros(4)
    held = held_of(seconds, none, np.array([4.0, 1.0]), np.array([0.0, 10.0]))

    def bound(seconds_per_byte: float, times: float = 1.0) -> float:
        spill = Spill(1.0, 1.0, 1.0, 0.0, 0.0, times=times, seconds=seconds_per_byte, microbatches=1)
        return recomputed(held, [Kept(0.0, (spill,))], 1, 10.0, split=True)

    assert bound(0.1) == pytest.approx(12), "beside the forwards"
    assert 12 + 1 < bound(1.0) <= 12 + 2, "6 seconds instead of the forwards' 4"
    assert bound(1e9) > 12 + 15, "10 seconds for 3 bytes of a layer"
    assert 13 < bound(0.5, times=5.0) <= 15, "3 seconds five times over, which takes longer than the passes"


def _least_extra(count: int, kept: float, room: float) -> float:
    """Of ``count`` layers that may keep ``room`` bytes of ``kept`` microbatches each."""
    ways = itertools.combinations_with_replacement([(4.0, 0.0), (2.0, 0.3), (1.0, 1.0)], count)
    fits = [sum(e for _, e in way) for way in ways if kept * sum(s for s, _ in way) <= room]
    return min(fits, default=math.inf)


def test_what_is_a_part_of_what() -> None:
    whole = Key(rows=8, ep=1, cp=1, tp=1)
    assert scaled(whole, whole) == 1
    assert scaled(whole, Key(rows=2, ep=1, cp=2, tp=2, several=True, copies=True)) == 1 / 16
    assert scaled(Key(8, 1, 1, 2), Key(8, 1, 1, 1)) is None, "less split isn't a part"
    assert scaled(Key(8, 1, 1, 2), Key(8, 1, 1, 3)) is None
    assert scaled(Key(8, 1, 1, 1), Key(3, 1, 1, 1)) is None
    assert scaled(Key(8, 4, 1, 1), Key(4, 2, 1, 1)) is None, "other experts"
    assert scaled(Key(8, 1, 1, 1), Key(2, 4, 1, 1)) == 1 / 4
    assert scaled(Key(4, 1, 1, 1), Key(2, 4, 1, 1)) is None, "experts of four ranks get tokens of eight rows"
    assert scaled(Key(4, 4, 1, 1), Key(2, 4, 1, 1)) == 1 / 2
    assert scaled(Key(8, 2, 1, 2, ("tp",)), Key(4, 2, 1, 2)) is None
