"""ZB-V, V-Half and V-Min: two stages per rank, placed as a V, and each backward in two.

V-Half and V-Min are made from a building block (Qi et al., arXiv 2405.15362, section 4 and appendix A). It says when
one microbatch's F and I of both stages run, in units in which every pass takes 1. Repeated every six units, it fills a
rank with six passes per microbatch, and its lifespans from F to W, the same in sum for all ranks, decide the memory.
Warm-up and cool-down are then packed more tightly in the same memory. ZB-V (arXiv 2401.10241, section 6) has a block of
its own here, and the orders that a greedy search finds.

Who decides by what is there when a rank is free decides otherwise where a message comes a moment later, and then most
often worse: a rank begins another pass where it had better waited for that moment. So orders are found as if messages
took no time, and then packed for the times that there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

from autopar.schedules.actions import Schedule
from autopar.schedules.eager import Eager, Lists, Pass
from autopar.schedules.pass_times import PassTimes
from autopar.schedules.placements import v_shaped
from autopar.schedules.trials import Line, shortest, stage_passes
from autopar.schedules.vocabulary import BARRIERS
from autopar.schedules.zero_bubble import Greedy, Rule

INTERVAL: Final = 6
_CHANGES: Final = {"F": 1, "I": 0, "W": -1}

Block = Callable[[int, int, int], tuple[int, int, int, int]]
"""From rank, number of ranks and barriers to when F and F of the first and second stage, I and I of the second and
first stage run."""


def v_half_peak(ranks: int) -> int:
    """The microbatches that every rank keeps, each with its activations of both stages."""
    return (ranks + 2) // 2


def v_min_peak(ranks: int) -> int:
    """The microbatches that the fullest rank keeps, each with its activations of both stages."""
    return (ranks + 4) // 3


def _v_half_block(rank: int, ranks: int, barriers: int) -> tuple[int, int, int, int]:
    wait = (3 if ranks % 2 == 0 else 0) + INTERVAL * barriers
    return (2 * rank, 3 * ranks - rank - 2, 3 * ranks + wait + 2 * rank - 1, 6 * ranks + wait - rank - 2)


def _v_min_block(rank: int, ranks: int, barriers: int) -> tuple[int, int, int, int]:
    wait = (2 if ranks % 3 == 0 else 0) + INTERVAL * barriers
    return (rank, 2 * ranks - rank - 1, 2 * ranks + wait + rank, 4 * ranks + wait - rank - 1)


def _zb_v_block(rank: int, ranks: int, barriers: int) -> tuple[int, int, int, int]:
    """On the way down a pass starts four units after the one before, on the way up two, so that all but the turns leave
    time: a pass may end three units later, or one, before the next has to wait, as where it takes longer than others,
    or its message does. All four move by as much against the interval, so none meets another on any rank."""
    last, wait = ranks - 1, INTERVAL * barriers
    turned = 6 * last + 2 + wait
    return (4 * rank, 6 * last + 1 - 2 * rank, turned + 4 * rank, turned + 6 * last + 1 - 2 * rank)


def zb_v(
    ranks: int, microbatches: int, limit: int, times: PassTimes, head: str = "", embedding: bool = False
) -> Schedule:
    """At most ``limit`` microbatches between F and W on any rank, counting its whole share of each.

    With a limit of ``ranks``, the memory that 1F1B takes on its first rank, every rank is busy from its first pass to
    its last if all passes take the same and messages no time. Compute actions only.
    """
    line, warm_ups = Line(v_shaped(ranks), times, head, embedding), (2 * limit,) * ranks
    orders = [partial(_greedy, line, 2 * limit, Rule(warm_ups, *choice)) for choice in _CHOICES]
    if limit >= ranks + BARRIERS[head]:  # what its block keeps
        orders.append(partial(_of_block, line, 2 * limit, _zb_v_block))
    return _packed("zb-v", line, 2 * limit, microbatches, orders)


def v_half(ranks: int, microbatches: int, times: PassTimes, head: str = "", embedding: bool = False) -> Schedule:
    """About half the memory of 1F1B, the same on all ranks, and about half its bubble. Compute actions only.

    :func:`v_half_peak` microbatches in flight, and one more per barrier of ``head``.
    """
    line, limit = Line(v_shaped(ranks), times, head, embedding), 2 * (v_half_peak(ranks) + BARRIERS[head])
    return _packed("v-half", line, limit, microbatches, [partial(_of_block, line, limit, _v_half_block)])


def v_min(ranks: int, microbatches: int, times: PassTimes, head: str = "", embedding: bool = False) -> Schedule:
    """About a third of the memory of 1F1B; idles in every interval unless all passes take the same.

    Compute actions only. :func:`v_min_peak` microbatches in flight, and one more per barrier of ``head``.
    """
    line, limit = Line(v_shaped(ranks), times, head, embedding), 2 * (v_min_peak(ranks) + BARRIERS[head])
    return _packed("v-min", line, limit, microbatches, [partial(_of_block, line, limit, _v_min_block)])


_CHOICES: Final = ((True, False, True), (False, True, False))
"""Of :class:`Rule`: two of eight. With the block's order, theirs do best in the mean; the others hardly add to it."""

Order = Callable[[int], Lists]
"""From the number of microbatches, what each rank is to run."""


def _greedy(line: Line, limit: int, rule: Rule, microbatches: int) -> Lists:
    return stage_passes(line.at_once().run(Greedy(line.placement, microbatches, limit, rule), microbatches))


