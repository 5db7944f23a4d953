"""What is copied beside passes, and in them: activations to the host and back, weights that are gathered."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import BudgetError
from autopar.mesh import Mesh
from autopar.passes.vocabulary import staged_calls
from autopar.planner.zero import MoveCosts
from autopar.search.bounds import Kept, Spill, recomputed
from autopar.search.hulls import amounts, few_amounts
from autopar.search.layers import comes_and_goes
from autopar.search.outlook import Outlook
from autopar.search.space import Point, Region
from autopar.search.wholesale import Host, Stored, least_seconds, straight
from tests.fast_cluster import BUSY, FAST
from tests.search.spaces import search_of
from tests.search.test_bounds import held_of
from tests.search.test_wholesale import EXTRA, FREE, ROUNDED, SAVED, layers_of

PASSES = 100.0  # of a layer of the hull


def test_what_takes_little_more_is_told_apart_most_closely() -> None:
    saved, extra = np.array([9.0, 5.0, 1.0]), np.array([0.0, 2.0, 60.0])
    kept, taken = amounts(saved, extra, PASSES)
    assert (kept[0], taken[0], kept[-1], taken[-1]) == (9.0, 0.0, 1.0, 60.0)
    assert (np.diff(kept) <= 0).all()
    assert kept == pytest.approx(np.interp(taken, extra, saved))
    steps = np.diff(taken)
    assert steps[taken[1:] <= 0.02 * PASSES].max() == pytest.approx(0.0025 * PASSES)
    assert steps.max() <= 60.0 / 12 * ROUNDED
    few, _ = few_amounts(saved, extra)
    assert np.diff(few) == pytest.approx(-1.0)
    ways = np.array([1.0, PASSES])
    every = [amounts(saved, extra, passes) for passes in (ways, *ways)]
    pairs = [(every[0][n][:, way], every[1 + way][n]) for n in (0, 1) for way in (0, 1)]
    assert all(np.array_equal(np.unique(together), np.unique(alone)) for together, alone in pairs)
    assert [set(each.tolist()) for each in amounts(saved[:1], extra[:1], PASSES)] == [{9.0}, {0.0}]


def test_copies_of_gathered_weights_are_made_in_every_pass() -> None:
    layers, microbatches = layers_of(6), 4
    for ends, puts_off in ((True, False), (False, True)):
        ranks = replace(straight(layers, 1, microbatches, np.ones(1), ends=ends), puts_off=puts_off)
        (free,), (copied,) = (
            least_seconds(layers, [way], ranks, microbatches, 1e9) for way in (FREE, FREE._replace(copied=0.25))
        )
        assert copied == pytest.approx(free + microbatches * 6 * 2 * 0.25)


@pytest.mark.parametrize("master", [None, torch.float16])
@pytest.mark.parametrize("name_of_model", ["gpt2", "llama"])
def test_a_layer_moves_and_copies_as_much_alone_as_in_a_stage(name_of_model: str, master: torch.dtype | None) -> None:
    """And nothing where weights stay from pass to pass."""
    search = search_of(name_of_model, 8, 4, BUSY)
    search.glance()
    region = Region(Mesh(dp=4), 1, 2)
    profile, found = search.place(region), {}
    assert profile is not None
    assert search._outlook is not None
    block, calls, parameters = search._outlook.scaler.block, profile.model.calls, profile.model.parameters
    parameters |= {name: replace(known, master=master) for name, known in parameters.items()}
    layers = [i for i in staged_calls(profile.model) if calls[i].block == block]
    for zero in (1, 3):
        options = search.costing.options_of(Point(region, "1f1b", None, "redistributed", zero, 0, (), 1))
        machine = search.costing.machine_of(region.mesh, 0)
        found[zero] = comes_and_goes(profile, block, options, machine)
        moves = MoveCosts(profile.model, options, machine, [layers], [0])
        of_stage = moves.cast_seconds(layers) + moves.unpack_seconds(layers)
    assert not {"copied", "gathered", "scattered"} & set(found[1])
    sent = [("gathered", "gather", moves.gathering(layers)), ("scattered", "scatter", moves.scattering(layers))]
    for figure, name, (seconds, held) in sent:
        assert seconds > 0
        assert len(layers) * found[3][figure] == pytest.approx(seconds)
        assert found[3][f"{name}_held"] * seconds == pytest.approx(held)
    assert ("last_bytes" in found[3]) == (name_of_model == "llama"), "whose head has weights of its own"
    assert "last_bytes" not in found[1]
    assert found[3]["copied"] > 0
    assert len(layers) * found[3]["copied"] == pytest.approx(of_stage)
    assert (moves.cast_seconds(layers) > 0) == (master is not None)
    own, calls[layers[1]] = calls[layers[1]], replace(calls[layers[1]], parameters=calls[layers[0]].parameters)
    shared = comes_and_goes(replace(profile), block, options, machine)
    assert not {"copied", "gathered"} & set(shared), "a stage gathers what layers share once"
    calls[layers[1]] = own
    parameters |= {name: replace(parameters[name], trainable=False) for name in own.parameters}
    assert "scattered" not in comes_and_goes(replace(profile), block, options, machine), "less of it is trained"


def step_of(count: int, head: tuple[float, float], rate: float, room: float, *, splits: bool) -> float:
    """Of one rank and microbatch: the least over what layers may keep. What there is no room for goes out after the
    first layer's forward, until that of the last stage begins, or a split head's passes are over, and comes back until
    the first layer's backward begins."""
    best, ahead, behind = math.inf, count + splits * sum(head), (not splits) * sum(head)
    for saved in np.linspace(SAVED[-1], SAVED[0], 2001):
        backward = 2.0 + float(np.interp(-saved, [-each for each in SAVED], EXTRA))
        copy = max(0.0, count * saved - room) / rate
        best = min(best, max(ahead, 1.0 + copy) + max(behind + count * backward, copy + backward))
    return best


