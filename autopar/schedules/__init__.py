"""Pipeline schedules: action lists, their generators, lowering, checker, timeline and picture (DESIGN 4.4).

``lower(generate("1f1b", ranks, microbatches))`` gives lists that an executor can run; ``check`` proves them.
"""

from autopar.schedules.actions import Action, Schedule, format_list, parse_action, parse_list
from autopar.schedules.check import check
from autopar.schedules.draw import Picture, render
from autopar.schedules.gpipe import gpipe
from autopar.schedules.lower import lower
from autopar.schedules.one_f_one_b import one_f_one_b
from autopar.schedules.pass_times import PassTimes
from autopar.schedules.progress import run_order
from autopar.schedules.registry import SCHEDULES, Row, generate, placement
from autopar.schedules.timeline import Costs, Event, Timeline, Timelines, simulate_timeline

__all__ = [
    "SCHEDULES",
    "Action",
    "Costs",
    "Event",
    "PassTimes",
    "Picture",
    "Row",
    "Schedule",
    "Timeline",
    "Timelines",
    "check",
    "format_list",
    "generate",
    "gpipe",
    "lower",
    "one_f_one_b",
    "parse_action",
    "parse_list",
    "placement",
    "render",
    "run_order",
    "simulate_timeline",
]
