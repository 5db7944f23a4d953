"""What many points take at least, at once: a row of equal layers on pipeline ranks, stored in several ways.

A rank r that holds n layers takes ``rows[r, n]`` seconds of a step: its passes, with what it has to recompute, gather
or copy to the host for n layers to fit. Beside that it waits for layers of other ranks. A weighted mean over the ranks
of what each takes and waits for is below the step; in it, each layer counts by what the next one of its rank takes
more, and by how much others wait for it. So no cut is below the sum of the least of these, one for each layer, of those
with which no rank takes longer than that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from autopar.search.hulls import Array, Figure, Flags, amounts, few_amounts
from autopar.search.interleaving import Counts, messages

_NOTHING: Final = np.zeros(1)
_TINY: Final = 1e-30  # of a share: there may be none
_WIDE: Final = 3  # times its even share of the layers that a rank is looked at with
_PARTS: Final = (0.16, 0.08, 0.04, 0.02, 0.01, 0.005)  # by which a bound may turn out to be higher


@dataclass(frozen=True)
class Layers:
    """``count`` equal layers, ``ahead`` other calls before the first, ``behind`` after the last; with others between,
    all count as if they were at both ends. Of a microbatch: seconds of a layer's ``forward``, of the part of its
    backward that the next one waits for (``inputs``), and of its ``weights``' gradients; seconds of all other calls
    (``beside``: forward, backward), and of these the last one's at least (``last``). A layer may keep ``saved`` bytes
    (falling) for ``extra`` seconds more (rising, convex), a ``share`` of both, and works in ``working`` bytes; what its
    weights' gradients need takes ``later`` bytes. For a backward that waits for it, the host needs ``issued`` seconds,
    whatever is computed in it. What a stage gives takes ``sent`` seconds to the next rank, and what comes back to it.
    What isn't counted may differ by way to store them: then it is an array."""

    count: int
    ahead: int
    behind: int
    forward: Figure
    inputs: Figure
    weights: Figure
    beside: tuple[Figure, Figure]
    saved: Array
    extra: Array
    working: Figure
    share: Figure = 1.0
    last: tuple[float, float] = (0.0, 0.0)
    later: Figure = 0.0
    issued: Figure = 0.0
    sent: tuple[Figure, Figure] = (0.0, 0.0)

    def slower(self, other: Layers) -> Layers:
        """With passes that take as long as those of ``other``, if they don't already."""
        return replace(
            self,
            forward=np.maximum(self.forward, other.forward),
            inputs=np.maximum(self.inputs, other.inputs),
            weights=np.maximum(self.weights, other.weights),
            beside=(np.maximum(self.beside[0], other.beside[0]), np.maximum(self.beside[1], other.beside[1])),
        )

    def with_head(self, more: float) -> Layers:
        """Where the last call, which is the head, takes so many seconds ``more``."""
        (forward, backward), last = self.beside, self.last
        return replace(self, beside=(forward, backward + more), last=(last[0], last[1] + more))

    def waiting(self, forward: float, backward: float) -> Layers:
        """With passes that the host needs so long for, where it has no lead."""
        return replace(self, forward=np.maximum(self.forward, forward), issued=backward)


class Stored(NamedTuple):
    """A way to store weights: bytes of a layer that stay from step to step, seconds of gathering its weights for each
    pass (0: they are there), of a SCATTER of its gradients for each microbatch, and of adding these up; the share of a
    device's multiprocessors that the former two hold (``gather_held``, ``scatter_held``,
    :mod:`autopar.planner.contention`); bytes of a layer's weights that come and go (``gathered_bytes``), of the last
    messages of its gradients (``flying_bytes``), and of its state on the host (``hosted``); what each pass takes for
    casts and copies of weights that are gathered for it (``copied``); bytes of those of the last call, if that is no
    layer (``last_bytes``). What is likely alone: seconds of gathering them ``before`` all passes, of summing gradients
    ``after`` them, of that for ``each`` microbatch, and of their update."""

    state: float
    gathered: float
    scattered: float
    added: float = 0.0
    gather_held: float = 0.0
    gathered_bytes: float = 0.0
    flying_bytes: float = 0.0
    hosted: float = 0.0
    copied: float = 0.0
    last_bytes: float = 0.0
    scatter_held: float = 0.0
    before: float = 0.0
    after: float = 0.0
    each: float = 0.0
    updated: float = 0.0

    @property
    def proven(self) -> Stored:
        """Without what is likely alone."""
        return self._replace(before=0.0, after=0.0, each=0.0, updated=0.0)


