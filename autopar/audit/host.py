"""How many calls the host issues (:mod:`autopar.planner.host` says what one is), counted in what was seen."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.audit.prices import once
from autopar.audit.record import Phase, Ran
from autopar.rules.experts import DISPATCH_START, ROUTE


def forward_calls(phase: Phase) -> int:
    """Of a forward."""
    return _count(ran for ran in phase.ops if not ran.again)


def gradient_calls(phase: Phase) -> int:
    """Of the backward of that forward: gradients of what its ops were given."""
    ops = (ran.op for ran in once(ran for ran in phase.ops if not ran.again))
    made = (op for op in ops if op.outputs and op.result.needs_grad)
    return sum(meta.needs_grad for op in made for meta in op.operands)


def again_calls(phase: Phase) -> int:
    """Of what a backward computes again."""
    return _count(ran for ran in phase.ops if ran.again and (ran.is_done or ran.started))


def reads_counts(phase: Phase) -> bool:
    """Whether the host waits there for what routers chose."""
    return any(ran.op.name == ROUTE for ran in phase.ops)


def _count(ops: Iterable[Ran]) -> int:
    """Of a dispatch in two halves, the second is all of it."""
    return sum(ran.op.name != DISPATCH_START for ran in ops)
