"""What a choice or a change of type costs on one axis, in seconds per microbatch, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import fx

from autopar.cluster import Device, Link
from autopar.cost_models import collective, step
from autopar.graph import Choice, Meta
from autopar.planner.op_costs import expert_imbalance, pass_seconds
from autopar.rules.base import Op, Rule
from autopar.spmd import P, R, Type, transition

STATE_COPIES = 4
"""A trained parameter is kept with its gradient and the two moments of AdamW."""

FORBIDDEN_SECONDS = 1e4
"""Price of a change that can't be executed: a solution that pays it is a refusal, and names the op."""


ESTIMATE_SECONDS = 1e-3
"""Price of an estimate from a microbatch: none where the exact value is to be had."""


def may_be_term(meta: Meta) -> bool:
    """Whether a whole value may become a pending sum, a share of it on each rank: a loss that is added to others."""
    return meta.numel == 1 and meta.dtype.is_floating_point


class Prices(Protocol):
    """Prices on one axis."""

    def op(self, node: fx.Node, op: Op, rule: Rule, choice: Choice) -> float: ...

    def change(self, meta: Meta, src: Type, dst: Type, *, per_step: bool, from_tables: bool) -> float | None: ...

    def update(self, elements: int) -> float: ...


@dataclass(frozen=True)
class RankPrices:
    """Prices on an axis of real ranks: roofline compute, latency-bandwidth collectives."""

    size: int
    device: Device
    link: Link
    microbatches: int
    paired: bool = False

    def op(self, node: fx.Node, op: Op, rule: Rule, choice: Choice) -> float:
        """Forward and backward seconds of one rank, the communication inside the op's form included."""
        there, back = rule.communication(op, choice, self.size), rule.communication_back(op, choice, self.size)
        messages = (there, back if op.result.needs_grad else [])
        inside = [sum(self._collective(kind, bytes_) for kind, bytes_ in some) for some in messages]
        unequal = 1.0 if self.paired else rule.imbalance(op, choice, self.size)
        passes = pass_seconds(node, op, rule, choice, self.size, self.device, unequal)
        overlaps = rule.overlaps(op, choice)
        each = sum(max(own, sent) if overlaps else own + sent for own, sent in zip(passes, inside, strict=True))
        return each * expert_imbalance(node, choice)

    def change(self, meta: Meta, src: Type, dst: Type, *, per_step: bool, from_tables: bool) -> float | None:
        """Seconds of a transition both ways; ``per_step``: its backward runs once per step (gradients of
        parameters); ``from_tables``: a total over the batch, once per step. None: there is no such transition."""
        if src == dst:
            return 0.0
        way = transition(src, dst)
        if way is None or (dst == P and not may_be_term(meta)):
            return None
        forward = self._one_way(way.forward, meta)
        backward = self._one_way(way.backward, meta) if meta.needs_grad else 0.0
        if per_step and way.backward is not None and meta.needs_grad:
            backward -= self._collective(way.backward, 0)  # buckets share the latency among many parameters
        if per_step:
            return forward + backward / self.microbatches
        return (forward + backward) / (self.microbatches if from_tables else 1)

    def update(self, elements: int) -> float:
        """Seconds of the optimizer for ``elements`` of a rank's parameters, once per step."""
        return step.optimizer_seconds(elements, self.device) / self.microbatches

    def _one_way(self, kind: str | None, meta: Meta) -> float:
        if kind is None:
            return meta.bytes / self.size / self.device.memory_bytes_per_second
        return self._collective(kind, meta.bytes // self.size if kind == "all_to_all" else meta.bytes)

    def _collective(self, kind: str, bytes_: int) -> float:
        return collective.seconds(kind, bytes_, self.size, self.link)


@dataclass(frozen=True)
class MicrobatchPrices:
    """Prices on the axis of microbatches: they run one after another, so nothing can be exchanged between them.

    Only what the batch alone determines can be summed over them, before the step (the number of tokens, say). With
    ``estimates``, a microbatch may take ``microbatches`` times its own part for a sum over all of them.
    """

    estimates: bool = False

    def op(self, node: fx.Node, op: Op, rule: Rule, choice: Choice) -> float:
        return FORBIDDEN_SECONDS if rule.communication(op, choice, 2) else 0.0

    def change(self, meta: Meta, src: Type, dst: Type, *, per_step: bool, from_tables: bool) -> float | None:
        if src == dst:
            return 0.0
        if (src, dst) == (P, R) and from_tables and not meta.shape:
            return 0.0
        if self.estimates and ((src, dst) == (P, R) or (src == R and dst == P and may_be_term(meta))):
            return ESTIMATE_SECONDS
        return FORBIDDEN_SECONDS if transition(src, dst) is not None else None

    def update(self, elements: int) -> float:
        return 0.0