@dataclass(frozen=True)
class Ranks:
    """How pipeline ranks work, by rank. In the mean, each counts with ``share`` (they sum to 1 at most), and a layer of
    each of its stages is waited for so many forwards and backwards (``waits``, ``[rank, stage]``); ``idle`` layers are
    waited for wherever they are, and so many ``messages`` to the next rank and back; a microbatch crosses ``hops`` on
    its way through all stages. ``must`` says which stages have a layer in any case. ``ahead`` layers at least come
    before a rank's first forward; if they do after its last backward, too, these ``ends`` count. ``puts_off``: weights'
    gradients are a pass of their own. ``kept`` microbatches wait for a backward at most, after as many forwards, or
    when some backwards ran as well (``goes_on``: there are several ``stages``). A split head is spread over all ranks,
    in time that counts with that of layers or (``skips_head``) doesn't. A rank works in ``working`` bytes at least,
    whatever its layers do, and holds the gathered weights of so many layers and the messages of so many (``passing``).
    What a layer computes again may be taken to be there as a whole in its backward (``transient``). ``last`` is the
    rank that has the last call, if that isn't spread. ``beside``: so many microbatches wait for a backward while what
    weights' gradients of another one of a stage need is there (None: backwards leave nothing). What is waited for may
    be said of passes alone (``by_passes``): not of copies to the host, which may have taken the time in which a path is
    elsewhere."""

    share: Array
    waits: tuple[Array, Array]
    must: Flags
    idle: tuple[Figure, Figure]
    ahead: Array
    ends: bool
    puts_off: bool
    kept: Array
    goes_on: bool = False
    stages: int = 1
    spreads_head: bool = False
    skips_head: bool = False
    working: Array | float = 0.0
    passing: tuple[int, int] = (0, 0)
    transient: bool = False
    last: int | None = None
    beside: Array | None = None
    messages: tuple[float, float] = (0.0, 0.0)
    hops: int = 0
    by_passes: bool = False

    @property
    def count(self) -> int:
        return len(self.share)


class Host(NamedTuple):
    """Where activations may go, at ``rate`` bytes per second: as many as it has ``room`` for, of each rank, beside what
    of its state is there. For some numbers of microbatches that a rank would keep (``kept``, ``[level, rank]``): how
    often in a step what it has no room for of these is copied (``times``), beside how many forwards and backwards
    (``ahead``, at least, and ``most``) that is for the first time. Of some microbatches nothing goes: ``stays`` of each
    rank. What layers recompute is told apart closely, or (``roughly``) in a few steps: it may be less by one."""

    rate: float
    room: float
    kept: Array
    times: Array
    ahead: tuple[Array, Array]
    most: tuple[Array, Array]
    stays: Array
    roughly: bool = False


def straight(layers: Layers, ranks: int, microbatches: int, kept: Array, *, ends: bool) -> Ranks:
    """One stage per rank: each waits for all layers of those ahead, to begin with, and if that ``ends`` so at the end.

    Shares are those for which the mean is largest where a layer takes as long wherever it is: the dual of filling
    stages in order.
    """
    waited = layers.forward + ends * (layers.inputs + layers.weights)
    whole = microbatches * (layers.forward + layers.inputs + layers.weights)
    share = (1 - min(1.0, waited / whole if whole else 0.0)) ** np.arange(ranks)[::-1]
    share = share / share.sum()
    later = (np.cumsum(share[::-1])[::-1] - share)[:, None]
    none = np.zeros((ranks, 1))
    waits = later, later if ends else none
    found = Ranks(share, waits, none > 0, (0.0, 0.0), _ahead(layers, ranks), ends, False, kept)
    return _with_messages(found, ranks - 1)


