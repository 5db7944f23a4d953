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
from autopar.graph import Model
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.passes.recompute import own_modules
from autopar.planner.block_costs import BlockCost, Machine
from autopar.planner.build import rank_plan
from autopar.planner.modes import MODES
from autopar.planner.offload import require_host
from autopar.planner.pipeline import Pipeline, Wanted, kept_stages, lay_out
from autopar.planner.rank_memory import Storage, rank_state
from autopar.schedules import generate
from autopar.schedules.registry import SCHEDULES
from autopar.search.bounds import Held, folded, recomputed, scaled, straight
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
    _passes: dict[tuple[object, ...], float] = field(default_factory=dict)
    _machines: dict[tuple[Mesh, int], Machine] = field(default_factory=dict)
    _updates: dict[tuple[object, ...], tuple[float, float, float, float]] = field(default_factory=dict)
    _inflight: dict[tuple[object, ...], tuple[float, ...]] = field(default_factory=dict)
    _regions: dict[tuple[float, int, int], float] = field(default_factory=dict)
    _leanest: Held | None = None
    _holdings: dict[tuple[object, ...], Held | None] = field(default_factory=dict)

    @property
    def budget_bytes(self) -> int:
        return (self.options.budget_bytes or self.cluster.device.memory_bytes) - self.spared_bytes

    def options_of(self, point: Point) -> Options:
        searched = {name: getattr(point, name) for name in ("zero", "zero_ranks", "offload", "head_chunks")}
        return self.options.model_copy(update=searched)

    def laid_out(self, point: Point, profile: Profile) -> Outcome:
        """Raises AutoparError where the point can't run or doesn't fit."""
        options, region = self.options_of(point), point.region
        require_host(options, self.cluster.device)
        machine = Machine.of(self.cluster, profile.mesh(region.mesh), point.zero_ranks)
        costs = profile.costs_on(machine)
        wanted = Wanted(point.schedule, point.vocabulary, point.chunks, point.head_chunks, self.spared_bytes)
        model = profile.model
        pipeline = lay_out(model, costs, machine, region.microbatches, wanted, options, profile.activations)
        request = replace(profile.placed.request, mesh=machine.mesh, options=options)
        ranks = [rank_plan(model, rank, pipeline, request) for rank in range(region.mesh.pp)]
        require_host(options, machine.device, max(rank.host_bytes for rank in ranks))
        recomputes = any(chosen.regions for chosen in pipeline.chosen.values())
        seconds = pipeline.timeline.makespan_seconds
        return Outcome(point, seconds, max(r.peak_bytes for r in ranks), recomputes, parts_of(pipeline, costs, model))

    def bound(self, point: Point, profile: Profile) -> float:
        """No step of ``point`` is below, by its passes. The head may be another than the profile's."""
        update = self._update_seconds(point, profile)
        return max(self._pass_seconds(point, profile), self._streamed_seconds(point, profile)) + update

    def memory_bound(self, point: Point, profile: Profile) -> float:
        """The same, by what has to be recomputed; inf where its layers can't fit."""
        return self._memory_seconds(point, profile) + self._update_seconds(point, profile)

    def _pass_seconds(self, point: Point, profile: Profile) -> float:
        mesh, microbatches = point.region.mesh, point.region.microbatches
        row = SCHEDULES.get(point.schedule)
        if mesh.pp == 1:
            return microbatches * profile.seconds
        if row is None:
            return microbatches * profile.seconds / mesh.pp
        inner, shared = self._units(point, profile)
        key = (profile.key, mesh.pp, microbatches, row.chunks or point.chunks, row.splits_backward, len(inner))
        if key not in self._passes:
            self._passes[key] = self._pipeline_seconds(inner, mesh.pp, microbatches, point)
        return self._passes[key] + shared

    def _units(self, point: Point, profile: Profile) -> tuple[list[Unit], float]:
        """What stages are cut between, and what all ranks share of a step beside: a split head's passes."""
        if not MODES[point.vocabulary].head or len(profile.units) < 3:
            return profile.units, 0.0
        inner = profile.units[1:-1]
        rest = profile.seconds - math.fsum(unit.seconds for unit in inner)
        return inner, point.region.microbatches * rest / point.region.mesh.pp

    def _pipeline_seconds(self, units: list[Unit], ranks: int, microbatches: int, point: Point) -> float:
        row = SCHEDULES[point.schedule]
        chunks = row.chunks or point.chunks or 2
        if chunks > 1:
            return folded(units, ranks, chunks, microbatches)
        return straight(units, ranks, microbatches, split=row.splits_backward)

    def _memory_seconds(self, point: Point, profile: Profile) -> float:
        """Of the layers alone, with what has to be recomputed."""
        row = SCHEDULES.get(point.schedule)
        if row is None or self.options.recompute not in ("auto", "none"):
            return 0.0
        held = self._held(point, profile)
        if held is None:
            return 0.0
        mesh, microbatches = point.region.mesh, point.region.microbatches
        _, shared = self._units(point, profile)
        seconds = recomputed(
            held.inner() if shared else held,
            self._kept(point),
            microbatches,
            self.budget_bytes,
            split=row.splits_backward,
            chunks=(row.chunks or point.chunks or 1) if mesh.pp > 1 else 1,
            host_rate=self.cluster.device.host_bytes_per_second if "activations" in point.offload else 0.0,
        )
        return seconds + shared

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

    def least_streamed(self, region: Region) -> float:
        """Seconds of gathers, where not even the copies of parameters that are computed with fit on a rank."""
        assert self.root is not None
        mesh = region.mesh
        copies = sum(weights.copies for weights in self.root.weights.values()) / (mesh.pp * mesh.tp * mesh.experts)
        ranks = mesh.zero_shards(0)
        if copies <= self.budget_bytes or ranks == 1:
            return 0.0
        link = self._machine_of(mesh, 0).lines[mesh.data_axes()].shard
        return 2 * region.microbatches * seconds_of("all_gather", int(copies), ranks, link)

    def _least_kept(self, ranks: int, microbatches: int) -> tuple[float, ...]:
        if ranks == 1:
            return (1.0,)
        each = [self._kept_by(name, ranks, microbatches, None) for name in _LEAN]
        return tuple(min(kept) for kept in zip(*each, strict=True))

    def _update_seconds(self, point: Point, profile: Profile) -> float:
        """Of the optimizer, and of what is gathered before the first pass and summed after the last, if ranks shared
        all of it evenly."""
        gathered, scattered, summed, updated = self._moves(point, profile)
        layers, pp = max(1, len(profile.units) // point.region.mesh.pp), point.region.mesh.pp
        backward = math.fsum(unit.backward for unit in profile.units) / pp
        scattered, summed = (step.left_seconds(each, layers, backward) for each in (scattered, summed))
        first = (
            gathered / (SCHEDULES[point.schedule].chunks or point.chunks or 1) if point.schedule in SCHEDULES else 0.0
        )
        return (0.0 if self._streams(point) else first) + scattered + summed + updated

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
            total = np.zeros(4)
            for axes, weights in profile.weights.items():
                line = mesh.data_axes(axes)
                shards = mesh.zero_shards(point.zero_ranks, line) if point.zero and line else 1
                total += self._line_seconds(line, shards, weights, point, options)
            gathered, scattered, summed, updated = (float(each) / mesh.pp for each in total)
            self._updates[key] = gathered, scattered, summed, updated
        return self._updates[key]

    def _line_seconds(
        self, axes: tuple[str, ...], shards: int, weights: Weights, point: Point, options: Options
    ) -> list[float]:
        machine = self._machine(point)
        line = machine.lines.get(axes)
        updated = step.optimizer_seconds(weights.elements // shards, machine.device)
        if line is None or line.size == 1:
            return [0.0, 0.0, 0.0, updated]
        sent = (
            weights.elements * getattr(torch, options.reduce_dtype).itemsize
            if options.reduce_dtype
            else weights.masters
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
    sent: Counter[str] = Counter()
    for cost in (costs[model.calls[i].block] for k in stages for i in pipeline.stages[k]):
        for (axis, _), seconds in cost.wires.items():
            sent[f"communication over {axis}"] += schedule.microbatches * sum(seconds)
    again = schedule.microbatches * sum(pipeline.recompute_seconds(k) for k in stages)
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
