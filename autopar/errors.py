"""Every refusal of autopar, each naming what is wrong, where, and what would work (DESIGN 10)."""

from __future__ import annotations


class AutoparError(Exception):
    """Base of all errors that autopar raises on purpose."""


class ArgumentError(AutoparError):
    """An argument of the public surface, or a pair of them, can't be used."""


class CaptureError(AutoparError):
    """The model can't be traced into one graph; names the user's source line."""


class BatchError(AutoparError):
    """A sample or batch whose structure, shape, dtype or device is not what the call expects."""


class ShardingError(AutoparError):
    """A size doesn't divide over an axis, or no legal placement exists; names the op and its source line."""


class StageError(AutoparError):
    """The model can't be cut into the requested pipeline stages."""


class BudgetError(StageError):
    """No cut and no choice fits the memory that a rank may use; ``needed_bytes`` would do, of which solvers don't know
    ``uncounted_bytes``: what ranks were seen to hold beside what is counted."""

    def __init__(self, message: str, needed_bytes: int, uncounted_bytes: int = 0) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.uncounted_bytes = uncounted_bytes

    def __reduce__(self) -> tuple[type[BudgetError], tuple[str, int, int]]:
        """All arguments, so that it crosses processes."""
        return type(self), (str(self), self.needed_bytes, self.uncounted_bytes)


class StateError(BudgetError, ShardingError):
    """No placement splits parameters, gradients and the optimizer's state so far that they fit."""


class PlanError(AutoparError):
    """A plan that is truncated, of another version, or made for another model, mesh or batch."""


class ScheduleError(AutoparError):
    """Action lists that don't parse, don't match their peers', or can't make progress."""


class ClusterError(AutoparError):
    """A cluster description with missing or absurd figures."""


class GraphError(AutoparError):
    """A graph that breaks a rule of the IR; names the pass, the node and the rule."""


class RankError(AutoparError):
    """Something went wrong between ranks; names the ranks, the actions and the call sites."""


class MismatchError(RankError):
    """Ranks of one group called different collectives, or the same with other shapes, dtypes or arguments."""


class DeadlockError(RankError):
    """No rank can run: each waits for another; carries the wait-for graph."""


class DeadRankError(RankError):
    """A rank ended with an exception, or stopped answering, while others still needed it."""
