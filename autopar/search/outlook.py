"""Regions and families from afar: what none of their points is below, found for all ways to store weights at once."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

from autopar.mesh import Mesh
from autopar.options import activations_on_host, masters_on_host, weights_streamed
from autopar.planner.modes import MODES
from autopar.schedules.placements import looped as going_round
from autopar.schedules.placements import v_shaped
from autopar.schedules.registry import SCHEDULES
from autopar.schedules.weight_moves import MESSAGES
from autopar.search.bounds import scaled
from autopar.search.costing import BESIDE, Costing, seconds_of, splits_further
from autopar.search.ends import left_seconds
from autopar.search.gradients import Adding, Kind, Sums, adding
from autopar.search.hulls import Array
from autopar.search.interleaving import Counts
from autopar.search.keeping import Ratios, folded_kept, looped_kept, looped_messages, straight_kept, straight_messages
from autopar.search.layers import LayerWeight, Messages, Scaler, comes_and_goes, layer_weights, weights_of_layer
from autopar.search.profiles import Key, Profile, Weights
from autopar.search.ranks import even, kind_of, kinds_of, last_rank, ranks_of, unevenness, waited, with_last
from autopar.search.scaling import Times
from autopar.search.space import Family, Point, Region, Way, expert_share, splits_head, stages_of
from autopar.search.ways import (
    BestWays,
    any_away,
    beside_each_other,
    bounds_of_each,
    least_of,
    least_of_rows,
    of_weights,
    undominated,
    with_sums,
)
from autopar.search.wholesale import (
    Host,
    Layers,
    Ranks,
    Stored,
    least_seconds,
    passes_of,
    placed,
    without_memory,
)

_STAGES: Final = 8  # of a rank at most, where several are likely
_STEADY: Final = 2  # times the ranks: of fewer microbatches, none are taken to wait as those of a steady state do
_BOUNDLESS: Final = 1e30
_TINY: Final = 1e-30


class View(NamedTuple):
    """What is known of a region: the ``ways`` in which its points store weights, what layers take at least
    (``times``, :class:`autopar.search.scaling.Scaling`), or its own ``profile``, and another bound."""

    region: Region
    ways: Sequence[Way]
    times: Array
    profile: Profile | None
    known: float


class _Row(NamedTuple):
    """A region's layers, and ways to store them that are worth it; and those if there was room for everything."""

    layers: Layers
    stored: list[Stored]
    roomy: list[Stored]


