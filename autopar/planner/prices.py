"""What a choice or a change of type costs on one axis, in seconds per microbatch, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import fx

from autopar.cluster import Device, Link
from autopar.cost_models import collective, compute, step
from autopar.graph import AVERAGED, AxisRef, Choice, Meta, operands
from autopar.planner.block_costs import OpCost, add_form
from autopar.planner.earlier_axes import EarlierAxes
from autopar.planner.exchange_prices import Journeys
from autopar.planner.gradient_sums import added_operands
from autopar.planner.local_ops import in_part, local_op
from autopar.planner.op_costs import (
    expert_imbalance,
    local_bytes,
    moves_nothing,
    own_seconds,
    pass_seconds,
    work_seconds,
)
from autopar.planner.placement import Change
from autopar.planner.transitions import is_parameter, is_transition
from autopar.rules import lookup
from autopar.rules.base import Op, Rule
from autopar.rules.experts import EXCHANGE, FILTER
from autopar.spmd import P, R, Transition, Type, transition

FORBIDDEN_SECONDS = 1e8
"""Price of a change that can't be executed: a solution that pays it is a refusal, and names the op."""


ESTIMATE_SECONDS = 1e-3
"""Price of an estimate from a microbatch: none where the exact value is to be had."""


def may_be_term(meta: Meta) -> bool:
    """Whether a whole value may become a pending sum, a share of it on each rank: a loss that is added to others."""
    return meta.numel == 1 and meta.dtype.is_floating_point


def is_total(meta: Meta, src: Type, dst: Type) -> bool:
    """Whether it is a sum over the batch that a step makes before its passes, where the batch alone determines it."""
    return (src, dst) == (P, R) and not meta.shape


class Prices(Protocol):
    """Prices on one axis."""

    def op(self, node: fx.Node, op: Op, rule: Rule, choice: Choice) -> float: ...

    def ops(self, node: fx.Node, op: Op, rule: Rule, choices: Sequence[Choice]) -> list[float]:
        """Of each of its choices."""

    def change(self, meta: Meta, src: Type, dst: Type, *, per_step: bool, from_tables: bool) -> float | None:
        """Which dims are split makes no difference to it."""

    def changes(
        self, meta: Meta, changes: tuple[Change, ...], *, per_step: bool, from_tables: bool
    ) -> list[float | None]:
        """Of each of some changes."""

    def update(self, elements: int) -> float: ...


