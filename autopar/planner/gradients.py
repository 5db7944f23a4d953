"""What adding up gradients over microbatches takes on a rank: memory traffic, by how the runtime keeps the sum.

As :mod:`autopar.runtime.buckets` does it. A parameter that is its own master: autograd adds to its gradient in place;
where ranks sum it, the first one of a step is copied into the bucket. Of a master in another dtype, the first gradient
becomes one of that dtype when a second one is added to it. Where gradients are scattered in every backward (ZeRO 2 and
3), each is sent in the master's dtype, and a rank adds up its own rows alone. Products that are put off add to a sum of
their own dtype by themselves. Gradients that are sent together are copied for that, those that are cast anyway at no
further cost; a large one, which is sent alone, isn't.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import fx

from autopar.cluster import Device
from autopar.cost_models import step
from autopar.graph import info
from autopar.options import Options
from autopar.planner.block_costs import put_off_weights
from autopar.planner.packing import alone
from autopar.planner.rank_memory import is_own_master
from autopar.planner.turned import is_turned
from autopar.planner.zero import MoveCosts
from autopar.schedules.backwards import Backwards, Order, Terms


class Summed(NamedTuple):
    """How gradients are kept: the dtypes of the parameter as it is computed with, of its master, and of what is sent;
    over how many ranks its rows are stored; whether it is its own master; whether several ranks have terms; whether it
    is scattered in every backward."""

    dtype: torch.dtype
    master: torch.dtype
    travels: torch.dtype
    shards: int
    is_own: bool
    is_summed: bool
    is_scattered: bool

    def added(
        self,
        elements: float,
        microbatches: int,
        device: Device,
        *,
        put_off: bool = False,
        follows: bool = False,
        begins: bool = True,
        casts: bool | None = None,
    ) -> float:
        """Seconds of an update, for so many elements of parameters on a rank, as gradients are made. ``put_off``: by
        products that are. ``follows``: each microbatch has made one before, elsewhere on the rank. ``begins``: the
        update's first gradient is one of these; ``casts``: so is its second (None: it is if there are two)."""
        if (self.is_scattered and not follows) or (put_off and self.dtype == self.master):
            return 0.0
        more, made, own = microbatches - begins, self.dtype.itemsize, self.master.itemsize
        if follows:  # what there is of another dtype was the first, of an update or of all that is sent
            firsts = microbatches if self.is_scattered else int(bool(casts))
            cast = firsts * self._cast(elements, self.dtype, self.master, device)
            return microbatches * step.add_seconds(elements, made, own, device) + cast
        added = more * step.add_seconds(elements, made, own, device)
        if self.is_in_place:
            return added + (step.copy_seconds(elements, own, own, device) if self.is_summed and begins else 0.0)
        has_second = more > 0 if casts is None else casts
        return added + (self._cast(elements, self.dtype, self.master, device) if has_second else 0.0)

    def sent(
        self,
        elements: float,
        microbatches: int,
        device: Device,
        part: float | None = None,
        *,
        packed: bool = False,
        again: bool = False,
        terms: Terms | None = None,
        idle: bool = False,
        joined: bool = False,
    ) -> float:
        """The same, as gradients are sent; ``part`` is the rank's of them, with padding (None: there is none).
        ``packed``: with others, or with padding; ``again``: ``part`` is summed over further ranks. ``terms``: of how
        many microbatches each time, where that is after every backward (None: of one). ``idle``: there are none, and
        zeros are sent. ``joined``: each microbatch has made several."""
        if self.is_in_place:
            return 0.0
        part = elements / self.shards if part is None else part
        one, several = (
            step.copy_seconds(elements, held.itemsize, self.travels.itemsize, device)
            if not idle and (packed or held != self.travels)
            else 0.0
            for held in (self.dtype, self.master)
        )
        arrived = (3 if again else 1) * self._cast(part, self.travels, self.master, device)  # and there and back
        if self.is_scattered:
            added = (microbatches - 1) * step.add_seconds(part, self.travels.itemsize, self.master.itemsize, device)
            known = terms or Terms.each(microbatches)
            of_several = known.sent if joined else known.several
            return (known.sent - of_several) * one + of_several * several + arrived + added
        return (several if microbatches > 1 or joined else one) + arrived

    def waiting(self, elements: float, terms: Terms, device: Device, *, whole: bool) -> float:
        """The same of those that wait for others of their message, as one is added to them: in passes of a kind."""
        added = step.add_seconds(elements, self.dtype.itemsize, self.master.itemsize, device)
        cast = self._cast(elements, self.dtype, self.master, device)
        return terms.added[whole] * added + terms.second[whole] * cast

    @property
    def is_in_place(self) -> bool:
        """Whether autograd adds to what is sent, if any is."""
        return self.is_own and (not self.is_summed or self.travels == self.master)

    @staticmethod
    def _cast(elements: float, old: torch.dtype, new: torch.dtype, device: Device) -> float:
        return step.copy_seconds(elements, old.itemsize, new.itemsize, device) if old != new else 0.0