def _of_block(line: Line, limit: int, block: Block, microbatches: int) -> Lists:
    lists = _repeated(block, max(line.placement) + 1, BARRIERS[line.head], microbatches)
    return stage_passes(_run(line.at_once(), limit, lists, microbatches))


def _packed(name: str, line: Line, limit: int, microbatches: int, orders: Sequence[Order]) -> Schedule:
    """The shortest of ``orders``, each packed into the memory of ``limit`` stages' activations."""

    def trial(order: Order, count: int) -> Eager:
        return _run(line, limit, order(count), count)

    stages = len(line.placement)
    lists = shortest([partial(trial, order) for order in orders], microbatches, limit + stages)
    return Schedule(name, stages, microbatches, line.placement, lists, line.head, line.embedding)


def _run(line: Line, limit: int, lists: Lists, microbatches: int) -> Eager:
    return line.run(_Packed(lists, limit, window=2 * INTERVAL * len(lists)), microbatches)


def _repeated(block: Block, ranks: int, barriers: int, microbatches: int) -> Lists:
    """Of each rank, the block of every microbatch."""
    return tuple(
        tuple(_row(block(rank, ranks, barriers), (rank, 2 * ranks - 1 - rank), microbatches)) for rank in range(ranks)
    )


def _row(block: tuple[int, int, int, int], stages: tuple[int, int], microbatches: int) -> Iterator[Pass]:
    """One rank's passes in the order of their times, each W in the first slot that is free after its I."""
    kinds = (("F", stages[0]), ("F", stages[1]), ("I", stages[1]), ("I", stages[0]))
    slots = {
        start + INTERVAL * microbatch: Pass(kind, microbatch, stage)
        for microbatch in range(microbatches)
        for start, (kind, stage) in zip(block, kinds, strict=True)
    }
    free = 0
    for time in sorted(slots):
        if slots[time].kind == "I":
            free = max(free, time + 1)
            while free in slots:
                free += 1
            slots[free] = slots[time]._replace(kind="W")
    return (slots[time] for time in sorted(slots))


class _Packed:
    """Given lists, in which a rank that has to wait does a later pass early, as far as ``limit`` stages' activations
    allow; once a rank has no forward left, backwards that others wait for go first.

    ``window`` is how many passes a rank looks ahead. Inputs of passes of one kind and stage arrive in the order of
    their microbatches, and so they run: of each kind and stage (a *lane*) only the first that is left can be next.
    """

    def __init__(self, lists: Lists, limit: int, window: int) -> None:
        self.lists, self.limit, self.window = [list(passes) for passes in lists], limit, window
        self.position = [0] * len(lists)
        self.early: list[set[int]] = [set() for _ in lists]
        self.held = [0] * len(lists)
        self.forwards = [sum(step.kind == "F" for step in passes) for passes in lists]
        self.turned: set[tuple[int, int]] = set()
        self.lanes: list[dict[tuple[str, int], deque[int]]] = [{} for _ in lists]
        for lanes, passes in zip(self.lanes, self.lists, strict=True):
            for index, step in enumerate(passes):
                lanes.setdefault((step.kind, step.stage), deque()).append(index)

    def choose(self, run: Eager, rank: int, now: float) -> Pass | None:
        position = self._position(rank)
        if position == len(self.lists[rank]):
            return None
        if not self.forwards[rank]:
            found = self._find(run, rank, now, lambda step: step.kind == "I")
            if found is not None:
                return self._take(rank, found)
        first = self.lists[rank][position]
        if self._is_ready(run, first, now):
            return self._take(rank, position)
        until = run.arrival["F" if first.kind == "F" else "B"][first.stage][first.microbatch]
        found = self._find(run, rank, now, lambda step: step.kind == "I" or now + run.seconds(step) <= until)
        return None if found is None else self._take(rank, found)

    def _position(self, rank: int) -> int:
        """Where the first pass of the list is that hasn't run."""
        early = self.early[rank]
        while self.position[rank] in early:
            early.remove(self.position[rank])
            self.position[rank] += 1
        return self.position[rank]

    def _find(self, run: Eager, rank: int, now: float, fits: Callable[[Pass], bool]) -> int | None:
        """The first pass ahead that can run now; a forward only if memory holds until its place in the list."""
        passes, end = self.lists[rank], self.position[rank] + self.window
        heads = sorted(lane[0] for lane in self.lanes[rank].values() if lane and lane[0] < end)
        for index in heads:
            step = passes[index]
            if self._is_ready(run, step, now) and fits(step) and (step.kind != "F" or self._has_room(rank, index)):
                return index
        return None

    def _has_room(self, rank: int, index: int) -> bool:
        """Whether there is room for one more until all passes before ``index`` have run."""
        held = self.held[rank]
        for before in range(self.position[rank], index):
            if held >= self.limit:
                return False
            if before not in self.early[rank]:
                held += _CHANGES[self.lists[rank][before].kind]
        return held < self.limit

    def _is_ready(self, run: Eager, step: Pass, now: float) -> bool:
        if step.kind == "W":
            return (step.microbatch, step.stage) in self.turned
        return run.arrival["F" if step.kind == "F" else "B"][step.stage][step.microbatch] <= now

    def _take(self, rank: int, index: int) -> Pass:
        step = self.lists[rank][index]
        self.early[rank].add(index)
        self.lanes[rank][step.kind, step.stage].popleft()
        self.held[rank] += _CHANGES[step.kind]
        self.forwards[rank] -= step.kind == "F"
        if step.kind == "I":
            self.turned.add((step.microbatch, step.stage))
        return step