def side_by_side(rows: Sequence[tuple[Layers, int]]) -> Layers:
    """Of as many ways as each has, one after the other; what they may keep are shares of the same."""
    times, (first, _) = [count for _, count in rows], rows[0]
    assert all(np.array_equal(layers.saved, first.saved) for layers, _ in rows)

    def column(figures: Iterable[Figure]) -> Array:
        found: Array = np.repeat(np.array(list(figures), dtype=np.float64), times)
        return found

    return replace(
        first,
        forward=column(layers.forward for layers, _ in rows),
        inputs=column(layers.inputs for layers, _ in rows),
        weights=column(layers.weights for layers, _ in rows),
        beside=(column(layers.beside[0] for layers, _ in rows), column(layers.beside[1] for layers, _ in rows)),
        working=column(layers.working for layers, _ in rows),
        later=column(layers.later for layers, _ in rows),
        issued=column(layers.issued for layers, _ in rows),
        share=column(layers.share for layers, _ in rows),
        sent=(column(layers.sent[0] for layers, _ in rows), column(layers.sent[1] for layers, _ in rows)),
    )


def folded(layers: Layers, ranks: int, kept: Array, *, ends: bool, stages: int, hops: int) -> Ranks:
    """Several ``stages`` per rank, wherever they are: rank r waits for a layer of each of those ahead at least, and for
    as many messages."""
    ahead, none = _ahead(layers, ranks), np.zeros((ranks, 1))
    idle = float(ahead.mean())
    share = np.full(ranks, 1 / ranks)
    waits = idle, ends * idle
    found = Ranks(share, (none, none), none > 0, waits, ahead, ends, False, kept)
    return _with_messages(replace(found, goes_on=True, stages=stages), hops)


def _with_messages(ranks: Ranks, hops: int) -> Ranks:
    """With one to each next rank before its first forward, and if they end so, after its last backward."""
    each = float(ranks.share @ np.arange(ranks.count))
    return replace(ranks, messages=(each, ranks.ends * each), hops=hops)


def placed(
    layers: Layers, placement: Sequence[int], counts: Counts, microbatches: int, kept: Array, *, ends: bool
) -> Ranks:
    """Several stages on each rank, of which paths have these ``counts``."""
    stage = np.argsort(placement, kind="stable").reshape(len(kept), -1)
    forward, backward = counts.forward[stage], counts.backward[stage]
    share = backward.min(axis=1) / microbatches
    waits = (each - microbatches * share[:, None] for each in (forward, backward))
    must = (stage >= layers.ahead) & (stage < forward.size - layers.behind)
    found = Ranks(share, (next(waits), next(waits)), must, (0.0, 0.0), _ahead(layers, len(kept)), ends, False, kept)
    hops = int(messages(placement)[-1])
    return replace(found, goes_on=True, stages=stage.shape[1], messages=counts.messages, hops=hops, by_passes=True)


def _ahead(layers: Layers, ranks: int) -> Array:
    found: Array = np.maximum(0.0, np.arange(ranks) - float(layers.ahead))
    return found


def least_seconds(
    layers: Layers, ways: Sequence[Stored], ranks: Ranks, microbatches: int, budget: float, host: Host | None = None
) -> Array:
    """By way, seconds that no step of these ``ranks`` is below; inf where layers don't fit in ``budget`` bytes.

    With a ``host``, what isn't kept may be there instead of being recomputed.
    """
    stored = np.array(ways, dtype=np.float64)
    beside, (forward, backward) = _beside(layers, ranks, microbatches), passes_of(layers, stored)
    inputs = np.maximum(layers.inputs + stored[:, 8], layers.issued - layers.weights - stored[:, 3])
    waited = ranks.idle[0] * forward + ranks.idle[1] * backward
    waited = waited + (ranks.messages[0] * layers.sent[0] + ranks.messages[1] * layers.sent[1])
    until = backward if ranks.ends else inputs
    latency = layers.count * (forward + until) + (0.0 if ranks.spreads_head else layers.beside[0])
    latency = latency + ranks.hops * (layers.sent[0] + layers.sent[1])
    shared = _takes(layers, ways, ranks, microbatches, budget, host).least(layers.count, beside + waited)
    found = np.maximum(shared, latency)
    moves = stored[:, 1:3].any()
    result: Array = np.maximum(found, moved_seconds(layers, stored, ranks, microbatches)) if moves else found
    return result


def passes_of(layers: Layers, stored: Array) -> tuple[Array, Array]:
    """By way, seconds of a layer's forward and backward, which wait for no gather: what others wait for."""
    forward = layers.forward + stored[:, 8]
    backward = np.maximum(layers.inputs + layers.weights + stored[:, 3] + stored[:, 8], layers.issued)
    held = stored[:, 4]
    return forward + _slowed(forward, (stored[:, 1], held)) if held.any() else forward, backward


