"""What ranks hold over a training step, by kind: predicted, and beside it what was measured; as a table and a picture.

Kinds are those of :data:`autopar.storages.KINDS`. A peak's kinds are those of one moment: what adds up to it then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

from rich.table import Table
from torch import Tensor

from autopar.errors import ArgumentError
from autopar.plan import Column, Section, bytes_text, spans_text
from autopar.report.plan_tables import section_table
from autopar.report.timeline_svg import document
from autopar.runtime.executor import Executor
from autopar.runtime.job import Job
from autopar.simulate.measure import RankMemory, device_memory, fake_memory, measured_memory
from autopar.simulate.predict import predicted_memory
from autopar.storages import ALLOCATED, KINDS, Phase

_COLOURS: Final = {
    "parameters": "#33475b",
    "working": "#5b7d9c",
    "gradients": "#d98a1f",
    "optimizer": "#8c5a9e",
    "saved": "#3478b8",
    "gathered": "#7ba7a0",
    "buffers": "#a3b545",
    "temporaries": "#c9c4b8",
}
_STYLE: Final = """
.memory{background:#fff;color:#1a1a1a;font-family:system-ui,"Segoe UI",Helvetica,Arial,sans-serif;font-size:11px}
.memory .name{font-weight:600;font-size:12px}
.memory .scale{fill:none;stroke:#33475b;stroke-width:.8}
.memory rect{shape-rendering:crispEdges}
.memory .budget{stroke:#b3261e;stroke-width:1;stroke-dasharray:4 3}
""".strip()
_PANEL, _GAP, _LABELS, _HEADING, _LEGEND, _SCALE, _KEY, _MARGIN = 110, 26, 180, 22, 26, 70, 100, 12  # px
_TITLE: Final = "memory of a rank at the peak of each action, in the order of its list (not to the scale of time)"
_LONGEST: Final = 18  # characters that there is room for beside a panel
_WIDEST, _NARROWEST, _DIGIT = 40.0, 1.5, 6.2  # px of an action, and of a letter


@dataclass(frozen=True)
class MemoryReport:
    """One entry per rank. ``measured`` is empty where nothing was; ``how`` says how it was ("simulated ranks").

    ``budget_bytes`` is what a rank may use; ``pipeline_index[rank]`` tells which ranks do the same.
    """

    predicted: Sequence[RankMemory]
    measured: Sequence[RankMemory]
    how: str
    budget_bytes: int
    pipeline_index: Sequence[int]

    @property
    def errors(self) -> list[float]:
        """Per measured rank, by how much the predicted peak differs, as a fraction of the measured one."""
        pairs = zip(self.predicted, self.measured, strict=bool(self.measured))
        return [predicted.peak_bytes / measured.peak_bytes - 1 for predicted, measured in pairs]

    def section(self) -> Section:
        """A row for the ranks of each pipeline index, and one below it of what was measured on the fullest of them."""
        kinds = [kind for kind in (*KINDS, ALLOCATED) if any(rank.peak.peak.get(kind) for rank in self._all())]
        columns = (
            Column("ranks", "ranks"),
            Column("action", "at"),
            *(Column(f"{kind}_bytes", kind, "bytes") for kind in kinds),
            Column("peak_bytes", "peak", "bytes"),
            Column("share", "of budget", "share"),
            Column("host_peak_bytes", "host", "bytes"),
        )
        rows = []
        for index in dict.fromkeys(self.pipeline_index):
            ranks = [rank for rank, own in enumerate(self.pipeline_index) if own == index]
            rows.append(self._row(spans_text(ranks), self.predicted[ranks[0]], kinds))
            if self.measured:
                fullest = max(ranks, key=lambda rank: self.measured[rank].peak_bytes)
                rows.append(self._row(f"  {self.how}", self.measured[fullest], kinds))
        return Section("memory", "", columns, tuple(rows))

    def table(self) -> Table:
        """:meth:`section` as one table, however wide."""
        return section_table(self.section())

    def _row(self, ranks: str, memory: RankMemory, kinds: Sequence[str]) -> tuple[Any, ...]:
        peak = memory.peak
        held = [peak.peak.get(kind) or None for kind in kinds]
        share = peak.peak_bytes / self.budget_bytes
        return (ranks, peak.label, *held, peak.peak_bytes, share, memory.host_peak_bytes or None)

    def _all(self) -> list[RankMemory]:
        return [*self.predicted, *self.measured]

    def to_json(self) -> dict[str, Any]:
        """For machines: per rank, predicted and measured."""
        return {
            "budget_bytes": self.budget_bytes,
            "measured_on": self.how,
            "predicted": [_json(memory) for memory in self.predicted],
            "measured": [_json(memory) for memory in self.measured],
        }

    def __str__(self) -> str:
        """One line per rank."""
        lines = []
        for rank, memory in enumerate(self.predicted):
            peak = memory.peak
            beside = f", measured {bytes_text(self.measured[rank].peak_bytes)}" if self.measured else ""
            lines.append(f"rank {rank}: peak {bytes_text(peak.peak_bytes)} in {peak.label}{beside}")
        return "\n".join(lines)


def _json(memory: RankMemory) -> dict[str, Any]:
    peak = memory.peak
    return {
        "peak_bytes": peak.peak_bytes,
        "action": peak.label,
        "kinds": {kind: peak.peak[kind] for kind in KINDS if peak.peak.get(kind)},
        "host_peak_bytes": memory.host_peak_bytes,
        "phases": [[phase.label, phase.peak_bytes] for phase in memory.phases],
    }


def memory_svg(report: MemoryReport) -> str:
    """One self-contained SVG: of each pipeline index a panel, an action after another, what is held in it at most.

    The dashed line is the budget, where it isn't far above everything.
    """
    indices = list(dict.fromkeys(report.pipeline_index))
    panels = [report.predicted[report.pipeline_index.index(index)] for index in indices]
    top = max(memory.peak_bytes for memory in panels)
    shown = max(top, report.budget_bytes if report.budget_bytes < 2 * top else 0)
    actions = max(len(memory.phases) for memory in panels)
    box = min(_WIDEST, max(_NARROWEST, 900.0 / actions))
    held = [kind for kind in KINDS if any(phase.peak.get(kind) for memory in panels for phase in memory.phases)]
    budget = [] if report.budget_bytes > shown else [f"budget: {bytes_text(report.budget_bytes)}"]
    inner = [f'<text class="name" y="10">{_TITLE}</text>', _legend(held, budget)]
    for number, (index, memory) in enumerate(zip(indices, panels, strict=True)):
        y = _HEADING + _LEGEND + number * (_PANEL + _GAP)
        ranks = [rank for rank, own in enumerate(report.pipeline_index) if own == index]
        inner.append(_panel(memory, _name(ranks), y, box, shown, report.budget_bytes))
    width = max(_LABELS + actions * box + _SCALE, _KEY * (len(held) + len(budget)), _DIGIT * len(_TITLE)) + 2 * _MARGIN
    height = _HEADING + _LEGEND + len(panels) * (_PANEL + _GAP) + 2 * _MARGIN
    return document(f'<g class="memory">{"".join(inner)}</g>', width, height, _STYLE, "memory over a step", _MARGIN)


def _name(ranks: Sequence[int]) -> str:
    """Short enough to stand beside a panel."""
    text = spans_text(ranks)
    return f"ranks {text}" if len(text) <= _LONGEST else f"{len(ranks)} ranks from {ranks[0]}"


def _legend(kinds: Sequence[str], budget: Sequence[str]) -> str:
    parts = []
    for number, name in enumerate((*kinds, *budget)):
        x, y = _KEY * number, _HEADING
        if name in _COLOURS:
            parts.append(f'<rect x="{x}" y="{y}" width="10" height="10" fill="{_COLOURS[name]}"/>')
        else:
            parts.append(f'<path class="budget" d="M{x} {y + 5}h10"/>')
        parts.append(f'<text x="{x + 14}" y="{y + 9}">{name}</text>')
    return "".join(parts)


def _panel(memory: RankMemory, name: str, y: float, box: float, shown: int, budget_bytes: int) -> str:
    peak, end = memory.peak, _LABELS + len(memory.phases) * box
    parts = [
        f'<text class="name" y="{y + 14:.1f}">{name}</text>',
        f'<text y="{y + 30:.1f}">{bytes_text(peak.peak_bytes)} in {escape(peak.label)}</text>',
        f'<path class="scale" d="M{end + 6:.1f} {y:.1f}h-4v{_PANEL}h4"/>',
        f'<text x="{end + 9:.1f}" y="{y + 4:.1f}">{bytes_text(shown)}</text>',
        f'<text x="{end + 9:.1f}" y="{y + _PANEL + 4:.1f}">0</text>',
    ]
    for position, phase in enumerate(memory.phases):
        parts.append(_bar(phase, _LABELS + position * box, y, box, shown))
    if budget_bytes <= shown:
        line = y + _PANEL * (1 - budget_bytes / shown)
        parts.append(f'<line class="budget" x1="{_LABELS}" x2="{end:.1f}" y1="{line:.1f}" y2="{line:.1f}"/>')
    return "".join(parts)


def _bar(phase: Phase, x: float, y: float, box: float, shown: int) -> str:
    level, parts = y + _PANEL, []
    title = ", ".join(f"{kind} {bytes_text(phase.peak[kind])}" for kind in KINDS if phase.peak.get(kind))
    for kind in KINDS:
        height = _PANEL * max(0, phase.peak.get(kind, 0)) / shown
        level -= height
        if height >= 0.05:
            place = f'x="{x:.1f}" y="{level:.1f}" width="{box:.1f}" height="{height:.1f}"'
            parts.append(f'<rect {place} fill="{_COLOURS[kind]}"/>')
    return f"<g><title>{escape(phase.label)}: {escape(title)}</title>{''.join(parts)}</g>"


MEASURES: Final = {"simulate": "simulated ranks", "fake": "fake tensors", "device": "this rank's GPU"}
"""How memory can be measured -> what the report calls it."""


def memory_report(
    job: Job,
    batch: Mapping[str, Tensor],
    budget_bytes: int,
    measure: str = "",
    running: Executor | None = None,
    device: str = "cpu",
) -> MemoryReport:
    """Predict for a ``device`` of this kind, and measure as ``measure`` says: "" not at all, or a key of
    :data:`MEASURES`. Simulated ranks run on the CPU: beside them, that is predicted.

    "device" is about the one rank that is ``running``. Raises ArgumentError for another ``measure``, or a batch without
    values where it needs them.
    """
    if measure not in ("", *MEASURES):
        raise ArgumentError(f"measure={measure!r}; it may be one of {', '.join(MEASURES)}, or be left out")
    if measure in ("simulate", "device") and any(tensor.is_meta for tensor in batch.values()):
        raise ArgumentError(f"measure={measure!r} trains a step, so it needs a batch; give one, or use measure='fake'")
    index = job.mesh.places("pp")
    kind = "cpu" if measure == "simulate" else device
    predicted = predicted_memory(job, batch, device=kind)
    if running is not None:
        own = running.axes.rank
        return MemoryReport(
            [predicted[own]], [device_memory(running, batch)], MEASURES[measure], budget_bytes, [index[own]]
        )
    measured: list[RankMemory] = []
    if measure:
        measured = measured_memory(job, batch) if measure == "simulate" else fake_memory(job, batch, kind)
    return MemoryReport(predicted, measured, MEASURES.get(measure, ""), budget_bytes, index)
