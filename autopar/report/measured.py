"""What a real run measured, beside its prediction: torch.profiler ranges of the actions against a timeline.

On each rank, ``with record(axes, folder): executor.step(batch)`` profiles a step or more. On one machine,
:func:`read_steps` reads one step of each pipeline rank, :func:`compare` makes a table and :func:`merged_trace` one
trace of both, predicted and measured ranks side by side.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile

from autopar.errors import ArgumentError
from autopar.report.chrome_trace import MICRO, Process, TraceEvent, document, timeline_events
from autopar.report.lanes import NOUNS
from autopar.runtime.axes import Axes
from autopar.schedules.actions import Schedule
from autopar.schedules.looks import LOOKS, duration_text
from autopar.schedules.timeline import Event, Timeline

WAIT: Final = "WAIT"
"""The range, within an action's, in which a rank waits for others; no part of the action's own time."""

_ROUNDING: Final = 1e-2
"""Microseconds between the end of a range's last kernel and that of the range, as the profiler writes them."""

_CPU, _GPU = "user_annotation", "gpu_user_annotation"
_KEY: Final = "autopar"


@contextmanager
def record(axes: Axes, folder: str | Path) -> Iterator[profile]:
    """Profile what this rank runs, and write it to ``folder/rank<N>.json``; every rank of the job may do so.

    The executor marks each action with a range of its name, so that the trace can be laid beside a timeline. The
    trace is written only where the body ends without an error.
    """
    activities = [ProfilerActivity.CPU]
    if axes.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, acc_events=True) as profiler:  # torch 2.11 warns of what it leaves out else
        place = {"rank": axes.rank, "pipeline_rank": axes["pp"].index}
        profiler.add_metadata_json(_KEY, json.dumps(place))
        yield profiler
        if axes.device.type == "cuda":
            torch.cuda.synchronize(axes.device)
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path / f"rank{axes.rank}.json"))


@dataclass(frozen=True)
class MeasuredRank:
    """One step of one pipeline rank; times in seconds from the start that :func:`read_steps` chose.

    ``events`` has an event per action of the rank's list, ``waits[i]`` the seconds of event i that the rank waited,
    ``trace`` everything that the profiler saw during the step, as its own trace events.
    """

    rank: int
    events: tuple[Event, ...]
    waits: tuple[float, ...]
    trace: tuple[TraceEvent, ...] = field(repr=False)

    @property
    def busy_seconds(self) -> float:
        """What its passes and its optimizer step take, without waits."""
        return sum(self.own_seconds(i) for i, event in enumerate(self.events) if event.action.kind in LOOKS)

    def own_seconds(self, index: int) -> float:
        """What event ``index`` takes without waits."""
        event = self.events[index]
        return event.end_seconds - event.start_seconds - self.waits[index]


def read_steps(
    schedule: Schedule, paths: Sequence[str | Path], *, step: int = -1, shared_clock: bool = True
) -> tuple[MeasuredRank, ...]:
    """Read one step of each pipeline rank from traces that :func:`record` wrote, ``.json`` or ``.json.gz``.

    ``step`` counts the complete steps in the traces, from the end if negative. Time 0 is where the first of all
    ranks begins; with ``shared_clock=False`` (ranks on machines with clocks of their own) where each rank itself
    does. Of data or tensor parallel ranks, give one for each pipeline rank. A trace without a note of its rank
    counts by its place. Where the GPU was profiled, an action lasts from its first kernel to its last.

    Raises ArgumentError for files that are no traces, two of one rank, or a trace that isn't of ``schedule``.
    """
    read = [_read(schedule, Path(path), place, step) for place, path in enumerate(paths)]
    if not read:
        raise ArgumentError("there is no trace to read; give the files that record() wrote, one per pipeline rank")
    ranks = [measured.rank for measured, _ in read]
    if len(set(ranks)) != len(ranks):
        raise ArgumentError(f"the traces are of pipeline ranks {ranks}; give one for each")
    earliest = min(begin for _, begin in read)
    later = (_later(measured, begin - earliest if shared_clock else 0.0) for measured, begin in read)
    return tuple(sorted(later, key=lambda measured: measured.rank))


def _read(schedule: Schedule, path: Path, place: int, step: int) -> tuple[MeasuredRank, Fraction]:
    """One step in times from its first action on, and when that was, in microseconds."""
    content = _load(path)
    note = content.get(_KEY)
    rank = note["pipeline_rank"] if isinstance(note, dict) else place
    if rank >= schedule.ranks:
        raise ArgumentError(f"{path} is of pipeline rank {rank}, but schedule {schedule.name!r} has {schedule.ranks}")
    slices = sorted((e for e in content["traceEvents"] if _is_slice(e)), key=lambda e: e["ts"])
    ranges = _step_ranges(schedule, rank, slices, path, step)
    begin = ranges[0]["ts"]
    ranges, slices = ([{**e, "ts": e["ts"] - begin} for e in events] for events in (ranges, slices))
    base = Fraction(content.get("baseTimeNanoseconds", 0)) / 1000  # with a float, microseconds would be lost
    return _measured(schedule, rank, ranges, slices), base + Fraction(begin)