def moved_seconds(layers: Layers, stored: Array, ranks: Ranks, microbatches: int) -> Array:
    """By way, seconds of the stream that gathers weights for each pass and scatters gradients, one after the other, on
    the average of ranks. Before the first backward, all layers run forward once, and a rank gathers for as many
    forwards as there are and two passes more at most."""
    forward, gathered, scattered = layers.forward + np.zeros(len(stored)), stored[:, 1], stored[:, 2]
    each = layers.count / ranks.count
    found = np.zeros(len(stored))
    for gathers, until in ((2 * microbatches, 0.0), (max(0, microbatches - 2), layers.count * forward)):
        found = np.maximum(found, until + each * (gathers * gathered + microbatches * scattered))
    return found


def _beside(layers: Layers, ranks: Ranks, microbatches: int) -> Figure:
    """What calls that are no layers add, wherever they are; nothing where they may fill the time that ranks wait."""
    if ranks.skips_head:
        return 0.0
    forward, backward = layers.beside
    if ranks.spreads_head:
        return microbatches * (forward + backward) / ranks.count
    counts = [float((microbatches * ranks.share[:, None] + waits).min()) for waits in ranks.waits]
    return counts[0] * forward + counts[1] * backward


@dataclass(frozen=True)
class _Takes:
    """Of ranks with 1 to n layers, ``[way, rank, n]``: seconds until each is done (``starts``). One rank takes so long
    ``alone``, whatever layers it has. ``ranks`` wait for a layer's ``passes`` (forward, backward). ``choices`` are what
    layers may recompute: seconds of a rank's passes, and with copies."""

    starts: Array
    alone: float
    ranks: Ranks
    passes: tuple[Array, Array]
    choices: _Choices

    def least(self, count: int, rest: Array) -> Array:
        """No step with ``count`` layers is below, by way, which waits for ``rest`` in the mean.

        In a step of T seconds no rank has layers that take it longer, so the others have what is left, and none
        recomputes so little that its copies take longer; if the mean isn't below T then, no step is. T is found by
        halving, from what ranks take each on their own.
        """
        added = self._added(self.choices.within(None))
        low = np.maximum(self.alone, _lowest(self.starts, count)[:, -1])
        low = np.maximum(low, added.mean(count) + rest)
        if (self._within(low, added, count) + rest > low).any():  # a longer step allows more, so its mean is no higher
            for part in _PARTS:
                step = low * (1 + part)
                low = np.maximum(low, np.minimum(step, self._within(step, added, count) + rest))
        if self.starts.shape[-1] == count:
            return low
        # Or else a rank has more layers, each of which adds no less.
        cheapest = added.more[:, :, -1].min(axis=1)
        mean = added._replace(more=np.minimum(added.more, cheapest[:, None, None])).mean(count) + rest
        found: Array = np.minimum(low, np.maximum(self.starts[:, :, -1].min(axis=1), mean))
        return found

    def _within(self, step: Array, added: _Added, count: int) -> Array:
        """The mean where no rank has layers that take it longer than a ``step``."""
        if self.choices.copied is not None:
            added = self._added(self.choices.within(step))
        return added._replace(more=np.where(self.starts <= step[:, None, None], added.more, np.inf)).mean(count)

    def _added(self, rows: Array) -> _Added:
        """By ranks whose passes take so long."""
        ranks, (forward, backward) = self.ranks, self.passes
        more = rows.copy()
        with np.errstate(invalid="ignore"):
            more[:, :, 1:] -= rows[:, :, :-1]
            more *= ranks.share[:, None]
        more[~np.isfinite(rows)] = np.inf
        fixed = np.zeros(len(rows))
        if any(waits.any() for waits in ranks.waits):
            waited = np.multiply.outer(forward, ranks.waits[0]) + np.multiply.outer(backward, ranks.waits[1])
            nearest = waited.min(axis=2)
            more += nearest[:, :, None]
            fixed = ((waited - nearest[:, :, None]) * ranks.must).sum(axis=(1, 2))
        if not ranks.must.any():
            return _Added(more, fixed, 0)
        first = np.arange(rows.shape[-1]) < ranks.must.sum(axis=1)[:, None]  # [rank, n]: layers that it has in any case
        fixed = np.where(first, more, 0.0).sum(axis=(1, 2)) + fixed
        return _Added(np.where(first, np.inf, more), fixed, int(first.sum()))


