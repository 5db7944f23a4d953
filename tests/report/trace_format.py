"""The rules of the Trace Event Format that viewers rely on, as one check."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

FIELDS = {
    "X": {"name", "ts", "dur", "pid", "tid"},
    "C": {"name", "ts", "pid", "args"},
    "M": {"name", "pid", "args"},
    "s": {"name", "cat", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "id", "ts", "pid", "tid", "bp"},
}
METADATA = {"process_name": "name", "process_sort_index": "sort_index"}
METADATA |= {"thread_name": "name", "thread_sort_index": "sort_index"}
SLACK = 0.002  # microseconds: times are rounded to the nanosecond


def check_format(trace: dict[str, Any]) -> None:
    """Assert that ``trace`` is well formed: fields, finite times, names, nesting, paired arrows inside slices."""
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    slices = defaultdict(list)
    for event in trace["traceEvents"]:
        assert FIELDS[event["ph"]] <= event.keys(), event
        if event["ph"] == "X":
            assert event["ts"] >= -SLACK
            assert event["dur"] >= 0
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "M":
            assert METADATA[event["name"]] in event["args"]
        elif event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
    _check_names(trace, slices)
    _check_nesting(slices)
    _check_arrows(trace, slices)


def _check_names(trace: dict[str, Any], slices: dict[tuple[int, int], list[tuple[float, float]]]) -> None:
    named = [(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["ph"] == "M" and e["name"] == "thread_name"]
    assert set(slices) <= set(named)
    assert len(named) == len(set(named)) == len({tid for _, tid in named})
    assert 0 not in {pid for pid, _ in named}


def _check_nesting(slices: dict[tuple[int, int], list[tuple[float, float]]]) -> None:
    """Slices of a thread are apart or nested; a viewer can't draw anything else."""
    for spans in slices.values():
        stack: list[tuple[float, float]] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while stack and stack[-1][1] <= start + SLACK:
                stack.pop()
            assert not stack or end <= stack[-1][1] + SLACK
            stack.append((start, end))


def _check_arrows(trace: dict[str, Any], slices: dict[tuple[int, int], list[tuple[float, float]]]) -> None:
    ends = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] in "sf":
            ends[event["cat"], event["id"]].append(event)
            spans = slices[event["pid"], event["tid"]]
            assert any(start - SLACK <= event["ts"] <= end + SLACK for start, end in spans), event
    for pair in ends.values():
        assert [event["ph"] for event in sorted(pair, key=lambda event: event["ph"], reverse=True)] == ["s", "f"]
        start, finish = sorted(pair, key=lambda event: event["ph"], reverse=True)
        assert start["ts"] <= finish["ts"]
        assert start["pid"] != finish["pid"]


def increasing(values: list[float]) -> bool:
    return all(a <= b for a, b in pairwise(values))
