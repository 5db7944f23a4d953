"""A timeline as a picture in the terminal: one row per pipeline rank, time from left to right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from autopar.schedules.timeline import Event, Timeline


@dataclass(frozen=True)
class _Look:
    """How one kind of time is drawn: a fill without colour, and two shades that neighbours take in turn."""

    name: str
    fill: str
    shades: tuple[str, str]


_LOOKS: Final = {
    "F": _Look("forward", "-", ("#ffffff on #1f5f9e", "#ffffff on #3478b8")),
    "B": _Look("backward", "=", ("#000000 on #e09f3e", "#000000 on #f2c46d")),
    "STEP": _Look("step", "#", ("#ffffff on #5b8c5a", "#ffffff on #5b8c5a")),
}
_IDLE: Final = "·"
_MIN_COLUMNS: Final = 10
_MAX_LISTED_RANKS: Final = 8


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

    Microbatch numbers appear where a forward or backward is wide enough for them; what is too short for a
    column of its own is left out. Needs about 20 columns; a narrower ``width`` is exceeded.
    """
    label_columns = len(f"rank {timeline.schedule.ranks - 1} ")
    columns = max(_MIN_COLUMNS, width - label_columns)
    rows: list[list[Event]] = [[] for _ in range(timeline.schedule.ranks)]
    for event in timeline.events:
        if event.action.kind in _LOOKS:
            rows[event.rank].append(event)
    scale = columns / timeline.makespan_seconds if timeline.makespan_seconds else 0.0
    digits = len(str(timeline.schedule.microbatches - 1))
    lines = (
        (_same(f"rank {rank}".ljust(label_columns), "bold"), *_row(events, columns, scale, digits))
        for rank, events in enumerate(rows)
    )
    return Picture((*lines, *_wrap(_legend(timeline), max(width, label_columns + _MIN_COLUMNS))))


def _row(events: list[Event], columns: int, scale: float, digits: int) -> Iterator[_Span]:
    """``columns`` columns of one rank; ``scale`` is columns per second."""
    column = 0
    for event in events:
        start, end = _column(event.start_seconds, scale), _column(event.end_seconds, scale)
        if end > start:
            yield _idle(start - column)
            roomy = (event.end_seconds - event.start_seconds) * scale >= digits + 1
            yield _cell(event, end - start, roomy)
            column = end
    yield _idle(columns - column)


def _column(seconds: float, scale: float) -> int:
    return int(seconds * scale + 0.5)


def _idle(columns: int) -> _Span:
    return _same(_IDLE * columns, "dim")


def _cell(event: Event, columns: int, roomy: bool) -> _Span:
    look = _LOOKS[event.action.kind]
    label = str(event.action.microbatch) if roomy and event.action.kind != "STEP" else ""
    shade = look.shades[event.action.microbatch % 2]
    return _Span(label.ljust(columns, look.fill), label.center(columns), shade)


def _legend(timeline: Timeline) -> list[tuple[_Span, ...]]:
    """The parts of the legend, in order; a part is never broken over two lines."""
    schedule = timeline.schedule
    drawn = {event.action.kind for event in timeline.events if event.end_seconds > event.start_seconds}
    keys = [
        (_Span(look.fill * 2, "  ", look.shades[0]), _same(f" {look.name}"))
        for kind, look in _LOOKS.items()
        if kind in drawn
    ]
    in_flight = " ".join(map(str, timeline.peak_in_flight))
    if schedule.ranks > _MAX_LISTED_RANKS:
        in_flight = f"up to {max(timeline.peak_in_flight)}"
    return [
        (_same(schedule.name, "bold"),),
        *keys,
        (_same(_IDLE * 2, "dim"), _same(" idle")),
        (_same(f"bubble {timeline.bubble_ratio:.1%}"),),
        (_same(f"in flight {in_flight}"),),
        (_same(f"makespan {_duration(timeline.makespan_seconds)}"),),
    ]


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


def _duration(seconds: float) -> str:
    """Three significant digits in the largest unit that leaves at least one before the point."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{_three_digits(seconds / size)} {unit}"
    return f"{_three_digits(seconds / 1e-6)} µs"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
