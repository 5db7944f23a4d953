"""Which runs of a block's ops to recompute in the backward: the whole trade of bytes against seconds, exactly.

What a *region* does (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; torch's checkpoint without
reentrance): a contiguous run of ops whose tensors are dropped after the forward. Its inputs are kept instead; the first
time that the backward needs one of its tensors, it runs again, up to the last op that keeps anything, and of that op
nothing if it keeps operands only.

Sets
    ops i = 1..n in the order they run; memories m (:mod:`autopar.planner.saved`: views share one) of ``bytes_m``
    keeps_i: memories that i's backward needs; uses_i: pairs (m, p): i reads memory m through a result of op p < i
Choice
    regions [a, b], apart from each other; K: the memories that are kept
    keeps_i in K                         i in no region: an op outside keeps what it needs
    m in K                               (m, p) in uses_i, p < a <= i <= b: an input of a region
    rerun [a, b] = a..b, without b if b keeps operands only; b keeps something, or the region could end before
Objectives
    bytes   = sum bytes_m over K + sum extra_i over ops outside
    seconds = sum seconds_i over reruns
    min w_b bytes + w_s seconds, then fewer regions, then fewer ops in them

For given weights, a dynamic program over (next op, memories kept so far that an op to come could ask for) is exact
(:class:`_Chain`): the next op lies outside, or one of the regions begins with it. A block keeps few memories that are
asked for more than once, so there are few states (of more than 2^14 for one op, the cheapest are gone on from).

The frontier is the lower convex hull of all (bytes, seconds): its ends are solved lexicographically, and between two
neighbours the weights that value both alike find the point farthest below their line or prove that there is none
(Aneja and Nair, "Bicriteria transportation problem", 1979) (:func:`frontier`). Sums are scaled to 2^20 units, so points
closer than a millionth are one. Beside them are always "nothing" (first) and "the whole block" (:func:`whole`).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import or_
from typing import NamedTuple

from torch import fx

from autopar.graph import AxisRef, Block, RuntimeOp, info
from autopar.passes.edges import gradient_paths
from autopar.passes.recompute import groups
from autopar.planner.block_costs import calls_of, weight_product
from autopar.planner.recompute_walk import Walk
from autopar.planner.saved import BlockSaved, Saved
from autopar.rules.base import Op
from autopar.rules.contraction import copies_factors
from autopar.spmd import Type, transition

Region = tuple[int, int]
"""The first and the last op of a run, by position."""

Regions = tuple[Region, ...]

POINTS = 8
"""As many points of a frontier are looked for."""

_UNITS = 1 << 20
_STATES = 1 << 14
_LARGEST = 400  # ops of a block; of a larger one only the whole is recomputed, or nothing


@dataclass(frozen=True)
class Problem:
    """A block as the docstring's sets: by op, ``seconds`` of its forward, memories it ``keeps``, ``extra_bytes`` made
    inside (and ``hidden_bytes`` in objects, which are kept even of what runs again; (): none), its ``uses``;
    ``keeps_any`` and ``keeps_made``: whether it keeps anything at all (weights included), and anything but operands, or
    runs before it does; ``communicates``: whether other ranks take part. ``made_by`` is the op that makes a memory (-1:
    an input of the block). ``live``: whether its backward ever runs ((): all do). ``puts_off``: whether, where
    backwards are split, it is a product that keeps its factors once it has run ((): none). ``called``: how many calls
    its forward is, as a transition of a weight is none ((): each is one).
    """

    seconds: tuple[float, ...]
    keeps: tuple[frozenset[int], ...]
    extra_bytes: tuple[int, ...]
    uses: tuple[frozenset[tuple[int, int]], ...]
    keeps_any: tuple[bool, ...]
    keeps_made: tuple[bool, ...]
    communicates: tuple[bool, ...]
    bytes_: tuple[int, ...]
    made_by: tuple[int, ...]
    live: tuple[bool, ...] = ()
    puts_off: tuple[bool, ...] = ()
    called: tuple[int, ...] = ()
    hidden_bytes: tuple[int, ...] = ()

    def asks(self, op: int) -> bool:
        """Whether a backward needs what the op keeps."""
        return self.keeps_any[op] and (not self.live or self.live[op])

    def runs(self, op: int, *, split: bool) -> bool:
        """Whether the last op that keeps anything runs before it does."""
        return self.keeps_made[op] or (split and bool(self.puts_off) and self.puts_off[op])

    def rerun_seconds(self, ops: range) -> float:
        """Of a run of ops."""
        return math.fsum(self.seconds[ops.start : ops.stop])

    def rerun_calls(self, ops: range) -> int:
        """Of a run of ops."""
        return sum(self.called[ops.start : ops.stop]) if self.called else len(ops)

    @property
    def size(self) -> int:
        return len(self.seconds)


@dataclass(frozen=True)
class Point:
    """One choice: what a microbatch keeps of the block under it, the seconds of recomputation, and the bytes that the
    largest region's tensors take again while its backward runs. ``memories`` are those kept. Where backwards are split,
    recomputation takes ``late_seconds`` more: such functions run before they keep what they are given. ``calls`` are
    the ops that run again, ``late_calls`` those beside them there."""

    regions: Regions
    saved_bytes: int
    seconds: float
    transient_bytes: int
    memories: frozenset[int] = frozenset()
    late_seconds: float = 0.0
    calls: int = 0
    late_calls: int = 0


def evaluate(problem: Problem, regions: Regions) -> Point:
    """What a choice of regions costs, by the definition."""
    inside = {i: region for region in regions for i in range(region[0], region[1] + 1)}
    outside = [i for i in range(problem.size) if i not in inside]
    kept = {m for i in outside for m in problem.keeps[i]}
    kept |= {m for i, (first, _) in inside.items() for m, p in problem.uses[i] if p < first}
    saved = sum(problem.bytes_[m] for m in kept) + sum(problem.extra_bytes[i] for i in outside)
    saved += sum(problem.hidden_bytes)
    whole, split = ([_rerun(problem, region, split=late) for region in regions] for late in (False, True))
    seconds, late = (math.fsum(map(problem.rerun_seconds, ops)) for ops in (whole, split))
    calls, late_calls = (sum(map(problem.rerun_calls, ops)) for ops in (whole, split))
    transient = max((_transient(problem, region) for region in regions), default=0)
    memories = frozenset(kept)
    return Point(regions, saved, seconds, transient, memories, late - seconds, calls, late_calls - calls)


def _rerun(problem: Problem, region: Region, *, split: bool) -> range:
    """Up to the last op that keeps anything, and that one only if it keeps what it makes; nothing where no backward
    needs what ops keep."""
    first, last = region
    if not any(map(problem.asks, range(first, last + 1))):
        return range(0)
    while last >= first and not problem.keeps_any[last]:
        last -= 1
    end = last + 1 if last >= first and problem.runs(last, split=split) else last
    return range(first, max(first, end))


def _transient(problem: Problem, region: Region) -> int:
    """Tensors that a region makes again, all at once: those that its ops keep."""
    ops = range(region[0], region[1] + 1)
    made = {m for i in ops for m in problem.keeps[i] if problem.made_by[m] >= region[0]}
    hidden = sum(problem.hidden_bytes[ops.start : ops.stop])
    return sum(problem.bytes_[m] for m in made) + sum(problem.extra_bytes[i] for i in ops) + hidden


def frontier(problem: Problem, points: int = POINTS, *, silent: bool = False) -> list[Point]:
    """Nothing recomputed first, then by falling bytes: proven points of the lower convex hull, at most ``points``.

    ``silent``: of the choices that communicate nothing again.
    """
    none = evaluate(problem, ())
    if problem.size > _LARGEST or not none.saved_bytes:
        return [none]
    search = _Search(problem, silent)
    first, last = search.best(2 * _UNITS, 1), search.best(1, 2 * _UNITS)
    found = {first.regions: first, last.regions: last}
    waiting = [(-_area(none, first, last), 0, first, last)]
    for number in itertools.count(1):
        if not waiting or len(found) >= points:
            break
        _, _, left, right = heapq.heappop(waiting)
        between = search.below(left, right)
        if between is not None and between.regions not in found:
            found[between.regions] = between
            for pair in ((left, between), (between, right)):
                heapq.heappush(waiting, (-_area(none, *pair), 2 * number + (pair[0] is between), *pair))
    hull = sorted(found.values(), key=lambda p: (-p.saved_bytes, p.seconds))
    return [none, *(p for p in hull if p.regions)]


def _area(none: Point, left: Point, right: Point) -> float:
    """How much may lie between two points."""
    return float(left.saved_bytes - right.saved_bytes) * (right.seconds - left.seconds)


@dataclass(frozen=True)
class _Scale:
    """Bytes and seconds in whole units of which a block has at most 2^20, or as they are where they are few."""

    byte_unit: float
    second_unit: float

    @classmethod
    def of(cls, problem: Problem) -> _Scale:
        total = sum(problem.bytes_) + sum(problem.extra_bytes)
        seconds = math.fsum(problem.seconds)
        return cls(max(1.0, total / _UNITS), seconds / _UNITS or 1.0)

    def bytes_(self, count: float) -> int:
        return round(count / self.byte_unit)

    def seconds(self, count: float) -> int:
        return round(count / self.second_unit)


class _Search:
    """The choices that are looked through."""

    def __init__(self, problem: Problem, silent: bool) -> None:
        self.problem, self.scale = problem, _Scale.of(problem)
        self.chain = _Chain(problem, silent)

    def below(self, left: Point, right: Point) -> Point | None:
        """A point below the line through two; None where it is proven that there is none."""
        bytes_, seconds = left.saved_bytes - right.saved_bytes, right.seconds - left.seconds
        if bytes_ <= 0 or seconds <= 0:
            return None
        found = self.best(max(1, self.scale.bytes_(bytes_)), max(1, self.scale.seconds(seconds)))
        value = bytes_ * found.seconds + seconds * found.saved_bytes
        line = bytes_ * left.seconds + seconds * left.saved_bytes
        return found if value < line * (1 - 1e-9) else None

    def best(self, second_weight: int, byte_weight: int) -> Point:
        return evaluate(self.problem, self.chain.best(second_weight, byte_weight))


class _Run(NamedTuple):
    """A region by its last op: what it asks to be kept (bits), the seconds of its rerun (scaled), its ops."""

    last: int
    asked: int
    seconds: int
    size: int


class _Chain:
    """A block's ops as the dynamic program takes them; sets of memories are bits, those of no bytes left out."""

    def __init__(self, problem: Problem, silent: bool) -> None:
        self.size, self.scale = problem.size, _Scale.of(problem)
        counted = [m for m, bytes_ in enumerate(problem.bytes_) if bytes_]
        self.bit = {m: 1 << k for k, m in enumerate(counted)}
        self.weights = [self.scale.bytes_(problem.bytes_[m]) for m in counted]
        self.keeps = [self._bits(keeps) for keeps in problem.keeps]
        self.extra = [self.scale.bytes_(bytes_) for bytes_ in problem.extra_bytes]
        self.seconds = [0, *itertools.accumulate(self.scale.seconds(t) for t in problem.seconds)]
        self.runs = [list(self._runs(problem, first, silent)) for first in range(problem.size)]
        asked = [k | self._bits(m for m, _ in u) for k, u in zip(self.keeps, problem.uses, strict=True)]
        self.later = [*itertools.accumulate(reversed(asked), or_, initial=0)][::-1]
        self.sums = {0: 0}

    def _bits(self, memories: Iterable[int]) -> int:
        return reduce(or_, (self.bit.get(m, 0) for m in memories), 0)

    def _runs(self, problem: Problem, first: int, silent: bool) -> Iterator[_Run]:
        """The regions that begin with an op, but for those that could end before."""
        asked, is_needed = 0, False
        for last in range(first, problem.size):
            if silent and problem.communicates[last]:
                return
            asked |= self._bits(m for m, p in problem.uses[last] if p < first)
            is_needed = is_needed or problem.asks(last)
            if problem.keeps_any[last]:
                end = last + bool(problem.keeps_made[last])
                seconds = self.seconds[end] - self.seconds[first] if is_needed else 0
                yield _Run(last, asked, seconds, last + 1 - first)

    def bytes_of(self, bits: int) -> int:
        """Of a set of memories, scaled."""
        if bits not in self.sums:
            lowest = bits & -bits
            self.sums[bits] = self.weights[lowest.bit_length() - 1] + self.bytes_of(bits ^ lowest)
        return self.sums[bits]

    def best(self, second_weight: int, byte_weight: int) -> Regions:
        """The best regions under these weights; then the fewest, then those with the fewest ops."""
        unit = (self.size + 1) ** 2
        if self.walk is not None:
            return _regions(self.walk.best(byte_weight * unit, second_weight * unit))
        return self._of_cheapest(byte_weight * unit, second_weight * unit)

    @cached_property
    def walk(self) -> Walk | None:
        """All states; None where there are too many for some op."""
        places: list[dict[int, int]] = [{} for _ in range(self.size + 1)]
        places[0][0] = 0
        steps: list[list[int]] = []
        for first in range(self.size):
            if len(places[first]) > _STATES:
                return None
            for kept, source in places[first].items():
                for place, asked, extra, seconds, ops, origin in self.ways[first]:
                    after = (kept | asked) & self.later[place]
                    target = places[place].setdefault(after, len(places[place]))
                    bytes_ = self.bytes_of(asked & ~kept) + extra
                    steps.append([first, source, place, target, bytes_, seconds, ops, origin])
        return Walk.of([len(states) for states in places], steps)

    @cached_property
    def ways(self) -> list[list[tuple[int, int, int, int, int, int]]]:
        """What may come next from each op on: where it leads, what it asks to be kept, bytes and seconds beside, how
        many ops it counts for, and its origin: the op stays outside of regions, or one begins with it (negated)."""
        found = []
        for first, runs in enumerate(self.runs):
            outside = (first + 1, self.keeps[first], self.extra[first], 0, 0, first)
            regions = [(run.last + 1, run.asked, 0, run.seconds, run.size + self.size + 1, ~first) for run in runs]
            found.append([outside, *regions])
        return found

    def _of_cheapest(self, byte_price: int, second_price: int) -> Regions:
        """Going on from the cheapest states of each op alone."""
        costs: list[dict[int, int]] = [{} for _ in range(self.size + 1)]
        origins: list[dict[int, tuple[int, int]]] = [{} for _ in range(self.size + 1)]
        costs[0][0] = 0
        for first, ways in enumerate(self.ways):
            for kept, cost in self._cheapest(costs[first]):
                for place, asked, extra, seconds, ops, origin in ways:
                    bytes_ = self.bytes_of(asked & ~kept) + extra
                    total = cost + byte_price * bytes_ + second_price * seconds + ops
                    after = (kept | asked) & self.later[place]
                    known = costs[place].get(after)
                    if known is None or total < known:
                        costs[place][after] = total
                        origins[place][after] = origin, kept
        found, place, kept = [], self.size, 0
        while place:
            origin, kept = origins[place][kept]
            found.append((origin, place))
            place = max(origin, ~origin)
        return _regions(found)

    def _cheapest(self, costs: dict[int, int]) -> Iterable[tuple[int, int]]:
        if len(costs) <= _STATES:
            return costs.items()
        return heapq.nsmallest(_STATES, costs.items(), key=lambda item: item[1])


