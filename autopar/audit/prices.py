"""Seconds of what was seen, by the cost models: what a program's ops and messages take on a cluster.

The formulas are those that the planner uses (:mod:`autopar.cost_models`, and of each op which of its bytes are moved,
:mod:`autopar.planner.op_costs`); what goes into them was seen while the program ran: which ops, their shapes, the
products of their kernels, which operands have gradients, and every message, forward and backward.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from autopar.audit.flops import flops_of
from autopar.audit.record import Message, Phase, Ran
from autopar.cluster import Cluster, Link
from autopar.cost_models import collective, compute, step
from autopar.cost_models.compute import Work
from autopar.cost_models.step import Collectives
from autopar.graph import Choice
from autopar.mesh import Mesh
from autopar.planner.op_costs import view_seconds, work_of
from autopar.rules import lookup
from autopar.rules.base import Op, Rule
from autopar.rules.experts import DISPATCH, DISPATCH_START, EXCHANGE, ROUTE, WITHIN, told_bytes
from autopar.spmd import R

_LATER = frozenset({"linear", "matmul", "grouped_linear"})
"""Functions of the runtime whose weight gradient ``W`` makes."""

_RULES = {
    "__getitem__": "aten.slice.Tensor",
    "embedding_rows": "embedding_sharded",
    "linear": "aten.linear.default",
    "matmul": "aten.matmul.default",
}
"""What no rule is for, since no graph has it (brackets, functions of the runtime), and the ops whose work it does."""


@dataclass(frozen=True)
class Prices:
    """On ``cluster``, in a job on ``mesh``."""

    cluster: Cluster
    mesh: Mesh

    def message(self, message: Message) -> float:
        """Of a message alone, on the slowest link that such groups cross."""
        size = 2 if message.kind == "send" else len(message.ranks)
        return collective.seconds(message.kind, message.bytes_, size, self._link(message))

    def _link(self, message: Message) -> Link:
        stride = min((b - a for a, b in pairwise(message.ranks)), default=1)
        return self.cluster.link(len(message.ranks), stride, self.mesh.world)

    def messages(self, messages: Iterable[Message]) -> float:
        return math.fsum(map(self.message, messages))

    def collectives(self, messages: Iterable[Message]) -> Collectives:
        """Of messages in which all take part, with the multiprocessors that these hold."""
        sent = [(self.message(m), self.cluster.device.held_share(self._link(m))) for m in messages]
        return Collectives(math.fsum(seconds for seconds, _ in sent), math.fsum(s * share for s, share in sent))

    def together(self, messages: Iterable[Message]) -> float:
        """Of messages that are one, sent in pieces."""
        return self.messages(joined(messages))

    def forward(self, phase: Phase) -> float:
        """What the ops of a forward take, with what they send; rows travel to experts beside what stands between."""
        return self._forwards(ran for ran in phase.ops if not ran.again)

    def _forwards(self, ran: Iterable[Ran]) -> float:
        ops = list(once(ran))
        return math.fsum(self._forward(each) for each in ops) - math.fsum(
            each for _, each in self._hidden(ops, back=False)
        )

    def backward(self, phase: Phase) -> float:
        """What the backward of that forward takes, with the sums of gradients between its ops."""
        ops, device = list(once(ran for ran in phase.ops if not ran.again)), self.cluster.device
        sums = [(count - 1) * compute.adding_seconds(bytes_, device) for count, bytes_ in phase.uses() if count]
        return math.fsum([*map(self._backward, ops), *sums]) - math.fsum(
            each for _, each in self._hidden(ops, back=True)
        )

    def slowed(self, phase: Phase, *, back: bool = False) -> float:
        """What ops take longer because rows travel to experts beside them."""
        ops = list(once(ran for ran in phase.ops if not ran.again))
        return math.fsum(self._held_share(ran) * seconds for ran, seconds in self._hidden(ops, back=back))

    def _held_share(self, dispatch: Ran) -> float:
        """Of the multiprocessors, by rows that travel as a routing says."""
        routing = dispatch.made_by(ROUTE)
        if routing is None or not routing.op.kwargs.get(EXCHANGE):
            return 0.0
        ranks = self._groups(routing.op)[0]
        stride = min((b - a for a, b in pairwise(ranks)), default=1)
        return self.cluster.device.held_share(self.cluster.link(len(ranks), stride, self.mesh.world))

    def _groups(self, route: Op) -> tuple[tuple[int, ...], ...]:
        """The ranks that the first one sends to: all at once, or those at its place in each node and those of its
        node."""
        group, nodes = self.mesh.group(0, *(axis.name for axis in route.kwargs[EXCHANGE])), route.kwargs.get("nodes", 1)
        width = len(group) // nodes
        return (group[::width], group[:width]) if nodes > 1 else (group,)

    def weights(self, phase: Phase) -> float:
        """The part of that which ``W`` takes, where the backward is split: nothing of frozen weights."""
        products = [r for r in phase.ops if not r.again and r.op.name in _LATER and r.is_reached]
        ops = [ran for ran in products if ran.op.operands[1].needs_grad]
        return math.fsum(self._backward(ran) / max(1, sum(m.needs_grad for m in ran.op.operands)) for ran in ops)

    def again(self, phase: Phase) -> float:
        """What a backward computes a second time: up to the op that is stopped, which counts if its kernel ran."""
        return self._forwards(ran for ran in phase.ops if ran.again and (ran.is_done or ran.started))

    def casts(self, phase: Phase) -> float:
        """Of copies of masters in another dtype, and of weights because they travel together."""
        device = self.cluster.device
        cast = math.fsum(step.copy_seconds(count, *sizes, device) for sizes, count in phase.casts.items())
        return cast + step.copy_seconds(phase.packed_bytes, 1, 1, device)

    def fetched(self, phases: Iterable[Phase]) -> float:
        """Of masters on the host: cast there, while others are copied to the device."""
        device, elements = self.cluster.device, Counter[tuple[int, int]]()
        for phase in phases:
            elements.update(phase.fetched)
        copied = sum(count * copy for (_, copy), count in elements.items())
        cast = sum(count * (master + copy) for (master, copy), count in elements.items() if master != copy)
        return max(copied / device.host_bytes_per_second, step.host_cast_seconds(cast, device)) if copied else 0.0

    def arithmetic(self, phase: Phase) -> float:
        """Of kernels beside the text's ops: each product, and sweeps over matrices as one kernel."""
        device = self.cluster.device
        products = [k for k in phase.kernels if k.flops]
        swept = sum(k.bytes_ for k in phase.kernels if not k.flops)
        seconds = [
            compute.seconds(k.flops, k.bytes_, k.dtype, device, k.made, is_aligned=k.is_aligned) for k in products
        ]
        return math.fsum(seconds) + (compute.seconds(0, swept, "float32", device) if swept else 0.0)

    def _forward(self, ran: Ran) -> float:
        own, sent = self.compute(ran)[0], self._sent(ran) + self.messages(self._counts(ran))
        return max(own, sent) if _overlaps(ran.op) else own + sent

    def _counts(self, ran: Ran) -> Iterator[Message]:
        """Before rows travel, ranks tell each other how many, the way they go: without values there is nothing to
        tell."""
        if ran.op.name != ROUTE or not ran.op.kwargs.get(EXCHANGE):
            return
        groups, nodes = self._groups(ran.op), ran.op.kwargs.get("nodes", 1)
        if nodes > 1:
            for hop, bytes_ in told_bytes(ran.op, nodes):
                yield Message("all_to_all", bytes_, groups[hop == WITHIN], False)
            return
        ((kind, bytes_),) = lookup(ROUTE).communication(ran.op, Choice((R,), R, EXCHANGE), 1)
        yield Message(kind, bytes_, groups[0], False)

    def _backward(self, ran: Ran) -> float:
        own, sent = self.compute(ran)[1], self._sent(ran, back=True)
        return max(own, sent) if _overlaps(ran.op) else own + sent

    def _sent(self, ran: Ran, *, back: bool = False) -> float:
        """Messages, and what lays rows out for them."""
        messages, turned = (ran.back_messages, ran.back_turned_bytes) if back else (ran.messages, ran.turned_bytes)
        return self.messages(messages) + turned / self.cluster.device.achievable_memory_bytes_per_second

    def _hidden(self, ops: Sequence[Ran], *, back: bool) -> Iterator[tuple[Ran, float]]:
        """First halves of dispatches, and seconds. What is computed between the two halves hides as much of their
        messages; others are whole, those that begin between them too."""
        ends = {id(ran.began): ran for ran in ops if ran.began is not None}
        for start, ran in enumerate(ops):
            if id(ran) not in ends:
                continue
            end = ends[id(ran)]
            between = [other for other in ops[start + 1 : ops.index(end)] if other.began is None]
            between += [ends[id(other)] for other in between if id(other) in ends]
            free = math.fsum(self._backward(each) if back else self._forward(each) for each in between)
            both = [message for each in (ran, end) for message in (each.back_messages if back else each.messages)]
            yield ran, min(free, self.messages(self._beside(both)))

    def _beside(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Of rows that travel, the messages that are started: those across nodes, where there are others."""
        per_node = self.cluster.devices_per_node
        far = [m for m in messages if m.ranks[0] // per_node != m.ranks[-1] // per_node]
        return far or messages

    def compute(self, ran: Ran) -> tuple[float, float]:
        """Forward and backward of an op, without what it sends; changes of type only send."""
        op, device = ran.op, self.cluster.device
        if op.name == DISPATCH_START or "src" in op.kwargs or not op.outputs:
            return 0.0, 0.0
        if ran.is_view and not ran.copied_bytes:
            forward, backward = view_seconds(op, _rule(op), Choice((R,) * len(op.operands), R), 1, device)
            return forward, backward if ran.is_reached else 0.0
        work = _work(ran)
        backward = compute.backward_seconds(work, device) if ran.is_reached else 0.0
        return compute.forward_seconds(work, device), backward


def joined(messages: Iterable[Message]) -> Iterator[Message]:
    """Each of a kind and a group as if it was one."""
    sums: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for message in messages:
        sums[message.kind, message.ranks] += message.bytes_
    for (kind, ranks), bytes_ in sums.items():
        yield Message(kind, bytes_, ranks, True)


def _work(ran: Ran) -> Work:
    """What the cost models ask of an op: bytes from the tensors that it was given and made, products as they ran."""
    op, flops, rule = ran.op, flops_of(ran), _rule(ran.op)
    work = work_of(op, rule, Choice((R,) * len(op.operands), R), 1)
    if not flops:
        return replace(work, flops=0)
    dtype = str(op.operands[0].dtype).removeprefix("torch.")
    factors = tuple(op.operands[i].numel for i in rule.factors(op))
    return replace(work, flops=flops, dtype=dtype, made=work.made or op.result.numel, factors=factors)


def _rule(op: Op) -> Rule:
    return lookup(_RULES.get(op.name, op.name))


def once(ops: Iterable[Ran]) -> Iterator[Ran]:
    """``ops`` in order; of a dispatch in two halves, the second is all of it."""
    for ran in ops:
        if ran.began is not None:
            ran = replace(ran, op=replace(ran.began.op, name=DISPATCH, outputs=ran.op.outputs))
        yield ran


def _overlaps(op: Op) -> bool:
    whole = Choice((R,) * len(op.operands), R, op.name)
    return lookup(op.name).overlaps(op, whole)
