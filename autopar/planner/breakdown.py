"""Where the time of a step goes, read off its timeline and the costs of its calls: parts that add up to it.

Of one pipeline rank, the busiest. Its time is what it computes, and what it waits for. A pass is taken apart by
:class:`autopar.planner.block_costs.BlockCost`. A wait belongs to what arrives at its end, for as long as that was on
its way (*exposed* communication); the rest is a bubble: another rank wasn't ready. What is on its way while the rank
computes is *hidden*.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from autopar.graph import Model, info
from autopar.options import Options
from autopar.plan import BUBBLE, PARTS, CostPart, CostPlan
from autopar.planner.between import between
from autopar.planner.block_costs import BlockCost, Both, Machine, Wire
from autopar.planner.contention import Slowed
from autopar.planner.gradients import Accumulation
from autopar.planner.host import Waited
from autopar.planner.op_costs import dtype_name
from autopar.planner.pipeline import Pipeline
from autopar.rules import lookup
from autopar.rules.base import Op
from autopar.schedules.actions import Action
from autopar.schedules.flow import COMPUTE, VOCABULARY_KINDS, counterpart, is_exchange, is_receive, is_send, needs
from autopar.schedules.timeline import Event, Timeline
from autopar.schedules.weight_moves import GATHERS, PASSES, gather_of, moves_of

Key = tuple[str, str, str]
"""Name, axis and kind of a part."""

_COLLECTIVES: Final = {
    "SUM_E": "all_reduce",
    "CAST_E": "broadcast",
    "CAST_X": "broadcast",
    "MAX": "all_reduce",
    "STATS": "all_gather",
    "SUM_X": "all_reduce",
}
_MESSAGES: Final = ("messages", "pp", "send")
_HOST: Final = ("host copies", "host", "copy")
_SCALARS: Final = ("scalars", "", "")
_CASTS: Final = ("casts", "", "")
_ISSUING: Final = ("host", "", "")
_WAITING: Final = (BUBBLE, "", "")


@dataclass(frozen=True)
class Work:
    """Operations of a model's matrix products in a step, and the dtype in which most of them are ("": there is none).

    ``flops``: those of the forward as :meth:`autopar.rules.base.Rule.flops` counts them (a causal mask halves
    attention's), and as many for each factor with a gradient; nothing for what is recomputed.
    """

    flops: int
    dtype: str


def model_work(model: Model) -> Work:
    """Of a model that is whole: no axis is solved, its shapes are those of the global batch."""
    found: Counter[str] = Counter()
    for block, count in zip(model.blocks, model.counts(), strict=True):
        for node in block.ops:
            op = Op.of(node)
            rule = lookup(op.name)
            if flops := rule.flops(op):
                gradients = len(rule.factors(op)) if info(node).meta.needs_grad else 0
                done = count * flops * (1 + gradients)
                found[dtype_name(op.operands[0].dtype)] += round(done * info(node).likely)
    return Work(found.total(), max(sorted(found), key=found.__getitem__, default=""))


def cost_plan(
    model: Model,
    pipeline: Pipeline,
    costs: Sequence[BlockCost],
    machine: Machine,
    options: Options,
    work: Work,
    bound_seconds: float,
) -> CostPlan:
    """``model`` is local on all axes, ``costs`` are those of its blocks; no step is below ``bound_seconds``."""
    timeline = pipeline.timeline
    rank = max(range(timeline.schedule.ranks), key=timeline.busy_seconds.__getitem__)
    return CostPlan(
        step_seconds=timeline.step_seconds,
        bound_seconds=min(bound_seconds, timeline.step_seconds),
        order_seconds=min(pipeline.order_seconds, timeline.step_seconds),
        rank=rank,
        parts=step_parts(model, pipeline, costs, machine, options, rank),
        model_flops=work.flops,
        dtype=work.dtype,
        peak_flops_per_second=machine.device.rate(work.dtype) if work.dtype else 0.0,
    )


def step_parts(
    model: Model, pipeline: Pipeline, costs: Sequence[BlockCost], machine: Machine, options: Options, rank: int
) -> list[CostPart]:
    """What a step is made of on pipeline rank ``rank``: exposed parts add up to it. The host's is exposed where passes,
    or the whole step, wait for it; what of its own it issues meanwhile is not hidden."""
    spent = _Spent()
    moves = _Moves(machine, options, pipeline.timeline, rank)
    busy = _walk(pipeline.timeline, rank, moves, spent)
    _take_apart(busy, _sent_by_stage(model, pipeline, costs, machine, rank), pipeline, spent)
    cast = pipeline.casts.once[rank]
    spent.exposed[_CASTS].append(cast)
    spent.exposed[_SCALARS].append(-cast)
    spent.exposed[_ISSUING].append(pipeline.timeline.step_seconds - pipeline.timeline.makespan_seconds)
    spent.hidden[_ISSUING] += [pipeline.timeline.costs.host_seconds[rank], *(-x for x in spent.exposed[_ISSUING])]
    for key, seconds in moves.durations().items():
        spent.hidden[key].append(seconds - math.fsum(spent.exposed.get(key, ())))
    order = list(PARTS)
    keys = sorted(spent.exposed.keys() | spent.hidden.keys(), key=lambda key: (order.index(key[0]), *key))
    return [part for part in map(spent.part, keys) if part.exposed_seconds or part.hidden_seconds]


class _Spent:
    """Seconds by part, exposed and hidden, as terms of sums."""

    def __init__(self) -> None:
        self.exposed: dict[Key, list[float]] = defaultdict(list)
        self.hidden: dict[Key, list[float]] = defaultdict(list)

    def part(self, key: Key) -> CostPart:
        """What rounding leaves below nothing is nothing."""
        exposed, hidden = (max(0.0, math.fsum(terms.get(key, ()))) for terms in (self.exposed, self.hidden))
        name, axis, kind = key
        hidden = hidden if hidden > 1e-12 * exposed else 0.0
        return CostPart(name=name, axis=axis, kind=kind, exposed_seconds=exposed, hidden_seconds=hidden)


class _Move(NamedTuple):
    """Something on its way, from when to when."""

    start: float
    end: float
    key: Key


class _Moves:
    """What is on its way for one rank: messages to it, its reductions and gathers, exchanges, copies to its host."""

    def __init__(self, machine: Machine, options: Options, timeline: Timeline, rank: int) -> None:
        self.timeline, self.rank = timeline, rank
        axes = "+".join(machine.mesh.data_axes()) or "dp"
        shards = max((line.shards for line in machine.lines.values()), default=1) if options.zero else 1
        once = "reduce_scatter" if options.zero == 1 and shards > 1 else "all_reduce"
        self._reduction = ("reduction", axes, once)
        self._gather = ("gathers", axes, "all_gather")
        self._scatter = ("scatters", axes, "reduce_scatter")
        self.streams = moves_of(timeline.schedule).gathers == "pass"
        own = [event for event in timeline.events if event.rank == rank]
        self.reductions = [self._move(event) for event in own if self._key(event.action)]
        self.copies = {event.action: self._move(event) for event in own if event.action.kind in ("OFFLOAD", "FETCH")}
        self.exchanges = {event.action: self._exchange(event) for event in own if is_exchange(event.action)}
        self.sent = {(e.rank, e.action): e for e in timeline.events if e.action.peer == rank and is_send(e.action)}
        self.messages: list[_Move] = []
        self.gathered = {event.action: event.end_seconds for event in own if event.action.kind in GATHERS}

    def _key(self, action: Action) -> Key | None:
        """Of the rank's stream of reductions."""
        if action.kind in GATHERS:
            return self._gather
        return {"SCATTER": self._scatter, "REDUCE": self._reduction, "REDUCE_V": self._reduction}.get(action.kind)

    def _move(self, event: Event) -> _Move:
        return _Move(event.start_seconds, event.end_seconds, self._key(event.action) or _HOST)

    def _exchange(self, event: Event) -> _Move:
        """It begins once the last rank has posted it."""
        end, key = event.end_seconds, ("exchanges", "pp", _COLLECTIVES[event.action.kind])
        return _Move(end - self.timeline.costs.seconds(self.rank, event.action), end, key)

    def arriving(self, event: Event) -> list[_Move]:
        """The message that a receive waits for, or the copies that a FREE does."""
        if event.action.kind == "FREE":
            return [move for copy, move in self.copies.items() if copy.kind == "OFFLOAD"]
        sent = self.sent[event.action.peer, counterpart(self.rank, event.action)]
        self.messages.append(_Move(sent.start_seconds, sent.end_seconds, _MESSAGES))
        return self.messages[-1:]

    def before(self, action: Action) -> list[_Move]:
        """What the start of an action may wait for."""
        schedule = self.timeline.schedule
        if action.kind == "STEP":
            return self.reductions
        found = [self.exchanges[n] for n in needs(schedule, action, self.rank) if n in self.exchanges]
        if action.kind in ("B", "I"):
            fetch = self.copies.get(Action("FETCH", action.microbatch, action.stage))
            found += [fetch] if fetch is not None else []
        weights = Action("GATHER", stage=action.stage) if action.stage >= 0 else Action("GATHER_V")
        return [*found, *(move for move in self.reductions if move.end <= self.gathered.get(weights, 0.0))]

    def within(self, event: Event) -> list[_Move]:
        """What a pass that streams its weights may wait for at its end."""
        gather = gather_of(event.action)
        if gather in self.gathered:
            return self.reductions
        own = _Move(event.end_seconds - self.timeline.costs.seconds(self.rank, gather), event.end_seconds, self._gather)
        return [*self.reductions, own]

    def durations(self) -> Mapping[Key, float]:
        """Of all that was on its way, and gathers that passes go on with by themselves."""
        found: dict[Key, list[float]] = defaultdict(list)
        for move in (*self.reductions, *self.copies.values(), *self.exchanges.values(), *self.messages):
            found[move.key].append(move.end - move.start)
        if self.streams:
            passes = (a for a in self.timeline.schedule.lists[self.rank] if a.kind in PASSES)
            left = [gather for gather in map(gather_of, passes) if gather not in self.gathered]
            found[self._gather] += [self.timeline.costs.seconds(self.rank, gather) for gather in left]
        return {key: math.fsum(terms) for key, terms in found.items()}


def _walk(timeline: Timeline, rank: int, moves: _Moves, spent: _Spent) -> dict[tuple[str, int], float]:
    """Go through the rank's list: waits go to ``spent``; returns what is computed, by kind and stage."""
    busy: dict[tuple[str, int], list[float]] = defaultdict(list)
    clock, last = timeline.costs.begin_seconds[rank], timeline.costs.end_seconds[rank]
    if clock or last:
        spent.exposed[_SCALARS] += [clock, last]
    for event in timeline.events:
        kind = event.action.kind
        waits = is_receive(event.action) or (kind == "FREE" and event.end_seconds > event.start_seconds)
        if event.rank != rank or not (waits or kind in COMPUTE or kind == "STEP"):
            continue
        if waits:
            _wait(event.start_seconds, event.end_seconds, moves.arriving(event), spent)
        else:
            if event.start_seconds > clock:
                _wait(clock, event.start_seconds, moves.before(event.action), spent)
            end = event.end_seconds
            if moves.streams and kind in PASSES:
                end = min(end, event.start_seconds + timeline.costs.seconds(rank, event.action))
                if end < event.end_seconds:
                    _wait(end, event.end_seconds, moves.within(event), spent)
            busy[kind, event.action.stage].append(end - event.start_seconds - (last if kind == "STEP" else 0.0))
        clock = event.end_seconds
    _wait(clock, timeline.makespan_seconds, [], spent)
    return {passes: math.fsum(terms) for passes, terms in busy.items()}


def _wait(start: float, end: float, moves: Iterable[_Move], spent: _Spent) -> None:
    """From ``start`` to ``end`` the rank waits, last of all for what ends last: what moves then is exposed."""
    left = end
    for move in sorted((m for m in moves if m.end > start and m.start < end), key=lambda m: m.end, reverse=True):
        top, low = min(left, move.end), max(start, move.start)
        if top > low:
            spent.exposed[move.key].append(top - low)
            if left > top:
                spent.exposed[_WAITING].append(left - top)
            left = low
    if left > start:
        spent.exposed[_WAITING].append(left - start)


@dataclass(frozen=True)
class _Sent:
    """What the passes of a microbatch send in one stage, by axis and kind: seconds of forward and backward."""

    exposed: Mapping[Wire, Both]
    hidden: Mapping[Wire, Both]


def _sent_by_stage(
    model: Model, pipeline: Pipeline, costs: Sequence[BlockCost], machine: Machine, rank: int
) -> dict[int, _Sent]:
    """Of the stages of one rank: what their calls send, and what is sent between calls."""
    placement = pipeline.schedule.placement
    beside = between(model, pipeline.stages, costs, machine, placement)
    found = {}
    for stage in (stage for stage, home in enumerate(placement) if home == rank):
        calls = [costs[model.calls[call].block] for call in pipeline.stages[stage]]
        exposed = _total([*(call.wires for call in calls), beside[stage].wires])
        found[stage] = _Sent(exposed, _total([call.hidden for call in calls]))
    return found


def _total(parts: Iterable[Mapping[Wire, Both]]) -> dict[Wire, Both]:
    terms: dict[Wire, list[Both]] = defaultdict(list)
    for wire, both in (item for part in parts for item in part.items()):
        terms[wire].append(both)
    return {wire: (math.fsum(f for f, _ in some), math.fsum(b for _, b in some)) for wire, some in terms.items()}


def _take_apart(
    busy: Mapping[tuple[str, int], float], sent: Mapping[int, _Sent], pipeline: Pipeline, spent: _Spent
) -> None:
    """Split what passes take into compute, what they send, what they compute again, adding up gradients, casts, waiting
    for the host, and for multiprocessors that collectives hold."""
    counts = Counter((action.kind, action.stage) for row in pipeline.schedule.lists for action in row)
    for (kind, stage), seconds in busy.items():
        if kind in VOCABULARY_KINDS:
            spent.exposed["vocabulary", "", ""].append(seconds)
        elif kind in ("STEP", "UPDATE"):
            spent.exposed["optimizer", "", ""].append(seconds)
        else:
            way, times = int(kind != "F"), counts[kind, stage]
            own = spent.exposed["backward" if way else "forward", "", ""]
            own.append(seconds)
            slowed = times * _slowed(kind, pipeline.slowed[stage])
            spent.exposed["contention", "", ""].append(slowed)
            own.append(-slowed)
            if kind != "W":
                waited = times * _waited(kind, pipeline.waiting[stage])
                spent.exposed[_ISSUING].append(waited)
                own.append(-waited)
                cast = times * pipeline.casts.passes[stage]
                spent.exposed[_CASTS].append(cast)
                own.append(-cast)
            if way:
                added = times * _accumulated(kind, pipeline.accumulations[stage])
                spent.exposed["accumulation", "", ""].append(added)
                own.append(-added)
            if kind != "W":  # which sends nothing
                again = times * pipeline.recompute_seconds(stage) * way
                spent.exposed["recomputation", "", ""].append(again)
                own.append(-again)
                own.extend(-terms for terms in _book(sent[stage], way, times, spent))


def _slowed(kind: str, slowed: Slowed) -> float:
    """What of it is a pass of ``kind``."""
    inner = slowed.backward - slowed.weights
    return {"F": slowed.forward, "B": slowed.whole, "W": slowed.weights}.get(kind, inner)


def _waited(kind: str, waited: Waited) -> float:
    """Likewise."""
    return {"F": waited.forward, "B": waited.whole}.get(kind, waited.backward)


def _accumulated(kind: str, accumulation: Accumulation) -> float:
    """What of it a backward of ``kind`` takes."""
    return {"B": accumulation.whole, "W": accumulation.put_off}.get(kind, accumulation.seconds - accumulation.put_off)


def _book(sent: _Sent, way: int, times: int, spent: _Spent) -> Iterator[float]:
    """Book what is sent one way in so many passes; gives what of it is exposed."""
    for (axis, kind), both in sent.hidden.items():
        spent.hidden["collectives", axis, kind].append(times * both[way])
    for (axis, kind), both in sent.exposed.items():
        spent.exposed["collectives", axis, kind].append(times * both[way])
        yield times * both[way]