def _regions(way: Iterable[tuple[int, int]]) -> Regions:
    """Of a way to the end, last step first: by step its origin, which is negated where a region began, and its end."""
    return tuple(reversed([(~origin, end - 1) for origin, end in way if origin < 0]))


def problem_of(
    block: Block,
    found: BlockSaved,
    seconds: Mapping[fx.Node, float],
    free: frozenset[fx.Node] = frozenset(),
    stays: frozenset[fx.Node] = frozenset(),
) -> tuple[Problem, list[fx.Node]]:
    """The block's problem, whose ops are its groups (:func:`~autopar.passes.recompute.groups`), and the owners that its
    memories are. ``seconds`` are those of each op's forward; ``free`` are inputs that are kept anyway, by others;
    ``stays`` are converts of parameters that aren't hoisted.
    """
    ops = groups(block)
    place = {node: i for i, group in enumerate(ops) for node in group}
    owners = [n for n in found.owned_bytes if info(n).role not in ("parameter", "buffer")]
    number = {owner: m for m, owner in enumerate(owners)}
    kept, reached = [[found.ops[n] for n in group] for group in ops], gradient_paths(block, range(len(block.outputs)))

    def uses(group: Sequence[fx.Node]) -> Iterator[tuple[int, int]]:
        for operand in {o for n in group for o in n.all_input_nodes if o not in group}:
            owner = found.owner.get(operand)
            if owner in number:
                yield number[owner], place.get(operand, -1)

    problem = Problem(
        seconds=tuple(math.fsum(seconds.get(n, 0.0) for n in group) for group in ops),
        keeps=tuple(frozenset(number[v] for s in some for v in s.values) for some in kept),
        extra_bytes=tuple(sum(sum(s.inside) for s in some) for some in kept),
        uses=tuple(frozenset(uses(group)) for group in ops),
        keeps_any=tuple(any(s.is_something for s in some) for some in kept),
        keeps_made=tuple(
            any(_makes_inside(n, s) or set(s.values) & set(group) for n, s in zip(group, some, strict=True))
            or _keeps_late(group[0])
            for some, group in zip(kept, ops, strict=True)
        ),
        communicates=tuple(any(map(_communicates, group)) for group in ops),
        bytes_=tuple(0 if owner in free else found.owned_bytes[owner] for owner in owners),
        made_by=tuple(place.get(owner, -1) for owner in owners),
        live=tuple(any(node in reached for node in group) for group in ops),
        puts_off=tuple(weight_product(group[0], stays) is not None for group in ops),
        called=tuple(calls_of(group[:1])[0] for group in ops),
        hidden_bytes=tuple(sum(s.hidden_bytes for s in some) for some in kept),
    )
    return problem, owners


