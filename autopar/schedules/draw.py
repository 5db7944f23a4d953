"""A timeline as a picture in the terminal: one row per pipeline rank, time from left to right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from autopar.schedules.actions import KINDS, Action, Schedule
from autopar.schedules.looks import LOOKS, chunk_of, duration_text, shade
from autopar.schedules.timeline import Event, Timeline

_IDLE: Final = "·"
_MIN_COLUMNS: Final = 10
_MAX_LISTED_RANKS: Final = 8
_MAX_SWATCHES: Final = 4


class _Span(NamedTuple):
    """A piece of a line: its text without and with colour, equally long, and the style of the latter."""

    plain: str
    coloured: str
    style: str = ""


def _same(text: str, style: str = "") -> _Span:
    return _Span(text, text, style)


@dataclass(frozen=True)
class Picture:
    """A drawn timeline. ``str`` is the plain form, which rich also prints on a console without colours."""

    lines: tuple[tuple[_Span, ...], ...]

    def __str__(self) -> str:
        return "\n".join("".join(span.plain for span in line).rstrip() for line in self.lines)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self.lines:
            if console.color_system is None:
                yield Text("".join(span.plain for span in line), no_wrap=True)
            else:
                yield Text.assemble(*((span.coloured, span.style) for span in line), no_wrap=True)


def render(timeline: Timeline, width: int) -> Picture:
    """Draw ``timeline`` in ``width`` columns, to scale: a row per pipeline rank, then the legend.

    Microbatch numbers appear where a pass is wide enough for them; what is too short for a column of its own is
    left out. The chunks of a rank differ in fill (two in turn) and colour. Needs about 20 columns; a narrower
    ``width`` is exceeded.
    """
    schedule = timeline.schedule
    label_columns = len(f"rank {schedule.ranks - 1} ")
    columns = max(_MIN_COLUMNS, width - label_columns)
    rows: list[list[Event]] = [[] for _ in range(schedule.ranks)]
    for event in timeline.events:
        if event.action.kind in LOOKS:
            rows[event.rank].append(event)
    scale = columns / timeline.makespan_seconds if timeline.makespan_seconds else 0.0
    lines = (
        (_same(f"rank {rank}".ljust(label_columns), "bold"), *_row(schedule, events, columns, scale))
        for rank, events in enumerate(rows)
    )
    legend_columns = max(width, label_columns + _MIN_COLUMNS)
    return Picture((*lines, *_wrap(_legend(timeline, legend_columns), legend_columns)))


def _row(schedule: Schedule, events: list[Event], columns: int, scale: float) -> Iterator[_Span]:
    """``columns`` columns of one rank; ``scale`` is columns per second."""
    column, digits = 0, len(str(schedule.microbatches - 1))
    for event in events:
        start, end = _column(event.start_seconds, scale), _column(event.end_seconds, scale)
        if end > start:
            yield _idle(start - column)
            roomy = (event.end_seconds - event.start_seconds) * scale >= digits + 1
            yield _cell(schedule, event.action, end - start, roomy)
            column = end
    yield _idle(columns - column)


def _column(seconds: float, scale: float) -> int:
    return int(seconds * scale + 0.5)


def _idle(columns: int) -> _Span:
    return _same(_IDLE * columns, "dim")


def _cell(schedule: Schedule, action: Action, columns: int, roomy: bool) -> _Span:
    chunk = chunk_of(schedule, action)
    label = str(action.microbatch) if roomy and action.microbatch >= 0 else ""
    return _Span(
        label.ljust(columns, LOOKS[action.kind].fills[chunk % 2]),
        label.center(columns),
        _style(action.kind, action.microbatch, chunk, schedule.chunks),
    )


def _style(kind: str, microbatch: int, chunk: int, chunks: int) -> str:
    colours = shade(kind, microbatch, chunk, chunks)
    return f"{colours.text} on {colours.box}"


def _legend(timeline: Timeline, width: int) -> list[tuple[_Span, ...]]:
    """The parts of the legend, in order; a part is never broken over two lines."""
    schedule = timeline.schedule
    drawn = {event.action.kind for event in timeline.events if event.end_seconds > event.start_seconds}
    keys = [(*_swatches(schedule, kind), _same(f" {look.name}")) for kind, look in LOOKS.items() if kind in drawn]
    in_flight = f"in flight {' '.join(map(str, timeline.peak_in_flight))}"
    if schedule.ranks > _MAX_LISTED_RANKS or len(in_flight) > width:
        in_flight = f"in flight up to {max(timeline.peak_in_flight)}"
    return [
        (_same(schedule.name, "bold"),),
        *keys,
        *([(_same(f"chunks 0 to {schedule.chunks - 1}"),)] if schedule.chunks > 1 else []),
        (_same(_IDLE * 2, "dim"), _same(f" idle {100 * timeline.idle_share:.1f} % of all ranks")),
        (_same(in_flight),),
        (_same(f"makespan {duration_text(timeline.makespan_seconds)}"),),
    ]


def _swatches(schedule: Schedule, kind: str) -> list[_Span]:
    """Two columns of a kind's fill and colour for each chunk of a rank, of many chunks the first ones."""
    look = LOOKS[kind]
    shown = min(schedule.chunks, _MAX_SWATCHES) if KINDS[kind].stage and look.first != look.last else 1
    return [_Span(look.fills[c % 2] * 2, "  ", _style(kind, 0, c, schedule.chunks)) for c in range(shown)]


def _wrap(parts: list[tuple[_Span, ...]], width: int) -> list[tuple[_Span, ...]]:
    """Join ``parts`` by two spaces into lines of at most ``width`` columns, where the parts allow it."""
    lines: list[tuple[_Span, ...]] = []
    for part in parts:
        joined = (*lines[-1], _same("  "), *part) if lines else part
        if lines and sum(len(span.plain) for span in joined) <= width:
            lines[-1] = joined
        else:
            lines.append(part)
    return lines
