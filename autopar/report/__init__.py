"""Plans, timelines and memory to look at, and what a real or simulated run measured beside the prediction."""

from autopar.report.chrome_trace import chrome_trace
from autopar.report.experts import load_table
from autopar.report.measured import Comparison, MeasuredRank, compare, merged_trace, read_steps, record
from autopar.report.memory import MemoryReport, memory_report, memory_svg
from autopar.report.plan_tables import print_explanation, print_section
from autopar.report.search_progress import Progress, SearchProgress, live_progress
from autopar.report.timeline_html import timeline_html
from autopar.report.timeline_svg import timeline_svg

__all__ = [
    "Comparison",
    "MeasuredRank",
    "MemoryReport",
    "Progress",
    "SearchProgress",
    "chrome_trace",
    "compare",
    "live_progress",
    "load_table",
    "memory_report",
    "memory_svg",
    "merged_trace",
    "print_explanation",
    "print_section",
    "read_steps",
    "record",
    "timeline_html",
    "timeline_svg",
]