@settings(max_examples=80)
@given(
    st.integers(2, 8),
    st.tuples(st.floats(0.0, 8.0), st.floats(0.0, 8.0)),
    st.floats(0.3, 4.0),
    st.floats(0.0, 16.0),
    st.booleans(),
)
def test_the_passes_of_a_split_head_run_beside_copies_too(
    count: int, head: tuple[float, float], rate: float, room: float, splits: bool
) -> None:
    layers = replace(layers_of(count), beside=head, last=head, ahead=0, behind=1)
    ranks = replace(straight(layers, 1, 1, np.ones(1), ends=False), spreads_head=splits)
    one, none = np.ones((1, 1)), np.zeros((1, 1))
    host = Host(rate, math.inf, one, one, (one, none), (one, none), np.zeros(1))
    (bound,) = least_seconds(layers, [FREE], ranks, 1, room, host)
    assert bound <= (step := step_of(count, head, rate, room, splits=splits)) * ROUNDED
    held = held_of(np.full(count, 3.0), np.zeros(count), np.array(SAVED), np.array(EXTRA))
    spill = Spill(1.0, 1.0, 1.0, 0.0, 0.0, times=1.0, seconds=1 / rate, microbatches=1)
    split = sum(head) + recomputed(replace(held, beside=sum(head)), [Kept(0.0, (spill,))], 1, room, split=True)
    assert split <= step * ROUNDED


def test_copies_are_waited_for_where_the_head_is_short() -> None:
    layers, one, none = replace(layers_of(4), behind=1), np.ones((1, 1)), np.zeros((1, 1))
    ranks = straight(layers, 1, 1, np.ones(1), ends=False)
    host = Host(2.0, math.inf, one, one, (one, none), (one, none), none[0])
    (alone,) = least_seconds(layers, [FREE], ranks, 1, 2.0, host)
    (short,) = least_seconds(replace(layers, beside=(0.1, 0.2)), [FREE], ranks, 1, 2.0, host)
    (long,) = least_seconds(replace(layers, beside=(10.0, 20.0)), [FREE], ranks, 1, 2.0, host)
    assert alone > 4 * 3.0 * 1.05
    assert alone < short <= alone + 0.3, "the head's passes, which some copies run beside"
    assert long == pytest.approx(4 * 3.0 + 30.0), "all copies run beside the head's passes"


def test_a_pass_is_slowed_by_what_runs_beside_it_alone() -> None:
    """Forwards by gathers, backwards by scatters too, each by what it holds itself."""
    layers, held = layers_of(6), 0.5
    ranks = straight(layers, 1, 4, np.ones(1), ends=False)
    gathers = Stored(0.0, 0.6, 1.2, gather_held=held)
    scatters = Stored(0.0, 0.6, 1.2, scatter_held=held)
    found = least_seconds(layers, [gathers, scatters], ranks, 4, 100.0)
    beside = 5 / 6 * 1.2
    assert found == pytest.approx([4 * 6 * (3.0 + 2 * held * 0.6), 4 * 6 * (3.0 + held * beside)])


def test_the_last_call_works_beside_its_own_weights() -> None:
    layers, budget = layers_of(6), 24.0
    works = replace(straight(layers, 1, 4, np.ones(1), ends=False), last=0, working=np.array([4.0]))
    ways = [FREE, FREE._replace(last_bytes=6.0)]
    free, full = least_seconds(layers, ways, works, 4, budget)
    assert full == pytest.approx(least_seconds(layers, [FREE], works, 4, budget - 6.0)[0])
    assert full > free
    split = least_seconds(layers, ways, replace(works, last=None), 4, budget)
    assert split == pytest.approx([free, free]), "no rank has it"


