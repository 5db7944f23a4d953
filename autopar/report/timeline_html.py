"""A timeline as one page that needs nothing else: facts, the picture, and a table of the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Final

from autopar.plan import bytes_text, percent_text
from autopar.report.timeline_svg import LABELS, STYLE, Chart, document, title
from autopar.schedules.looks import duration_text
from autopar.schedules.timeline import Timeline

# The labels are there twice: in the picture, where paper needs them, and over it, where they stay while it scrolls.
_STYLE: Final = """
body{margin:24px;background:#fff;color:#1a1a1a;font:14px/1.45 system-ui,"Segoe UI",Helvetica,Arial,sans-serif}
h1{font-size:20px;margin:0 0 12px}
dl{display:flex;flex-wrap:wrap;gap:8px 28px;margin:0 0 14px}
dt{font-size:12px;color:#555}
dd{margin:0;font-size:17px;font-weight:600;font-variant-numeric:tabular-nums}
.scroll{display:flex;overflow-x:auto;margin:0 0 20px}
.scroll svg{flex:none;display:block}
.stays{position:sticky;left:0;z-index:1}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:2px 18px 2px 0;text-align:right;border-bottom:1px solid #e6e4df}
th{font-weight:600;font-size:12px;color:#555}
td:first-child,th:first-child{text-align:left}
p{color:#444;max-width:70em}
@media print{body{margin:0}.stays{display:none}.scroll{overflow:visible}.scroll svg{width:100%;height:auto}
tr{break-inside:avoid}*{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
""".strip()
_LEGEND_WIDTH: Final = 700.0  # px; about what fits on paper


def timeline_html(timeline: Timeline) -> str:
    """One self-contained HTML page with the picture of :func:`.timeline_svg`; it loads nothing and runs no script.

    Above :data:`autopar.report.timeline_svg.MAX_DETAILED` boxes, numbers and the titles under the pointer are left out,
    and the page says so: 64 ranks and 512 microbatches take a few MB.
    """
    chart = Chart(timeline)
    heading = escape(title(timeline.schedule))
    legend, legend_height = chart.legend(_LEGEND_WIDTH)
    labels = "".join(chart.labels())
    style = f"{STYLE}{chart.colours()}"  # in each picture, so that each can be taken out of the page
    picture = document(f"{labels}\n{chart.body()}", chart.width, chart.height, style, heading)
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{heading}</title>',
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>{heading}</h1>",
        f"<dl>{''.join(f'<div><dt>{name}</dt><dd>{value}</dd></div>' for name, value in _facts(timeline))}</dl>",
        *(f"<p>{escape(note)}.</p>" for note in chart.notes()),
        document(legend, _LEGEND_WIDTH, legend_height, style),
        '<div class="scroll">',
        f'<div class="stays" style="margin-right:-{LABELS}px">{document(labels, LABELS, chart.height, style)}</div>',
        f"{picture}</div>",
        _table(timeline),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _facts(timeline: Timeline) -> Iterator[tuple[str, str]]:
    yield "makespan", duration_text(timeline.makespan_seconds)
    if timeline.step_seconds > timeline.makespan_seconds:
        yield "step, as long as hosts issue it", duration_text(timeline.step_seconds)
    yield "idle, of all ranks", percent_text(timeline.idle_share)
    yield "communication overhead", duration_text(timeline.communication_overhead_seconds)
    yield "peak in flight", str(max(timeline.peak_in_flight))
    if max(timeline.peak_activation_bytes):
        yield "peak kept", bytes_text(max(timeline.peak_activation_bytes))


def _table(timeline: Timeline) -> str:
    """Per pipeline rank: busy, idle and peaks; the bytes kept where they are known."""
    peaks = timeline.peak_activation_bytes
    kept = ("peak kept",) if any(peaks) else ()
    columns = ("pipeline rank", "stages", "busy", "idle", "idle share", "peak in flight", *kept)
    rows = []
    for rank in range(timeline.schedule.ranks):
        busy, idle = timeline.busy_seconds[rank], timeline.idle_seconds[rank]
        share = idle / timeline.makespan_seconds if timeline.makespan_seconds else 0.0
        stages = [stage for stage, home in enumerate(timeline.schedule.placement) if home == rank]
        cells = (
            str(rank),
            ", ".join(map(str, stages)) or "none",
            duration_text(busy),
            duration_text(idle),
            percent_text(share),
            str(timeline.peak_in_flight[rank]),
            *(bytes_text(peaks[rank]) for _ in kept),
        )
        rows.append(_row("td", cells))
    return f"<table>{_row('th', columns)}{''.join(rows)}</table>"


def _row(tag: str, cells: tuple[str, ...]) -> str:
    return "<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in cells) + "</tr>\n"
