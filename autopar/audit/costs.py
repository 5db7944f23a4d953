"""What one rank's passes and moves of a step take, put together from what was seen of it.

Figures are those of :class:`autopar.schedules.timeline.Costs`, under the same names, so that both can be laid side by
side; nothing of the planner's own is read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Final

from autopar.audit import host
from autopar.audit.flops import is_by_shape
from autopar.audit.prices import Prices
from autopar.audit.record import (
    ENDED,
    LOADS,
    LOSS,
    MADE,
    PUT_OFF,
    SENT,
    TOTALS,
    Message,
    Moved,
    Phase,
    Where,
)
from autopar.audit.run import Seen, first_offloads
from autopar.cost_models import step
from autopar.cost_models.step import Collectives
from autopar.rules import lookup
from autopar.runtime.vocabulary import VOCABULARY
from autopar.schedules.actions import Action, Schedule
from autopar.schedules.backwards import Backwards, mixed_backwards, situations, telling
from autopar.schedules.flow import EXCHANGES, VOCABULARY_KINDS
from autopar.schedules.registry import swaps_both_ways

_EMPTY: Final = Phase()
_SENT: Final = (SENT, ENDED)
_REDUCTIONS: Final = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True)
class SeenCosts:
    """Of all stages and ranks of a step of ``schedule``; ``seen`` by pipeline index."""

    schedule: Schedule
    seen: Sequence[Seen]
    prices: Prices
    layers: Sequence[int]
    """Of each stage, how many parts of it have gradients that are summed as they are complete."""

    def _phase(self, kind: str, stage: int, microbatch: int = 0) -> Phase:
        rank = self.schedule.placement[stage]
        action = Action(kind, microbatch, stage) if kind not in ("GATHER", "REDUCE") else Action(kind, stage=stage)
        return self.seen[rank].phases.get(str(action), _EMPTY)

    def is_split(self, stage: int) -> bool:
        """Whether a backward of the stage is two passes."""
        return any(number == stage for _, number in self.schedule.split)

    def is_mixed(self, stage: int) -> bool:
        """Whether some are, and others one."""
        return stage in self._mixed

    @cached_property
    def _mixed(self) -> Mapping[int, Backwards]:
        return mixed_backwards(self.schedule)

    def _count(self, stage: int, *, whole: bool) -> int:
        """How many backwards of the stage are of this kind."""
        if stage in self._mixed:
            return self._mixed[stage].whole if whole else self._mixed[stage].split
        return 0 if whole == self.is_split(stage) else self.schedule.microbatches

    def _ends_split(self, stage: int) -> bool:
        """Whether W completes the last gradients."""
        return self._mixed[stage].ends_split if stage in self._mixed else self.is_split(stage)

    def _back(self, stage: int, *, whole: bool) -> list[Phase]:
        """The passes of the first backward of a kind that was seen."""
        split, seen = self.schedule.split, sorted(self._seen_of(stage))
        microbatch = next(number for number in seen if ((number, stage) in split) != whole)
        return [self._phase(kind, stage, microbatch) for kind in (("B",) if whole else ("I", "W"))]

    def _seen_of(self, stage: int) -> set[int]:
        return self._telling[self.schedule.placement[stage]]

    @cached_property
    def _telling(self) -> list[set[int]]:
        return [telling(self.schedule, rank) for rank in range(self.schedule.ranks)]

    def _last(self) -> int:
        return self.schedule.microbatches - 1

    def forward_seconds(self, stage: int) -> float:
        """As long as the host takes, where that has no lead."""
        return max(self._device_forward(stage), self._waited(stage, self._forward_calls(stage)))

    def _device_forward(self, stage: int) -> float:
        """With what collectives beside it take from it, as in all passes."""
        plain = self._forward(stage)
        within = self.prices.slowed(self._phase("F", stage))
        return plain + within + step.slowed_seconds([self._gathered_beside(stage)], plain)

    def backward_seconds(self, stage: int) -> float:
        """The same of the backward: of both parts of it, if one of the stage is split."""
        if not self.is_split(stage):
            return self.whole_seconds(stage)
        plain, late = self._of_stage("_split_backward", stage), self._weights(stage)
        back, within = self._beside_backward(stage)
        seconds = self.weight_seconds(stage) + (plain - late) + within + step.slowed_seconds(back, plain - late)
        return max(seconds, self._waited(stage, self._backward_calls(stage, whole=False)))

    def whole_seconds(self, stage: int) -> float:
        """Of a backward that isn't split."""
        plain = self._of_stage("_whole_backward", stage)
        back, within = self._beside_backward(stage)
        seconds = plain + within + step.slowed_seconds([*back, *self._summed_beside(stage)], plain)
        return max(seconds, self._waited(stage, self._backward_calls(stage, whole=True)))

    def _beside_backward(self, stage: int) -> tuple[list[Collectives], float]:
        """Gathers, and what rows that travel within it take."""
        back = [self._gathering(stage)] if self._streams else []
        return back, self.prices.slowed(self._phase("F", stage), back=True)

    def weight_seconds(self, stage: int) -> float:
        plain = self._weights(stage)
        return plain + (step.slowed_seconds(self._summed_beside(stage), plain) if self.is_split(stage) else 0.0)

    def _waited(self, stage: int, calls: int) -> float:
        waits = host.reads_counts(self._phase("F", stage))
        return step.host_seconds(calls, self.prices.cluster.device) if waits else 0.0

    def _forward_calls(self, stage: int) -> int:
        return host.forward_calls(self._phase("F", stage)) + self._copies(stage)

    def _backward_calls(self, stage: int, *, whole: bool) -> int:
        """Of all parts of it."""
        back = self._back(stage, whole=whole)
        made = host.gradient_calls(self._phase("F", stage)) + host.again_calls(back[0])
        return made + sum(phase.sums for phase in back) + self._copies(stage)

    def _copies(self, stage: int) -> int:
        """Of weights that are made in each pass: for each, those that are made for a forward."""
        return sum(self._phase(kind, stage).copies for kind in (("GATHER_F", "F") if self._streams else ()))

    def host_seconds(self, rank: int) -> float:
        """What the host of a rank takes to issue a step."""
        microbatches, mine = self.schedule.microbatches, self.seen[rank]
        stages = [stage for stage, home in enumerate(self.schedule.placement) if home == rank]
        passes = sum(microbatches * self._forward_calls(stage) for stage in stages)
        for stage, whole in product(stages, (False, True)):
            count = self._count(stage, whole=whole)
            passes += count * self._backward_calls(stage, whole=whole) if count else 0
        gathers = {str(action) for action in self.schedule.lists[rank] if action.kind == "GATHER"}
        once = sum(mine.phases.get(text, _EMPTY).copies for text in gathers)
        updates = mine.masters * (microbatches if self.schedule.is_asynchronous else 1)
        return step.host_seconds(passes + once + updates, self.prices.cluster.device)

    def _gathered_beside(self, stage: int) -> Collectives:
        """Of collectives, those beside a forward: of one a step, its share of each microbatch."""
        gathering = self._gathering(stage)
        if self._streams:
            return gathering
        return self._once(step.hidden(gathering, self._gathered(stage), self._first_gathered(stage)))

    def _summed_beside(self, stage: int) -> list[Collectives]:
        """The same of the pass that completes gradients."""
        scattered, reduced = (self.prices.collectives(m) for m in (self._scattered(stage), self._reduced(stage)))
        sums = reduced.seconds + self._returned(stage)
        return [
            step.hidden(scattered, scattered.seconds, self._left(scattered.seconds, stage)),
            self._once(step.hidden(reduced, sums, self._left(sums, stage))),
        ]

    def _once(self, collectives: Collectives) -> Collectives:
        """Of what happens once in an update, the share of a microbatch."""
        return collectives.times(1 / (1 if self.schedule.is_asynchronous else self.schedule.microbatches))

    def _forward(self, stage: int) -> float:
        """Of a pass alone, as of the next two."""
        return self._of_stage("_forward_of", stage)

    def _forward_of(self, stage: int) -> float:
        return self.prices.forward(self._phase("F", stage)) + self._cast(stage)

    def _cast(self, stage: int) -> float:
        """Of masters, in a pass that gathers its weights; for each, what is cast for a forward."""
        kinds = ("GATHER_F", "F") if self._streams else ()
        return math.fsum(self.prices.casts(self._phase(kind, stage)) for kind in kinds)

    def _split_backward(self, stage: int) -> float:
        """With what it computes again."""
        return self._backward_of(stage, whole=False)

    def _whole_backward(self, stage: int) -> float:
        return self._backward_of(stage, whole=True)

    def _backward_of(self, stage: int, *, whole: bool) -> float:
        ops = self.prices.backward(self._phase("F", stage)) + self.prices.again(self._back(stage, whole=whole)[0])
        return ops + self.accumulation_seconds(stage, whole=whole) + self._cast(stage)

    def _weights(self, stage: int) -> float:
        return self._of_stage("_weights_of", stage)

    def _weights_of(self, stage: int) -> float:
        return self.prices.weights(self._phase("F", stage)) + self.accumulation_seconds(stage, put_off=True)

    def accumulation_seconds(self, stage: int, *, whole: bool = False, put_off: bool = False) -> float:
        """Of adding up gradients, per microbatch: what is made in backwards of a kind, of those; all that is sent."""
        places = (PUT_OFF,) if put_off else (MADE, PUT_OFF)
        rank = self.schedule.placement[stage]
        mine = [where for where in self.seen[rank].gradients if where.stage == stage]
        made = [where for where in mine if (where.kind == "B") == whole] if self.is_mixed(stage) else mine
        count = self._count(stage, whole=whole)
        added = self._moved_seconds(rank, made, places) * self.schedule.microbatches / count if count else 0.0
        return added + self._moved_seconds(rank, mine, _SENT)

    def _table_seconds(self, rank: int, kind: str) -> float:
        """The same of a split vocabulary's, in a pass. What is done with sums once a step counts with ``T``."""
        kinds = (kind, "REDUCE_V", "STEP") if kind == "T" else (kind,)
        mine = (w for w in self.seen[rank].gradients if w.stage == VOCABULARY and w.kind in kinds)
        return self._moved_seconds(rank, mine, (MADE, *_SENT))

    def _moved_seconds(self, rank: int, mine: Iterable[Where], places: Collection[str]) -> float:
        """Per microbatch."""
        found = self.seen[rank].gradients
        moves = ((where, moved, elements) for where in mine for moved, elements in found[where].items())
        seconds = [
            self._times(rank, w, m) * self._move_seconds(m, elements) for w, m, elements in moves if m.place in places
        ]
        return math.fsum(seconds) / self.schedule.microbatches

    def _times(self, rank: int, where: Where, moved: Moved) -> float:
        """How often a step has what was seen of some microbatches: others are like the last one that was seen of their
        kind. But a sum is cast, and sent, once; what is sent in each backward is added once less."""
        seen = self._telling[rank]
        if moved.place == ENDED:
            return (self.schedule.microbatches - 1) / max(1, len(seen) - 1) if moved.is_added else 1
        if moved.in_pass and where.stage in self._sending:
            return self._like(where, seen)
        if where.microbatch < 0 or (moved.is_cast and moved.place != SENT):
            return 1
        split, stage = self.schedule.split, where.stage
        is_split = (where.microbatch, stage) in split
        kind = {m for m in range(self.schedule.microbatches) if ((m, stage) in split) == is_split}
        return 1 + len(kind - seen) if where.microbatch == max(kind & seen) else 1

    @cached_property
    def _sending(self) -> set[int]:
        """Stages that send gradients after each backward, of which some are two passes."""
        return {stage for _, stage in self.schedule.split} if self._scatters else set()

    def _like(self, where: Where, seen: Collection[int]) -> float:
        """How many passes of a step, for each one that was seen, find as many gradients waiting to be sent."""
        row = self.schedule.lists[self.schedule.placement[where.stage]]
        every = Counter(situation for _, situation in situations(row, where.stage))
        found = dict(situations([action for action in row if action.microbatch in seen], where.stage))
        ends = {action.microbatch: action for action in found if action.kind != "I"}
        ran = Action(where.kind, where.microbatch, where.stage)
        situation = found[ran if ran in found else ends[where.microbatch]]
        return every[situation] / list(found.values()).count(situation)

    def _move_seconds(self, moved: Moved, elements: int) -> float:
        price = step.add_seconds if moved.is_added else step.copy_seconds
        return price(elements, moved.before, moved.after, self.prices.cluster.device)

    def send_forward_seconds(self, stage: int) -> float:
        return self._sent("SEND_F", stage)

    def send_backward_seconds(self, stage: int) -> float:
        return self._sent("SEND_B", stage)

    def _sent(self, kind: str, stage: int) -> float:
        """All tensors of a boundary are one message."""
        phases = self.seen[self.schedule.placement[stage]].phases
        texts = (
            str(a)
            for a in self.schedule.lists[self.schedule.placement[stage]]
            if (a.kind, a.microbatch, a.stage) == (kind, 0, stage)
        )
        return math.fsum(self.prices.together(phases[text].messages) for text in texts if text in phases)

    def _reductions(self, stage: int, microbatch: int) -> Iterator[Message]:
        """Sums of gradients that the backward of a microbatch starts, wherever it does."""
        for kind in ("B", "I", "W", "SCATTER"):
            yield from _started(self._phase(kind, stage, microbatch))

    def scatter_seconds(self, stage: int) -> float:
        """After each backward, where gradients are split."""
        return self._left(self.scattering_seconds(stage), stage)

    def scattering_seconds(self, stage: int) -> float:
        """All of that."""
        return self.prices.messages(self._scattered(stage))

    def _scattered(self, stage: int) -> list[Message]:
        if not self._scatters:
            return []
        return [m for m in self._reductions(stage, 0) if m.kind == "reduce_scatter"]

    def reduce_seconds(self, stage: int) -> float:
        """What the last backward and REDUCE start, but for that; and copies to the host."""
        return self._left(self.reducing_seconds(stage), stage)

    def reducing_seconds(self, stage: int) -> float:
        """All of that."""
        return self.prices.messages(self._reduced(stage)) + self._returned(stage)

    def _returned(self, stage: int) -> float:
        """Of gradients of masters that lie on the host."""
        bytes_ = self.seen[self.schedule.placement[stage]].returned.get(stage, 0)
        return bytes_ / self.prices.cluster.device.host_bytes_per_second if bytes_ else 0.0

    def _reduced(self, stage: int) -> list[Message]:
        started = [*self._reductions(stage, self._last()), *_started(self._phase("REDUCE", stage))]
        return [m for m in started if not (self._scatters and m.kind == "reduce_scatter")]

    def _left(self, sums: float, stage: int) -> float:
        """Of sums that run beside the pass that makes their terms: what is left at its end."""
        completing = self._weights(stage) if self._ends_split(stage) else self._of_stage("_whole_backward", stage)
        return step.left_seconds(sums, self.layers[stage], completing)

    @cached_property
    def _scatters(self) -> bool:
        return any(a.kind == "SCATTER" for row in self.schedule.lists for a in row)

    def gather_seconds(self, stage: int) -> float:
        """For a forward: what is gathered before it and in it. Once a step: what is left when the first forward of the
        stage begins, whose layers wait for their own weights, and what was left of gathers before when theirs did."""
        gathered = self._gathered(stage)
        if self._streams:
            return gathered
        before = [s for s in range(stage) if self.schedule.placement[s] == self.schedule.placement[stage]]
        late = self._gathered(before[-1]) - self._first_gathered(before[-1]) if before else 0.0
        return late + self._first_gathered(stage)

    def _first_gathered(self, stage: int) -> float:
        if self.seen[self.schedule.placement[stage]].on_host:
            return self._gathered(stage)
        mine = self.seen[self.schedule.placement[stage]]
        return step.left_seconds(self._gathered(stage), mine.places[stage], self._forward(stage))

    def _gathered(self, stage: int) -> float:
        return self._gathering(stage).seconds + self.prices.fetched(self._gathers(stage))

    def _gathers(self, stage: int) -> list[Phase]:
        return [self._phase(kind, stage) for kind in (("GATHER_F", "F") if self._streams else ("GATHER",))]

    def _gathering(self, stage: int) -> Collectives:
        messages = [m for phase in self._gathers(stage) for m in phase.messages if m.kind == "all_gather"]
        return self.prices.collectives(m for m in messages if m.is_started)

    @cached_property
    def _streams(self) -> bool:
        return any(a.kind in ("GATHER_F", "GATHER_B") for row in self.schedule.lists for a in row)

    def step_seconds(self, rank: int) -> float:
        """Of the update, and before it of the sums that begin when all backwards are over."""
        mine = self.seen[rank]
        shared = self.prices.messages(_started(mine.phases.get("STEP", _EMPTY)))
        return shared + step.optimizer_seconds(mine.updated, self.prices.cluster.device, on_host=mine.on_host)

    def back_flops(self, stage: int) -> tuple[int, int]:
        """Of products whose kernels ran in the backward; and one more for each factor with a gradient.

        Not of ops whose backward does their forward again, in an order of its own.
        """
        ops = [ran for ran in self._phase("F", stage).ops if not ran.again and ran.flops and not is_by_shape(ran)]
        ops = [ran for ran in ops if ran.is_reached and not lookup(ran.op.name).repeats]
        late = self._phase("W", stage).flops if (0, stage) in self.schedule.split else 0
        run = sum(ran.back_flops for ran in ops) + late
        return run, sum(ran.flops * len(lookup(ran.op.name).factors(ran.op)) for ran in ops)

    def vocabulary_seconds(self, rank: int, kind: str) -> float:
        """Of a pass of a split vocabulary: what it runs of the text, what it sends meanwhile, and the arithmetic on
        logits. A lookup's gradient is the backward of its forward."""
        phase, forward = (self.seen[rank].phases.get(str(Action(name, 0)), _EMPTY) for name in (kind, "E"))
        added = self._table_seconds(rank, kind)
        if kind == "G":
            return self.prices.backward(forward) + self.prices.messages(phase.messages) + added
        first = self._first_of_tokens(phase, kind)
        kept = [ran for ran in phase.ops[first:] if self.seen[rank].matrices.are_made(ran.op)]
        ops = replace(phase, ops=[*phase.ops[:first], *kept])
        return math.fsum(
            (self.prices.forward(ops), self.prices.messages(phase.messages), self.prices.arithmetic(phase), added)
        )

    @staticmethod
    def _first_of_tokens(phase: Phase, kind: str) -> int:
        """From where on what ops do per token is nothing: of a lookup, of what enters and of targets, all counts."""
        if kind == "E":
            return len(phase.ops)
        return next((place for place, ran in enumerate(phase.ops) if ran.flops), 0) if kind == "S" else 0

    def offloads(self, stage: int) -> bool:
        """Whether what the stage keeps goes to the host."""
        return stage in first_offloads(self.schedule, self.schedule.placement[stage])

    def offload_seconds(self, stage: int) -> float:
        """Of what a microbatch keeps to the host, or back: each memory once."""
        rank = self.schedule.placement[stage]
        action = first_offloads(self.schedule, rank).get(stage)
        copied = self.seen[rank].phases.get(str(action), _EMPTY).copied_bytes
        both_ways = swaps_both_ways(self.schedule.name, self.schedule.microbatches)
        rate = self.prices.cluster.device.swap_bytes_per_second(both_ways=both_ways)
        return copied / rate if copied else 0.0

    def exchange_seconds(self, rank: int, kind: str) -> float:
        """Of an exchange of the vocabulary, of the first microbatch."""
        return self.prices.together(self.seen[rank].phases.get(str(Action(kind, 0)), _EMPTY).messages)

    @cached_property
    def gather_vocabulary_seconds(self) -> float:
        phase = self.seen[0].phases.get("GATHER_V", _EMPTY)
        return self.prices.messages(phase.messages) + self.prices.fetched([phase])

    @cached_property
    def reduce_vocabulary_seconds(self) -> float:
        """All sums of tables' gradients start there, and copies to the host."""
        returned = self.seen[0].returned.get(VOCABULARY, 0)
        copied = returned / self.prices.cluster.device.host_bytes_per_second if returned else 0.0
        return self.prices.messages(_started(self.seen[0].phases.get("REDUCE_V", _EMPTY))) + copied

    def begin_seconds(self, rank: int) -> float:
        """Before the first pass: totals of the batch, what they are counted by, and masters that are cast once."""
        gathers = [a for a in self.schedule.lists[rank] if a.kind in ("GATHER", "GATHER_V")]
        cast = [self.prices.casts(self.seen[rank].phases.get(str(action), _EMPTY)) for action in gathers]
        return math.fsum((self._beside_seconds(rank, TOTALS), *cast))

    def end_seconds(self, rank: int) -> float:
        """After the last: loads of experts, and the loss."""
        return math.fsum(self._beside_seconds(rank, name) for name in (LOADS, LOSS))

    def _beside_seconds(self, rank: int, name: str) -> float:
        phase = self.seen[rank].phases.get(name, _EMPTY)
        return self.prices.forward(phase) + self.prices.messages(phase.messages)

    def stray_seconds(self, rank: int) -> float:
        """Messages of a step that the plan doesn't know: of clipping, which is asked of a job."""
        phases = self.seen[rank].phases
        asked = phases.get("STEP", _EMPTY)
        sums = set(map(id, _started(asked)))
        return self.prices.messages([*phases[""].messages, *(m for m in asked.messages if id(m) not in sums)])

    def seconds(self, rank: int, action: Action) -> float:
        """How long ``action`` takes on ``rank``; a receive takes none of its own."""
        kind, stage = action.kind, action.stage
        if kind == "I":
            return self.backward_seconds(stage) - self.weight_seconds(stage)
        if kind in VOCABULARY_KINDS:
            return self.vocabulary_seconds(rank, kind)
        if kind in EXCHANGES:
            return self.exchange_seconds(rank, kind)
        if kind == "GATHER_V":
            return self.gather_vocabulary_seconds
        if kind == "REDUCE_V":
            return self.reduce_vocabulary_seconds
        if kind == "STEP":
            updates = 0.0 if self.schedule.is_asynchronous else self.step_seconds(rank)
            return updates + self.end_seconds(rank)
        if kind == "UPDATE":
            return self.step_seconds(rank)
        name = _FIELDS.get(kind)
        return self._of_stage(name, stage) if name else 0.0

    def summed_seconds(self, rank: int, action: Action) -> float:
        """What all sums of ``action`` take, which begin beside the pass before it."""
        whole = {"SCATTER": "scattering_seconds", "REDUCE": "reducing_seconds"}.get(action.kind)
        return self._of_stage(whole, action.stage) if whole else self.seconds(rank, action)

    @cached_property
    def _known(self) -> dict[tuple[str, int], float]:
        return {}

    def _of_stage(self, name: str, stage: int) -> float:
        if (name, stage) not in self._known:
            self._known[name, stage] = getattr(self, name)(stage)
        return self._known[name, stage]


_FIELDS: Final = {
    "F": "forward_seconds",
    "B": "whole_seconds",
    "W": "weight_seconds",
    "SEND_F": "send_forward_seconds",
    "SEND_B": "send_backward_seconds",
    "GATHER": "gather_seconds",
    "GATHER_F": "gather_seconds",
    "GATHER_B": "gather_seconds",
    "SCATTER": "scatter_seconds",
    "REDUCE": "reduce_seconds",
    "OFFLOAD": "offload_seconds",
    "FETCH": "offload_seconds",
}


def _started(phase: Phase) -> Iterator[Message]:
    yield from (m for m in phase.messages if m.is_started and m.kind in _REDUCTIONS)
