"""Justification: from a finished run to the priorities of a better one.

How late could each pass start without a longer step, on ranks that keep their order? As priorities of a second run,
these times improve the first (V. Valls, F. Ballestín, S. Quintanilla, European J. Operational Research 165(2), 2005).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Final

from autopar.schedules.actions import Action
from autopar.schedules.exchanges import Exchange, exchanges
from autopar.schedules.greedy import Plan, Ran, Rule, Run

_JUSTIFIED: Final = ", justified"


def justify(run: Run, hold: float = 0.0) -> Rule:
    """The rule that plans each pass at the latest time at which ``run`` could have started it."""
    name = run.name if run.name.endswith(_JUSTIFIED) else run.name + _JUSTIFIED
    return Rule(name, plan=latest_starts(run), ahead=4, hold=hold)


def latest_starts(run: Run) -> Plan:
    """Per rank, how late each pass could start with the same end of the step, if ranks keep their order."""
    latest = _Latest(run)
    passes_ = [(ran, rank) for rank, row in enumerate(run.rows) for ran in row]
    for ran, rank in sorted(passes_, key=lambda item: (-item[0].start_seconds, -item[0].end_seconds, item[1])):
        latest.take(rank, ran)
    return latest.starts


class _Latest:
    """Latest starts, found from the end of the step to its beginning."""

    def __init__(self, run: Run) -> None:
        self.job, self.split = run.job, run.job.split
        self.starts: tuple[dict[Action, float], ...] = tuple({} for _ in range(run.job.ranks))
        self.following = [run.makespan_seconds - seconds for seconds in run.job.costs.step_seconds]
        self.table = exchanges(run.job.head, run.job.embedding)
        self.kinds = {e.kind: run.job.costs.seconds(0, Action(e.kind, 0)) for e in self.table}
        self.due: dict[tuple[str, int], float] = {}

    def take(self, rank: int, ran: Ran) -> None:
        end = min([self.following[rank], *self._users(ran.action)])
        self.following[rank] = self.starts[rank][ran.action] = end - (ran.end_seconds - ran.start_seconds)

    def _users(self, action: Action) -> Iterator[float]:
        """When those who use what a pass makes need it."""
        kind, microbatch, stage, costs = action.kind, action.microbatch, action.stage, self.job.costs
        if kind == "F" and stage < self.job.stages - 1:
            yield self._at("F", microbatch, stage + 1) - self._sending(costs.send_forward_seconds, stage, stage + 1)
        elif kind == "F" and not self.job.head:
            yield self._at("B", microbatch, stage)
        elif kind in ("B", "I") and stage > 0:
            yield self._at("B", microbatch, stage - 1) - self._sending(costs.send_backward_seconds, stage, stage - 1)
        if kind == "I":
            yield self._at("W", microbatch, stage)
        role = "B" if kind == "I" else kind
        for e in self.table:
            if e.source == role and (not e.source_at or stage == self._stage(e.source_at)):
                yield self._exchange_due(e.kind, microbatch) - self.kinds[e.kind]

    def _at(self, role: str, microbatch: int, stage: int) -> float:
        kind = "I" if role == "B" and self.split else role
        return self.starts[self.job.placement[stage]].get(Action(kind, microbatch, stage), inf)

    def _sending(self, seconds: tuple[float, ...], source: int, target: int) -> float:
        return 0.0 if self.job.placement[source] == self.job.placement[target] else seconds[source]

    def _stage(self, at: str) -> int:
        return 0 if at == "first" else self.job.stages - 1

    def _exchange_due(self, kind: str, microbatch: int) -> float:
        """When an exchange has to be complete; its users start after its sources, so they are known by then."""
        if (kind, microbatch) not in self.due:
            self.due[kind, microbatch] = min(
                t for e in self.table if e.kind == kind for t in self._needed(e, microbatch)
            )
        return self.due[kind, microbatch]

    def _needed(self, e: Exchange, microbatch: int) -> Iterator[float]:
        if e.target in self.kinds:
            yield self._exchange_due(e.target, microbatch) - self.kinds[e.target]
        elif e.target_at:
            yield self._at(e.target, microbatch, self._stage(e.target_at))
        else:
            yield from (starts.get(Action(e.target, microbatch), inf) for starts in self.starts)