def _load(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
        content = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    except (OSError, EOFError, ValueError) as error:
        raise ArgumentError(f"can't read the trace {path}: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("traceEvents"), list):
        raise ArgumentError(f"{path} is no trace of torch.profiler: it has no list 'traceEvents'")
    return content


def _is_slice(event: Any) -> bool:
    return isinstance(event, dict) and event.get("ph") == "X" and {"name", "ts", "dur", "pid", "tid"} <= event.keys()


def _step_ranges(
    schedule: Schedule, rank: int, slices: Sequence[TraceEvent], path: Path, step: int
) -> list[TraceEvent]:
    """The ranges of the rank's actions in one step, in the order of its list."""
    wanted = [str(action) for action in schedule.lists[rank]]
    names = frozenset(wanted)
    ranges = [e for e in slices if e.get("cat") == _CPU and e["name"] in names]
    count = len(ranges) // len(wanted)
    if not count:
        raise ArgumentError(
            f"{path} has {len(ranges)} of the {len(wanted)} actions of pipeline rank {rank} in schedule "
            f"{schedule.name!r}; profile at least one whole step of a job with that schedule"
        )
    if not -count <= step < count:
        raise ArgumentError(f"{path} has {count} complete steps; there is no step {step}")
    first = step % count * len(wanted)
    chosen = ranges[first : first + len(wanted)]
    for index, (found, name) in enumerate(zip(chosen, wanted, strict=True)):
        if found["name"] != name:
            raise ArgumentError(
                f"{path}: action {index} of the step is {found['name']}, but pipeline rank {rank} of schedule "
                f"{schedule.name!r} has {name} there; the trace is of another schedule"
            )
    return chosen


def _measured(
    schedule: Schedule, rank: int, ranges: Sequence[TraceEvent], slices: Sequence[TraceEvent]
) -> MeasuredRank:
    on_gpu = _gpu_spans(slices)
    annotations = [e for e in slices if e.get("cat") == _CPU]
    begins = [e["ts"] for e in annotations]
    waiting = [e for e in annotations if e["name"] == WAIT]
    events, waits, at = [], [], 0
    for action, found in zip(schedule.lists[rank], ranges, strict=True):
        start, end = found["ts"], found["ts"] + found["dur"]
        while at < len(waiting) and waiting[at]["ts"] < start:
            at += 1
        waited = 0.0
        while at < len(waiting) and waiting[at]["ts"] < end:
            waited += waiting[at]["dur"]
            at += 1
        within = annotations[bisect_left(begins, found["ts"]) : bisect_left(begins, found["ts"] + found["dur"])]
        spans = [on_gpu[_external(e)] for e in within if _external(e) in on_gpu]
        if spans:  # a GPU waits in its streams, between kernels of other actions
            start, end, waited = min(start for start, _ in spans), max(end for _, end in spans), 0.0
        events.append(Event(rank, action, start / MICRO, end / MICRO))
        waits.append(waited / MICRO)
    first, last = ranges[0]["ts"], max(e.end_seconds for e in events) * MICRO + _ROUNDING
    inside = tuple(e for e in slices if e["ts"] >= first and e["ts"] + e["dur"] <= last)
    return MeasuredRank(rank, tuple(events), tuple(waits), inside)


def _external(event: TraceEvent) -> Any:
    return event.get("args", {}).get("External id")


def _gpu_spans(slices: Sequence[TraceEvent]) -> dict[Any, tuple[float, float]]:
    """From the first kernel of each range to its last, over all streams, by the number that links it to the range.

    A kernel is in the innermost range alone: an optimizer has one of its own within an action's.
    """
    spans: dict[Any, tuple[float, float]] = {}
    for event in slices:
        number = _external(event)
        if event.get("cat") == _GPU and number is not None:
            start, end = spans.get(number, (event["ts"], event["ts"] + event["dur"]))
            spans[number] = (min(start, event["ts"]), max(end, event["ts"] + event["dur"]))
    return spans


def _later(measured: MeasuredRank, micro: Fraction | float) -> MeasuredRank:
    shift = float(micro)
    seconds = shift / MICRO
    events = (
        e._replace(start_seconds=e.start_seconds + seconds, end_seconds=e.end_seconds + seconds)
        for e in measured.events
    )
    trace = ({**e, "ts": round(e["ts"] + shift, 3)} for e in measured.trace)
    return replace(measured, events=tuple(events), trace=tuple(trace))


@dataclass(frozen=True)
class Row:
    """Mean seconds of one kind of action, or of idling per rank, or the makespan."""

    name: str
    predicted_seconds: float
    measured_seconds: float

    @property
    def ratio(self) -> float:
        """Measured over predicted; NaN where nothing was predicted."""
        return self.measured_seconds / self.predicted_seconds if self.predicted_seconds else float("nan")


@dataclass(frozen=True)
class Comparison:
    """A row per kind that occupies a rank, then idle time per rank, then the makespan; ``str`` is a table."""

    rows: tuple[Row, ...]

    def __getitem__(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)

    def __str__(self) -> str:
        cells = [("", "predicted", "measured", "measured / predicted")]
        for row in self.rows:
            ratio = f"{row.ratio:.3f}" if row.predicted_seconds else "-"
            name = f"{row.name} ({NOUNS[row.name]})" if row.name in NOUNS else row.name
            cells.append((name, duration_text(row.predicted_seconds), duration_text(row.measured_seconds), ratio))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = (
            "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
            for line in cells
        )
        return "\n".join(lines)


def compare(timeline: Timeline, measured: Sequence[MeasuredRank]) -> Comparison:
    """Mean seconds per kind on the ranks that were measured, their mean idle time, and the makespan: of the device, and
    where a step takes as long as its host, that.

    What passes wait for messages and exchanges counts as idle, on both sides; the measured ``STEP`` includes the wait
    for reductions and the clipping of gradients.
    """
    ranks = {rank.rank for rank in measured}
    predicted: dict[str, list[float]] = defaultdict(list)
    found: dict[str, list[float]] = defaultdict(list)
    for event in timeline.events:
        if event.rank in ranks and event.action.kind in LOOKS:
            predicted[event.action.kind].append(event.end_seconds - event.start_seconds)
    for rank in measured:
        for index, event in enumerate(rank.events):
            if event.action.kind in LOOKS:
                found[event.action.kind].append(rank.own_seconds(index))
    rows = [Row(kind, _mean(predicted[kind]), _mean(found[kind])) for kind in LOOKS if kind in predicted]
    span = max(e.end_seconds for rank in measured for e in rank.events)
    idle = _mean([span - rank.busy_seconds for rank in measured])
    rows.append(Row("idle per rank", _mean([timeline.idle_seconds[rank] for rank in sorted(ranks)]), idle))
    rows.append(Row("makespan", timeline.step_seconds, span))
    return Comparison(tuple(rows))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def merged_trace(timeline: Timeline, measured: Sequence[MeasuredRank]) -> dict[str, Any]:
    """One trace of both, to open in Perfetto: each measured rank below its prediction, aligned at their starts."""
    return document(_merged_events(timeline, measured))


def _merged_events(timeline: Timeline, measured: Sequence[MeasuredRank]) -> Iterator[TraceEvent]:
    ranks = range(timeline.schedule.ranks)
    yield from timeline_events(timeline, [Process(2 * rank + 1, f"rank {rank}, predicted") for rank in ranks])
    for rank in measured:
        process = Process(2 * rank.rank + 2, f"rank {rank.rank}, measured")
        threads = _threads(rank)
        yield from process.header(list(threads))
        for index, events in enumerate(threads.values()):
            for event in events:
                yield {**event, "pid": process.pid, "tid": process.thread(index)}


def _threads(measured: MeasuredRank) -> dict[str, list[TraceEvent]]:
    """What was measured by thread, the one that runs the actions first.

    Communication that a thread began and that ended later, in another action, gets threads of its own: slices of one
    thread may only be apart or nested.
    """
    first = str(measured.events[0].action)
    main = next((e["pid"], e["tid"]) for e in measured.trace if e["name"] == first and e.get("cat") == _CPU)
    by_thread: dict[tuple[Any, Any], list[TraceEvent]] = {main: []}
    for event in measured.trace:
        by_thread.setdefault((event["pid"], event["tid"]), []).append(event)
    found = {}
    for (pid, tid), events in by_thread.items():
        name = "actions" if (pid, tid) == main else f"process {pid}, thread or stream {tid}"
        for index, lane in enumerate(_nested(events)):
            found[f"{name}, meanwhile {index}" if index else name] = lane
    return found


def _nested(events: Sequence[TraceEvent]) -> list[list[TraceEvent]]:
    """``events`` dealt out to as few lanes as it takes, so that those of a lane are apart or nested."""
    lanes: list[list[TraceEvent]] = []
    open_ends: list[list[float]] = []  # per lane, the ends of the slices that are still open, the innermost last
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        start, end = event["ts"], event["ts"] + event["dur"]
        for lane, ends in zip(lanes, open_ends, strict=True):
            while ends and ends[-1] <= start:
                ends.pop()
            if not ends or end <= ends[-1]:
                lane.append(event)
                ends.append(end)
                break
        else:
            lanes.append([event])
            open_ends.append([end])
    return lanes
