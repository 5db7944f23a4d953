"""Which runs of a block's ops to recompute in the backward: the whole trade of bytes against seconds, by CP-SAT.

What a *region* does (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; torch's checkpoint without
reentrance): a contiguous run of ops whose tensors are dropped after the forward. Its inputs are kept instead; the first
time that the backward needs one of its tensors, it runs again, up to the last op that keeps anything, and of that op
nothing if it keeps operands only.

Sets
    ops i = 1..n in the order they run; memories m (:mod:`autopar.planner.saved`: views share one) of ``bytes_m``
    keeps_i: memories that i's backward needs; uses_i: pairs (m, p): i reads memory m through a result of op p < i
Variables (binary)
    x_i: i lies in a region; s_i: a region starts with i; k_m: m is kept                     :func:`_regions`
    f_i: i runs again as a whole; a_i: i is reached, at least by what it keeps of operands   :func:`_rerun`
Constraints
    s_i <= x_i,  s_i >= x_i - x_(i-1)                                                        :func:`_regions`
    k_m >= 1 - x_i                      m in keeps_i: an op outside keeps what it needs      :func:`_kept`
    k_m >= x_i + s_j - 1                (m, p) in uses_i, p < j <= i: an input of a region   :func:`_kept`
    f_i >= x_i                          i keeps its result, or something made inside         :func:`_rerun`
    a_i >= x_i                          i keeps anything                                     :func:`_rerun`
    a_i >= f_i,  f_i >= a_(i+1) - s_(i+1)     an op is reached through those before it       :func:`_rerun`
Objectives
    bytes   = sum bytes_m k_m + sum extra_i (1 - x_i)
    seconds = sum seconds_i f_i
    min w_b bytes + w_s seconds, then fewer regions, then fewer ops in them                  :class:`_Search`

The frontier is the lower convex hull of all (bytes, seconds): its ends are solved lexicographically, and between two
neighbours the weights that value both alike find the point farthest below their line or prove that there is none
(Aneja and Nair, "Bicriteria transportation problem", 1979) (:func:`frontier`). Sums are scaled to 2^20 units, so points
closer than a millionth are one. Beside them are always "nothing" (first) and "the whole block" (:func:`whole`).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ortools.sat.python import cp_model
from torch import fx

from autopar.graph import AxisRef, Block, info
from autopar.passes.recompute import groups
from autopar.planner.saved import BlockSaved
from autopar.spmd import Type, transition

Region = tuple[int, int]
"""The first and the last op of a run, by position."""

Regions = tuple[Region, ...]

POINTS = 8
"""As many points of a frontier are looked for."""

_UNITS = 1 << 20
_LARGEST = 400  # ops of a block; of a larger one only the whole is recomputed, or nothing


@dataclass(frozen=True)
class Problem:
    """A block as the docstring's sets: by op, ``seconds`` of its forward, memories it ``keeps``, ``extra_bytes`` made
    inside, its ``uses``; ``keeps_any`` and ``keeps_made``: whether it keeps anything at all (weights included), and
    anything but operands; ``communicates``: whether other ranks take part. ``made_by`` is the op that makes a memory
    (-1: an input of the block)."""

    seconds: tuple[float, ...]
    keeps: tuple[frozenset[int], ...]
    extra_bytes: tuple[int, ...]
    uses: tuple[frozenset[tuple[int, int]], ...]
    keeps_any: tuple[bool, ...]
    keeps_made: tuple[bool, ...]
    communicates: tuple[bool, ...]
    bytes_: tuple[int, ...]
    made_by: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.seconds)


@dataclass(frozen=True)
class Point:
    """One choice: what a microbatch keeps of the block under it, the seconds of recomputation, and the bytes that the
    largest region's tensors take again while its backward runs. ``memories`` are those kept."""

    regions: Regions
    saved_bytes: int
    seconds: float
    transient_bytes: int
    memories: frozenset[int] = frozenset()

    @property
    def is_none(self) -> bool:
        return not self.regions


