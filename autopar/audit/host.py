"""How many calls the host issues (:mod:`autopar.planner.host` says what one is), counted in what was seen."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.audit.prices import once
from autopar.audit.record import Phase, Ran
from autopar.rules.base import Op
from autopar.rules.experts import DISPATCH_START, ROUTE
from autopar.rules.issued import Calls, issued


def forward_calls(phase: Phase) -> int:
    """Of a forward."""
    return _count(ran for ran in phase.ops if not ran.again)


def gradient_calls(phase: Phase) -> int:
    """Of the backward of that forward: gradients of what its ops were given."""
    return sum(_issued(ran)[1] for ran in once(ran for ran in phase.ops if not ran.again))


def again_calls(phase: Phase) -> int:
    """Of what a backward computes again."""
    return _count(ran for ran in phase.ops if ran.again and (ran.is_done or ran.started))


def reads_counts(phase: Phase) -> bool:
    """Whether the host waits there for what routers chose."""
    return any(ran.op.name == ROUTE for ran in phase.ops)


def _count(ops: Iterable[Ran]) -> int:
    """Of a dispatch in two halves, the second is all of it."""
    return sum(_issued(ran)[0] for ran in ops if ran.op.name != DISPATCH_START)


def _issued(ran: Ran) -> Calls:
    op = ran.op
    makes = ran.is_reached and op.result.needs_grad
    return issued(op.name, op.operands, back=makes, route=_route_of(ran))


def _route_of(ran: Ran) -> Op | None:
    """What says where the rows are that it takes or makes, if they are of experts."""
    if ran.op.name == ROUTE:
        return ran.op
    found = (ran.began or ran).made_by(ROUTE)
    return None if found is None else found.op
