"""Traces of real runs beside the prediction: made up ones, one that torch.profiler wrote, and one of real processes."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import record_function
from typer.testing import CliRunner

from autopar import cli
from autopar.errors import ArgumentError
from autopar.mesh import Mesh
from autopar.report import compare, merged_trace, read_steps, record
from autopar.report.lanes import lane_of
from autopar.report.measured import WAIT
from autopar.runtime import Axes
from autopar.schedules import Timeline, generate
from tests.report.timelines import timeline_of
from tests.report.trace_format import check_format

ROOT = Path(__file__).parents[2]
SECOND = 1e6


def span(name: str, start: float, seconds: float, category: str = "user_annotation", **more: Any) -> dict[str, Any]:
    """A trace event as torch.profiler writes it; times in seconds."""
    at = {"ts": start * SECOND, "dur": seconds * SECOND, "pid": 77, "tid": 78}
    return {"ph": "X", "cat": category, "name": name, **at, "args": {}, **more}


def spans_of(timeline: Timeline, rank: int, slower: float = 1.0, begin: float = 0.0) -> list[dict[str, Any]]:
    """A step of ``rank`` as predicted, ``slower`` times as long, from ``begin`` on. What doesn't block just starts."""
    spans = []
    for event in timeline.events:
        if event.rank == rank:
            blocks = lane_of(event.action) is None
            seconds = slower * (event.end_seconds - event.start_seconds) if blocks else 0.0
            spans.append(span(str(event.action), begin + slower * event.start_seconds, seconds))
    return sorted(spans, key=lambda one: one["ts"])


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """``write(rank, events)``: the trace of that pipeline rank, as a file."""

    def written(rank: int, events: list[dict[str, Any]], **more: Any) -> Path:
        path = tmp_path / f"rank{rank}.json"
        content = {"traceEvents": events, "autopar": {"rank": rank, "pipeline_rank": rank}, **more}
        path.write_text(json.dumps(content))
        return path

    return written


@pytest.fixture
def flat() -> Timeline:
    """Nothing but passes takes time, so that measured times are easy to say."""
    return timeline_of(generate("1f1b", 2, 3), send_seconds=0, reduce_seconds=0)


def test_a_run_twice_as_slow(flat: Timeline, write: Callable[..., Path]) -> None:
    paths = [write(rank, spans_of(flat, rank, 2.0, begin=5.0)) for rank in range(2)]
    measured = read_steps(flat.schedule, paths)
    assert [rank.rank for rank in measured] == [0, 1]
    for event, found in zip(flat.events, [e for rank in measured for e in rank.events], strict=True):
        assert (found.rank, found.action) == (event.rank, event.action)
        assert found.start_seconds == pytest.approx(2 * event.start_seconds, abs=1e-9)
        assert found.end_seconds == pytest.approx(2 * event.end_seconds, abs=1e-9)
    comparison = compare(flat, measured)
    assert [row.name for row in comparison.rows] == ["F", "B", "STEP", "idle per rank", "makespan"]
    # On ranks that wait in receives, which are no passes, everything is twice as long.
    assert all(row.ratio == pytest.approx(2) for row in comparison.rows)
    assert comparison["F"].measured_seconds == pytest.approx(0.02)


def test_the_order_of_the_files_does_not_matter(flat: Timeline, write: Callable[..., Path]) -> None:
    paths = [write(rank, spans_of(flat, rank)) for rank in (1, 0)]
    assert [rank.rank for rank in read_steps(flat.schedule, paths)] == [0, 1]


def test_waits_inside_a_pass_are_idle_time(flat: Timeline, write: Callable[..., Path]) -> None:
    events = spans_of(flat, 0)
    forward = next(e for e in events if e["name"] == "F0@0")
    paths = [
        write(0, [*events, span(WAIT, 0.001, 0.004), span("aten::mm", 0.006, 0.001, "cpu_op")]),
        write(1, spans_of(flat, 1)),
    ]
    measured = read_steps(flat.schedule, paths)
    place = [str(e.action) for e in measured[0].events].index("F0@0")
    assert measured[0].waits[place] == pytest.approx(0.004)
    assert measured[0].own_seconds(place) == pytest.approx(forward["dur"] / SECOND - 0.004)
    assert sum(measured[0].waits) == pytest.approx(0.004)
    assert compare(flat, measured)["F"].measured_seconds == pytest.approx(0.01 - 0.004 / 6)
    idle = compare(flat, measured)["idle per rank"]
    assert idle.measured_seconds - idle.predicted_seconds == pytest.approx(0.002)


def test_one_of_several_steps(flat: Timeline, write: Callable[..., Path]) -> None:
    def steps(rank: int) -> list[dict[str, Any]]:
        return [e for i in range(3) for e in spans_of(flat, rank, 1.0 + i, begin=10.0 * i)] + [span("F0@0", 40, 1)]

    paths = [write(rank, steps(rank)) for rank in range(2)]
    for step, slower in ((0, 1), (1, 2), (2, 3), (-1, 3), (-3, 1)):
        assert compare(flat, read_steps(flat.schedule, paths, step=step))["makespan"].ratio == pytest.approx(slower)
    with pytest.raises(ArgumentError, match=r"has 3 complete steps; there is no step 3"):
        read_steps(flat.schedule, paths, step=3)


