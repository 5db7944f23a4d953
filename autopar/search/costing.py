"""What one point takes: bounded from its profile, or laid out exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from autopar.cluster import Cluster, Link
from autopar.cost_models import collective, step
from autopar.errors import BudgetError
from autopar.mesh import Mesh
from autopar.options import Options, activations_on_host, masters_on_host, weights_streamed
from autopar.planner.block_costs import Machine
from autopar.planner.build import moved_seconds, rank_plan
from autopar.planner.modes import MODES
from autopar.planner.offload import require_host
from autopar.planner.pipeline import BOUNDLESS, Pipeline, lay_out
from autopar.planner.rank_memory import MOMENTS, Storage
from autopar.planner.wanted import Wanted
from autopar.schedules import Timelines
from autopar.schedules.registry import SCHEDULES, swaps_both_ways
from autopar.search.bounds import Held, by_paths, folded, recomputed, scaled, shared_out, straight
from autopar.search.ends import left_seconds, most_parameters
from autopar.search.gradients import Sums
from autopar.search.held import held_by
from autopar.search.interleaving import Interleaving
from autopar.search.keeping import Keeping
from autopar.search.outcomes import Outcome, is_tight, parts_of
from autopar.search.profiles import Profile, Profiler, Unit, Weights
from autopar.search.space import Family, Point, Region, Way, moves_each_time, splits_head, stages_of, works_of

BESIDE = 0.3
"""Of what scatters have left to do after a backward, where other stages have passes."""

_WHOLE = 0.02  # of the weights: as many at least that tp doesn't split


@dataclass(frozen=True)
class _Loaded:
    """Units with what their backwards take to add up gradients, and what all of them take, forward and backward."""

    units: list[Unit]
    seconds: float
    backward_seconds: float

    @classmethod
    def of(cls, units: Sequence[Unit], added: Iterable[float]) -> _Loaded:
        """Equal units with as much to add up are one."""
        pairs = list(zip(units, added, strict=True))
        one = {pair: replace(pair[0], backward=pair[0].backward + pair[1]) for pair in dict.fromkeys(pairs)}
        found = [one[pair] for pair in pairs]
        return cls(found, math.fsum(u.seconds for u in found), math.fsum(u.backward for u in found))


@dataclass
class Costing:
    """Costs of points of one search; ``spared_bytes`` of a budget are left for what no solver counts. ``root`` is
    the profile of the whole batch on one rank, ``logits_seconds`` what the product takes there that makes its logits.

    What several points share is kept: passes of a cut, microbatches in flight, what layers may keep, timelines.
    """

    cluster: Cluster
    options: Options
    spared_bytes: int = 0
    root: Profile | None = None
    logits_seconds: float = 0.0
    _passes: dict[tuple[object, ...], float] = field(default_factory=dict)
    _hosts: dict[tuple[object, ...], float] = field(default_factory=dict)
    _machines: dict[tuple[Mesh, int], Machine] = field(default_factory=dict)
    _updates: dict[tuple[object, ...], tuple[float, float, float, float]] = field(default_factory=dict)
    keeping: Keeping = field(default_factory=Keeping)
    interleaving: Interleaving = field(default_factory=Interleaving)
    timelines: Timelines = field(default_factory=Timelines)
    _loads: dict[tuple[object, ...], _Loaded] = field(default_factory=dict)
    _holdings: dict[tuple[object, ...], Held | None] = field(default_factory=dict)
    _sent: dict[tuple[object, ...], tuple[float, float]] = field(default_factory=dict)

    @property
    def whole_budget_bytes(self) -> int:
        return self.options.budget_bytes or self.cluster.device.memory_bytes

    @property
    def budget_bytes(self) -> int:
        """Without what is spared."""
        return self.whole_budget_bytes - self.spared_bytes

    def swap_rate(self, schedules: Iterable[str], microbatches: int) -> float:
        """Bytes/s at which activations go to the host and back, under the one of ``schedules`` where that is most."""
        both_ways = all(swaps_both_ways(name, microbatches) for name in schedules)
        return self.cluster.device.swap_bytes_per_second(both_ways=both_ways)

    def under(self, options: Options) -> Costing:
        """Of the same search under other ``options``."""
        return Costing(self.cluster, options, self.spared_bytes)

    def aside(self) -> Costing:
        """The same, for another who reckons with it: work counts for each, though lists and timelines are in common."""
        other = Costing(self.cluster, self.options, self.spared_bytes, self.root, self.logits_seconds)
        return replace(other, keeping=self.keeping.aside(), interleaving=self.interleaving, timelines=self.timelines)

    def options_of(self, point: Point) -> Options:
        searched = {name: getattr(point, name) for name in ("zero", "zero_ranks", "offload", "head_chunks")}
        return self.options.model_copy(update=searched)

    def laid_out(self, point: Point, profile: Profile) -> Outcome:
        """Raises AutoparError where the point can't run or doesn't fit."""
        options, region = self.options_of(point), point.region
        require_host(options, self.cluster.device)
        machine = Machine.of(self.cluster, profile.mesh(region.mesh), point.zero_ranks)
        pipeline = self._pipeline(point, profile, machine, self.spared_bytes)
        request = replace(profile.placed.request, mesh=machine.mesh, options=options)
        ranks = [rank_plan(profile.model, rank, pipeline, request) for rank in range(region.mesh.pp)]
        require_host(options, machine.device, max(rank.host_bytes for rank in ranks))
        recomputes = any(chosen.regions for chosen in pipeline.chosen.values())
        if (held := max(r.peak_bytes for r in ranks)) > (budget := self.whole_budget_bytes):
            raise BudgetError(f"a rank would hold {held} bytes of {budget}", held)
        seconds = pipeline.timeline.step_seconds
        parts = parts_of(pipeline, profile.costs_on(machine), profile.model)
        return Outcome(point, seconds, held, recomputes, is_tight(pipeline), parts, pipeline.layout, profile.key)

    def roomy_seconds(self, point: Point, profile: Profile) -> float:
        """Of a step of ``point``, laid out as if ranks had all the memory that it takes. Raises AutoparError where it
        can't run."""
        machine = Machine.of(self.cluster, profile.mesh(point.region.mesh), point.zero_ranks)
        return self._pipeline(point, profile, machine, -BOUNDLESS).timeline.step_seconds

    def _pipeline(self, point: Point, profile: Profile, machine: Machine, spared_bytes: int) -> Pipeline:
        """Laid out on ``profile``, but for so many bytes of each rank."""
        wanted = Wanted(point.schedule, point.vocabulary, point.chunks, point.head_chunks, spared_bytes)
        costs, kept = profile.costs_on(machine), profile.activations
        count, options = point.region.microbatches, self.options_of(point)
        return lay_out(profile.model, costs, machine, count, wanted, options, kept, timelines=self.timelines)

    def bound(self, point: Point, profile: Profile) -> float:
        """No step of ``point`` is below, by its passes. The head may be another than the profile's."""
        passes, pp = self._pass_seconds(point, profile), point.region.mesh.pp
        if splits_further(point.way, profile):
            return passes
        passes, issued = max(passes, self.host_waits(point, profile)), self.least_issued(point, profile)
        update, streamed = self._update_seconds(point, profile), self._streamed_seconds(point, profile)
        if pp == 1:
            return max(issued, max(passes, streamed) + update)
        # The rank with the longest passes may have the least to update; both are at least their means.
        return max(issued, passes, max(self._mean_seconds(point, profile), streamed) + update)

    def least_issued(self, point: Point, profile: Profile) -> float:
        """What hosts take to issue the passes of ``point``, on the average of pipeline ranks: without those of the
        first and the last call, which may be others than the profile's. Devices wait for none of it, so what they do
        after their passes doesn't come after it."""
        if splits_further(point.way, profile):
            return 0.0
        return self.passes_issued(point.region, profile.inner_calls)

    def host_waits(self, point: Point, profile: Profile) -> float:
        """Where passes wait for the host, how long those of a pipeline take at least because of that."""
        region, row = point.region, SCHEDULES.get(point.schedule)
        if row is None or not profile.host_units or splits_further(point.way, profile):
            return 0.0
        key = (
            profile.key,
            region.mesh.pp,
            region.microbatches,
            point.schedule,
            point.chunks,
            splits_head(point.family),
        )
        if key not in self._hosts:
            units = profile.host_units
            mean = region.microbatches * math.fsum(unit.seconds for unit in units) / region.mesh.pp
            passes = self._pipeline_seconds(units, point.family, (0.0, 0.0)) if region.mesh.pp > 1 else 0.0
            self._hosts[key] = max(mean, passes)
        return self._hosts[key]

    def passes_issued(self, region: Region, calls: int) -> float:
        """Seconds that a host takes to issue the passes of a rank on average, with so many ``calls`` of all ranks in
        each microbatch."""
        return step.host_seconds(region.microbatches * calls / region.mesh.pp, self.cluster.device)

    def issued_seconds(self, point: Point, profile: Profile) -> float:
        """What it likely takes to issue all of ``point``: each weight is updated, and copied where others store it."""
        once = step.host_seconds((1 + (point.zero > 0)) * profile.trained / point.region.mesh.pp, self.cluster.device)
        return self.passes_issued(point.region, profile.issued_calls) + once

    def memory_bound(self, point: Point, profile: Profile) -> float:
        """No step of ``point`` is below, by what has to be recomputed; inf where its layers can't fit."""
        if splits_further(point.way, profile):
            return 0.0
        return self._memory_seconds(point, profile) + self.after_seconds(point, profile)

    def after_seconds(self, point: Point, profile: Profile) -> float:
        """What comes after all passes at least, however long these are: longer ones hide more of what is summed beside
        the last. Nothing where those of other ranks may run meanwhile."""
        if point.region.mesh.pp > 1 or splits_further(point.way, profile):
            return 0.0
        _, scattered, summed, updated = self._moves(point, profile)
        return updated + (0.0 if _has_several_stages(point) else (scattered + summed) / len(profile.units))

    def _mean_seconds(self, point: Point, profile: Profile) -> float:
        """Of the passes of a pipeline rank, on average."""
        return point.region.microbatches * self._loaded(point, profile).seconds / point.region.mesh.pp

    def _pass_seconds(self, point: Point, profile: Profile) -> float:
        mesh, microbatches = point.region.mesh, point.region.microbatches
        row = SCHEDULES.get(point.schedule)
        mean = self._mean_seconds(point, profile)
        if mesh.pp == 1 or row is None:
            return mean
        sums, chunks = self._sums(point, profile), row.chunks or point.chunks
        split = (row.splits_backward, splits_head(point.family), row.placement)
        sent = self.sent_seconds(profile, mesh)
        key = (profile.key, sums, mesh.pp, microbatches, chunks, split, sent, point.head_chunks)
        if key not in self._passes:
            self._passes[key] = self._pipeline_seconds(self._loaded(point, profile).units, point.family, sent)
        return max(mean, self._passes[key])

    def _sums(self, point: Point, profile: Profile) -> Sums:
        mesh, row = point.region.mesh, SCHEDULES.get(point.schedule)
        lines = {axes: mesh.data_axes(axes) for axes in profile.weights}
        shards = tuple((a, mesh.zero_shards(point.zero_ranks, b) if point.zero and b else 1) for a, b in lines.items())
        microbatches = 1 if row is not None and row.asynchronous else point.region.microbatches
        split = row is None or row.splits_backward
        return Sums(shards, point.zero, tuple(point.offload), microbatches, split)

    def _loaded(self, point: Point, profile: Profile) -> _Loaded:
        sums, again = self._sums(point, profile), self.again_seconds(point, profile)
        key = profile.key, sums, again
        if key not in self._loads:
            options, device = self.options_of(point), self.cluster.device
            kinds = {id(each): each for each in profile.unit_parameters}  # few: most units are alike
            seconds = {number: sums.seconds(each, options, device) for number, each in kinds.items()}
            added = [seconds[id(each)] for each in profile.unit_parameters]
            added[-1] += again
            self._loads[key] = _Loaded.of(profile.units, added)
        return self._loads[key]

    def again_seconds(self, point: Point, profile: Profile) -> float:
        """What a microbatch takes longer at least where the head is computed in chunks, and in the profile it isn't:
        its logits are made twice."""
        if point.head_chunks == 1 or profile.key.chunks > 1 or self.root is None:
            return 0.0
        return self.logits_seconds * (scaled(self.root.key, profile.key) or 0.0)

    def _pipeline_seconds(self, units: Sequence[Unit], family: Family, sent: tuple[float, float]) -> float:
        row, ranks, microbatches = SCHEDULES[family.schedule], family.region.mesh.pp, family.region.microbatches
        chunks = row.chunks or family.chunks or 2
        inner, beside = _inner(units, family), _head_seconds(units, family)
        split = row.splits_backward or splits_head(family)
        if chunks == 1:
            return beside + straight(inner, ranks, microbatches, split=split, sent=sent)
        if ranks * chunks > len(units):
            return beside  # no cut has so many stages, as laying it out says
        found, paths = beside + folded(inner, ranks, microbatches, split=split, sent=sent), self.interleaving
        first, last = (Unit(unit.block, 0.0, 0.0, 0.0) for unit in (units[0], units[-1]))
        cut = [first, *inner, last] if beside else units
        if row.placement == "v":
            return max(found, beside + by_paths(cut, paths.on_v(ranks, microbatches, len(inner)), sent))
        sizes = ranks, chunks, microbatches, len(inner)
        if not beside:
            return max(found, by_paths(cut, paths.counts(*sizes, ends=True), sent))
        both = (by_paths(cut, paths.counts(*sizes, ends=ends), sent) for ends in (True, False))
        return max(found, next(both), beside + next(both))  # the head may be computed while the last backwards run

    def _memory_seconds(self, point: Point, profile: Profile) -> float:
        """Of the layers alone, with what has to be recomputed."""
        row = SCHEDULES.get(point.schedule)
        if row is None or self.options.recompute not in ("auto", "none"):
            return 0.0
        held = self._held(point, profile)
        if held is None:
            return 0.0
        added = [a.seconds - b.seconds for a, b in zip(self._loaded(point, profile).units, profile.units, strict=True)]
        held = replace(held, seconds=held.seconds + np.array(added))
        if point.head_chunks > 1:
            held = held.in_chunks()
        sent = self.sent_seconds(profile, point.region.mesh)
        return self._filled(held, point.family, sent, away=activations_on_host(point.offload))

    def _filled(self, held: Held, family: Family, sent: tuple[float, float], *, away: bool) -> float:
        """Seconds of ranks that ``held`` fills; activations may be ``away`` on the host."""
        row, pp, microbatches = SCHEDULES[family.schedule], family.region.mesh.pp, family.region.microbatches
        if pp * (row.chunks or family.chunks or 2) > len(held.seconds):
            return 0.0  # no cut has so many stages, as laying it out says
        beside, split = 0.0, row.splits_backward or splits_head(family)
        if splits_head(family) and len(held.seconds) > 2:
            head = float(held.seconds[-1]) / pp
            beside, held = microbatches * head, replace(held.inner(), beside=head)
        asked = (family.schedule, pp, microbatches, family.chunks, MODES[family.vocabulary].head)
        rate = self.swap_rate([family.schedule], microbatches)
        kept = self.keeping.away(*asked, rate) if away and rate else self.keeping.here(*asked)
        if pp == 1 or (row.chunks or family.chunks) == 1:
            return beside + recomputed(held, kept, microbatches, self.budget_bytes, split=split, sent=sent)
        last = 0 if row.placement == "v" else pp - 1
        return beside + shared_out(held, kept, microbatches, self.budget_bytes, split=split, last=last, sent=sent)

    def _held(self, point: Point, profile: Profile) -> Held | None:
        """None where there are too few layers to speak of."""
        mesh = point.region.mesh
        storage = Storage(self.options_of(point), mesh)
        shards = {axes: mesh.zero_shards(point.zero_ranks, axes) for axes in mesh.data_lines()}
        key = (profile.key, point.zero, tuple(shards.items()), point.offload)
        if key not in self._holdings:
            self._holdings[key] = held_by(profile, storage, self.options.recompute)
        return self._holdings[key]

    def trained_bytes(self, weights: Weights) -> int:
        """Of masters and the optimizer's state."""
        dtype = self.options.state_dtype
        return weights.masters + MOMENTS * (
            weights.elements * getattr(torch, dtype).itemsize if dtype else weights.masters
        )

    def hosted_bytes(self, weights: Weights) -> int:
        """Of masters that lie on the host, with the optimizer's state and gradients there."""
        return self.trained_bytes(weights) + weights.masters

    def sent_bytes(self, weights: Weights) -> int:
        """Of their gradients, as they travel."""
        dtype = self.options.reduce_dtype
        return weights.elements * getattr(torch, dtype).itemsize if dtype else weights.masters

    def may_fit(self, point: Point, profile: Profile) -> bool:
        """Whether parameters, gradients and moments would fit, on the device and on its host, if ranks shared them
        evenly, and kept nothing else."""
        if splits_further(point.way, profile):
            return True
        mesh, total, hosted = point.region.mesh, 0.0, 0.0
        away = masters_on_host(point.offload)
        for axes, weights in profile.weights.items():
            line = mesh.data_axes(axes)
            shards = mesh.zero_shards(point.zero_ranks, line) if point.zero and line else 1
            twice = shards > 1 or weights.copies != weights.masters or away
            hosted += self.hosted_bytes(weights) / shards if away else 0
            total += 0 if away else self.trained_bytes(weights) / shards
            total += weights.masters / (shards if point.zero >= 2 else 1)
            total += weights.copies if twice and not self._streams(point.region.mesh, point.way) else 0
        room = self.cluster.device.host_memory_bytes
        return total / mesh.pp <= self.budget_bytes and hosted / mesh.pp <= room

    def least_gpus(self, *, on_host: bool | None) -> int:
        """On fewer, ranks can't hold gradients, parameters and moments, though each was split over all of them; the
        latter two are ``on_host`` or not (None: either way)."""
        assert self.root is not None
        every, room = self.root.weights.values(), self.cluster.device.host_memory_bytes
        ways, gradients = [], sum(each.masters for each in every)
        if not on_host:
            ways.append((gradients + sum(map(self.trained_bytes, every))) / self.budget_bytes)
        if on_host is not False and room:
            ways.append(max(gradients / self.budget_bytes, sum(map(self.hosted_bytes, every)) / room))
        return math.ceil(min(ways))

    def likely(self, passes: float, point: Point, profile: Profile) -> float:
        """Seconds of a step of ``point`` whose ``passes`` likely take so long: these, with what scatters have left to
        do after each, or all that moves beside them; then what comes after the last; or what it takes to issue all."""
        passes += point.region.microbatches * self._left_seconds(point, profile)
        device = max(passes, self._streamed_seconds(point, profile)) + self._ends_seconds(point, profile)
        return max(device, self.issued_seconds(point, profile))

    def _left_seconds(self, point: Point, profile: Profile) -> float:
        """Of a scatter, what a pass likely waits for: more of it runs beside passes where a rank has several stages."""
        _, scattered, *_ = self._moves(point, profile, likely=True)
        backward = self._loaded(point, profile).backward_seconds / point.region.mesh.pp
        left = max(0.0, scattered - backward) if point.zero >= 2 else 0.0
        return left * (BESIDE if _has_several_stages(point) else 1.0)

    def _update_seconds(self, point: Point, profile: Profile) -> float:
        """Of the optimizer, and of what is summed after the last pass at least, if ranks shared all of it evenly. What
        is gathered before the first isn't counted: with parameters on the host nothing is."""
        _, scattered, summed, updated = self._moves(point, profile)
        pp = point.region.mesh.pp
        layers = math.ceil(len(profile.units) / pp)
        backward = self._loaded(point, profile).backward_seconds / pp
        if _has_several_stages(point):
            backward *= point.region.microbatches  # sums of later stages run beside the first ones' passes
        scattered, summed = (step.left_seconds(each, layers, backward) for each in (scattered, summed))
        return scattered + summed + updated

    def _ends_seconds(self, point: Point, profile: Profile) -> float:
        """Of the optimizer, and of what is likely left to gather before the first pass and to sum after the last, on
        the rank with the most parameters."""
        gathered, scattered, summed, updated = self._moves(point, profile, likely=True)
        loaded, ranks, units = self._loaded(point, profile), point.region.mesh.pp, len(profile.units)
        backward = loaded.backward_seconds / ranks
        forward = loaded.seconds / ranks - backward
        if self._streams(point.region.mesh, point.way) or masters_on_host(point.offload):
            gathered = 0.0
        moved = (gathered, forward), (scattered, backward), (summed, backward)
        most, works = most_parameters(point, profile), works_of(point.region)
        stages = stages_of(point) // ranks
        left = (left_seconds(most * each, passing, works, stages, units) for each, passing in moved)
        return float(sum(left)) + updated

    def _streamed_seconds(self, point: Point, profile: Profile) -> float:
        """Of what runs beside the passes, one after the other: of each microbatch two gathers, and of all but the last,
        of which more is known, a scatter, after one microbatch's forward through all layers, and its gathers."""
        gathered, scattered, *_ = self._moves(point, profile)
        count, gathered = point.region.microbatches, gathered if self._streams(point.region.mesh, point.way) else 0.0
        scatters = (count - 1) * scattered if point.zero >= 2 else 0.0
        first = math.fsum(unit.forward for unit in profile.units[1:-1])  # the first and last call may be others
        return max(2 * count * gathered + scatters, first + max(0, count - 2) * gathered + scatters)

    def _streams(self, mesh: Mesh, way: Way) -> bool:
        return weights_streamed(way.zero, way.offload, mesh.zero_shards(way.zero_ranks))

    def _moves(self, point: Point, profile: Profile, *, likely: bool = False) -> tuple[float, float, float, float]:
        """Seconds of one gather, one scatter and the rest of the sums of a rank's parameters, and of their update, if
        each was one message: at least, without gradients that only some ranks have terms of; or as is ``likely``."""
        mesh = point.region.mesh
        key = (profile.key, mesh, point.zero, point.zero_ranks, point.offload, likely)
        if key not in self._updates:
            totals, none = np.zeros(4), Weights(0, 0, 0)
            lines: dict[tuple[str, ...], tuple[Weights, Weights, int]] = {}
            for axes, weights in profile.weights.items():
                sums = profile.summed_partly if likely else profile.summed
                summed, layers = sums.get(axes, none), profile.layers[axes]
                if not axes and splits_further(point.way, profile):  # as that one has it that it is laid out on
                    axes, weights, summed = ("tp",), weights.times(1 / mesh.tp), summed.times(1 / mesh.tp)
                before = lines.get(line := mesh.data_axes(axes), (none, none, 0))
                lines[line] = before[0] + weights, before[1] + summed, max(before[2], layers)  # they travel together
            for line, (weights, summed, layers) in lines.items():
                totals += self.line_seconds(line, weights, summed, layers, mesh, point.way)
            gathered, scattered, rest, updated = (float(each) / mesh.pp for each in totals)
            self._updates[key] = gathered, scattered, rest, updated
        return self._updates[key]

    def line_seconds(
        self, axes: tuple[str, ...], weights: Weights, summed: Weights, layers: int, mesh: Mesh, way: Way
    ) -> list[float]:
        """Seconds of one gather, one scatter and the rest of the sums of weights that are whole along ``axes``, and of
        their update. Those of so many ``layers`` are gathered apart if that is for each pass; of ``summed`` all ranks
        have terms."""
        shards = mesh.zero_shards(way.zero_ranks, axes) if way.zero and axes else 1
        machine, streams = self.machine_of(mesh, way.zero_ranks), self._streams(mesh, way)
        line = machine.lines.get(axes)
        away = masters_on_host(way.offload)
        updated = step.optimizer_seconds(weights.elements // shards, machine.device, on_host=away)
        rate = machine.device.host_bytes_per_second
        copied = self.sent_bytes(weights) / shards / rate if away and rate else 0.0  # of summed gradients to the host
        if line is None or line.size == 1:
            return [0.0, 0.0, copied, updated]
        sent = self.sent_bytes(summed)
        further = layers - 1 if streams and shards > 1 else 0  # messages: each layer has its own
        gather = "all_gather", weights.copies - further, shards, line.shard
        moved = [gather, ("reduce_scatter", sent, shards, line.shard)]
        gathered, scattered = (seconds_of(*each) if each[2] > 1 else 0.0 for each in moved)
        gathered += further * seconds_of("all_gather", 1, shards, line.shard)
        rest = seconds_of(
            "all_reduce", sent // shards, line.size // shards, line.replicate if shards > 1 else line.whole
        )
        if way.zero >= 2:
            return [gathered, scattered, rest + copied, updated]
        return [gathered, 0.0, rest + copied + (scattered if way.zero else 0.0), updated]

    def sent_seconds(self, profile: Profile, mesh: Mesh, share: float = 1.0) -> tuple[float, float]:
        """What a message between pipeline ranks takes at least, on and back: of that ``share`` of what those of
        ``profile`` send."""
        key = profile.key, mesh.pp, mesh.stride("pp"), share
        if key not in self._sent:
            link = self.cluster.link(mesh.pp, mesh.stride("pp"), mesh.world)
            there, back = (seconds_of("send", int(share * each), mesh.pp, link) for each in profile.message_bytes)
            self._sent[key] = there, back
        return self._sent[key]

    def machine_of(self, mesh: Mesh, zero_ranks: int) -> Machine:
        key = mesh, zero_ranks
        if key not in self._machines:
            self._machines[key] = Machine.of(self.cluster, *key)
        return self._machines[key]


def seconds_of(kind: str, bytes_: int, size: int, link: Link) -> float:
    return collective.seconds(kind, bytes_, size, link) if bytes_ and size > 1 else 0.0


def _has_several_stages(point: Point) -> bool:
    """Whether a rank has, or may have."""
    row = SCHEDULES.get(point.schedule)
    return point.region.mesh.pp > 1 if row is None else (row.chunks or point.chunks) != 1


def splits_further(way: Way, profile: Profile) -> bool:
    """Whether points that store weights this ``way`` are laid out on a profile of their own, whose placement knows that
    weights move with each microbatch: its passes are no faster, but ranks have fewer weights."""
    key = profile.key
    return moves_each_time(way) and not (key.stages or key.streamed) and profile.whole_share > _WHOLE


def laid_on(point: Point, profile: Profile, profiler: Profiler) -> Profile:
    """What ``point`` of a region with this ``profile`` is laid out on, or what bounds that: another one where weights
    are split further or the head is computed in chunks, if that is placed."""
    if point.head_chunks > 1 and not point.head:
        streamed = profile.key.streamed or splits_further(point.way, profile)
        own = profile.key._replace(chunks=point.head_chunks, streamed=streamed)
        if (found := profiler.placed(own, point.region.mesh)) is not None:
            return found
    if not splits_further(point.way, profile):
        return profile
    found = profiler.placed(profile.key._replace(streamed=True), point.region.mesh)
    if found is None:
        return profile
    if point.head or point.head_chunks > 1:  # it is laid out on one of its own
        request = found.placed.request
        here = moved_seconds(replace(request, mesh=point.region.mesh))
        return found if here >= moved_seconds(request) else profile  # passes take more where weights that move do
    return found


def on_own(
    points: Sequence[Point],
    profile: Profile,
    profiler: Profiler,
    of: Callable[[Sequence[Point], Profile], list[float]],
) -> list[float]:
    """What is said ``of`` those of ``points`` that are laid out on the same profile, as far as it is placed."""
    found = dict.fromkeys(points, 0.0)
    every = {point: laid_on(point, profile, profiler) for point in points}
    for key in dict.fromkeys(each.key for each in every.values()):
        some = [point for point in points if every[point].key == key]
        found |= zip(some, of(some, every[some[0]]), strict=True)
    return [found[point] for point in points]


def _inner(units: Sequence[Unit], family: Family) -> Sequence[Unit]:
    """What stages are cut between: without the first and last where a split vocabulary's passes may be all there is in
    them. Those fill the time that ranks wait after their last pass, but not before their first one."""
    return units[1:-1] if splits_head(family) and len(units) > 2 else units


def _head_seconds(units: Sequence[Unit], family: Family) -> float:
    """What a rank computes of a split head, at least."""
    if not splits_head(family) or len(units) <= 2:
        return 0.0
    return family.region.microbatches * units[-1].seconds / family.region.mesh.pp
