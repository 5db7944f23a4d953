"""The trace for Perfetto: its format, and that it says what the timeline says."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.report import chrome_trace
from autopar.report.lanes import exchange_events
from autopar.schedules import Timeline
from autopar.schedules.flow import counterpart, is_exchange, is_send
from tests.report.trace_format import check_format, increasing


def slices(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def thread_names(trace: dict[str, Any]) -> dict[int, str]:
    return {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}


def test_the_format_holds(timeline: Timeline) -> None:
    check_format(chrome_trace(timeline))


def test_every_event_is_there_in_microseconds(timeline: Timeline) -> None:
    found = {(s["pid"] - 1, s["name"]): s for s in slices(chrome_trace(timeline))}
    assert len(found) == len(timeline.events)
    exchanges = exchange_events(timeline)
    for event in timeline.events:
        start, end = exchanges.get(event.action, (event.start_seconds, event.end_seconds))
        one = found[event.rank, str(event.action)]
        assert one["ts"] == pytest.approx(start * 1e6, abs=1e-3)
        assert one["dur"] == pytest.approx((end - start) * 1e6, abs=1e-3)
        if is_exchange(event.action):
            assert one["args"]["posted_us"] == pytest.approx(event.start_seconds * 1e6, abs=1e-3)


def test_threads_by_what_they_occupy(vocabulary: Timeline) -> None:
    trace = chrome_trace(vocabulary)
    names = thread_names(trace)
    found: dict[str, set[str]] = {}
    for one in slices(trace):
        found.setdefault(names[one["tid"]], set()).add(one["cat"])
    assert found == {
        "passes": {"F", "B", "S", "T", "E", "G", "STEP"},
        "waits for messages": {"RECV_F", "RECV_B"},
        "sends activations to rank 1": {"SEND_F"},
        "sends gradients to rank 0": {"SEND_B"},
        "exchanges": {"CAST_X", "STATS", "SUM_X", "SUM_E", "CAST_E"},
        "reductions": {"REDUCE", "REDUCE_V"},
    }


def test_an_arrow_from_each_send_to_its_receive(timeline: Timeline) -> None:
    events = chrome_trace(timeline)["traceEvents"]
    previous: dict[str, Any] = {}
    arrows: dict[int, dict[str, tuple[int, str]]] = {}
    for event in events:
        if event["ph"] in "sf":
            arrows.setdefault(event["id"], {})[event["ph"]] = (previous["pid"] - 1, previous["name"])
        else:
            previous = event
    expected = {
        (event.rank, str(event.action), event.action.peer, str(counterpart(event.rank, event.action)))
        for event in timeline.events
        if is_send(event.action)
    }
    assert {(*ends["s"], *ends["f"]) for ends in arrows.values()} == expected


def test_counters_follow_what_is_kept(timeline: Timeline) -> None:
    events = chrome_trace(timeline)["traceEvents"]
    for rank in range(timeline.schedule.ranks):
        counters = [e for e in events if e["ph"] == "C" and e["pid"] == rank + 1]
        in_flight = [e["args"]["microbatches"] for e in counters if e["name"] == "in flight"]
        kept = [e["args"]["bytes"] for e in counters if e["name"] == "kept"]
        assert increasing([e["ts"] for e in counters])
        assert (max(in_flight), in_flight[-1]) == (timeline.peak_in_flight[rank], 0)
        assert (max(kept), kept[-1]) == (timeline.peak_activation_bytes[rank], 0)


def test_processes_are_named_after_ranks_in_their_order(timeline: Timeline) -> None:
    events = chrome_trace(timeline)["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    ranks = [f"rank {rank}" for rank in range(timeline.schedule.ranks)]
    assert [names[pid] for pid in sorted(names, key=order.__getitem__)] == ranks