class _Added(NamedTuple):
    """``[way, rank, n]``: what the last of n layers adds to the mean (``more``), but for so many (``had``) that ranks
    have in any case, which are ``fixed``."""

    more: Array
    fixed: Array
    had: int

    def mean(self, count: int) -> Array:
        """By way, with ``count`` layers: those that add the least."""
        found: Array = self.fixed + _lowest(self.more, count - self.had).sum(axis=1)
        return found


class _Choices(NamedTuple):
    """``[way, rank, n]``: seconds of the ``passes`` of a rank with n layers; or, where activations may go to the host,
    ``[value, way, rank, n]`` for each of some things that layers may recompute, which take so long with copies
    (``copied``)."""

    passes: Array
    copied: Array | None = None

    def within(self, step: Array | None) -> Array:
        """``[way, rank, n]``: the least whose copies take no longer than a ``step`` (None: than any); inf: none."""
        if self.copied is None:
            return self.passes
        fits = np.isfinite(self.copied) if step is None else self.copied <= step[:, None, None]
        found: Array = np.where(fits, self.passes, np.inf).min(axis=0)
        return found


def _takes(
    layers: Layers, ways: Sequence[Stored], ranks: Ranks, microbatches: int, budget: float, host: Host | None
) -> _Takes:
    """Of ranks with up to :data:`_WIDE` times their even share of the layers."""
    stored = np.array(ways, dtype=np.float64)
    most = min(layers.count, _WIDE * math.ceil(layers.count / ranks.count))
    forward, backward = passes_of(layers, stored)
    count = np.arange(1.0, most + 1)
    working = ranks.working + np.zeros((len(stored), ranks.count))
    if ranks.last is not None:
        working[:, ranks.last] += [way.last_bytes for way in ways]
    working = np.maximum(np.asarray(layers.working)[..., None], working)  # [way, rank]
    passing = stored[:, 5] * ranks.passing[0] + stored[:, 6] * ranks.passing[1]
    state = (stored[:, :1] * count)[:, None, :]
    room = budget - working[..., None] - passing[:, None, None] - state  # [way, rank, n]
    beside = None if ranks.beside is None else _beside_later(layers, ranks, budget - state, count)
    choices = _choices(layers, stored, ranks, microbatches, (room, beside), count, host)
    starts = choices.passes if choices.copied is None else choices.copied.min(axis=0)
    if not ranks.by_passes:
        choices = _Choices(starts)
    if ranks.ahead.any():
        starts = starts + ((forward + (backward if ranks.ends else 0.0))[:, None] * ranks.ahead)[:, :, None]
    if ranks.hops:
        each = np.asarray(layers.sent[0]) + (layers.sent[1] if ranks.ends else 0.0)
        starts = starts + np.multiply.outer(np.broadcast_to(each, len(stored)), np.arange(ranks.count))[..., None]
    if alone := microbatches * sum(layers.last) if ranks.last is not None else 0.0:
        starts = starts.copy()
        starts[:, ranks.last] += alone
    return _Takes(starts, alone, ranks, (forward, backward), choices)


def _lowest(values: Array, count: int) -> Array:
    """By way, the ``count`` lowest, the largest of them last."""
    flat = values.reshape(len(values), -1)
    return np.partition(flat, count - 1, axis=1)[:, :count] if count else flat[:, :0]


def _beside_later(layers: Layers, ranks: Ranks, room: Array, count: Array) -> Array:
    """What is left of ``room`` beside what the weights' gradients of a stage need: of the largest."""
    return room - _by_way(layers.later) * np.ceil(count / ranks.stages)


