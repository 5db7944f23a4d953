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
from autopar.planner.pipeline import Pipeline, Wanted, lay_out
from autopar.planner.rank_memory import MOMENTS, Storage, rank_state
from autopar.schedules.registry import SCHEDULES
from autopar.search.bounds import Held, folded, looped, recomputed, scaled, shared_out, straight
from autopar.search.gradients import Sums
from autopar.search.keeping import Keeping
from autopar.search.profiles import Profile, Unit, Weights
from autopar.search.space import Family, Point, Region


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
    _keeping: Keeping = field(default_factory=Keeping)
    _regions: dict[tuple[float, int, int], float] = field(default_factory=dict)
    _loads: dict[tuple[object, ...], list[Unit]] = field(default_factory=dict)
    _leanest: Held | None = None
    _likely: Held | None = None
    _stateless: dict[object, Held | None] = field(default_factory=dict)
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
        wanted = Wanted(point.schedule, point.vocabulary, point.chunks, point.head_chunks, self.spared_bytes)
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

    def family_bound(self, family: Family, profile: Profile, enough: float = math.inf) -> float:
        """No step of any point of ``family`` is below: by its passes alone, as if no rank held state; inf where even
        so nothing fits. A bound that is ``enough`` isn't made any better."""
        region, row, units = family.region, SCHEDULES.get(family.schedule), profile.units
        mesh, microbatches = region.mesh, region.microbatches
        found = microbatches * math.fsum(unit.seconds for unit in units) / mesh.pp
        if row is None:
            return found
        if mesh.pp > 1:
            found = max(found, self._pipeline_seconds(units, family))
        if found >= enough or self.options.recompute not in ("auto", "none"):
            return found
        if profile.key not in self._stateless:
            self._stateless[profile.key] = self._unstored(profile)
        held = self._stateless[profile.key]
        if held is None:
            return found
        return max(found, self._filled(held, family, away=True))

    def _unstored(self, profile: Profile) -> Held | None:
        """Of all points of a placement: without state, and with a head in chunks."""
        held = held_by(profile, None, self.options.recompute, self.root or profile)
        return None if held is None else held.in_chunks()

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
        sums, chunks = self._sums(point, profile), row.chunks or point.chunks
        split = (row.splits_backward, splits_head(point.family), row.placement)
        key = (profile.key, sums, mesh.pp, microbatches, chunks, split)
        if key not in self._passes:
            self._passes[key] = self._pipeline_seconds(self._loaded(point, profile), point.family)
        return max(mean, self._passes[key])

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

    def _pipeline_seconds(self, units: Sequence[Unit], family: Family) -> float:
        row, ranks, microbatches = SCHEDULES[family.schedule], family.region.mesh.pp, family.region.microbatches
        chunks = row.chunks or family.chunks or 2
        inner, beside = _inner(units, family), _head_seconds(units, family)
        split = row.splits_backward or splits_head(family)
        if chunks == 1:
            return beside + straight(inner, ranks, microbatches, split=split)
        found = folded(inner, ranks, microbatches, split=split)
        if row.placement == "looped":
            found = max(found, looped(inner, ranks, chunks, microbatches, ends=not split))
        return beside + found

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
        if point.head_chunks > 1:
            held = held.in_chunks()
        return self._filled(held, point.family, away="activations" in point.offload)

    def _filled(self, held: Held, family: Family, *, away: bool) -> float:
        """Seconds of ranks that ``held`` fills; activations may be ``away`` on the host."""
        row, pp, microbatches = SCHEDULES[family.schedule], family.region.mesh.pp, family.region.microbatches
        beside, split = 0.0, row.splits_backward or splits_head(family)
        if splits_head(family) and len(held.seconds) > 2:
            beside, held = microbatches * float(held.seconds[-1]) / pp, held.inner()
        head = MODES[family.vocabulary].head
        asked = (family.schedule, pp, microbatches, family.chunks, head)
        rate = self.cluster.device.host_bytes_per_second
        kept = self._keeping.away(*asked, rate) if away and rate else self._keeping.here(*asked)
        if pp == 1 or (row.chunks or family.chunks) == 1:
            return beside + recomputed(held, kept, microbatches, self.budget_bytes, split=split)
        last = 0 if row.placement == "v" else pp - 1
        return beside + shared_out(held, kept, microbatches, self.budget_bytes, split=split, last=last)

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
            self._leanest = self._unstored(self.root)
        if self._leanest is None:
            return 0.0
        key = (share, region.mesh.pp, region.microbatches)
        if key not in self._regions:
            inflight = self._keeping.least(region.mesh.pp, region.microbatches)
            held = self._leanest.scaled(share)
            self._regions[key] = shared_out(held, inflight, region.microbatches, self.budget_bytes, split=True)
        return self._regions[key]

    def estimate(self, region: Region, share: float, *, away: bool = False) -> float:
        """Seconds of a likely step of ``region``: 1F1B, with the best ZeRO stage; inf where none leaves room for
        activations. ``away``: masters and the optimizer are on the host."""
        assert self.root is not None
        if self._likely is None:
            self._likely = held_by(self.root, None, self.options.recompute, self.root)
        mesh = region.mesh
        if self._likely is None:
            return 0.0
        total = Weights(0, 0, 0)
        for weights in self.root.weights.values():
            total += weights
        parts = mesh.pp * mesh.tp
        spread = (1 - self.expert_share + self.expert_share / mesh.experts) / parts
        shards = mesh.zero_shards(0)
        found = math.inf
        for zero in (1, 2, 3) if shards > 1 else (0,):
            # Masters of experts are on fewer copies' ranks, but split over ep: as many parts in all.
            state = 0.0 if away else self._trained_bytes(total) / shards / parts
            state += total.masters * spread / (shards if zero >= 2 else 1)
            state += total.copies * spread if zero < 3 else 0.0
            key = ("estimate", share, mesh.pp, region.microbatches, round(state / self.budget_bytes, 2))
            if key not in self._passes:
                kept = self._keeping.here("1f1b", mesh.pp, region.microbatches)
                held, room = self._likely.scaled(share), self.budget_bytes - state
                self._passes[key] = recomputed(held, kept, region.microbatches, room, split=False)
            moved = {2: region.microbatches * total.masters, 3: 2 * region.microbatches * total.copies}.get(zero, 0)
            found = min(found, max(self._passes[key], self._moved_estimate(region, moved * spread)))
        return found

    def _trained_bytes(self, weights: Weights) -> int:
        """Of masters and the optimizer's state."""
        dtype = self.options.state_dtype
        return weights.masters + MOMENTS * (
            weights.elements * getattr(torch, dtype).itemsize if dtype else weights.masters
        )

    def _moved_estimate(self, region: Region, bytes_: float) -> float:
        """Of gathers or scatters of so much over the ranks that share parameters."""
        mesh = region.mesh
        link = self._machine_of(mesh, 0).lines[mesh.data_axes()].shard
        return seconds_of("all_gather", int(bytes_), mesh.zero_shards(0), link)

    def least_streamed(self, region: Region) -> float:
        """Seconds of gathers, where not even the copies of parameters that are computed with fit on a rank."""
        assert self.root is not None
        mesh = region.mesh
        copies = sum(weights.copies for weights in self.root.weights.values()) / (mesh.pp * mesh.tp * mesh.experts)
        if copies <= self.budget_bytes or mesh.zero_shards(0) == 1:
            return 0.0
        return self._moved_estimate(region, 2 * region.microbatches * copies)

    def may_fit(self, point: Point, profile: Profile) -> bool:
        """Whether parameters, gradients and moments would fit if ranks shared them evenly, and kept nothing else."""
        mesh, total = point.region.mesh, 0.0
        away = not {"optimizer", "parameters"}.isdisjoint(point.offload)
        for axes, weights in profile.weights.items():
            line = mesh.data_axes(axes)
            shards = mesh.zero_shards(point.zero_ranks, line) if point.zero and line else 1
            twice = shards > 1 or weights.copies != weights.masters or away
            total += 0 if away else self._trained_bytes(weights) / shards
            total += weights.masters / (shards if point.zero >= 2 else 1)
            total += weights.copies if twice and not self._streams(point) else 0
        return total / mesh.pp <= self.budget_bytes

    def _update_seconds(self, point: Point, profile: Profile) -> float:
        """Of the optimizer, and of what is summed after the last pass, if ranks shared all of it evenly. What is
        gathered before the first isn't counted: with parameters on the host nothing is."""
        _, scattered, summed, updated = self._moves(point, profile)
        pp = point.region.mesh.pp
        layers = math.ceil(len(profile.units) / pp)
        row = SCHEDULES.get(point.schedule)
        backward = math.fsum(unit.backward for unit in self._loaded(point, profile)) / pp
        if pp > 1 and (row is None or (row.chunks or point.chunks) != 1):
            backward *= point.region.microbatches  # sums of later stages run beside the first ones' passes
        scattered, summed = (step.left_seconds(each, layers, backward) for each in (scattered, summed))
        return scattered + summed + updated

    def _streamed_seconds(self, point: Point, profile: Profile) -> float:
        """Of what runs beside the passes: of each microbatch two gathers, a scatter of all but the last."""
        gathered, scattered, *_ = self._moves(point, profile)
        count = point.region.microbatches
        gathers = 2 * count * gathered if self._streams(point) else 0.0
        return max(gathers, (count - 1) * scattered if point.zero >= 2 else 0.0)

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
                totals += self._line_seconds(line, shards, weights, summed, profile.layers[axes], point, options)
            gathered, scattered, rest, updated = (float(each) / mesh.pp for each in totals)
            self._updates[key] = gathered, scattered, rest, updated
        return self._updates[key]

    def _line_seconds(
        self,
        axes: tuple[str, ...],
        shards: int,
        weights: Weights,
        summed: Weights,
        layers: int,
        point: Point,
        options: Options,
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
        if self._streams(point) and shards > 1:  # each layer by itself
            gathered += (layers - 1) * seconds_of("all_gather", 1, shards, line.shard)
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


def splits_head(family: Family) -> bool:
    return bool(MODES[family.vocabulary].head)


def _inner(units: Sequence[Unit], family: Family) -> Sequence[Unit]:
    """What stages are cut between: without the first and last where a split vocabulary's passes may be all there is in
    them. Those fill the time that ranks wait after their last pass, but not before their first one."""
    return units[1:-1] if splits_head(family) and len(units) > 2 else units


def _head_seconds(units: Sequence[Unit], family: Family) -> float:
    """What a rank computes of a split head, at least."""
    if not splits_head(family) or len(units) <= 2:
        return 0.0
    return family.region.microbatches * units[-1].seconds / family.region.mesh.pp


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
        working=np.array([float(profile.activations.working_bytes[b]) for b in blocks]),
        saved=share * saved,
        extra=share * extra,
        later=float(profile.costs[block].later_bytes),
    )


def _first_call(profile: Profile, block: int) -> int:
    return next(i for i, call in enumerate(profile.model.calls) if call.block == block)


def _least_bytes(profile: Profile, call: int, recompute: str) -> int:
    """Of a microbatch, with everything recomputed that can be."""
    choices = profile.activations.choices[profile.model.calls[call].block]
    layer = call in own_modules(profile.model)
    return profile.activations.call_bytes(call, choices.whole if layer and recompute == "auto" else choices.none)
