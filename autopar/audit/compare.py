"""The planner's costs beside those of what was seen, one row for each figure that the timeline is made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from rich.console import Console
from rich.table import Table

from autopar.audit.costs import SeenCosts
from autopar.audit.prices import Prices
from autopar.audit.run import see
from autopar.audit.step import step_seconds
from autopar.cluster import Cluster
from autopar.plan import Plan
from autopar.runtime.job import Job
from autopar.runtime.modules import dtype_of
from autopar.schedules import Timeline
from autopar.schedules.flow import EXCHANGES

TOLERANCE: Final = 1e-9
"""Two sums of the same figures in another order differ by less, relative to them."""


@dataclass(frozen=True)
class Row:
    """One figure: what the planner says of it, and the evaluator. ``unit`` is "s" or "FLOP".

    Of products of backwards the planner has no figure of its own: its side is what its cost models take them for, two
    for each one of the forward whose factors both have gradients, of the forwards that were seen.
    """

    what: str
    planner: float
    evaluator: float
    unit: str = "s"

    @property
    def difference(self) -> float:
        """The planner's figure less the evaluator's, relative to the larger of both."""
        largest = max(abs(self.planner), abs(self.evaluator))
        return (self.planner - self.evaluator) / largest if largest else 0.0

    @property
    def is_equal(self) -> bool:
        return abs(self.difference) <= TOLERANCE


@dataclass(frozen=True)
class Unpriced:
    """What programs do in a step and no cost counts: its seconds by the same cost models."""

    what: str
    seconds: float


@dataclass(frozen=True)
class Audit:
    """Rows in the order of the step. For the record, and no error: what programs do and no cost counts
    (``unpriced``)."""

    rows: tuple[Row, ...]
    unpriced: tuple[Unpriced, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether all figures are equal to rounding."""
        return all(row.is_equal for row in self.rows)

    @property
    def largest_difference(self) -> float:
        """Of all figures, relative."""
        return max((abs(row.difference) for row in self.rows), default=0.0)

    @property
    def different(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if not row.is_equal)

    def table(self) -> Table:
        """As a rich table."""
        verdict = "equal" if self.ok else f"NOT equal in {len(self.different)} of {len(self.rows)} figures"
        table = Table(title=f"costs of the planner and of its programs are {verdict}")
        for name in ("", "planner", "evaluator", "difference"):
            table.add_column(name, justify="right" if name else "left")
        for row in self.rows:
            difference = "" if row.is_equal else f"{100 * row.difference:+.3g} %"
            figures = (f"{value:.6g} {row.unit}" for value in (row.planner, row.evaluator))
            table.add_row(row.what, *figures, difference, style="" if row.is_equal else "red")
        for extra in self.unpriced:
            table.add_row(f"not priced: {extra.what}", "", f"{extra.seconds:.6g} s", "")
        return table

    def __str__(self) -> str:
        console = Console(width=120, no_color=True)
        with console.capture() as captured:
            console.print(self.table())
        return captured.get()


class Planned(Protocol):
    """What is audited: a compiled model."""

    @property
    def plan(self) -> Plan: ...

    @property
    def job(self) -> Job: ...

    @property
    def timeline(self) -> Timeline: ...


def audit(planned: Planned) -> Audit:
    """Run one rank of each pipeline index on fake tensors, at any size, and compare what that costs with the plan."""
    plan, job, timeline = planned.plan, planned.job, planned.timeline
    batch = {i.path: torch.empty(i.shape, dtype=dtype_of(i.dtype), device="meta") for i in plan.inputs}
    prices = Prices(Cluster.parse(plan.cluster_toml, origin="the plan"), job.mesh)
    ran = see(job, batch, prices.cluster.device.kind)
    seen = SeenCosts(job.schedule, ran, prices, [len(s.units) for s in plan.stage_plans])
    rows = [*_of_stages(timeline, seen), *_of_ranks(timeline, seen), *_of_exchanges(timeline, seen)]
    begins = [seen.begin_seconds(rank) for rank in range(job.schedule.ranks)]
    device = step_seconds(job.schedule, seen.seconds, seen.summed_seconds, begins)
    rows.append(Row("step", plan.cost.step_seconds, max(device, *map(seen.host_seconds, range(job.schedule.ranks)))))
    return Audit(tuple(rows), tuple(_unpriced(seen)))


_STAGE: Final = {
    "forward_seconds": "forward",
    "backward_seconds": "backward",
    "whole_seconds": "whole backward",
    "weight_seconds": "weight gradients",
    "send_forward_seconds": "message forward",
    "send_backward_seconds": "message backward",
    "gather_seconds": "gather of weights",
    "scatter_seconds": "scatter of gradients",
    "reduce_seconds": "reduction of gradients",
    "scattering_seconds": "all of a scatter",
    "reducing_seconds": "all of a reduction",
    "offload_seconds": "copy to the host",
}
"""Fields of :class:`autopar.schedules.timeline.Costs` by what rows call them."""


_RANK: Final = {
    "step_seconds": "optimizer",
    "begin_seconds": "totals of the batch and casts",
    "end_seconds": "loads and loss",
    "host_seconds": "host",
}


def _of_stages(timeline: Timeline, seen: SeenCosts) -> Iterator[Row]:
    for stage in range(timeline.schedule.stages):
        for name, what in _STAGE.items():
            if not _is_used(name, stage, seen):
                continue
            planned, found = getattr(timeline.costs, name)[stage], getattr(seen, name)(stage)
            if planned or found:
                yield Row(f"stage {stage}: {what}", planned, found)
        run, priced = seen.back_flops(stage)
        yield Row(f"stage {stage}: products of the backward", priced, run, "FLOP")


def _is_used(name: str, stage: int, seen: SeenCosts) -> bool:
    """A figure of the timeline that this schedule's actions don't ask for is nobody's."""
    if name == "weight_seconds":
        return seen.is_split(stage)
    if name == "whole_seconds":
        return seen.is_mixed(stage)
    return name != "offload_seconds" or seen.offloads(stage)


def _of_ranks(timeline: Timeline, seen: SeenCosts) -> Iterator[Row]:
    for rank in range(timeline.schedule.ranks):
        for name, what in _RANK.items():
            planned, found = getattr(timeline.costs, name)[rank], getattr(seen, name)(rank)
            if planned or found:
                yield Row(f"pipeline rank {rank}: {what}", planned, found)


def _of_exchanges(timeline: Timeline, seen: SeenCosts) -> Iterator[Row]:
    for kind, planned in timeline.costs.vocabulary_seconds.items():
        found = seen.exchange_seconds if kind in EXCHANGES else seen.vocabulary_seconds
        for rank in range(timeline.schedule.ranks):
            yield Row(f"pipeline rank {rank}: {kind}", planned[rank], found(rank, kind))
    for name, what in (("gather", "gather of tables"), ("reduce", "reduction of tables' gradients")):
        planned, made = (getattr(side, f"{name}_vocabulary_seconds") for side in (timeline.costs, seen))
        if planned or made:
            yield Row(what, planned, made)


def _unpriced(seen: SeenCosts) -> Iterator[Unpriced]:
    for rank in range(seen.schedule.ranks):
        if stray := seen.stray_seconds(rank):
            yield Unpriced(f"the norm of the gradient, on pipeline rank {rank}", stray)
