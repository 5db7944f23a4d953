"""Timelines to look at: SVG, a page, a trace for Perfetto, and what a real run measured beside the prediction."""

from autopar.report.chrome_trace import chrome_trace
from autopar.report.measured import Comparison, MeasuredRank, compare, merged_trace, read_steps, record
from autopar.report.timeline_html import timeline_html
from autopar.report.timeline_svg import timeline_svg

__all__ = [
    "Comparison",
    "MeasuredRank",
    "chrome_trace",
    "compare",
    "merged_trace",
    "read_steps",
    "record",
    "timeline_html",
    "timeline_svg",
]
