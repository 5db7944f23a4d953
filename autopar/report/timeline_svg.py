"""A timeline as SVG: per pipeline rank a row of passes, lanes of communication, and what is kept over time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from statistics import median
from typing import Final

from autopar.plan import bytes_text, percent_text
from autopar.report.lanes import described, exchange_events, lane_events, lane_of, rank_events
from autopar.schedules.actions import KINDS, Action, Schedule
from autopar.schedules.looks import LOOKS, chunk_of, duration_text, shade
from autopar.schedules.timeline import Event, Kept, Timeline
from autopar.schedules.weight_moves import moves_of

MAX_DETAILED: Final = 20_000
"""Up to this many boxes have a title that appears under the pointer, and a number where there is room."""

LABELS: Final = 132
"""Width of the labels left of the time axis, in px."""

_MARGIN, _AXIS, _DIGIT = 12, 20, 6.2  # px; of a digit, the width
_NARROWEST, _WIDEST, _PASS = 760.0, 12_000.0, 22.0  # px; of a pass in the middle of all, the width wanted
_MANY_RANKS: Final = 16
_LANE_COLOURS: Final = {
    "activations": "#3478b8",
    "gradients": "#d98a1f",
    "exchanges": "#9b3a70",
    "reductions": "#4f8a3c",
    "offloads": "#7b63ab",
    "fetches": "#a3b545",
}
_LANE_NAMES: Final = {
    "activations": "activations sent",
    "gradients": "gradients sent",
    "exchanges": "exchanges",
    "reductions": "reductions",
    "offloads": "activations to the host",
    "fetches": "activations from the host",
}

STYLE: Final = """
.chart{background:#fff;color:#1a1a1a;font-family:system-ui,"Segoe UI",Helvetica,Arial,sans-serif;font-size:11px}
.chart text{fill:#1a1a1a}
.chart .name{font-weight:600;font-size:12px}
.chart .small{font-size:10px;fill:#444}
.chart .in{text-anchor:middle;pointer-events:none}
.chart .track{fill:#f0efec}
.chart .grid{stroke:#d9d7d1;stroke-width:.6}
.chart .bytes{fill:#c9d6e2}
.chart .count{fill:none;stroke:#33475b;stroke-width:1}
.chart .rule{stroke:#b5b2aa;stroke-width:.6}
""".strip()


@dataclass(frozen=True)
class _Layout:
    """Where things are, in px; y counts from the top of a rank's row."""

    scale: float  # px per second
    width: float
    box: float
    lane: float
    kept: float
    gap: float
    lanes: tuple[str, ...]
    ranks: int
    exchanges: float  # height of the one row of exchanges, 0 without any

    @property
    def lane_top(self) -> float:
        return self.box + 2

    @property
    def kept_top(self) -> float:
        return self.lane_top + (self.lane + 1) * len(self.lanes) + 3

    @property
    def pitch(self) -> float:
        return self.kept_top + self.kept + self.gap

    def top(self, rank: int) -> float:
        return _AXIS + (self.exchanges and self.exchanges + self.gap) + rank * self.pitch

    @property
    def height(self) -> float:
        return self.top(self.ranks) - self.gap


def timeline_svg(timeline: Timeline, width: float | None = None) -> str:
    """One self-contained SVG document.

    ``width`` of the time axis in px; None: as wide as the numbers of most passes need, from 760 to 12,000 px.
    Above :data:`MAX_DETAILED` boxes, titles and numbers are left out, and the picture says so; what takes no time is
    never drawn.
    """
    chart = Chart(timeline, width)
    lines = _wrapped([_facts(timeline), *chart.notes()], chart.width - 2 * _MARGIN)
    legend, legend_height = chart.legend(chart.width - 2 * _MARGIN)
    heading, y = escape(title(timeline.schedule)), 12.0
    head = f'<text class="name" y="{_n(y)}">{heading}</text>'
    for line in lines:
        y += 16
        head += f'<text y="{_n(y)}">{escape(line)}</text>'
    top = y + 12
    head += f'<g transform="translate(0,{_n(top)})">{legend}</g>'
    top += legend_height
    inner = f'{head}<g transform="translate(0,{_n(top)})">{"".join(chart.labels())}\n{chart.body()}</g>'
    return (
        document(inner, chart.width, top + chart.height + 2 * _MARGIN, f"{STYLE}{chart.colours()}", heading, _MARGIN)
        + "\n"
    )


def document(inner: str, width: float, height: float, style: str = "", label: str = "", margin: float = 0) -> str:
    """An ``<svg>`` of ``width`` x ``height`` px; ``margin`` moves what is in it."""
    size = f'width="{_n(width)}" height="{_n(height)}" viewBox="0 0 {_n(width)} {_n(height)}"'
    role = f' role="img" aria-label="{label}"' if label else ' aria-hidden="true"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" {size}{role}>'
        + (f"<style>{style}</style>" if style else "")
        + f'<rect width="100%" height="100%" fill="#fff"/><g transform="translate({margin},{margin})">{inner}</g></svg>'
    )


def title(schedule: Schedule) -> str:
    """The schedule's name and sizes in words."""
    ranks, microbatches = schedule.ranks, schedule.microbatches
    sizes = f"{ranks} pipeline rank{'' if ranks == 1 else 's'}, "
    sizes += f"{microbatches} microbatch{'' if microbatches == 1 else 'es'}"
    sizes += f", {schedule.stages} stages" if schedule.stages != schedule.ranks else ""
    sizes += f", vocabulary split by {schedule.head}" if schedule.head else ""
    return f"{schedule.name}: {sizes}"


def _facts(timeline: Timeline) -> str:
    in_flight = timeline.peak_in_flight
    return (
        f"makespan {duration_text(timeline.makespan_seconds)} · "
        f"idle {percent_text(timeline.idle_share)} of all ranks · "
        f"communication overhead {duration_text(timeline.communication_overhead_seconds)} · "
        f"in flight {_range([str(count) for count in (min(in_flight), max(in_flight))])}"
    )


def _range(ends: list[str]) -> str:
    return " to ".join(dict.fromkeys(ends))


class Chart:
    """The parts of a picture, from which an SVG document and a page are put together."""

    def __init__(self, timeline: Timeline, width: float | None = None) -> None:
        self.timeline = timeline
        self.rows = [[e for e in row if _is_drawn(e)] for row in rank_events(timeline)]
        self.lanes = lane_events(timeline)
        self.exchanges = [Event(0, action, *span) for action, span in exchange_events(timeline).items()]
        self.exchanges = [event for event in self.exchanges if event.end_seconds > event.start_seconds]
        lanes = (row for rows in self.lanes.values() for row in rows)
        boxes = sum(map(len, (self.exchanges, *self.rows, *lanes)))
        self._chunks = [chunk_of(timeline.schedule, Action("F", 0, s)) for s in range(timeline.schedule.stages)]
        self.is_detailed = boxes <= MAX_DETAILED
        self.boxes = boxes
        self.kept = [timeline.kept(rank) for rank in range(timeline.schedule.ranks)]
        self.peak_bytes = max(timeline.peak_activation_bytes)
        self.layout = _layout(timeline, self.rows, tuple(self.lanes), bool(self.exchanges), width)

    @property
    def width(self) -> float:
        """Of labels, time axis and margins, in px."""
        return self.layout.width + LABELS + 2 * _MARGIN

    @property
    def height(self) -> float:
        """Of all rows, in px."""
        return self.layout.height

    def notes(self) -> list[str]:
        """What isn't drawn, in words."""
        found = []
        if moves_of(self.timeline.schedule).gathers == "pass":
            found.append(
                "weights gathered before a pass are those of its first layer; "
                "those of the others are gathered during passes, which isn't drawn"
            )
        if not self.is_detailed:
            found.append(
                f"{self.boxes:,} boxes: more than {MAX_DETAILED:,}, so without numbers and titles; "
                "the trace for Perfetto has them all"
            )
        return found

    def colours(self) -> str:
        """CSS: a class for each colour that is used."""
        chunks = self.timeline.schedule.chunks
        used = {self._class(event.action) for row in self.rows for event in row}
        rules = []
        for name in sorted(used):
            kind, parity, chunk = name.split("-")
            colours = shade(kind, int(parity), int(chunk), chunks)
            rules.append(_colour(name, colours.box))
            rules.append(f".chart text.{name}{{fill:{colours.text}}}")
        rules += [_colour(name, colour) for name, colour in _LANE_COLOURS.items()]
        return "\n" + "\n".join(rules)

    def labels(self) -> Iterator[str]:
        """The names of the ranks with how busy they are and what they keep at most."""
        layout, timeline = self.layout, self.timeline
        if self.exchanges:
            yield f'<text class="small" x="0" y="{_AXIS + 8}">exchanges of all ranks</text>'
        for rank in range(timeline.schedule.ranks):
            top = layout.top(rank)
            share = timeline.busy_seconds[rank] / timeline.makespan_seconds if timeline.makespan_seconds else 0.0
            middle = top + layout.box / 2 + 4
            yield f'<text class="name" x="0" y="{_n(middle)}">rank {rank}</text>'
            yield f'<text class="small" x="64" y="{_n(middle)}">{100 * share:.0f} % busy</text>'
            kept = f"{timeline.peak_in_flight[rank]} in flight"
            kept += f", {bytes_text(timeline.peak_activation_bytes[rank])}" if self.peak_bytes else ""
            yield f'<text class="small" x="0" y="{_n(top + layout.kept_top + layout.kept / 2 + 4)}">{kept}</text>'

    def body(self) -> str:
        """Axis and rows, right of the labels."""
        return f'<g transform="translate({LABELS},0)">\n{"".join(self._body())}</g>\n'

    def _body(self) -> Iterator[str]:
        yield from self._axis()
        yield from self._boxes(self.exchanges, _AXIS, self.layout.exchanges)
        for rank, row in enumerate(self.rows):
            layout, top = self.layout, self.layout.top(rank)
            yield f'<rect class="track" y="{_n(top)}" width="{_n(layout.width)}" height="{_n(layout.box)}"/>\n'
            yield from self._boxes(row, top, layout.box)
            for i, lane in enumerate(layout.lanes):
                y = top + layout.lane_top + i * (layout.lane + 1)
                yield from self._boxes(self.lanes[lane][rank], y, layout.lane)
            yield from self._kept(self.kept[rank], top + layout.kept_top)

    def _axis(self) -> Iterator[str]:
        layout, makespan = self.layout, self.timeline.makespan_seconds
        for seconds in _ticks(makespan, layout.width / 90):
            x = seconds * layout.scale
            if layout.width - x < 50 and seconds:
                continue  # where the text would be cut off
            yield f'<path class="grid" d="M{_n(x)} {_AXIS - 4}V{_n(layout.height)}"/>'
            yield f'<text class="small" x="{_n(x)}" y="{_AXIS - 8}">{duration_text(seconds) if seconds else "0"}</text>'
        yield f'<path class="grid" d="M{_n(layout.width)} {_AXIS - 4}V{_n(layout.height)}"/>\n'

    def _boxes(self, events: list[Event], y: float, height: float) -> Iterator[str]:
        if self.is_detailed:
            yield from (self._detailed(event, y, height) for event in events)
            return
        lines: dict[str, list[str]] = defaultdict(list)  # a thick line is the shortest way to write a box
        for event in events:
            x, width = self._extent(event)
            lines[self._class(event.action)].append(f"M{_n(x, 1)} 0h{_n(width, 1)}")
        at = f'transform="translate(0,{_n(y + height / 2)})" stroke-width="{_n(height)}"'
        for name, parts in sorted(lines.items()):
            yield f'<path class="{name}" {at} d="{"".join(parts)}"/>\n'

    def _detailed(self, event: Event, y: float, height: float) -> str:
        x, width = self._extent(event)
        name, action = self._class(event.action), event.action
        seconds = event.end_seconds - event.start_seconds
        hover = f"{escape(str(action))} · {described(action)} · at {duration_text(event.start_seconds)}"
        hover += f" for {duration_text(seconds)}"
        text = ""
        label = "" if action.microbatch < 0 else str(action.microbatch)
        if action.kind in LOOKS and width >= _DIGIT * len(label) + 2:
            text = f'<text class="in {name}" x="{_n(x + width / 2)}" y="{_n(y + height / 2 + 4)}">{label}</text>'
        rect = f'<rect class="{name}" x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}">'
        return f"{rect}<title>{hover}</title></rect>{text}\n"

    def _extent(self, event: Event) -> tuple[float, float]:
        """x and width in px; a hair of the neighbour's width stays free between boxes that are wide enough."""
        x = event.start_seconds * self.layout.scale
        width = (event.end_seconds - event.start_seconds) * self.layout.scale
        return x, width - 0.5 if width > 4 else max(width, 0.3)

    def _class(self, action: Action) -> str:
        if action.kind in LOOKS:
            chunk = self._chunks[action.stage] if action.stage >= 0 else 0
            return f"{action.kind}-{max(action.microbatch, 0) % 2}-{chunk}"
        return str(lane_of(action))

    def _kept(self, points: list[Kept], top: float) -> Iterator[str]:
        """The bytes kept as an area, the microbatches in flight as a line, each to the scale of all ranks' peak."""
        layout, bottom = self.layout, top + self.layout.kept
        end = layout.width
        yield f'<path class="rule" d="M0 {_n(bottom)}H{_n(end)}"/>'
        if self.peak_bytes:
            area = _steps(((p.seconds, p.bytes / self.peak_bytes) for p in points), layout, bottom)
            yield f'<path class="bytes" d="M0 {_n(bottom)}{area}H{_n(end)}V{_n(bottom)}z"/>'
        most = max(self.timeline.peak_in_flight) or 1
        line = _steps(((p.seconds, p.in_flight / most) for p in points), layout, bottom)
        yield f'<path class="count" d="M0 {_n(bottom)}{line}H{_n(end)}"/>\n'

    def legend(self, width: float) -> tuple[str, float]:
        """The legend in lines of at most ``width`` px, and its height in px."""
        parts = [*self._pass_keys(), *self._lane_keys()]
        parts.append(('<path class="count" d="M0 9h6v-6h8"/>', 18, "microbatches in flight"))
        if self.peak_bytes:
            parts.append((_swatch("bytes", 0), 18, "bytes kept"))
        if self.timeline.schedule.microbatches > 1:
            numbers = "numbers are those of microbatches; " if self.is_detailed else ""
            parts.append(("", 0, f"{numbers}odd microbatches are lighter"))
        text, x, y = "", 0.0, 0.0
        for shapes, shapes_width, name in parts:
            needed = shapes_width + _DIGIT * len(name) + 14
            if x and x + needed > width:
                x, y = 0.0, y + 18
            text += (
                f'<g transform="translate({_n(x)},{_n(y)})">{shapes}<text x="{shapes_width}" y="10">{name}</text></g>'
            )
            x += needed
        return text, y + 24

    def _pass_keys(self) -> Iterator[tuple[str, float, str]]:
        schedule = self.timeline.schedule
        drawn = {event.action.kind for row in self.rows for event in row}
        for kind, look in LOOKS.items():
            if kind not in drawn:
                continue
            chunks = schedule.chunks if KINDS[kind].stage and look.first != look.last else 1
            shapes = "".join(_swatch(f"{kind}-0-{chunk}", 14 * chunk) for chunk in range(chunks))
            name = f"{look.name}, chunks 0 to {chunks - 1}" if chunks > 1 else look.name
            yield shapes, 14 * chunks + 4, name

    def _lane_keys(self) -> Iterator[tuple[str, float, str]]:
        drawn = {self._class(event.action) for rows in self.lanes.values() for row in rows for event in row}
        drawn |= {"exchanges"} if self.exchanges else set()
        kinds = {event.action.kind for row in self.lanes.get("reductions", []) for event in row}
        gathers = {"reductions": "weights gathered, gradients reduced"} if any(k.startswith("G") for k in kinds) else {}
        for name, text in (_LANE_NAMES | gathers).items():
            if name in drawn:
                yield f'<rect class="{name}" y="3" width="14" height="5"/>', 18, text


def _colour(name: str, colour: str) -> str:
    return f".chart .{name}{{fill:{colour}}}.chart path.{name}{{stroke:{colour}}}"


def _is_drawn(event: Event) -> bool:
    return event.action.kind in LOOKS and event.end_seconds > event.start_seconds


def _layout(
    timeline: Timeline, rows: list[list[Event]], lanes: tuple[str, ...], exchanges: bool, width: float | None
) -> _Layout:
    makespan = timeline.makespan_seconds
    lengths = [event.end_seconds - event.start_seconds for row in rows for event in row if event.action.stage >= 0]
    if width is None:
        wanted = makespan / median(lengths) * _PASS if lengths else _NARROWEST
        width = min(max(wanted, _NARROWEST), _WIDEST)
    scale = width / makespan if makespan else 0.0
    many = timeline.schedule.ranks > _MANY_RANKS
    box, lane, kept, gap = (16.0, 3.0, 13.0, 9.0) if many else (22.0, 4.0, 24.0, 12.0)
    return _Layout(scale, width, box, lane, kept, gap, lanes, timeline.schedule.ranks, 9.0 if exchanges else 0.0)


def _ticks(makespan: float, most: float) -> Iterator[float]:
    """At most about ``most`` round times from 0 up to the makespan, in seconds."""
    if not makespan:
        return
    rough = makespan / max(most, 1)
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    yield from (i * step for i in range(int(makespan / step) + 1))


def _steps(points: Iterable[tuple[float, float]], layout: _Layout, bottom: float) -> str:
    """Path commands of a curve that changes only in steps: (seconds, height as a share of the panel).

    Of changes at one moment the last counts: what one pass frees, the next takes.
    """
    heights = {_n(seconds * layout.scale, 1): bottom - share * (layout.kept - 1) for seconds, share in points}
    return "".join(f"H{x}V{_n(y, 1)}" for x, y in heights.items())


def _swatch(name: str, x: float) -> str:
    return f'<rect class="{name}" x="{_n(x)}" width="13" height="12"/>'


def _wrapped(lines: list[str], width: float) -> list[str]:
    """Each line broken at its separators so that it fits ``width`` px."""
    found = []
    for line in lines:
        current = ""
        for part in line.split(" "):
            if current and _DIGIT * len(f"{current} {part}") > width:
                found.append(current)
                current = part
            else:
                current = f"{current} {part}".strip()
        found.append(current)
    return found


def _n(value: float, digits: int = 2) -> str:
    """A coordinate to a hundredth of a px, without zeros that say nothing."""
    return f"{value:.{digits}f}".rstrip("0").rstrip(".")