def _choices(
    layers: Layers,
    stored: Array,
    ranks: Ranks,
    microbatches: int,
    rooms: tuple[Array, Array | None],
    count: Array,
    host: Host | None,
) -> _Choices:
    """Of ranks with n layers, for which they have so much room: in passes, and where a stage's weights' gradients are
    due."""
    room, left = rooms
    each = _room_of_each(layers, ranks, room, count, host.stays if host is not None else ranks.kept)
    if left is not None:
        assert ranks.beside is not None
        each = np.minimum(each, _shared(left, ranks.beside[:, None] * count))
    share = _by_way(layers.share)
    extra = share * np.interp(-each / np.maximum(share, _TINY), -layers.saved, layers.extra)
    rows = microbatches * count * _layer_passes(layers, stored, ranks, count, extra)[1]
    if ranks.count > 1 and not ranks.goes_on and stored[:, 1].any():
        # The first gather is over when the first forward begins.
        rows = rows - count * np.maximum(0.0, stored[:, 1] - layers.forward)[:, None, None]
    rows = np.where(each < share * layers.saved[-1] * (1 - 1e-9), np.inf, rows)
    if host is None:
        return _Choices(rows)
    passes, copied = _copied(layers, stored, ranks, microbatches, rooms, count, host)
    return _Choices(np.maximum(passes, rows), np.maximum(copied, rows))


def _room_of_each(layers: Layers, ranks: Ranks, room: Array, count: Array, kept: Array) -> Array:
    """``[way, rank, n]``: bytes of a microbatch that each of n layers may keep on average, if a rank keeps so many;
    negative where it has no room at all."""
    waiting, most = kept[:, None] * count, _by_way(layers.share) * layers.saved[0]
    each = _shared(room, waiting)
    with np.errstate(divide="ignore", invalid="ignore"):
        if ranks.transient:
            again = (room - most) / np.maximum(waiting - 1, 1e-9)
            each = np.where((waiting > 1) & (each < most), np.minimum(each, again), each)
    return each


def _shared(room: Array, waiting: Array) -> Array:
    """Of each of so many that wait."""
    with np.errstate(divide="ignore", invalid="ignore"):
        each: Array = np.where(waiting > 0, room / waiting, np.where(room < 0, -np.inf, np.inf))
    return each


def _layer_passes(layers: Layers, stored: Array, ranks: Ranks, count: Array, extra: Array) -> tuple[Array, Array]:
    """Of one microbatch, ``[…, way, rank, n]``: seconds of each of n layers' forward, and of both passes with ``extra``
    seconds in the backward. Passes of one stage last as long as its weights are gathered for them. A scatter runs
    beside the pass that completes gradients but for those of each stage's first layer."""
    gathered, scattered, added, held, copied, scatter_held = (stored[:, i, None, None] for i in (1, 2, 3, 4, 8, 10))
    gathers, holds = (bool(stored[:, i].any()) for i in (1, (4, 10)))
    completing = _by_way(layers.weights) + added
    forward = _by_way(layers.forward) + copied
    backward = _by_way(layers.inputs) + copied + extra + (0.0 if ranks.puts_off else completing)
    if holds:
        hidden = np.maximum(0.0, 1 - ranks.stages / count) * np.minimum(
            scattered, completing if ranks.puts_off else backward
        )
        gather, scatter = (gathered, held), (hidden, scatter_held)
        forward = forward + _slowed(forward, gather)
        if ranks.puts_off:
            completing = completing + _slowed(completing, scatter)
            backward = backward + _slowed(backward, gather)
        else:
            backward = backward + _slowed(backward, gather, scatter)
    backward = np.maximum(backward, _by_way(layers.issued) - (completing if ranks.puts_off else 0.0))
    if gathers and not ranks.goes_on:
        forward, backward = np.maximum(forward, gathered), np.maximum(backward, gathered)
    return forward, forward + backward + (completing if ranks.puts_off else 0.0)


def _slowed(seconds: Array, *beside: tuple[Array, Array]) -> Array:
    """By how much a pass of so many ``seconds`` takes longer ``beside`` collectives: what these take, and the share of
    the device that they hold."""
    moved = sum(taken for taken, _ in beside)
    held = sum(taken * share for taken, share in beside) / np.maximum(moved, _TINY)
    found: Array = held * np.minimum(moved, seconds / (1 - held))
    return found