def test_clocks(flat: Timeline, write: Callable[..., Path]) -> None:
    """Rank 1's clock is 100 s ahead; the files say since when their times count."""
    paths = [write(0, spans_of(flat, 0)), write(1, spans_of(flat, 1, begin=100.0))]
    assert compare(flat, read_steps(flat.schedule, paths))["makespan"].measured_seconds > 100
    apart = read_steps(flat.schedule, paths, shared_clock=False)
    assert compare(flat, apart)["makespan"].ratio == pytest.approx(1)
    late = [write(0, spans_of(flat, 0)), write(1, spans_of(flat, 1, begin=-3.0), baseTimeNanoseconds=3_000_000_000)]
    assert compare(flat, read_steps(flat.schedule, late))["makespan"].ratio == pytest.approx(1)


def test_gpu_times_count_where_there_are_any(flat: Timeline, write: Callable[..., Path]) -> None:
    events = spans_of(flat, 0)
    for number, event in enumerate(events):
        event["args"]["External id"] = number
    number = next(i for i, e in enumerate(events) if e["name"] == "F0@0")
    link = {"args": {"External id": number}, "pid": 0}
    kernels = [span("F0@0", 0.05, 0.01, "gpu_user_annotation", **link, tid=7)]
    kernels.append(span("F0@0", 0.055, 0.015, "gpu_user_annotation", **link, tid=9))
    paths = [write(0, events + kernels), write(1, spans_of(flat, 1))]
    found = next(e for e in read_steps(flat.schedule, paths)[0].events if str(e.action) == "F0@0")
    assert (found.start_seconds, found.end_seconds) == pytest.approx((0.05, 0.07))


def test_kernels_of_a_range_within_an_actions_are_the_actions(flat: Timeline, write: Callable[..., Path]) -> None:
    """As an optimizer has one of its own: its kernels are in that alone."""
    events = spans_of(flat, 0)
    step = next(e for e in events if e["name"] == "STEP")
    link = {"args": {"External id": 1000}}
    inner = span("Optimizer.step", step["ts"] / SECOND + 1e-6, step["dur"] / SECOND - 2e-6, **link)
    kernel = span("Optimizer.step", 90.0, 0.5, "gpu_user_annotation", **link, tid=7)
    paths = [write(0, [*events, inner, kernel]), write(1, spans_of(flat, 1))]
    found = next(e for e in read_steps(flat.schedule, paths)[0].events if e.action.kind == "STEP")
    assert (found.start_seconds, found.end_seconds) == pytest.approx((90.0, 90.5))


def test_compressed_traces_and_traces_without_a_note(flat: Timeline, tmp_path: Path) -> None:
    paths = [tmp_path / f"{rank}.json.gz" for rank in range(2)]
    for rank, path in enumerate(paths):
        path.write_bytes(gzip.compress(json.dumps({"traceEvents": spans_of(flat, rank)}).encode()))
    assert compare(flat, read_steps(flat.schedule, paths))["makespan"].ratio == pytest.approx(1)


def test_both_in_one_trace(timeline: Timeline, write: Callable[..., Path]) -> None:
    kernel = span("aten::mm", 0.0051, 0.001, "cpu_op", tid=5)
    paths = [write(rank, [*spans_of(timeline, rank, begin=0.005), kernel]) for rank in range(2)]
    trace = merged_trace(timeline, read_steps(timeline.schedule, paths))
    check_format(trace)
    events = trace["traceEvents"]
    names = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    order = ["rank 0, predicted", "rank 0, measured", "rank 1, predicted", "rank 1, measured"]
    assert sorted(names, key=names.__getitem__) == order
    starts = {(e["pid"], e["name"]): e["ts"] for e in events if e["ph"] == "X" and e["cat"] in ("F", "user_annotation")}
    for rank in range(2):
        first = next(e for e in timeline.events if e.rank == rank and e.action.kind == "F")
        predicted = starts[names[f"rank {rank}, predicted"], str(first.action)]
        assert starts[names[f"rank {rank}, measured"], str(first.action)] == pytest.approx(predicted, abs=1e-2)
    assert [e["ts"] for e in events if e["name"] == "aten::mm"] == pytest.approx([100.0] * 2)


def test_communication_that_outlasts_its_action_gets_a_thread_of_its_own(
    flat: Timeline, write: Callable[..., Path]
) -> None:
    late = [span("gloo:recv", 0.005, 0.02), span("gloo:recv", 0.006, 0.02), span("gloo:all_reduce", 0.007, 0.001)]
    trace = merged_trace(flat, read_steps(flat.schedule, [write(0, spans_of(flat, 0) + late)]))
    check_format(trace)
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name" and e["pid"] == 2}
    where = [names[e["tid"]] for e in trace["traceEvents"] if e["name"].startswith("gloo:")]
    assert sorted(where) == ["actions", "actions, meanwhile 1", "actions, meanwhile 2"]


