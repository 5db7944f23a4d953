"""Orders that are made for passes of unequal length, for messages that take time, and for a split head's exchanges."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import autopar.schedules.v_shaped as folded
from autopar.schedules import Costs, PassTimes, Schedule, generate, lower, simulate_timeline
from autopar.schedules.eager import Eager, InOrder, Pass
from autopar.schedules.exchanges import HEAD_EXCHANGES, HEAD_PASSES, seconds_ahead
from autopar.schedules.trials import Line
from autopar.schedules.v_shaped import v_half_peak, v_min_peak
from autopar.schedules.vocabulary import BARRIERS

PASSES = {"forward_seconds": 0.5, "backward_seconds": 1.3, "weight_seconds": 0.45}
"""Of each of two stages on a rank."""
HEAD = {"S": 0.05, "T": 0.1}
EXCHANGES = {"CAST_X": 0.2, "STATS": 0.01, "SUM_X": 0.1}
PEAKS = {"zb-v": lambda ranks: ranks, "v-half": v_half_peak, "v-min": v_min_peak}


def waited(name: str, ranks: int, microbatches: int, *, head: str = "", chunks: int | None = 2, send: float) -> float:
    """What the slowest rank's step takes longer than its passes."""
    draft = generate(name, ranks, microbatches, chunks=chunks, head=head)
    costs = Costs.uniform(draft, **PASSES, send_seconds=send, vocabulary_seconds=(HEAD | EXCHANGES) if head else None)
    schedule = generate(name, ranks, microbatches, chunks=chunks, head=head, costs=PassTimes.of(costs))
    seconds = simulate_timeline(lower(schedule, costs.seconds), costs).makespan_seconds
    return seconds - microbatches * (2 * 1.8 + (sum(HEAD.values()) if head else 0))


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_zb_v_idles_in_no_interval(ranks: int) -> None:
    """Whatever passes and messages take, only where it is filled and drained: for less time than a schedule that keeps
    half as much more."""
    few, many = (waited("zb-v", ranks, times * ranks, send=0.03) for times in (2, 4))
    assert many == pytest.approx(few, rel=0.1)
    assert many < 0.75 * waited("interleaved", ranks, 4 * ranks, send=0.03)


@pytest.mark.parametrize(
    ("microbatches", "seconds", "needed"), [(4, (1.0, 1.7, 0.9, 0.05), 0), (8, (1.0, 1.5, 0.7, 0.1), 1)]
)
def test_each_greedy_order_is_the_shortest_of_some(
    microbatches: int, seconds: tuple[float, ...], needed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    *passes, send = seconds
    times = PassTimes(*((each,) * 8 for each in passes), send=send)

    def makespan() -> float:
        schedule = generate("zb-v", 4, microbatches, costs=times)
        lists = tuple(tuple(Pass(*action[:3]) for action in row) for row in schedule.lists)
        return Line(schedule.placement, times).run(InOrder(lists), microbatches).makespan

    whole, choices = makespan(), folded._CHOICES
    monkeypatch.setattr(folded, "_CHOICES", tuple(each for each in choices if each != choices[needed]))
    assert makespan() > 1.01 * whole


@pytest.mark.parametrize("head", ["vocab-1", "vocab-2"])
@pytest.mark.parametrize(("name", "chunks"), [("interleaved", 2), ("zb-v", 2), ("v-half", 2)])
def test_exchanges_are_waited_for_by_no_microbatch(name: str, chunks: int, head: str) -> None:
    """They take about a tenth of a microbatch's passes, and are hidden but where a step begins and ends."""
    few, many = (waited(name, 4, microbatches, head=head, chunks=chunks, send=0.01) for microbatches in (16, 48))
    assert (many - few) / 32 < 0.25 * sum(EXCHANGES.values())


def made_for(name: str, times: PassTimes, costs: Costs) -> float:
    schedule = generate(name, 4, 16, costs=times, head="vocab-1")
    return simulate_timeline(lower(schedule, costs.seconds), costs).makespan_seconds


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "zb-1p", "zb-v", "v-half"])
def test_an_order_for_exchanges_is_no_longer_than_one_without(name: str) -> None:
    draft = generate(name, 4, 16, head="vocab-1")
    costs = Costs.uniform(draft, **PASSES, send_seconds=0.01, vocabulary_seconds=HEAD | EXCHANGES)
    times = PassTimes.of(costs)
    without, with_them = (made_for(name, each, costs) for each in (replace(times, exchanges={}), times))
    assert with_them <= without
    if name != "1f1b":  # whose order is given
        assert with_them < 0.99 * without