@dataclass(frozen=True)
class RankPrices:
    """Prices on an axis of real ranks: roofline compute, latency-bandwidth collectives."""

    size: int
    device: Device
    link: Link
    microbatches: float
    paired: bool = False
    axis: str = ""
    earlier: EarlierAxes = field(default_factory=EarlierAxes)
    """The axes that were solved before."""
    journeys: Journeys | None = None
    """How tokens travel to experts, where there are any on several ranks."""
    moved_seconds: float = 0.0
    """What an element of a rank's parameters costs with each microbatch, beside its update."""
    known: dict[tuple[Any, ...], float] = field(default_factory=dict, compare=False, repr=False)
    """Changes priced before."""
    together: dict[tuple[Any, ...], list[float | None]] = field(default_factory=dict, compare=False, repr=False)
    """And several at once."""

    def op(self, node: fx.Node, op: Op, rule: Rule, choice: Choice) -> float:
        """Forward and backward seconds of one rank, the communication inside the op's form included."""
        return self.ops(node, op, rule, (choice,))[0]

    def ops(self, node: fx.Node, op: Op, rule: Rule, choices: Sequence[Choice]) -> list[float]:
        """:meth:`op` of each choice. What a rank computes depends only on which operands and results are split, and in
        how many pieces it is done: that is found out once for choices that have it in common."""
        added = self._added(node, op, choices)
        return [own + more for own, more in zip(self._own(node, op, rule, choices), added, strict=True)]

    def _added(self, node: fx.Node, op: Op, choices: Sequence[Choice]) -> list[float]:
        """What adding its gradients to those of other ops takes."""
        positions, found = added_operands(node), []
        for choice in choices:
            taken = (local_bytes(op.operands[i], choice.operands[i], self.size) for i in positions)
            found.append(math.fsum(compute.adding_seconds(bytes_, self.device) for bytes_ in taken))
        return found

    def _own(self, node: fx.Node, op: Op, rule: Rule, choices: Sequence[Choice]) -> list[float]:
        if is_transition(node):
            return [self._changed(node, op, rule, choice) for choice in choices]
        known = op.found.setdefault((self.device, self.size), {})
        free, sends, found = moves_nothing(node, op, self.device), self.earlier.send_by_form(node), []
        for choice in choices:
            if sends or choice.form not in ("", EXCHANGE, FILTER):
                found.append(self._by_form(node, op, rule, choice))
                continue
            unequal = 1.0 if self.paired else rule.imbalance(op, choice, self.size)
            split = tuple(kind.is_shard for kind in choice.operands)
            key = split, choice.result.is_shard, unequal, rule.pieces(op, choice, self.size)
            if key not in known:
                known[key] = own_seconds(op, rule, choice, self.size, self.device, unequal, is_view=free)
            found.append(self._with_messages(node, op, rule, choice, known[key]) * expert_imbalance(node, choice))
        return found

    def _changed(self, node: fx.Node, op: Op, rule: Rule, choice: Choice) -> float:
        """Of a change of type on an earlier axis. A parameter's gradient is summed once a step, mostly beside passes;
        what each microbatch adds to it goes through memory, which no pass has where steps don't count."""
        if is_parameter(operands(node)[0]):
            added = (
                0.0 if math.isinf(self.microbatches) else sum(work_seconds(op, rule, choice, self.size, self.device))
            )
            return added * expert_imbalance(node, choice)
        return self.earlier.change_seconds(node, in_part(op, choice, self.size)) * expert_imbalance(node, choice)

    def _by_form(self, node: fx.Node, op: Op, rule: Rule, choice: Choice) -> float:
        """Of code of its own on this axis or on an earlier one: as what it becomes is priced."""
        local = local_op(op, rule, choice, AxisRef(self.axis, self.size, self.paired))
        whole = Choice((R,) * len(local.operands), R)
        cost = OpCost(*pass_seconds(node, local, lookup(local.name), whole, 1, self.device))
        self.earlier.add_forms(cost, node, local)
        if choice.form:
            add_form(cost, local, self.axis, choice, self.size, self.link)
        return (cost.seconds(0) + cost.seconds(1)) * expert_imbalance(node, choice)

    def _with_messages(self, node: fx.Node, op: Op, rule: Rule, choice: Choice, passes: tuple[float, float]) -> float:
        there, back = rule.communication(op, choice, self.size), rule.communication_back(op, choice, self.size)
        if not there and not back and self.journeys is None:
            return sum(passes)
        messages = (there, back if op.result.needs_grad else [])
        inside: Sequence[float] = [sum(self._collective(kind, bytes_) for kind, bytes_ in some) for some in messages]
        if self.journeys is not None:
            inside = self.journeys.seconds(node, op, choice, inside)
        overlaps = rule.overlaps(op, choice)
        return sum(max(own, sent) if overlaps else own + sent for own, sent in zip(passes, inside, strict=True))

    def change(self, meta: Meta, src: Type, dst: Type, *, per_step: bool, from_tables: bool) -> float | None:
        """Seconds of a transition both ways; ``per_step``: its backward runs once per step (gradients of
        parameters); ``from_tables``: so does that of a total over the batch (:func:`is_total`). None: there is no such
        transition."""
        if src == dst:
            return 0.0
        way = transition(src, dst)
        if way is None or (dst == P and not may_be_term(meta)):
            return None
        once = from_tables and is_total(meta, src, dst)
        key = way.forward, way.backward, meta.bytes, meta.needs_grad, per_step, once
        if key not in self.known:
            self.known[key] = self._change(way, meta, per_step, once)
        return self.known[key]

    def changes(
        self, meta: Meta, changes: tuple[Change, ...], *, per_step: bool, from_tables: bool
    ) -> list[float | None]:
        key = changes, meta.bytes, meta.needs_grad, may_be_term(meta), not meta.shape, per_step, from_tables
        if key not in self.together:
            priced = (self.change(meta, *each, per_step=per_step, from_tables=from_tables) for each in changes)
            self.together[key] = list(priced)
        return self.together[key]

    def _change(self, way: Transition, meta: Meta, per_step: bool, once: bool) -> float:
        forward = self._one_way(way.forward, meta)
        backward = self._one_way(way.backward, meta) if meta.needs_grad else 0.0
        if per_step and way.backward is not None and meta.needs_grad:  # buckets share the latency among many parameters
            backward = collective.marginal_seconds(way.backward, self._sent(way.backward, meta), self.size, self.link)
        if per_step:
            return forward + backward / self.microbatches
        return (forward + backward) / (self.microbatches if once else 1)

    def update(self, elements: int) -> float:
        """Seconds of the optimizer for ``elements`` of a rank's parameters, once per step; and of moving them."""
        return step.optimizer_seconds(elements, self.device) / self.microbatches + elements * self.moved_seconds

    def _one_way(self, kind: str | None, meta: Meta) -> float:
        if kind is None:
            return meta.bytes / self.size / self.device.achievable_memory_bytes_per_second
        return self._collective(kind, self._sent(kind, meta))

    def _sent(self, kind: str, meta: Meta) -> int:
        return meta.bytes // self.size if kind == "all_to_all" else meta.bytes

    def _collective(self, kind: str, bytes_: int) -> float:
        return collective.seconds(kind, bytes_, self.size, self.link)


@dataclass(frozen=True)
class MicrobatchPrices:
    """Prices on the axis of microbatches: they run one after another, so nothing can be exchanged between them.

    Only what the batch alone determines can be summed over them, before the step (the number of tokens, say). With
    ``estimates``, a microbatch may take ``microbatches`` times its own part for a sum over all of them, and moves
    buffers by that; without, they would be moved more than once in a step.
    """

    estimates: bool = False

    def op(self, node: fx.Node, op: Op, rule: Rule, choice: Choice) -> float:
        if node.target == AVERAGED and not self.estimates:
            return FORBIDDEN_SECONDS
        return FORBIDDEN_SECONDS if rule.communication(op, choice, 2) else 0.0

    def ops(self, node: fx.Node, op: Op, rule: Rule, choices: Sequence[Choice]) -> list[float]:
        return [self.op(node, op, rule, choice) for choice in choices]

    def change(self, meta: Meta, src: Type, dst: Type, *, per_step: bool, from_tables: bool) -> float | None:
        if src == dst:
            return 0.0
        if from_tables and is_total(meta, src, dst):
            return 0.0
        if self.estimates and ((src, dst) == (P, R) or (src == R and dst == P and may_be_term(meta))):
            return ESTIMATE_SECONDS
        return FORBIDDEN_SECONDS if transition(src, dst) is not None else None

    def changes(
        self, meta: Meta, changes: tuple[Change, ...], *, per_step: bool, from_tables: bool
    ) -> list[float | None]:
        return [self.change(meta, *each, per_step=per_step, from_tables=from_tables) for each in changes]

    def update(self, elements: int) -> float:
        return 0.0