class Accumulation(NamedTuple):
    """Seconds per microbatch: all, and those of the pass that completes gradients, where there is one for that; and of
    a backward that is ``whole``. The same for stages all of whose backwards are alike."""

    seconds: float
    put_off: float
    whole: float


class _Elements(NamedTuple):
    """Elements of the gradients of some calls, by what becomes of them: of those that are ``made``, of those that lie
    otherwise than their weights (``turned``), and of those that are ``sent``, of which ranks keep rows (``stored``)."""

    made: Counter[tuple[Summed, bool, bool, bool]]
    turned: Counter[tuple[Summed, bool]]
    sent: Counter[tuple[Summed, bool, bool, bool, bool, bool]]
    stored: Counter[tuple[Summed, bool, bool, bool, bool, bool]]


@dataclass(frozen=True)
class GradientCosts:
    """Of stages whose weights move as ``moves`` says, for ``microbatches`` that make up one update; ``split``: their
    backwards are two passes; ``idle``: weights to which no gradient comes."""

    moves: MoveCosts
    microbatches: int
    split: bool
    idle: frozenset[fx.Node] = frozenset()

    def accumulation(self, calls: Sequence[int], backwards: Backwards | None = None) -> Accumulation:
        """What the backward of a microbatch through ``calls`` takes for it, on the average of those of its kind in an
        update, which are these ``backwards`` (None: all alike)."""
        known = backwards or Backwards.alike(self.microbatches, split=self.split)
        key = self.moves.key(calls), known
        if key not in self._known:
            self._known[key] = self._accumulation(calls, known)
        return self._known[key]

    @cached_property
    def _known(self) -> dict[Hashable, Accumulation]:
        return {}

    def _accumulation(self, calls: Sequence[int], backwards: Backwards) -> Accumulation:
        count, device = self.microbatches, self.moves.machine.device
        made, turned, sent, stored = self._elements(calls)
        each = Terms.each(count)
        leaves = math.fsum(
            key[0].sent(
                elements,
                count,
                device,
                stored[key],
                packed=key[1],
                again=key[2],
                terms=each if key[3] else backwards.terms,
                idle=key[4],
                joined=key[5],
            )
            for key, elements in sent.items()
        )
        now, later, whole = (
            self._added(made, backwards, whole=whole, late=late)
            for whole, late in ((False, False), (False, True), (True, None))
        )
        now += self._copied(turned, backwards, whole=False)
        whole += self._copied(turned, backwards, whole=True)
        whole += leaves / count
        if not backwards.split:
            return Accumulation(whole, leaves / count, whole)
        put_off = later + leaves / count
        return Accumulation(now + put_off, put_off, whole if backwards.whole else now + put_off)

    def _elements(self, calls: Sequence[int]) -> _Elements:
        """However backwards come."""
        key = self.moves.key(calls)
        if key not in self._counted:
            self._counted[key] = self._count(calls)
        return self._counted[key]

    @cached_property
    def _counted(self) -> dict[Hashable, _Elements]:
        return {}

    def _count(self, calls: Sequence[int]) -> _Elements:
        moves = self.moves
        kept = {name: (self._summed(name, node), node) for name, node in moves.trained(calls, borrowed=True)}
        own = {name: summed for name, (summed, _) in kept.items() if name not in moves.borrowed(calls)}
        unpacked, lent = alone(moves.sums(calls)), moves.lent(calls)
        found = _Elements(Counter(), Counter(), Counter(), Counter())
        for name, (summed, node) in kept.items():
            is_idle = node in self.idle
            if not is_idle:
                leads = name not in own and name not in lent
                found.made[summed, node in self._put_off, name in lent, leads] += info(node).meta.numel
            # What goes on from autograd, as what it makes of another dtype does, is the first there each time.
            if not is_idle and node in self._turned and (name not in lent or summed.dtype != summed.master):
                found.turned[summed, node in self._put_off] += info(node).meta.numel
            if name in own and (summed.is_scattered or not is_idle):
                again = summed.travels != summed.master and moves.is_summed_again(name, node)
                key = summed, name not in unpacked, again, node in self._put_off, is_idle, name in lent
                found.sent[key] += info(node).meta.numel
                found.stored[key] += moves.whole_elements(name, node) // summed.shards
        return found

    def summing_bytes(self, stages: Iterable[Sequence[int]]) -> int:
        """What sums that are sent once a step hold at most, on the rank of ``stages``, beside gradients in the dtypes
        of masters: copies of those that travel together, or in another dtype, which stay until all are over, and the
        rank's rows of sums. Of one microbatch there are gradients in the dtype that they are made in."""
        found: list[_Sending] = []
        for stage in stages:
            messages = self.moves.sums(stage)
            unpacked = alone(messages)
            for message in messages:
                if message[0].in_place or message[0].in_pass:
                    continue
                sent, shards = sum(each.sent for each in message), message[0].weight.shards
                kept, made = sum(each.kept for each in message), sum(each.weight.as_used for each in message)
                pending = kept if self.microbatches > 1 else made
                is_copied = message[0].weight.name not in unpacked or pending != sent
                change = (sent - pending if is_copied else 0) + (sent // shards if shards > 1 else 0)
                found.append(_Sending(kept - pending, sent if is_copied else 0, change))
        return _most_of(found)

    def _added(
        self,
        made: Mapping[tuple[Summed, bool, bool, bool], int],
        backwards: Backwards,
        *,
        whole: bool,
        late: bool | None,
    ) -> float:
        """Per backward of a kind, ``whole`` or split; ``late``: by products that are put off, or not (None: all)."""
        count, device, found = backwards.whole if whole else backwards.split, self.moves.machine.device, list[float]()
        for (summed, is_late, follows, leads), elements in made.items():
            if count and late in (None, is_late):
                if summed.is_scattered and not is_late and not follows:
                    found.append(summed.waiting(elements, backwards.terms, device, whole=whole))
                    continue
                order = backwards.late if is_late else backwards.made
                found.append(
                    summed.added(
                        elements,
                        count,
                        device,
                        put_off=is_late and not whole,
                        follows=follows,
                        begins=order.first == whole,
                        casts=order.first == whole if follows else self._has_second(order, whole=whole) and not leads,
                    )
                )
        return math.fsum(found) / count if count else 0.0

    def _has_second(self, order: Order, *, whole: bool) -> bool:
        return self.microbatches > 1 and order.second == whole

    def _copied(self, turned: Mapping[tuple[Summed, bool], int], backwards: Backwards, *, whole: bool) -> float:
        """The same of gradients that lie otherwise than their weights, by autograd: of each that is the first where it
        goes. One of another dtype than its master goes on from there, and so does what a backward sends."""
        count, device, found = backwards.whole if whole else backwards.split, self.moves.machine.device, list[float]()
        for (summed, is_late), elements in turned.items():
            times = int(backwards.made.first == whole)
            if summed.is_scattered:
                times = count - (0 if is_late else backwards.terms.added[whole])
            if summed.dtype != summed.master:
                times = count
            width = summed.dtype.itemsize
            found.append(times * step.copy_seconds(elements, width, width, device))
        return math.fsum(found) / count if count else 0.0

    @cached_property
    def _turned(self) -> frozenset[fx.Node]:
        weights = (node for block in self.moves.model.blocks for node in block.parameters)
        trained = (node for node in weights if info(node).meta.needs_grad)
        return frozenset(node for node in trained if is_turned(node, self.moves.machine.device.kind))

    def _summed(self, name: str, node: fx.Node) -> Summed:
        moves, dtype = self.moves, info(node).meta.dtype
        master = moves.model.parameters[name].master or dtype
        return summed_as(
            dtype, master, moves.shards_of(name, node), moves.options, is_summed=moves.is_summed(name, node)
        )

    @cached_property
    def _put_off(self) -> frozenset[fx.Node]:
        return put_off_weights(self.moves.model) if self.split else frozenset()


class _Sending(NamedTuple):
    """Bytes of a message of gradients: by how much they are fewer than in the dtype of masters before they are sent,
    what is copied, and by how much more there are once they are on their way."""

    narrower: int
    copied: int
    change: int


def _most_of(messages: Sequence[_Sending]) -> int:
    """One after another, beside gradients in the dtype of masters."""
    held, most = -sum(message.narrower for message in messages), 0
    for message in messages:
        most = max(most, held + message.copied)
        held += message.change
        most = max(most, held)
    return most


def summed_as(dtype: torch.dtype, master: torch.dtype, shards: int, options: Options, *, is_summed: bool) -> Summed:
    """How gradients are kept of a parameter that is computed with in ``dtype``."""
    sent = getattr(torch, options.reduce_dtype) if options.reduce_dtype else master
    is_own = is_own_master(shards, dtype, master, options)
    return Summed(dtype, master, sent, shards, is_own, is_summed, options.zero >= 2 and shards > 1)