def evaluate(problem: Problem, regions: Regions) -> Point:
    """What a choice of regions costs, by the definition."""
    inside = {i: region for region in regions for i in range(region[0], region[1] + 1)}
    outside = [i for i in range(problem.size) if i not in inside]
    kept = {m for i in outside for m in problem.keeps[i]}
    kept |= {m for i, (first, _) in inside.items() for m, p in problem.uses[i] if p < first}
    saved = sum(problem.bytes_[m] for m in kept) + sum(problem.extra_bytes[i] for i in outside)
    seconds = math.fsum(_rerun_seconds(problem, region) for region in regions)
    transient = max((_transient(problem, region) for region in regions), default=0)
    return Point(regions, saved, seconds, transient, frozenset(kept))


def _rerun_seconds(problem: Problem, region: Region) -> float:
    """Up to the last op that keeps anything, and that one only if it keeps what it makes."""
    first, last = region
    while last >= first and not problem.keeps_any[last]:
        last -= 1
    end = last + 1 if last >= first and problem.keeps_made[last] else last
    return math.fsum(problem.seconds[first : max(first, end)])


def _transient(problem: Problem, region: Region) -> int:
    """Tensors that a region makes again, all at once: those that its ops keep."""
    ops = range(region[0], region[1] + 1)
    made = {m for i in ops for m in problem.keeps[i] if problem.made_by[m] >= region[0]}
    return sum(problem.bytes_[m] for m in made) + sum(problem.extra_bytes[i] for i in ops)


def frontier(problem: Problem, points: int = POINTS, *, silent: bool = False) -> list[Point]:
    """Nothing recomputed first, then by falling bytes: proven points of the lower convex hull, at most ``points``.

    ``silent``: of the choices that communicate nothing again.
    """
    none = evaluate(problem, ())
    if problem.size > _LARGEST or not none.saved_bytes:
        return [none]
    search = _Search(problem, _Scale.of(problem), silent)
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


@dataclass(frozen=True)
class _Variables:
    inside: list[cp_model.IntVar]
    starts: list[cp_model.IntVar]
    kept: list[cp_model.IntVar]
    again: list[cp_model.IntVar]


@dataclass(frozen=True)
class _Search:
    """The choices that are looked through."""

    problem: Problem
    scale: _Scale
    silent: bool

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
        """The best choice under these weights, proven; then the one with fewer regions, then with fewer ops."""
        problem, scale = self.problem, self.scale
        model = cp_model.CpModel()
        inside, starts = _regions(model, problem, self.silent)
        kept = _kept(model, problem, inside, starts)
        again = _rerun(model, problem, inside, starts)
        bytes_ = sum(scale.bytes_(b) * k for b, k in zip(problem.bytes_, kept, strict=True))
        extra = sum(scale.bytes_(b) * (1 - x) for b, x in zip(problem.extra_bytes, inside, strict=True))
        seconds = sum(scale.seconds(t) * f for t, f in zip(problem.seconds, again, strict=True))
        ties = sum(inside) + (problem.size + 1) * sum(starts)
        weighed = byte_weight * (bytes_ + extra) + second_weight * seconds
        model.minimize(weighed * (problem.size + 1) ** 2 + ties)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1  # the same regions on every machine
        solver.parameters.random_seed = 0
        solver.parameters.max_deterministic_time = 10.0
        solver.solve(model)
        return evaluate(problem, _read(solver, inside, starts))


def _regions(
    model: cp_model.CpModel, problem: Problem, silent: bool
) -> tuple[list[cp_model.IntVar], list[cp_model.IntVar]]:
    inside = [model.new_bool_var(f"x{i}") for i in range(problem.size)]
    starts = [model.new_bool_var(f"s{i}") for i in range(problem.size)]
    for i, (x, s) in enumerate(zip(inside, starts, strict=True)):
        model.add(s <= x)
        model.add(s >= x - inside[i - 1] if i else s >= x)
        if silent and problem.communicates[i]:
            model.add(x == 0)
    return inside, starts


