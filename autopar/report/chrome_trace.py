"""A timeline as a trace that ui.perfetto.dev and chrome://tracing open: the Trace Event Format's JSON.

A process per pipeline rank; in it a thread each for its passes, for its waits for messages, for every channel on
which it sends, for exchanges, for reductions, and for copies to the host and back; counters of what it keeps; arrows
from each send to its receive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from autopar.report.lanes import described, exchange_events, lane_of, rank_events
from autopar.schedules.actions import Action
from autopar.schedules.flow import channel, counterpart, is_exchange, is_receive, is_send
from autopar.schedules.timeline import Event, Timeline

TraceEvent = dict[str, Any]
MICRO: Final = 1e6
_THREADS: Final = 100  # thread numbers per process: viewers want them unique over all processes


@dataclass(frozen=True)
class Process:
    """The numbers and the name under which a rank appears."""

    pid: int  # from 1: 0 stands for the idle process
    name: str

    def thread(self, index: int) -> int:
        return self.pid * _THREADS + index

    def header(self, threads: Sequence[str]) -> Iterator[TraceEvent]:
        """Metadata events: the names of the process and of its threads, and that viewers show them in this order."""
        yield _metadata(self.pid, 0, "process_name", name=self.name)
        yield _metadata(self.pid, 0, "process_sort_index", sort_index=self.pid)
        for index, name in enumerate(threads):
            yield _metadata(self.pid, self.thread(index), "thread_name", name=name)
            yield _metadata(self.pid, self.thread(index), "thread_sort_index", sort_index=index)


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The trace as a JSON value; times in microseconds from the start of the step."""
    processes = [Process(rank + 1, f"rank {rank}") for rank in range(timeline.schedule.ranks)]
    return document(timeline_events(timeline, processes))


def document(events: Iterator[TraceEvent]) -> dict[str, Any]:
    return {"traceEvents": list(events), "displayTimeUnit": "ms"}


def timeline_events(timeline: Timeline, processes: Sequence[Process]) -> Iterator[TraceEvent]:
    """The trace events of ``timeline``, one process for each of its ranks."""
    exchanges = exchange_events(timeline)
    messages = _messages(timeline)
    for rank, row in enumerate(rank_events(timeline)):
        process = processes[rank]
        threads = list(dict.fromkeys(["passes", *sorted(map(_thread, row), key=_thread_order)]))
        yield from process.header(threads)
        for event in row:
            posted = event.start_seconds
            if is_exchange(event.action):
                start, end = exchanges[event.action]
                event = event._replace(start_seconds=start, end_seconds=end)
            tid = process.thread(threads.index(_thread(event)))
            yield _slice(event, process.pid, tid, posted)
            if (arrow := _arrow(event, messages)) is not None:
                yield {**arrow, "pid": process.pid, "tid": tid}
        for point in timeline.kept(rank):
            at = {"ph": "C", "ts": _micro(point.seconds), "pid": process.pid, "tid": 0}
            yield {**at, "name": "in flight", "args": {"microbatches": point.in_flight}}
            yield {**at, "name": "kept", "args": {"bytes": point.bytes}}


def _thread(event: Event) -> str:
    """The name of the thread in which an event appears; events of one thread never overlap."""
    action = event.action
    if is_receive(action):
        return "waits for messages"
    if action.kind == "FREE":
        return "waits for memory"
    if is_send(action):
        return f"sends {lane_of(action)} to rank {channel(event.rank, action).destination}"
    return lane_of(action) or "passes"


def _thread_order(name: str) -> tuple[int, str]:
    order = ("passes", "waits", "sends", "exchanges", "reductions", "offloads", "fetches")
    return order.index(name.split(" ", maxsplit=1)[0]), name


def _slice(event: Event, pid: int, tid: int, posted_seconds: float) -> TraceEvent:
    action = event.action
    args: dict[str, Any] = {"what": described(action)}
    args |= {name: value for name in ("microbatch", "stage", "peer") if (value := getattr(action, name)) >= 0}
    if is_exchange(action):
        args["posted_us"] = _micro(posted_seconds)
    return {
        "ph": "X",
        "name": str(action),
        "cat": action.kind,
        "ts": _micro(event.start_seconds),
        "dur": _micro(event.end_seconds - event.start_seconds),
        "pid": pid,
        "tid": tid,
        "args": args,
    }


@dataclass(frozen=True)
class _Message:
    """A message's number, and the times at which its arrow leaves and arrives."""

    number: int
    leaves_seconds: float
    arrives_seconds: float


def _messages(timeline: Timeline) -> dict[tuple[int, Action], _Message]:
    """Each message under both its ends: (rank, send) and (rank, receive)."""
    sent = {(e.rank, e.action): e for e in timeline.events if is_send(e.action)}
    found: dict[tuple[int, Action], _Message] = {}
    for event in timeline.events:
        if not is_receive(event.action):
            continue
        source = event.action.peer, counterpart(event.rank, event.action)
        leaves = sent[source].start_seconds
        # Within the wait, but not before the message has left.
        arrives = max(leaves, (event.start_seconds + event.end_seconds) / 2)
        found[source] = found[event.rank, event.action] = _Message(len(found) // 2 + 1, leaves, arrives)
    return found


def _arrow(event: Event, messages: dict[tuple[int, Action], _Message]) -> TraceEvent | None:
    message = messages.get((event.rank, event.action))
    if message is None:
        return None
    common = {"name": "message", "cat": "message", "id": message.number}
    if is_send(event.action):
        return {"ph": "s", **common, "ts": _micro(message.leaves_seconds)}
    return {"ph": "f", "bp": "e", **common, "ts": _micro(message.arrives_seconds)}


def _micro(seconds: float) -> float:
    """Microseconds, to the nanosecond."""
    return round(seconds * MICRO, 3)


def _metadata(pid: int, tid: int, what: str, **args: Any) -> TraceEvent:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}