@dataclass
class Outlook:
    """Of one search: :class:`autopar.search.layers.Scaler` knows what layers take, ``costing`` the rest."""

    costing: Costing
    scaler: Scaler
    expert_share: float  # of a layer's parameters
    _ways: dict[tuple[object, ...], Stored] = field(default_factory=dict)
    _best: dict[tuple[object, ...], BestWays] = field(default_factory=dict)
    _added: dict[tuple[object, ...], Adding] = field(default_factory=dict)
    _sums: dict[tuple[object, ...], Adding] = field(default_factory=dict)
    _kinds: dict[Key, Counter[Kind]] = field(default_factory=dict)
    _shares: dict[Key, dict[tuple[str, ...], Weights]] = field(default_factory=dict)
    _found: dict[tuple[object, ...], Array] = field(default_factory=dict)
    _uneven: dict[tuple[Key, int, int, bool], float] = field(default_factory=dict)

    @classmethod
    def of(cls, costing: Costing, root: Profile) -> Outlook | None:
        """None where the model has no layers, or it is said what they recompute."""
        scaler = Scaler.of(root, costing.options.recompute) if costing.options.recompute in ("auto", "none") else None
        return None if scaler is None else cls(costing, scaler, expert_share(root.model.blocks[scaler.block]))

    @cached_property
    def _root_sizes(self) -> list[int]:
        """Bytes of each weight of a layer that isn't split."""
        return [each.meta.bytes for each in weights_of_layer(self.scaler.root, self.scaler.block) if not each.axes]

    def region_bounds(self, views: Sequence[View], families: Sequence[Family], enough: float = math.inf) -> Array:
        """No step of any point of these regions is below, by region, which have as many pipeline ranks and microbatches
        and so the same ``families``. A bound that is ``enough`` isn't made any better."""
        known = np.array([view.known for view in views])
        if any(family.schedule not in SCHEDULES for family in families):
            return known
        alone = any(SCHEDULES[family.schedule].asynchronous for family in families)
        region, found = views[0].region, np.full(len(views), math.inf)
        rows = [self._row(view, 1 if alone else region.microbatches) for view in views]
        away = any(any_away(view.ways) for view in views)
        names = [family.schedule for family in families]
        for ranks, chunks in kinds_of(region, rows[0].layers, families):
            some = np.flatnonzero(found > known)  # of the others it says nothing
            if not some.size:
                break
            fastest = self._fastest([rows[place] for place in some], ranks, chunks, region.microbatches)
            is_open = fastest < np.minimum(found[some], enough)
            if is_open.any():
                host = self._host(ranks, region, names, away=away, fills=bool(chunks))
                pairs = [(rows[place].layers, rows[place].stored) for place in some[is_open]]
                least = least_of(pairs, ranks, region.microbatches, self.costing.budget_bytes, host)
                fastest[is_open] = np.maximum(fastest[is_open], least)
            found[some] = np.minimum(found[some], fastest)
        result: Array = np.maximum(known, found)
        return result

    def _row(self, view: View, microbatches: int) -> _Row:
        mesh, profile = view.region.mesh, view.profile
        if profile is None or not self.scaler.suits(profile):
            layers = self._sending(self.scaler.scaled(view.region.key, view.times), view.region)
            best = self._best_ways(mesh, view.ways)
            return _Row(layers, with_sums(best.proven, microbatches), with_sums(best.roomy, microbatches))
        ways = of_weights(view.ways)
        every = [self._of_way(mesh, profile, way, microbatches, split=True).proven for way in ways]
        stored = [every[place] for place in undominated(every)]
        free_of_state = [way._replace(state=0.0) for way in stored]
        roomy = [free_of_state[place] for place in undominated(free_of_state)]
        return _Row(self._sending(self.scaler.placed(profile), view.region, profile), stored, roomy)

    def _sending(self, layers: Layers, region: Region, profile: Profile | None = None) -> Layers:
        """With messages between pipeline ranks as of ``profile``, or else as small as any of as many rows can be."""
        if profile is None:
            share = scaled(self.scaler.root.key, region.key) or 0.0
            return replace(layers, sent=self.costing.sent_seconds(self.scaler.root, region.mesh, share))
        return replace(layers, sent=self.costing.sent_seconds(profile, region.mesh))

    def _fastest(self, rows: Sequence[_Row], ranks: Ranks, chunks: Sequence[int], microbatches: int) -> Array:
        """As if all fitted."""
        pairs = [(without_memory(row.layers), row.roomy) for row in rows]
        layers, ways = beside_each_other(pairs)
        found = least_seconds(layers, ways, ranks, microbatches, _BOUNDLESS)
        if ranks.goes_on:
            found = np.maximum(found, self._by_paths(layers, ways, ranks, chunks, microbatches))
        return least_of_rows(found, pairs)

    def _by_paths(
        self, layers: Layers, ways: Sequence[Stored], ranks: Ranks, chunks: Sequence[int], microbatches: int
    ) -> Array:
        """By way, what takes as long as the passes of the fastest of interleaved schedules with these ``chunks``, or of
        those on a V (no chunks)."""
        paths, sizes, stored = self.costing.interleaving, (microbatches, layers.count), np.array(ways, dtype=np.float64)
        each = np.stack(passes_of(layers, stored), axis=1)
        beside = np.stack(np.broadcast_arrays(*layers.beside, each[:, 0])[:2], axis=1)
        shared = microbatches * beside.sum(axis=1) / ranks.count if ranks.spreads_head else np.full(len(each), np.inf)

        def inner(counts: Counts) -> Array:
            return counts.layer_seconds(layers.count, each, layers.ahead, layers.behind) + counts.sent(layers.sent)

        def whole(counts: Counts) -> Array:
            """With the other calls: in any stage, or as ranks share them."""
            least = beside[:, 0] * counts.forward.min() + beside[:, 1] * counts.backward.min()
            found: Array = inner(counts) + np.minimum(shared, least)
            return found

        if not chunks:
            return whole(paths.on_v(ranks.count, *sizes))
        found: list[Array] = []
        for number in chunks:
            ends = paths.counts(ranks.count, number, *sizes, ends=True)
            passes = whole(ends)
            if ranks.spreads_head:  # it may be computed while the last backwards run
                passes = np.maximum(inner(ends), whole(paths.counts(ranks.count, number, *sizes, ends=False)))
            found.append(passes)
        least: Array = np.min(found, axis=0)
        return least

    def likely(self, region: Region, ways: Iterable[Way], times: Times, like: Profile | None) -> float:
        """Seconds of a likely step of ``region``, with one stage on each rank, or with many.

        ``like`` is a profile with as many ranks on each axis: other rows take as long, and weights are split as there.
        """
        if like is None or not self.scaler.suits(like):
            return float(self.all_likely([region], [list(ways)], [times])[0])
        layers, ways = self.scaler.scaled(region.key, times.layers), list(ways)
        layers = layers.slower(self.scaler.alike(like, region.rows / like.key.rows))
        layers = self._sending(layers.waiting(*like.host_passes(self.scaler.block)), region)
        count = region.microbatches
        every = [self._of_way(region.mesh, like, way, count, split=False) for way in ways]
        stored = [every[place] for place in undominated(every)]
        last = np.array(self.scaler.last_bytes(region.key))
        return float(self._likely_seconds(region, layers, stored, last, away=any_away(ways)).min())

    def all_likely(self, regions: Sequence[Region], ways: Sequence[Sequence[Way]], times: Sequence[Times]) -> Array:
        """The same of ``regions`` with as many pipeline ranks and microbatches, like which nothing is known."""
        count = regions[0].microbatches
        best = (self._best_ways(region.mesh, some) for region, some in zip(regions, ways, strict=True))
        stored = [with_sums(each.likely, count) for each in best]
        pairs = zip(regions, times, strict=True)
        each = [self._sending(self.scaler.scaled(r.key, its.layers).waiting(*its.host), r) for r, its in pairs]
        rows = list(zip(each, stored, strict=True))
        layers, every = beside_each_other(rows)
        last = np.repeat([self.scaler.last_bytes(region.key) for region in regions], list(map(len, stored)))
        away = any_away(itertools.chain.from_iterable(ways))
        return least_of_rows(self._likely_seconds(regions[0], layers, every, last, away=away), rows)

    def _likely_seconds(
        self, region: Region, layers: Layers, stored: Sequence[Stored], last: Array, *, away: bool
    ) -> Array:
        """By way, for the best of what stages are likely; the last call works in ``last`` bytes."""
        pp, count = region.mesh.pp, region.microbatches
        chunks = max(1, min(_STAGES, layers.count // pp))
        straight = even(layers, straight_kept(pp, count), (pp - 1, straight_messages(pp, count)), 1)
        inputs = np.maximum(layers.inputs, layers.issued - layers.weights)
        waited_for = inputs / np.maximum(inputs + layers.weights, _TINY)  # of a backward, where it is split
        kinds = [replace(straight, idle=(straight.idle[0], waited_for * straight.idle[1]))]
        if chunks > 1 < pp:
            looped, folded = ((waited(pp, count, each), looped_messages(pp, each)) for each in (chunks, 2))
            kinds.append(even(layers, looped_kept(pp, count, chunks), looped, chunks))
            kinds.append(even(layers, 1.5 * folded_kept(pp, count), folded, 2))
        if chunks > 1 == pp:
            kinds.append(replace(even(layers, looped_kept(pp, count, chunks), (0.0, 0.0), chunks), stages=chunks))
        kinds = [with_last(ranks, last, "straight") for ranks in kinds]
        hosts = [self._host(ranks, region, (), away=away) for ranks in kinds]
        hosts = [host and host._replace(roughly=True) for host in hosts]
        budget = self.costing.budget_bytes
        every = [
            _with_moves(least_seconds(layers, stored, ranks, count, budget, host), layers, stored, ranks, count)
            for ranks, host in zip(kinds, hosts, strict=True)
        ]
        best: Array = np.min(every, axis=0)
        return best

    def estimates(self, points: Sequence[Point], profile: Profile, *, kept: bool = False) -> Array:
        """Seconds of likely steps of ``points`` of one family, as if all ranks had as many layers; with what these
        really keep (``kept``), which takes long to find, or as little as is possible."""
        family = points[0].family
        if family.schedule not in SCHEDULES or not self.scaler.suits(profile):
            return np.array([self.costing.bound(point, profile) for point in points])
        region, count = family.region, family.region.microbatches
        layers = self.scaler.placed(profile) if kept else self.scaler.timed(profile)
        layers = layers.with_head(self.costing.again_seconds(points[0], profile))
        layers = self._sending(layers.waiting(*profile.host_passes(self.scaler.block)), region, profile)
        stored = [self._of_point(point, profile) for point in points]
        asked = (family.schedule, region.mesh.pp, count, family.chunks, MODES[family.vocabulary].head)
        likely = self.costing.keeping.likely(*asked, Ratios.of(*profile.passes))
        waits = likely.waits, likely.messages
        ranks = even(layers, likely.kept, waits, stages_of(points[0]) // region.mesh.pp)
        if not MODES[family.vocabulary].head and points[0].head_chunks == 1:
            last = np.array(self.scaler.last_bytes(region.key))
            ranks = with_last(ranks, last, SCHEDULES[family.schedule].placement)
        host = self._copies(points[0], even=True)
        later = likely.later * profile.costs[self.scaler.block].later_bytes
        room = self.costing.budget_bytes - later * math.ceil(layers.count / region.mesh.pp)
        found = least_seconds(layers, stored, ranks, count, room, host)
        return found if region.mesh.pp == 1 else found * self._unevenness(family, profile)

    def _unevenness(self, family: Family, profile: Profile) -> float:
        ranks, stages = family.region.mesh.pp, stages_of(family)
        key = profile.key, ranks, stages, splits_head(family)
        if key not in self._uneven:
            seconds = [unit.seconds for unit in profile.waiting_units]
            inner = seconds[1:-1] if splits_head(family) and len(seconds) > 2 else seconds
            self._uneven[key] = unevenness(inner, math.fsum(seconds) - math.fsum(inner), ranks, stages // ranks)
        return self._uneven[key]

    def bounds(self, points: Sequence[Point], profile: Profile, *, memory: bool = True) -> Array:
        """What passes of each of ``points`` of one family are not below, all or none of which may have activations on
        the host; without ``memory``, as if all fitted."""
        family = points[0].family
        if family.schedule not in SCHEDULES or not self.scaler.suits(profile):
            return np.zeros(len(points))
        found = np.empty(len(points))
        for chunks in {point.head_chunks for point in points}:
            places = [place for place, point in enumerate(points) if point.head_chunks == chunks]
            some = [points[place] for place in places]
            passes = self._by_passes(some, profile)
            found[places] = np.maximum(passes, self._by_memory(some, profile)) if memory else passes
        return found

    def _by_passes(self, points: Sequence[Point], profile: Profile) -> Array:
        """As if all fitted."""
        family, region = points[0].family, points[0].region
        again = self.costing.again_seconds(points[0], profile)

        def found() -> Array:
            layers = self._sending(self.scaler.timed(profile).with_head(again), region, profile)
            kinds, ways = self._all_ranks(family, layers, np.ones(region.mesh.pp)), self._ways_of(points, profile)
            return bounds_of_each(ways, without_memory(layers), kinds, region.microbatches, _BOUNDLESS)

        passes = self._once((profile.key, again, *kind_of(points)), found)
        return np.maximum(passes, [self.costing.host_waits(point, profile) for point in points])

    def _by_memory(self, points: Sequence[Point], profile: Profile) -> Array:
        """With what ranks have to recompute, or to copy to the host."""
        family, region, keeping = points[0].family, points[0].region, self.costing.keeping
        asked = (family.schedule, region.mesh.pp, region.microbatches, family.chunks, MODES[family.vocabulary].head)
        kept, host = keeping.least(*asked), self._copies(points[0])
        beside = keeping.beside(*asked, away=host is not None)
        again = self.costing.again_seconds(points[0], profile)
        is_whole = points[0].head_chunks == max(1, profile.key.chunks) and not splits_head(family)

        def found() -> Array:
            layers = self._sending(self.scaler.placed(profile).with_head(again), region, profile)
            kinds, ways = self._all_ranks(family, layers, kept), self._ways_of(points, profile)
            kinds = [replace(ranks, passing=(int(layers.behind <= 1), 0), beside=beside) for ranks in kinds]
            if is_whole:
                last, placement = np.array(self.scaler.placed_last_bytes(profile)), SCHEDULES[family.schedule].placement
                kinds = [with_last(ranks, last, placement) for ranks in kinds]
            return bounds_of_each(ways, layers, kinds, region.microbatches, self.costing.budget_bytes, host)

        if host is not None:
            return found()
        held = kept.tobytes(), None if beside is None else beside.tobytes(), is_whole, again
        return self._once((profile.key, *kind_of(points), *held), found)

    def _once(self, key: tuple[object, ...], found: Callable[[], Array]) -> Array:
        """What is ``found``, kept for families that work and keep alike."""
        if key not in self._found:
            self._found[key] = found()
        return self._found[key]

    def _ways_of(self, points: Sequence[Point], profile: Profile) -> list[Stored]:
        return [self._of_point(point, profile) for point in points]

    def _all_ranks(self, family: Family, layers: Layers, kept: Array) -> list[Ranks]:
        """Ways to say how ranks work under a schedule, each of which is a bound."""
        found, row = [ranks_of(family, layers, kept)], SCHEDULES[family.schedule]
        pp, count, heads = family.region.mesh.pp, family.region.microbatches, splits_head(family)
        if pp == 1 or row.placement == "straight":
            return found
        is_v, paths = row.placement == "v", self.costing.interleaving
        placement = v_shaped(pp) if is_v else going_round(pp, family.chunks or 2)
        for ends in (False,) if is_v else (True, False) if heads else (True,):
            sizes = count, layers.count
            counts = paths.on_v(pp, *sizes) if is_v else paths.counts(pp, family.chunks or 2, *sizes, ends=ends)
            ranks = placed(layers, placement, counts, count, kept, ends=ends)
            puts_off = is_v and row.splits_backward
            ranks = replace(ranks, puts_off=puts_off, spreads_head=heads, skips_head=heads and ends)
            found.append(replace(ranks, last=last_rank(family)))
        return found

    def _copies(self, point: Point, *, even: bool = False) -> Host | None:
        """What copies to the host and back have to keep up with, however long a rank's stages are or if they are
        ``even``; None where there are none."""
        rate, region = self.costing.swap_rate([point.schedule], point.region.microbatches), point.region
        if not rate or not activations_on_host(point.offload) or stages_of(point) == 1:
            return None
        asked = (point.schedule, region.mesh.pp, region.microbatches, point.chunks, MODES[point.vocabulary].head)
        away = self.costing.keeping.away(*asked, rate, even=even)
        most = max(len(rank.spills) for rank in away)
        rows = [rank.spills + rank.spills[-1:] * (most - len(rank.spills)) for rank in away]
        kept, times, *ahead = (
            np.array([[getattr(spill, name) for spill in row] for row in rows]).T
            for name in ("kept", "times", "forwards", "backwards", "most_forwards", "most_backwards")
        )
        stays = np.array([rank.most for rank in away])
        return Host(rate, self._host_room, kept, times, (ahead[0], ahead[1]), (ahead[2], ahead[3]), stays)

    @property
    def _host_room(self) -> float:
        return self.costing.cluster.device.host_memory_bytes

    def _host(
        self, ranks: Ranks, region: Region, schedules: Iterable[str], *, away: bool, fills: bool = False
    ) -> Host | None:
        """Under one of ``schedules``. ``fills``: ranks keep the most before their first backward, as those with one
        stage do."""
        rate = self.costing.swap_rate(schedules, region.microbatches)
        if not away or not rate or ranks.count * ranks.stages == 1:
            return None
        pp, count, none = region.mesh.pp, region.microbatches, np.zeros(ranks.count)
        steady, ahead = max(0, count - _STEADY * pp), (ranks.kept, none)
        most, spans = ahead, np.maximum(1.0, ranks.kept)
        if ranks.goes_on:  # once in a round; none of those waits any more that did two rounds before
            most, spans = (none + min(count, 2 * pp), none), none + 3 * pp
        if ranks.goes_on and not fills:  # a rank may keep the most at any time
            most = ahead = none + count / 2, none + count / 2
        ahead, most = ((forwards[None], backwards[None]) for forwards, backwards in (ahead, most))
        return Host(rate, self._host_room, ranks.kept[None], (steady / spans)[None], ahead, most, none)

    def _best_ways(self, mesh: Mesh, ways: Sequence[Way]) -> BestWays:
        """Of regions with this mesh."""
        apart = of_weights(ways)
        key = (mesh.dp, mesh.ep, mesh.cp, mesh.tp, mesh.borrowed, apart)
        if key not in self._best:
            self._best[key] = BestWays([self._split_in(mesh, way) for way in apart])
        return self._best[key]

    def _of_region(self, mesh: Mesh, way: Way, microbatches: int) -> Stored:
        (stored,) = with_sums([self._split_in(mesh, way)], microbatches)
        return stored

    def _split_in(self, mesh: Mesh, way: Way) -> tuple[Stored, Adding]:
        """Weights that are split as far as axes go, and the sums of their gradients."""
        key = (mesh.dp, mesh.ep, mesh.cp, mesh.tp, mesh.borrowed, way)
        if key not in self._ways:
            root, sizes, spread = self.scaler.root, self._root_sizes, self._spread(mesh)
            least = MESSAGES.large(mesh.zero_shards(way[1]))
            large = sum(size // mesh.tp >= least for size in sizes) if mesh.experts == 1 else 0
            whole, kinds = self._weights_of(root).get((), Weights(0, 0, 0)), self._kinds_of(root)
            lines = {line: whole.times(share) for line, share in spread.items()}
            stored = self._stored(mesh, lines, way, (), {mesh.data_axes(): Messages(large, 0)})
            self._ways[key] = stored._replace(**self._least_passing(mesh, way, sizes, whole))
            shared = way, tuple((share, self._shards(mesh, way, line)) for line, share in spread.items())
            if shared not in self._sums:  # whatever axes these shares are on
                parts = {k._replace(split=line): share * n for line, share in spread.items() for k, n in kinds.items()}
                self._sums[shared] = self._adding(mesh, parts, {line: line for line in spread}, way, split=True)
            self._added[key] = self._sums[shared]
        return self._ways[key], self._added[key]

    def _of_point(self, point: Point, profile: Profile) -> Stored:
        row = SCHEDULES[point.schedule]
        microbatches = 1 if row.asynchronous else point.region.microbatches
        return self._of_way(point.region.mesh, profile, point.way, microbatches, split=row.splits_backward)

    def _of_way(self, mesh: Mesh, profile: Profile, way: Way, microbatches: int, *, split: bool) -> Stored:
        way = way.of_weights
        if splits_further(way, profile):  # as far as it may
            return self._of_region(mesh, way, microbatches)
        return self._of_profile(mesh, profile, way, microbatches, split=split)

    def _of_profile(self, mesh: Mesh, profile: Profile, way: Way, microbatches: int, *, split: bool) -> Stored:
        key = (profile.key, mesh.dp, way)
        if key not in self._ways:
            lines: dict[tuple[str, ...], Weights] = {}
            along: dict[tuple[str, ...], list[LayerWeight]] = {}
            for axes, each in self._weights_of(profile).items():
                lines[mesh.data_axes(axes)] = lines.get(mesh.data_axes(axes), Weights(0, 0, 0)) + each
            for weight in weights_of_layer(profile, self.scaler.block):
                along.setdefault(mesh.data_axes(weight.axes), []).append(weight)
            sent = {
                line: Messages.of(weights, mesh.zero_shards(way[1], line) if line else 1)
                for line, weights in along.items()
            }
            partly = {mesh.data_axes(s) for s, each in profile.weights.items() if profile.summed.get(s) != each}
            stored = self._stored(mesh, lines, way, set(lines) - partly, sent)
            self._ways[key] = stored._replace(**self._passing(mesh, way, profile))
        if (*key, split) not in self._added:
            sums = {each: mesh.data_axes(each) for each in profile.weights}
            self._added[*key, split] = self._adding(mesh, self._kinds_of(profile), sums, way, split=split)
        return self._ways[key]._replace(added=self._added[*key, split].each(microbatches))

    def _passing(self, mesh: Mesh, way: Way, profile: Profile) -> dict[str, float]:
        """Of a layer's weights and gradients, what comes and goes."""
        options = self.costing.options.model_copy(update=way._asdict())
        machine = self.costing.machine_of(mesh, way.zero_ranks)
        return comes_and_goes(profile, self.scaler.block, options, machine)

    def _least_passing(self, mesh: Mesh, way: Way, sizes: Sequence[int], weights: Weights) -> dict[str, float]:
        """The same if weights of these ``sizes`` were split as far as axes go."""
        zero, zero_ranks, offload = way
        split = mesh.tp * max(1, mesh.experts)
        shards = mesh.zero_shards(zero_ranks)
        if not zero or shards == 1:
            return {}
        small = sum(size for size in sizes if size < MESSAGES.large(shards))
        messages = [small, *(size for size in sizes if size >= MESSAGES.large(shards))] if small else sizes
        sent = self.costing.sent_bytes(weights) / max(1, weights.copies)
        flying = sent * sum(messages[:2]) / split if zero >= 2 else 0.0
        streams = weights_streamed(zero, offload, shards)
        return {"gathered_bytes": sum(sizes) / split if streams else 0.0, "flying_bytes": flying}

    def _weights_of(self, profile: Profile) -> dict[tuple[str, ...], Weights]:
        """What each layer has at least, by the axes that it is split on."""
        if profile.key not in self._shares:
            self._shares[profile.key] = _by_split(self._kinds_of(profile))
        return self._shares[profile.key]

    def _kinds_of(self, profile: Profile) -> Counter[Kind]:
        if profile.key not in self._kinds:
            self._kinds[profile.key] = layer_weights(profile, self.scaler.block)
        return self._kinds[profile.key]

    def _spread(self, mesh: Mesh) -> dict[tuple[str, ...], float]:
        """Which part of a layer's weights one rank has, if they were split as far as axes go, by the ranks that have
        the same."""
        experts = self.expert_share if mesh.experts > 1 else 0.0
        parts = {mesh.data_axes(): (1 - experts) / mesh.tp}
        if experts:
            line = mesh.data_axes(mesh.expert_axes)
            inner = 1 if "tp" in mesh.borrowed else mesh.tp
            parts[line] = parts.get(line, 0.0) + experts / mesh.experts / inner
        return parts

    def _shards(self, mesh: Mesh, way: Way, line: tuple[str, ...]) -> int:
        """Over how many ranks of a ``line`` the rows of what these have in common are stored."""
        zero, zero_ranks, _ = way
        return mesh.zero_shards(zero_ranks, line) if zero and line else 1

    def _adding(
        self,
        mesh: Mesh,
        kinds: Mapping[Kind, float],
        lines: Mapping[tuple[str, ...], tuple[str, ...]],
        way: Way,
        *,
        split: bool,
    ) -> Adding:
        """Of a layer's gradients, of so many elements; ``lines`` are the ranks that have the same of what is split so.
        Without the sums that ``split`` backwards make by themselves."""
        zero, _, offload = way
        shards = tuple((split, self._shards(mesh, way, line)) for split, line in lines.items())
        options = self.costing.options.model_copy(update={"zero": zero, "offload": offload})
        return adding(Sums(shards, zero, offload, 1, split), kinds, options, self.costing.cluster.device)

    def _stored(
        self,
        mesh: Mesh,
        lines: Mapping[tuple[str, ...], Weights],
        way: Way,
        summed: Iterable[tuple[str, ...]],
        sent: Mapping[tuple[str, ...], Messages],
    ) -> Stored:
        """``summed`` are the lines over which all gradients are, ``sent`` in how many messages what is along each."""
        zero, zero_ranks, offload = way
        host = self.costing.cluster.device.host_bytes_per_second
        away = masters_on_host(offload)
        streams = weights_streamed(zero, offload, mesh.zero_shards(zero_ranks))
        machine = self.costing.machine_of(mesh, zero_ranks)
        state = hosted = gathered = scattered = gather_held = scatter_held = 0.0
        for axes, weights in lines.items():
            shards = self._shards(mesh, way, axes)
            link = machine.lines[axes].shard if shards > 1 and axes in machine.lines else None
            gathers, scatters = (max(0, each - 1) for each in sent.get(axes, (0, 0)))  # further messages
            hosted += self.costing.hosted_bytes(weights) / shards if away else 0.0
            state += 0.0 if away else self.costing.trained_bytes(weights) / shards
            state += weights.masters / (shards if zero >= 2 else 1)
            twice = shards > 1 or weights.copies != weights.masters or away
            if not streams:
                state += weights.copies if twice else 0.0
            else:
                if link:
                    seconds = seconds_of("all_gather", int(weights.copies) - gathers, shards, link)
                    seconds += gathers * seconds_of("all_gather", 1, shards, link)
                    gathered += seconds
                    gather_held += seconds * machine.device.held_share(link)
                gathered += weights.copies / shards / host if away and host else 0.0
            if zero >= 2 and axes in summed and link:
                seconds = seconds_of("reduce_scatter", int(self.costing.sent_bytes(weights)) - scatters, shards, link)
                seconds += scatters * seconds_of("reduce_scatter", 1, shards, link)
                scattered += seconds
                scatter_held += seconds * machine.device.held_share(link)
        held = {"gather_held": gather_held / (gathered or 1.0), "scatter_held": scatter_held / (scattered or 1.0)}
        return Stored(state, gathered, scattered, hosted=hosted, **held, **self._at_ends(mesh, lines, way))

    def _at_ends(self, mesh: Mesh, lines: Mapping[tuple[str, ...], Weights], way: Way) -> dict[str, float]:
        """What comes before all passes and after them, of a layer: all layers travel together."""
        count, totals = self.scaler.layers.count, np.zeros(4)
        for axes, weights in lines.items():
            whole = weights.times(count)
            totals += self.costing.line_seconds(axes, whole, whole, count, mesh, way)
        gathered, scattered, rest, updated = (totals / count).tolist()
        at_first = 0.0 if weights_streamed(way.zero, way.offload, mesh.zero_shards(way.zero_ranks)) else gathered
        before = 0.0 if masters_on_host(way.offload) else at_first
        return {"before": before, "after": scattered + rest, "each": scattered, "updated": updated}


def _with_moves(passes: Array, layers: Layers, stored: Sequence[Stored], ranks: Ranks, microbatches: int) -> Array:
    """By way, seconds of a step whose ``passes`` likely take so long: as :meth:`Costing.likely` has it of a point."""
    share, works = layers.count / ranks.count, (ranks.count, microbatches)
    before, after, each, updated, gathered = (
        share * np.array([getattr(way, name) for way in stored])
        for name in ("before", "after", "each", "updated", "gathered")
    )
    forward, backward = (share * np.asarray(pass_) for pass_ in (layers.forward, layers.inputs + layers.weights))
    left = microbatches * np.maximum(0.0, each - backward) * (BESIDE if ranks.stages > 1 else 1.0)
    first = ranks.count * forward  # of one microbatch through all layers
    streamed = first + (microbatches - 1) * each + 2 * max(0, microbatches - 1) * gathered
    moved = (before, forward), (after, backward)
    ends = sum(left_seconds(moves, pass_, works, ranks.stages, layers.count) for moves, pass_ in moved)
    found: Array = np.maximum(passes + left, streamed) + ends + updated
    return found


def _by_split(kinds: Mapping[Kind, int]) -> dict[tuple[str, ...], Weights]:
    """All of them, by the axes that they are split on."""
    found: dict[tuple[str, ...], Weights] = {}
    for kind, elements in kinds.items():
        here = Weights(elements, elements * kind.dtype.itemsize, elements * kind.master.itemsize)
        found[kind.split] = found.get(kind.split, Weights(0, 0, 0)) + here
    return found