def test_what_exchanges_lie_ahead() -> None:
    seconds = {"CAST_X": 1.0, "STATS": 2.0, "MAX": 4.0, "SUM_X": 8.0, "SUM_E": 16.0, "CAST_E": 32.0}
    assert seconds_ahead("naive", False, seconds) == {"S": 1, "U": 4, "T": 2, "B": 8}
    assert seconds_ahead("vocab-1", False, seconds) == {"S": 1, "T": 2, "B": 8}
    assert seconds_ahead("vocab-2", True, seconds) == {"S": 1, "T": 2, "B": 10, "F": 16, "G": 32}
    assert seconds_ahead("", True, {}) == {"F": 0, "G": 0}


@pytest.mark.parametrize(("head", "until"), [("vocab-1", "STATS T SUM_X"), ("vocab-2", "STATS SUM_X")])
def test_exchanges_take_time_between_passes(head: str, until: str) -> None:
    seconds = {"E": 0.5, "S": 1.0, "T": 2.0, "CAST_X": 4.0, "STATS": 8.0, "SUM_X": 16.0, "SUM_E": 32.0}
    passes = {kind: (each,) * 2 for kind, each in seconds.items() if len(kind) == 1}
    times = PassTimes((1.0,) * 2, (1.0,) * 2, (1.0,) * 2, passes, 0.25, seconds)
    run = Eager((0, 1), 1, times, head, embedding=True)
    run.run(InOrder(tuple(tuple(Pass(kind, 0, stage) for kind in "FIW") for stage in (0, 1))))
    first = seconds["E"] + seconds["SUM_E"]
    assert run.arrival["F"] == [[first], [first + 1.25]]
    last = first + 2.25 + seconds["CAST_X"] + seconds["S"] + sum(seconds[kind] for kind in until.split())
    assert run.arrival["B"] == [[last + 1.25], [last]]


def peak(schedule: Schedule) -> float:
    """The most stages of microbatches between F and W on any rank."""
    most = 0
    for row in schedule.lists:
        kept = 0
        for action in row:
            kept += {"F": 1, "W": -1}.get(action.kind, 0)
            most = max(most, kept)
    return most


SECONDS = st.floats(0.1, 3)


@given(
    st.data(), st.sampled_from(sorted(PEAKS)), st.integers(2, 5), st.integers(1, 12), st.sampled_from(list(BARRIERS))
)
def test_memory_is_what_it_says_whatever_passes_take(
    data: st.DataObject, name: str, ranks: int, microbatches: int, head: str
) -> None:
    parts = [data.draw(st.tuples(*[SECONDS] * 2 * ranks)) for _ in range(3)]
    times = PassTimes(
        *parts,
        vocabulary={kind: (data.draw(SECONDS),) * ranks for kind in HEAD_PASSES[head]},
        send=data.draw(st.floats(0, 1)),
        exchanges={exchange.kind: data.draw(st.floats(0, 1)) for exchange in HEAD_EXCHANGES[head]},
    )
    assert peak(generate(name, ranks, microbatches, costs=times, head=head)) <= 2 * (
        PEAKS[name](ranks) + BARRIERS[head]
    )


def test_messages_are_left_out() -> None:
    times = PassTimes((1.0,), (1.0,), (1.0,), {"S": (1.0,)}, 0.5, {"STATS": 2.0})
    assert times.at_once() == PassTimes((1.0,), (1.0,), (1.0,), {"S": (1.0,)})