def test_the_table(flat: Timeline, write: Callable[..., Path]) -> None:
    paths = [write(rank, spans_of(flat, rank, 1.5)) for rank in range(2)]
    lines = str(compare(flat, read_steps(flat.schedule, paths))).splitlines()
    assert lines[0].split() == ["predicted", "measured", "measured", "/", "predicted"]
    assert lines[1].split() == ["F", "(forward)", "10", "ms", "15", "ms", "1.500"]
    assert len({len(line) for line in lines}) == 1


def replaced(events: list[dict[str, Any]], index: int, name: str) -> list[dict[str, Any]]:
    return [{**e, "name": name} if i == index else e for i, e in enumerate(events)]


def test_refusals(flat: Timeline, write: Callable[..., Path], tmp_path: Path) -> None:
    good = spans_of(flat, 0)
    bad = tmp_path / "bad.json"
    bad.write_text('{"traceEvents": [')
    with pytest.raises(ArgumentError, match=r"can't read the trace .*bad.json"):
        read_steps(flat.schedule, [bad])
    with pytest.raises(ArgumentError, match=r"can't read the trace .*absent.json"):
        read_steps(flat.schedule, [tmp_path / "absent.json"])
    bad.write_text("[]")
    with pytest.raises(ArgumentError, match=r"is no trace of torch.profiler"):
        read_steps(flat.schedule, [bad])
    with pytest.raises(ArgumentError, match=r"has 3 of the \d+ actions of pipeline rank 0 .* at least one whole step"):
        read_steps(flat.schedule, [write(0, good[:3])])
    order = [good[0]["name"], *(e["name"] for e in good)]
    swapped = replaced(replaced(good, 0, order[2]), 1, order[1])
    with pytest.raises(ArgumentError, match=r"action 0 of the step is SEND_F0@0>1, but .* has F0@0 there"):
        read_steps(flat.schedule, [write(0, swapped)])
    with pytest.raises(ArgumentError, match=r"is of pipeline rank 2, but schedule '1f1b' has 2"):
        read_steps(flat.schedule, [write(2, good)])
    with pytest.raises(ArgumentError, match=r"pipeline ranks \[0, 0\]; give one for each"):
        read_steps(flat.schedule, [write(0, good)] * 2)
    with pytest.raises(ArgumentError, match=r"there is no trace to read"):
        read_steps(flat.schedule, [])


def test_a_trace_that_torch_profiler_wrote(tmp_path: Path) -> None:
    """What record() writes, read_steps() reads: ranges of actions, waits within them, and the rank."""
    timeline = timeline_of(generate("gpipe", 1, 2))
    x = torch.ones(8, 8)
    with record(Axes.alone(Mesh(), 0, "cpu"), tmp_path):
        for action in timeline.schedule.lists[0]:
            with record_function(str(action)):
                with record_function(WAIT):
                    x.sum()
                x = x @ x
    (measured,) = read_steps(timeline.schedule, [tmp_path / "rank0.json"])
    assert [e.action for e in measured.events] == list(timeline.schedule.lists[0])
    lengths = [e.end_seconds - e.start_seconds for e in measured.events]
    assert all(0 < wait < length for wait, length in zip(measured.waits, lengths, strict=True))
    assert {e["name"] for e in measured.trace} >= {"F0@0", "aten::mm", WAIT}
    check_format(merged_trace(timeline, [measured]))


def test_nothing_is_written_where_the_run_fails(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), record(Axes.alone(Mesh(), 0, "cpu"), tmp_path / "traces"):
        raise ZeroDivisionError
    assert not (tmp_path / "traces").exists()


@pytest.mark.gloo
@pytest.mark.slow
def test_two_real_processes_beside_their_prediction(tmp_path: Path) -> None:
    """``train --profile`` on real processes, then ``plan --measured``, which reads their traces."""
    job = ["tests.report.small_model:make", "--mesh", "pp=2", "--microbatches", "4", "--schedule", "1f1b"]
    job += ["--vocabulary", "redistributed", "--zero", "0", "--offload", "none", "--head-chunks", "1"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "autopar", "train", *job, "--steps", "2", "--profile", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    files = ["--measured", str(tmp_path), "--trace", str(tmp_path / "both.json")]
    result = CliRunner().invoke(cli.app, ["plan", *job, "--gpus", "2", *files])
    assert result.exit_code == 0, result.output
    assert "measured / predicted" in result.output
    check_format(json.loads((tmp_path / "both.json").read_text(encoding="utf-8")))

    timeline = timeline_of(generate("1f1b", 2, 4))
    measured = read_steps(timeline.schedule, [tmp_path / f"rank{rank}.json" for rank in range(2)])
    assert all(row.measured_seconds > 0 for row in compare(timeline, measured).rows)
    ends = {str(e.action): e.end_seconds for rank in measured for e in rank.events}
    for before, after in (("F0@0", "F0@1"), ("B0@1", "B0@0")):  # on one machine the ranks' clocks agree
        assert ends[before] < ends[after]
    assert any(wait > 0 for wait in measured[1].waits)