def _makes_inside(node: fx.Node, saved: Saved) -> bool:
    """Whether it keeps what its kernels make: what a product keeps, beside what it is given, are copies of that."""
    return bool(saved.inside) and not copies_factors(Op.of(node))


def _keeps_late(node: fx.Node) -> bool:
    """Whether it keeps its operands once it has run: torch's own ops do so before, functions of ours after."""
    return isinstance(node.target, RuntimeOp)


def _communicates(node: fx.Node) -> bool:
    src, dst = node.kwargs.get("src"), node.kwargs.get("dst")
    if isinstance(src, Type) and isinstance(dst, Type):
        way = transition(src, dst)
        return way is not None and way.forward is not None
    return any(isinstance(a, AxisRef) for a in (*node.args, *node.kwargs.values()))


def whole(problem: Problem, block: Block, found: BlockSaved) -> Point:
    """The whole block recomputed; what only names parameters at its ends stays outside."""
    used = [i for i, group in enumerate(groups(block)) if not _is_of_parameters(group[0], found)]
    return evaluate(problem, ((used[0], used[-1]),) if used else ())


def _is_of_parameters(node: fx.Node, found: BlockSaved) -> bool:
    owner = found.owner.get(node)
    return owner is not None and info(owner).role in ("parameter", "buffer")