@pytest.mark.parametrize(
    ("ahead", "most", "expected"),
    [((2, 1), (2, 1), 1 + 20 + (48 - 16)), ((3, 3), (4, 4), 20 + 36), ((2, 0), (2, 0), 1 + 20 + (48 - 8))],
)
def test_backwards_that_come_ahead_of_copies_take_time_too(
    ahead: tuple[int, int], most: tuple[int, int], expected: float
) -> None:
    """Of four microbatches, which take 12 s each, 4 of them forward, 1 in each layer; a copy takes 20 s."""
    layers = replace(layers_of(4), saved=np.array([1.0]), extra=np.array([0.0]))
    ranks, one = straight(layers, 1, 4, np.ones(1), ends=False), np.ones((1, 1))
    first, last = ((forwards * one, backwards * one) for forwards, backwards in (ahead, most))
    host = Host(0.2, math.inf, one, one, first, last, np.zeros(1))
    (bound,) = least_seconds(layers, [FREE], ranks, 4, 0.0, host)
    assert bound == pytest.approx(expected)


@pytest.mark.parametrize(("backwards", "ahead"), [(0, 3.0), (1, 2 / 4 * 32.0)])
def test_the_last_forward_of_a_step_comes_after_what_is_kept_before_it(backwards: int, ahead: float) -> None:
    """What runs ahead of a copy, of the last call's 3 s and 5 s of each microbatch: it runs after the layers."""
    layers = replace(layers_of(4), saved=np.array([1.0]), extra=np.array([0.0]), behind=1)
    layers = replace(layers, beside=(3.0, 5.0), last=(3.0, 5.0))
    ranks, one = straight(layers, 1, 4, np.ones(1), ends=False), np.ones((1, 1))
    passes = 2 * one, backwards * one
    host = Host(4 / 35, math.inf, one, one, passes, passes, np.zeros(1))
    (bound,) = least_seconds(layers, [FREE], ranks, 4, 0.0, host)
    assert bound == pytest.approx(1 + 35 + (48 - 8 * (1 + backwards)) + 4 * 8 - ahead)


@pytest.mark.parametrize(("schedule", "chunks"), [("interleaved", 2), ("v-half", None)])
def test_pipelines_recompute_beside_what_they_wait_for(
    schedule: str, chunks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where activations may go to the host, too: each alone is less; and no plan that fits is below."""
    host = replace(FAST, device=replace(FAST.device, host_memory_bytes=10**12, host_bytes_per_second=3e9))
    region, laid_out, every = Region(Mesh(pp=2, dp=2), 1, 4), 0, Outlook._all_ranks
    point = Point(region, schedule, chunks, "redistributed", 1, 0, ("activations",), 1)
    for budget in (800_000, 1_200_000):
        search = search_of("gpt2", 8, 4, host, budget_bytes=budget, head_chunks=1)
        search._begin()
        profile = search.place(region)
        assert profile is not None
        assert search._outlook is not None
        (together,) = search._outlook.bounds([point], profile)
        with suppress(BudgetError):
            assert together <= search.lay_out(point).step_seconds * ROUNDED
            laid_out += 1
        with monkeypatch.context() as patched:
            patched.setattr(Outlook, "_all_ranks", lambda *given: every(*given)[:1])  # by memory alone
            (alone,) = search._outlook._by_memory([point], profile)
        waiting = max(alone, *search._outlook.bounds([point], profile, memory=False))
        assert together > 1.003 * waiting if budget == 800_000 else together >= waiting
    assert laid_out


@pytest.mark.parametrize("vocabulary", ["redistributed", "vocab-1"])
def test_logits_in_chunks_are_made_twice(vocabulary: str) -> None:
    search = search_of("llama", 8, 4, BUSY)
    search.glance()
    region = Region(Mesh(pp=2, dp=2), 1, 4)
    profile = search.place(region)
    assert profile is not None
    assert search._outlook is not None
    whole = Point(region, "1f1b", None, vocabulary, 0, 0, (), 1)
    chunked = whole._replace(head_chunks=8)
    again = search.costing.again_seconds(chunked, profile)
    assert 0 < again <= search.costing.logits_seconds / 8 * ROUNDED
    assert search.costing.again_seconds(whole, profile) == 0
    of_chunks = search.profiler.of(profile.key._replace(chunks=8), region.mesh, region.microbatches)
    assert of_chunks is not None
    assert of_chunks.units[-1].seconds >= profile.units[-1].seconds + again, "what the bound takes for granted"
    assert search.costing.again_seconds(chunked, of_chunks) == 0, "there it is a part of the head"
    pairs = [
        (
            search.costing.bound(point, profile),
            float(search._outlook._by_memory([point], profile)[0]),
            *(float(search._outlook.bounds([point], profile, memory=memory)[0]) for memory in (False, True)),
        )
        for point in (whole, chunked)
    ]
    for before, after in zip(*pairs, strict=True):
        assert after - before >= 4 * again / 2 / ROUNDED, "of four microbatches, on average of two ranks"
    mixed = search._outlook.bounds([chunked, whole, chunked], profile)
    assert mixed.tolist() == [pairs[1][-1], pairs[0][-1], pairs[1][-1]]
