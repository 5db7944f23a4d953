"""What one point takes: bounded from its profile, or laid out exactly."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from autopar.cluster import Cluster, Link
from autopar.cost_models import collective, step
from autopar.errors import BudgetError
from autopar.graph import Model
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.passes.recompute import own_modules
from autopar.planner.block_costs import BlockCost, Machine
from autopar.planner.build import rank_plan
from autopar.planner.modes import MODES
from autopar.planner.offload import require_host
from autopar.planner.pipeline import Pipeline, Wanted, kept_stages, lay_out
from autopar.planner.rank_memory import MOMENTS, Storage, rank_state
from autopar.schedules import generate
from autopar.schedules.registry import SCHEDULES
from autopar.search.bounds import Held, folded, recomputed, scaled, straight
from autopar.search.gradients import Sums
from autopar.search.profiles import Profile, Unit, Weights
from autopar.search.space import Point, Region

_LEAN = ("1f1b", "v-min", "v-half")
"""Schedules of which one or another keeps the least on any rank."""

_STEADY = 2  # times the ranks: with more microbatches, no more are in flight


@dataclass(frozen=True)
class Outcome:
    """A point as it was laid out: seconds of its step, bytes that its fullest rank is reckoned to hold, and whether it
    recomputes anything. ``parts`` say where its busiest rank's time goes."""

    point: Point
    step_seconds: float
    peak_bytes: int
    recomputes: bool
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Costing:
    """Costs of points of one search; ``spared_bytes`` of a budget are left for what no solver counts. ``root`` is
    the profile of the whole batch on one rank: what its layers may keep says, by scaling, what those of others may.

    What several points share is kept: passes of a cut, microbatches in flight, what layers may keep.
    """

    cluster: Cluster
    options: Options
    spared_bytes: int = 0
    root: Profile | None = None
    expert_share: float = 0.0  # of all parameters, those of experts
    _passes: dict[tuple[object, ...], float] = field(default_factory=dict)
    _machines: dict[tuple[Mesh, int], Machine] = field(default_factory=dict)
    _updates: dict[tuple[object, ...], tuple[float, float, float, float]] = field(default_factory=dict)
    _inflight: dict[tuple[object, ...], tuple[float, ...]] = field(default_factory=dict)
    _regions: dict[tuple[float, int, int], float] = field(default_factory=dict)
    _loads: dict[tuple[object, ...], list[Unit]] = field(default_factory=dict)
    _leanest: Held | None = None
    _holdings: dict[tuple[object, ...], Held | None] = field(default_factory=dict)

    @property
    def whole_budget_bytes(self) -> int:
        return self.options.budget_bytes or self.cluster.device.memory_bytes

    @property
    def budget_bytes(self) -> int:
        """Without what is spared."""
        return self.whole_budget_bytes - self.spared_bytes

    def under(self, options: Options) -> Costing:
        """Of the same search under other ``options``."""
        return Costing(self.cluster, options, self.spared_bytes, expert_share=self.expert_share)

    def options_of(self, point: Point) -> Options:
        searched = {name: getattr(point, name) for name in ("zero", "zero_ranks", "offload", "head_chunks")}
        return self.options.model_copy(update=searched)

    def laid_out(self, point: Point, profile: Profile) -> Outcome:
        """Raises AutoparError where the point can't run or doesn't fit."""
        options, region = self.options_of(point), point.region
        require_host(options, self.cluster.device)
        machine = Machine.of(self.cluster, profile.mesh(region.mesh), point.zero_ranks)
        costs = profile.costs_on(machine)
        spared = max(self.spared_bytes, profile.working_bytes // (point.head or 1))
        wanted = Wanted(point.schedule, point.vocabulary, point.chunks, point.head_chunks, spared)
        model = profile.model
        pipeline = lay_out(model, costs, machine, region.microbatches, wanted, options, profile.activations)
        request = replace(profile.placed.request, mesh=machine.mesh, options=options)
        ranks = [rank_plan(model, rank, pipeline, request) for rank in range(region.mesh.pp)]
        require_host(options, machine.device, max(rank.host_bytes for rank in ranks))
        recomputes = any(chosen.regions for chosen in pipeline.chosen.values())
        if (held := max(r.peak_bytes for r in ranks)) > (budget := self.whole_budget_bytes):
            raise BudgetError(f"a rank would hold {held} bytes of {budget}", held)
        seconds = pipeline.timeline.makespan_seconds
        return Outcome(point, seconds, max(r.peak_bytes for r in ranks), recomputes, parts_of(pipeline, costs, model))

    def bound(self, point: Point, profile: Profile) -> float:
        """No step of ``point`` is below, by its passes. The head may be another than the profile's."""
        update, pp = self._update_seconds(point, profile), point.region.mesh.pp
        passes, streamed = self._pass_seconds(point, profile), self._streamed_seconds(point, profile)
        if pp == 1:
            return max(passes, streamed) + update
        # The rank with the longest passes may have the least to update; both are at least their means.
        return max(passes, max(self._mean_seconds(point, profile), streamed) + update)

    def memory_bound(self, point: Point, profile: Profile) -> float:
        """The same, by what has to be recomputed; inf where its layers can't fit."""
        update = self._update_seconds(point, profile) if point.region.mesh.pp == 1 else 0.0
        return self._memory_seconds(point, profile) + update

    def _mean_seconds(self, point: Point, profile: Profile) -> float:
        """Of the passes of a pipeline rank, on average."""
        seconds = math.fsum(unit.seconds for unit in self._loaded(point, profile))
        return point.region.microbatches * seconds / point.region.mesh.pp

    def _pass_seconds(self, point: Point, profile: Profile) -> float:
        mesh, microbatches = point.region.mesh, point.region.microbatches
        row = SCHEDULES.get(point.schedule)
        mean = self._mean_seconds(point, profile)
        if mesh.pp == 1 or row is None:
            return mean
        inner = self._units(point, profile)
        sums = self._sums(point, profile)
        key = (profile.key, sums, mesh.pp, microbatches, row.chunks or point.chunks, row.splits_backward, len(inner))
        if key not in self._passes:
            self._passes[key] = self._pipeline_seconds(inner, mesh.pp, microbatches, point)
        return max(mean, self._passes[key])

    def _units(self, point: Point, profile: Profile) -> list[Unit]:
        """What stages are cut between: without the first and last where a split vocabulary's passes, which fill the
        time that ranks wait, may be all there is in them."""
        units = self._loaded(point, profile)
        return units[1:-1] if MODES[point.vocabulary].head and len(units) > 2 else units

    def _sums(self, point: Point, profile: Profile) -> Sums:
        mesh, row = point.region.mesh, SCHEDULES.get(point.schedule)
        lines = {axes: mesh.data_axes(axes) for axes in profile.weights}
        shards = tuple((a, mesh.zero_shards(point.zero_ranks, b) if point.zero and b else 1) for a, b in lines.items())
        microbatches = 1 if row is not None and row.asynchronous else point.region.microbatches
        split = row is None or row.splits_backward
        return Sums(shards, point.zero, tuple(point.offload), microbatches, split)

    def _loaded(self, point: Point, profile: Profile) -> list[Unit]:
        """Units with what their backwards take to add up gradients."""
        sums = self._sums(point, profile)
        key = profile.key, sums
        if key not in self._loads:
            options, device = self.options_of(point), self.cluster.device
            added = [sums.seconds(kinds, options, device) for kinds in profile.unit_parameters]
            pairs = zip(profile.units, added, strict=True)
            self._loads[key] = [replace(unit, backward=unit.backward + seconds) for unit, seconds in pairs]
        return self._loads[key]

    def _pipeline_seconds(self, units: list[Unit], ranks: int, microbatches: int, point: Point) -> float:
        row = SCHEDULES[point.schedule]
        chunks = row.chunks or point.chunks or 2
        if chunks > 1:
            return folded(units, ranks, microbatches, split=row.splits_backward)
        return straight(units, ranks, microbatches, split=row.splits_backward)

    def _memory_seconds(self, point: Point, profile: Profile) -> float:
        """Of the layers alone, with what has to be recomputed."""
        row = SCHEDULES.get(point.schedule)
        if row is None or self.options.recompute not in ("auto", "none"):
            return 0.0
        held = self._held(point, profile)
        if held is None:
            return 0.0
        added = [a.seconds - b.seconds for a, b in zip(self._loaded(point, profile), profile.units, strict=True)]
        held = replace(held, seconds=held.seconds + np.array(added))
        mesh, microbatches = point.region.mesh, point.region.microbatches
        return recomputed(
            held.inner() if len(self._units(point, profile)) < len(profile.units) else held,
            self._kept(point),
            microbatches,
            self.budget_bytes,
            split=row.splits_backward,
            chunks=(row.chunks or point.chunks or 1) if mesh.pp > 1 else 1,
            host_rate=self.cluster.device.host_bytes_per_second if "activations" in point.offload else 0.0,
        )

    def _kept(self, point: Point) -> tuple[float, ...]:
        """By rank, how many microbatches of all that it holds are in flight."""
        return self._kept_by(point.schedule, point.region.mesh.pp, point.region.microbatches, point.chunks)

    def _kept_by(self, name: str, ranks: int, microbatches: int, chunks: int | None) -> tuple[float, ...]:
        count = min(microbatches, _STEADY * ranks)
        if ranks == 1:
            return (1.0,)
        key = (name, ranks, count, chunks)
        if key not in self._inflight:
            schedule = generate(name, ranks, count, chunks=chunks)
            kept, most = [0.0] * ranks, kept_stages(schedule)
            for stage, rank in enumerate(schedule.placement):
                kept[rank] += most[stage] / schedule.chunks
            self._inflight[key] = tuple(kept)
        return self._inflight[key]

    def _held(self, point: Point, profile: Profile) -> Held | None:
        """None where there are too few layers to speak of."""
        mesh = point.region.mesh
        storage = Storage(self.options_of(point), mesh)
        shards = {axes: mesh.zero_shards(point.zero_ranks, axes) for axes in mesh.data_lines()}
        key = (profile.key, point.zero, tuple(shards.items()), point.offload)
        if key not in self._holdings:
            self._holdings[key] = held_by(profile, storage, self.options.recompute, self.root or profile)
        return self._holdings[key]

    def region_bound(self, region: Region, share: float) -> float:
        """No step of any point of ``region``, whose ranks have ``share`` of the root's work of a microbatch, is below,
        by what has to be recomputed or copied to the host; inf where nothing fits."""
        if self.root is None or self.options.recompute not in ("auto", "none"):
            return 0.0
        if self._leanest is None:
            self._leanest = held_by(self.root, None, self.options.recompute, self.root)
        if self._leanest is None:
            return 0.0
        pp, rate = region.mesh.pp, self.cluster.device.host_bytes_per_second
        key = (share, pp, region.microbatches)
        if key not in self._regions:
            inflight = self._least_kept(pp, region.microbatches)
            held = self._leanest.scaled(share)
            self._regions[key] = recomputed(
                held, inflight, region.microbatches, self.budget_bytes, split=True, chunks=8, host_rate=rate
            )
        return self._regions[key]

    def estimate(self, region: Region, share: float) -> float:
        """Seconds of a likely step of ``region``: 1F1B, with the first ZeRO stage that leaves room for activations;
        inf where none does."""
        assert self.root is not None
        if self._leanest is None:
            self._leanest = held_by(self.root, None, self.options.recompute, self.root)
        mesh = region.mesh
        if self._leanest is None:
            return 0.0
        total = Weights(0, 0, 0)
        for weights in self.root.weights.values():
            total += weights
        parts = mesh.pp * mesh.tp
        spread = (1 - self.expert_share + self.expert_share / mesh.experts) / parts
        shards = mesh.zero_shards(0)
        for zero in (1, 2, 3) if shards > 1 else (0,):
            # Masters of experts are on fewer copies' ranks, but split over ep: as many parts in all.
            state = (1 + MOMENTS) * total.masters / shards / parts
            state += total.masters * spread / (shards if zero >= 2 else 1)
            state += total.copies * spread if zero < 3 else 0.0
            key = ("estimate", share, mesh.pp, region.microbatches, round(state / self.budget_bytes, 2))
            if key not in self._passes:
                kept = self._kept_by("1f1b", mesh.pp, region.microbatches, None)
                held, room = self._leanest.scaled(share), self.budget_bytes - state
                self._passes[key] = recomputed(held, kept, region.microbatches, room, split=False, chunks=1)
            if not math.isinf(self._passes[key]):
                streamed = self._streamed_estimate(region, total.copies * spread) if zero == 3 else 0.0
                return max(self._passes[key], streamed)
        return math.inf

    def _streamed_estimate(self, region: Region, copies: float) -> float:
        mesh = region.mesh
        link = self._machine_of(mesh, 0).lines[mesh.data_axes()].shard
        return 2 * region.microbatches * seconds_of("all_gather", int(copies), mesh.zero_shards(0), link)

    def least_streamed(self, region: Region) -> float:
        """Seconds of gathers, where not even the copies of parameters that are computed with fit on a rank."""
        assert self.root is not None
        mesh = region.mesh
        copies = sum(weights.copies for weights in self.root.weights.values()) / (mesh.pp * mesh.tp * mesh.experts)
        if copies <= self.budget_bytes or mesh.zero_shards(0) == 1:
            return 0.0
        return self._streamed_estimate(region, copies)

    def may_fit(self, point: Point, profile: Profile) -> bool:
        """Whether parameters, gradients and moments would fit if ranks shared them evenly, and kept nothing else."""
        mesh, total = point.region.mesh, 0.0
        away = not {"optimizer", "parameters"}.isdisjoint(point.offload)
        for axes, weights in profile.weights.items():
            line = mesh.data_axes(axes)
            shards = mesh.zero_shards(point.zero_ranks, line) if point.zero and line else 1
            twice = shards > 1 or weights.copies != weights.masters or away
            total += 0 if away else (1 + MOMENTS) * weights.masters / shards
            total += weights.masters / (shards if point.zero >= 2 else 1)
            total += weights.copies if twice and not self._streams(point) else 0
        return total / mesh.pp <= self.budget_bytes

    def _least_kept(self, ranks: int, microbatches: int) -> tuple[float, ...]:
        if ranks == 1:
            return (1.0,)
        each = [self._kept_by(name, ranks, microbatches, None) for name in _LEAN]
        return tuple(min(kept) for kept in zip(*each, strict=True))

    def _update_seconds(self, point: Point, profile: Profile) -> float:
        """Of the optimizer, and of what is gathered before the first pass and summed after the last, if ranks shared
        all of it evenly."""
        gathered, scattered, summed, updated = self._moves(point, profile)
        pp = point.region.mesh.pp
        layers = math.ceil(len(profile.units) / pp)
        backward = math.fsum(unit.backward for unit in self._loaded(point, profile)) / pp
        scattered, summed = (step.left_seconds(each, layers, backward) for each in (scattered, summed))
        row = SCHEDULES.get(point.schedule)
        chunks = row.chunks or point.chunks or 2 if row is not None else 2  # only those of the first stage come first
        first = gathered if chunks == 1 and not self._streams(point) else 0.0
        return first + scattered + summed + updated

    def _streamed_seconds(self, point: Point, profile: Profile) -> float:
        """Of gathers that run beside the passes, two for each microbatch."""
        return 2 * point.region.microbatches * self._moves(point, profile)[0] if self._streams(point) else 0.0

    def _streams(self, point: Point) -> bool:
        return point.zero == 3 or "parameters" in point.offload

    def _moves(self, point: Point, profile: Profile) -> tuple[float, float, float, float]:
        """Seconds of one gather, one scatter and the rest of the sums of a rank's parameters, and of their update, if
        each was one message."""
        mesh, options = point.region.mesh, self.options_of(point)
        key = (profile.key, mesh, point.zero, point.zero_ranks, point.offload)
        if key not in self._updates:
            totals = np.zeros(4)
            for axes, weights in profile.weights.items():
                line = mesh.data_axes(axes)
                shards = mesh.zero_shards(point.zero_ranks, line) if point.zero and line else 1
                summed = profile.summed.get(axes, Weights(0, 0, 0))
                totals += self._line_seconds(line, shards, weights, summed, point, options)
            gathered, scattered, rest, updated = (float(each) / mesh.pp for each in totals)
            self._updates[key] = gathered, scattered, rest, updated
        return self._updates[key]

    def _line_seconds(
        self, axes: tuple[str, ...], shards: int, weights: Weights, summed: Weights, point: Point, options: Options
    ) -> list[float]:
        machine = self._machine(point)
        line = machine.lines.get(axes)
        updated = step.optimizer_seconds(weights.elements // shards, machine.device)
        if line is None or line.size == 1:
            return [0.0, 0.0, 0.0, updated]
        sent = (
            summed.elements * getattr(torch, options.reduce_dtype).itemsize if options.reduce_dtype else summed.masters
        )
        moved = [("all_gather", weights.copies, shards, line.shard), ("reduce_scatter", sent, shards, line.shard)]
        gathered, scattered = (seconds_of(*each) if each[2] > 1 else 0.0 for each in moved)
        rest = seconds_of(
            "all_reduce", sent // shards, line.size // shards, line.replicate if shards > 1 else line.whole
        )
        if point.zero >= 2:
            return [gathered, scattered, rest, updated]
        return [gathered, 0.0, rest + (scattered if point.zero else 0.0), updated]

    def _machine(self, point: Point) -> Machine:
        return self._machine_of(point.region.mesh, point.zero_ranks)

    def _machine_of(self, mesh: Mesh, zero_ranks: int) -> Machine:
        key = mesh, zero_ranks
        if key not in self._machines:
            self._machines[key] = Machine.of(self.cluster, *key)
        return self._machines[key]


def seconds_of(kind: str, bytes_: int, size: int, link: Link) -> float:
    return collective.seconds(kind, bytes_, size, link) if bytes_ and size > 1 else 0.0


def parts_of(pipeline: Pipeline, costs: Sequence[BlockCost], model: Model) -> dict[str, float]:
    """Of the busiest rank: compute, what layers send by axis, recomputation, the optimizer, and waiting."""
    timeline, schedule = pipeline.timeline, pipeline.schedule
    rank = max(range(schedule.ranks), key=lambda r: (timeline.busy_seconds[r], -r))
    stages = [k for k, home in enumerate(schedule.placement) if home == rank]
    sent: dict[str, float] = {}
    for cost in (costs[model.calls[i].block] for k in stages for i in pipeline.stages[k]):
        for (axis, _), seconds in cost.wires.items():
            name = f"communication over {axis}"
            sent[name] = sent.get(name, 0.0) + schedule.microbatches * sum(seconds)
    again = schedule.microbatches * math.fsum(pipeline.recompute_seconds(k) for k in stages)
    busy, updates = timeline.busy_seconds[rank], timeline.costs.step_seconds[rank]
    found: dict[str, float] = {
        "compute": busy - updates - again - sum(sent.values()),
        **sent,
        "recomputation": again,
        "optimizer": updates,
        "waiting (bubble, transfers, gradient sums)": timeline.makespan_seconds - busy,
    }
    return {name: seconds for name, seconds in found.items() if seconds}


def held_by(profile: Profile, storage: Storage | None, recompute: str, root: Profile) -> Held | None:
    """What units take and hold, their layers as little as those of ``root`` do by scaling; None where no block is
    called twice. Without ``storage``, no state."""
    counts = Counter(unit.block for unit in profile.units)
    block = max(counts, key=lambda b: (counts[b], b))
    share = scaled(root.key, profile.key) or 0.0
    if counts[block] < 2 or root.model.blocks[block].name != profile.model.blocks[block].name:
        return None
    first = {b: _first_call(profile, b) for b in counts}
    states = {b: rank_state(profile.model, [i], storage).device_bytes if storage else 0 for b, i in first.items()}
    leanest = {b: share * _least_bytes(root, i, recompute) for b, i in first.items() if b != block}
    saved, extra = root.hull(block, first[block], recompute)
    blocks = [unit.block for unit in profile.units]
    return Held(
        seconds=np.array([unit.seconds for unit in profile.units]),
        forward=np.array([unit.forward for unit in profile.units]),
        state=np.array([float(states[b]) for b in blocks]),
        least=np.array([leanest.get(b, 0.0) for b in blocks]),
        layers=np.array([float(b == block) for b in blocks]),
        saved=share * saved,
        extra=share * extra,
    )


def _first_call(profile: Profile, block: int) -> int:
    return next(i for i, call in enumerate(profile.model.calls) if call.block == block)


def _least_bytes(profile: Profile, call: int, recompute: str) -> int:
    """Of a microbatch, with everything recomputed that can be."""
    choices = profile.activations.choices[profile.model.calls[call].block]
    layer = call in own_modules(profile.model)
    return profile.activations.call_bytes(call, choices.whole if layer and recompute == "auto" else choices.none)