def _copied(
    layers: Layers,
    stored: Array,
    ranks: Ranks,
    microbatches: int,
    rooms: tuple[Array, Array | None],
    count: Array,
    host: Host,
) -> tuple[Array, Array]:
    """``[value, way, rank, n]``: the passes, and with the copies beside them, for some values of what layers may keep:
    between two of these, no less is recomputed than with the larger one, and no less copied than with the smaller one.
    What is copied ahead of the first time that a rank keeps the most is copied back after it. Other calls may run
    beside copies, too."""
    share = _by_way(layers.share)
    if host.roughly:
        values, each = (some[:, None] for some in few_amounts(layers.saved, layers.extra))
    else:
        alone = (layers.forward + layers.inputs + layers.weights) / np.maximum(layers.share, _TINY)
        values, each = amounts(layers.saved, layers.extra, np.atleast_1d(alone))
    saved, extra = (share * some[..., None, None] for some in (values[1:], each[:-1]))  # [value, way, rank, n]
    first, each = _layer_passes(layers, stored, ranks, count, extra)
    forward, passes = microbatches * count * first, microbatches * count * each
    (room, left), others = rooms, _others(layers, ranks, microbatches)
    # One layer has run forward before a copy begins, and one runs backward once all is copied back.
    later = passes + np.minimum(first, each - first)
    best = np.broadcast_to(passes, np.broadcast_shapes(passes.shape, room.shape)).copy()
    most = host.room - stored[:, 7, None, None] * count
    for kept, times, *ahead in zip(host.kept, host.times, *host.ahead, *host.most, strict=True):
        copy = (kept[:, None] * count) * saved - room
        if left is not None:  # each time that so many wait, a backward ends beside the others
            np.maximum(copy, ((kept[:, None] - 1) * count) * saved - left, out=copy)
        np.maximum(copy, 0.0, out=copy)
        if copy.max() > most.min():
            copy[copy > most] = np.inf
        copy /= host.rate
        before, after = (_until(some, forward, passes) / microbatches for some in (ahead[:2], ahead[2:]))
        # Passes ahead of the copy out and behind it, each of which may take less than a copy.
        behind = later - after - _others_ahead(layers, ranks, microbatches, ahead[2], ahead[3])
        np.maximum(best, copy + np.maximum(before - others, behind), out=best)
        copy *= np.maximum(2.0, times)[:, None]
        np.maximum(best, copy - others, out=best)
    return passes, best


def _until(ahead: Sequence[Array], forward: Array, passes: Array) -> Array:
    """``[value, way, rank, n]``: seconds of so many of a microbatch's forwards and backwards, by rank."""
    forwards, backwards = (each[:, None] for each in ahead)
    found: Array = (forwards - backwards) * forward
    return found + backwards * passes if backwards.any() else found


def _others(layers: Layers, ranks: Ranks, microbatches: int) -> Array:
    """``[way, rank, 1]``: seconds of a step, at most, of calls that are no layers, as :func:`_beside` counts them."""
    return _of_ends(microbatches * _by_way(layers.beside[0] + layers.beside[1]), layers, ranks)


def _others_ahead(layers: Layers, ranks: Ranks, microbatches: int, forwards: Array, backwards: Array) -> Array:
    """The same of what comes before the last of a rank's first ``forwards`` begins, with so many ``backwards`` among
    them: without any, none of other calls, nor the last call's forward of that one's microbatch."""
    forwards, backwards = forwards[:, None], backwards[:, None]
    found = forwards / microbatches * _others(layers, ranks, microbatches)
    if ranks.spreads_head or backwards.all():
        return found
    first = forwards * _by_way(layers.beside[0]) - np.minimum(1.0, forwards) * layers.last[0]
    return np.where(backwards > 0, found, _of_ends(first, layers, ranks))


def _of_ends(seconds: Array, layers: Layers, ranks: Ranks) -> Array:
    """Of ranks that may have other calls than layers."""
    rank = np.arange(ranks.count)[:, None]
    if ranks.spreads_head:
        return seconds / ranks.count + np.zeros(rank.shape)
    is_end = (rank < max(layers.ahead, layers.behind)) | (rank >= ranks.count - layers.behind)
    return np.where(is_end, seconds, 0.0)


def without_memory(layers: Layers) -> Layers:
    """As if they kept nothing: what their passes alone take."""
    return replace(layers, saved=_NOTHING, extra=_NOTHING, working=0.0)


def _by_way(figure: Figure) -> Array:
    """``[way, rank, n]``"""
    found: Array = np.asarray(figure, dtype=np.float64)[..., None, None]
    return found