def _kept(
    model: cp_model.CpModel, problem: Problem, inside: list[cp_model.IntVar], starts: list[cp_model.IntVar]
) -> list[cp_model.IntVar]:
    kept = [model.new_bool_var(f"k{m}") for m in range(len(problem.bytes_))]
    for i in range(problem.size):
        for m in problem.keeps[i]:
            model.add(kept[m] >= 1 - inside[i])
        for m, p in problem.uses[i]:
            if p < 0:
                model.add(kept[m] >= inside[i])
                continue
            for j in range(p + 1, i + 1):
                model.add(kept[m] >= inside[i] + starts[j] - 1)
    return kept


def _rerun(
    model: cp_model.CpModel, problem: Problem, inside: list[cp_model.IntVar], starts: list[cp_model.IntVar]
) -> list[cp_model.IntVar]:
    again = [model.new_bool_var(f"f{i}") for i in range(problem.size)]
    reached = [model.new_bool_var(f"a{i}") for i in range(problem.size)]
    for i in range(problem.size):
        model.add(reached[i] >= again[i])
        if problem.keeps_made[i]:
            model.add(again[i] >= inside[i])
        if problem.keeps_any[i]:
            model.add(reached[i] >= inside[i])
        if i + 1 < problem.size:
            model.add(again[i] >= reached[i + 1] - starts[i + 1])
    return again


def _read(solver: cp_model.CpSolver, inside: Sequence[cp_model.IntVar], starts: Sequence[cp_model.IntVar]) -> Regions:
    regions: list[Region] = []
    for i, (x, s) in enumerate(zip(inside, starts, strict=True)):
        if solver.value(s):
            regions.append((i, i))
        elif solver.value(x):
            regions[-1] = (regions[-1][0], i)
    return tuple(regions)


def problem_of(
    block: Block, found: BlockSaved, seconds: Mapping[fx.Node, float], free: frozenset[fx.Node] = frozenset()
) -> tuple[Problem, list[fx.Node]]:
    """The block's problem, whose ops are its groups (:func:`~autopar.passes.recompute.groups`), and the owners that its
    memories are. ``seconds`` are those of each op's forward; ``free`` are inputs that are kept anyway, by others.
    """
    ops = groups(block)
    place = {node: i for i, group in enumerate(ops) for node in group}
    owners = [n for n in found.owned_bytes if info(n).role not in ("parameter", "buffer")]
    number = {owner: m for m, owner in enumerate(owners)}
    kept = [[found.ops[n] for n in group] for group in ops]

    def uses(group: Sequence[fx.Node]) -> Iterator[tuple[int, int]]:
        for operand in {o for n in group for o in n.all_input_nodes if o not in group}:
            owner = found.owner.get(operand)
            if owner in number:
                yield number[owner], place.get(operand, -1)

    problem = Problem(
        seconds=tuple(math.fsum(seconds.get(n, 0.0) for n in group) for group in ops),
        keeps=tuple(frozenset(number[v] for s in some for v in s.values) for some in kept),
        extra_bytes=tuple(sum(s.extra_bytes for s in some) for some in kept),
        uses=tuple(frozenset(uses(group)) for group in ops),
        keeps_any=tuple(any(s.is_something for s in some) for some in kept),
        keeps_made=tuple(
            any(s.extra_bytes or set(s.values) & set(group) for s in some)
            for some, group in zip(kept, ops, strict=True)
        ),
        communicates=tuple(any(map(_communicates, group)) for group in ops),
        bytes_=tuple(0 if owner in free else found.owned_bytes[owner] for owner in owners),
        made_by=tuple(place.get(owner, -1) for owner in owners),
    )
    return problem, owners


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
