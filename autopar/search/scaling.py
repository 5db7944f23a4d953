"""What microbatches of placements that aren't made take at least, by those that are: found for all of a search at once.

A rank with 1/k of a microbatch takes 1/k of the time at least, launches aside (:mod:`autopar.search.bounds`). The
same where k times as many ranks share a microbatch: what k of them do, one could do in k times the time, with fewer
messages. So a placement bounds all that have as many ranks on each axis or several times as many, as many rows or a
part of them, and experts over the same axes or over more. What an axis makes wait for messages, which is known where
the whole batch is on that axis alone, comes to placements without any axis. With other axes inside, its ranks may be
further apart, where messages are likely to take longer.

Two kinds of messages may take less there. Tokens may travel once to each node and then within it. With n nodes of w
ranks each, the hop across takes more the larger n is (a token reaches more nodes, and a smaller part of them is its
own), the hop within less the smaller w is; and where experts are split over more ranks, n and w are no smaller than
those of fewer ranks, as far apart as these are there. So ranks that are as far apart as they may be are tried, and each
pass of a block takes the least that any distance gives it. And where a pair of devices has few of the wires within a
node, more ranks have more of them: messages are taken to have all. What is bounded by a placement on other axes counts
that much less (:attr:`autopar.search.profiles.Profile.slack`). A placement that gathers tokens is taken to be no slower
where ranks are closer.

Where experts are whole on an axis, what is known of that says nothing where they are split over it: tokens that travel
along it may be faster. Experts that ranks of ep share get tokens of all these ranks: one rank with all experts bounds
them if it has as many rows as they have together; with fewer it may take longer, to read weights for few tokens.

Solvers minimize passes and what a step does once (sums over tp, updates), as one in so many microbatches, and what each
of these adds to a weight. Where ``tp`` may leave parameters whole or split them, passes are as fast as they can be only
where the latter doesn't count (:attr:`autopar.search.profiles.Key.counted`): no other placement on tp bounds any.

Of fewer rows than ranks, some may have to be sent that the whole batch, cut by rows, has not. That is no bound: what is
placed there may send less.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from autopar.cluster import Link
from autopar.cost_models import collective
from autopar.search.hulls import Array
from autopar.search.layers import LayerTimes, layer_block
from autopar.search.profiles import Key, Profile

_AXES: Final = ("ep", "cp", "tp")
_TOTAL: Final = 5  # the place of what all calls take, after the five figures of layers


class Times(NamedTuple):
    """What layers are likely to take: the five figures of :class:`autopar.search.layers.LayerTimes`, and what the
    ``host`` needs for the passes of one where these wait for it."""

    layers: Array
    host: tuple[float, float]


class Scaling:
    """Of ``keys``, all at once, and of others that are asked for. ``root`` is the profile of the whole batch on one
    rank."""

    def __init__(self, keys: Iterable[Key], root: Profile) -> None:
        self._root, self._block = root, layer_block(root)
        self._place = {key: place for place, key in enumerate(dict.fromkeys(keys))}
        columns = np.array([(key.rows, key.ep, key.cp, key.tp) for key in self._place], dtype=np.int64).reshape(-1, 4)
        self._rows, self._sizes = columns[:, 0], dict(zip(_AXES, columns.T[1:], strict=True))
        self._several, self._copies = (
            np.array([getattr(key, name) for key in self._place], dtype=bool) for name in ("several", "copies")
        )
        self._borrows = {axis: np.array([axis in key.borrowed for key in self._place], dtype=bool) for axis in _AXES}
        shape = len(self._place), _TOTAL + 1
        self._plain, self._split, self._sent = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self._sent_on: dict[str, Array] = {}  # by axis; all of these together are what is sent
        self._on: dict[tuple[str, int], list[Profile]] = {}  # by the one axis that they are on, and its size
        self._issued: dict[str, Array] = {}  # of a layer's passes, on any placement with that one axis
        self._sent_over: dict[tuple[Key, Link], Array] = {}
        self._links: dict[tuple[int, int], Link] = {}  # by ranks, and how far apart these are
        self._learned: dict[Key, Profile] = {}
        self._others: dict[Key, Scaling] = {}

    def seconds(self, key: Key, *, likely: bool = False) -> float:
        """Of one rank that holds all stages: at least, or as they are ``likely``."""
        return float(self._found(key, likely)[_TOTAL])

    def layers(self, key: Key, *, likely: bool = False) -> Array:
        """The five figures of :class:`autopar.search.layers.LayerTimes`."""
        return self._found(key, likely)[:_TOTAL]

    def likely(self, key: Key) -> Times:
        """Of a layer. The host is likely to need what it does with any one of the axes."""
        found = self.layers(key, likely=True)
        if self._block is None or not any(plain := self._root.host_passes(self._block)):
            return Times(found, (0.0, 0.0))
        each = [np.array(plain), *(self._issued[axis] for axis in key.axes() if axis in self._issued)]
        forward, backward = np.max(each, axis=0).tolist()
        return Times(found, (forward, backward))

    def _found(self, key: Key, likely: bool) -> Array:
        if key not in self._place:
            other = self._others.setdefault(key, Scaling([key], self._root))
            other.learn(self._learned.values())
            return other._found(key, likely)
        place = self._place[key]
        found: Array = np.maximum(self._plain[place] + self._sent[place], self._split[place])
        if likely:
            sent = np.sum([self._likely(key, axis) for axis in key.axes()], axis=0)
            found = np.maximum(found, self._plain[place] + sent)
        return found

    def _likely(self, key: Key, axis: str) -> Array:
        """What ``key`` is likely to send along ``axis``: for each row as much as any placement on that axis alone, of
        as many ranks; or of another number of them, where each token goes to its experts among any."""
        found, size = np.zeros(_TOTAL + 1), getattr(key, axis)
        stride = {"ep": key.cp * key.tp, "cp": key.tp, "tp": 1}[axis]
        known = size
        if axis == "ep" and (axis, size) not in self._on:
            sizes = sorted(other for along, other in self._on if along == axis)
            known = min(sizes, key=lambda other: max(other, size) / min(other, size), default=size)
        link, slower = self._link(known, stride), 1.0
        if known != size:
            slower = collective.marginal_seconds("all_to_all", 1.0, size, self._link(size, stride))
            slower /= collective.marginal_seconds("all_to_all", 1.0, known, link)
        for profile in self._on.get((axis, known), ()):
            if (profile.key, link) not in self._sent_over:
                self._sent_over[profile.key, link] = self._messages(profile, axis, stride)
            share = key.rows / profile.key.rows * profile.key.inner / key.inner
            found = np.maximum(found, slower * share * self._sent_over[profile.key, link])
        return found

    def _link(self, size: int, stride: int) -> Link:
        if (size, stride) not in self._links:
            self._links[size, stride] = self._root.placed.request.cluster.link(size, stride)
        return self._links[size, stride]

    def all(self, keys: Sequence[Key]) -> Array:
        """``[key, figure]`` of some that were announced: the five figures of their layers, and what all calls take."""
        places = [self._place[key] for key in keys]
        found: Array = np.maximum(self._plain + self._sent, self._split)[places]
        return found

    def learn(self, profiles: Iterable[Profile]) -> None:
        """Of profiles that bound others, those that are new."""
        for profile in profiles:
            if profile.key not in self._learned:
                self._learned[profile.key] = profile
                self._add(profile)

    def _add(self, profile: Profile) -> None:
        share, axes = self._shares(profile.key)[:, None], profile.key.axes()
        seconds, further, launches = self._figures(profile)
        least = np.where(self._on_same_axes(profile.key)[:, None], seconds, further)
        found = np.where(share > 0, share * (least - launches) + launches, 0.0)
        kept = self._split if axes else self._plain
        np.maximum(kept, found, out=kept)
        if len(axes) == 1 and not profile.key.borrowed:
            if profile.key == alone(axes[0], profile.key, self._root.key.rows):
                sent = share * self._least_messages(profile, axes[0])
                self._sent_on[axes[0]] = np.maximum(self._sent_on.get(axes[0], 0.0), sent)
                self._sent = np.sum(list(self._sent_on.values()), axis=0)
            self._on.setdefault((axes[0], getattr(profile.key, axes[0])), []).append(profile)
            if self._times(profile) is not None:
                assert self._block is not None
                most = self._issued.setdefault(axes[0], np.zeros(2))
                np.maximum(most, profile.host_passes(self._block), out=most)

    def _on_same_axes(self, known: Key) -> Array:
        """Whether ranks of each key are as many and as far apart, and send to the same ones."""
        same = np.all([self._sizes[axis] == getattr(known, axis) for axis in _AXES], axis=0)
        same &= np.all([self._borrows[axis] == (axis in known.borrowed) for axis in _AXES], axis=0)
        found: Array = same
        return found

    def _shares(self, known: Key) -> Array:
        """Of the microbatch of ``known``, what each key's is at least; 0 where it is no part of it, or that one does
        more because there are other microbatches, or other ranks with rows, or experts aren't over its axes."""
        smaller = known.rows * known.ep % (self._rows * self._sizes["ep"]) == 0  # experts get tokens of all of ep
        smaller &= self._several | (not known.several)
        smaller &= self._copies | (not known.copies)
        for axis in _AXES:
            smaller &= self._sizes[axis] % getattr(known, axis) == 0
            if axis in known.borrowed:
                smaller &= self._borrows[axis]
            elif getattr(known, axis) > 1:
                smaller &= ~self._borrows[axis]  # each rank may compute for experts of its own there
        inner = self._sizes["cp"] * self._sizes["tp"] / known.inner
        found: Array = np.where(smaller, self._rows / known.rows / inner, 0.0)
        return found

    def _figures(self, profile: Profile) -> tuple[Array, Array, Array]:
        """Seconds, those of more ranks or of such that are further apart, and the part of them that is launches."""
        seconds, further, launches = np.zeros((3, _TOTAL + 1))
        seconds[_TOTAL], launches[_TOTAL] = profile.seconds, profile.fixed_seconds
        further[_TOTAL] = math.fsum(unit.seconds for unit in profile.further_units)
        if (times := self._times(profile)) is not None:
            seconds[:_TOTAL], further[:_TOTAL], launches[:_TOTAL] = times.seconds, times.further, times.launches
        return seconds, further, launches

    def _least_messages(self, profile: Profile, axis: str) -> Array:
        """The six figures of messages between ranks that are neighbours, or further apart."""
        pairs = zip(profile.sent_between(axis), profile.slack, strict=True)
        return self._of_blocks(profile, [(max(0.0, f - less), max(0.0, b - back)) for (f, b), (less, back) in pairs])

    def _messages(self, profile: Profile, axis: str, stride: int) -> Array:
        """The six figures of messages between ranks that are ``stride`` apart."""
        return self._of_blocks(profile, profile.sent_between(axis, stride))

    def _of_blocks(self, profile: Profile, sent: Sequence[tuple[float, float]]) -> Array:
        found = np.zeros(_TOTAL + 1)
        found[_TOTAL] = math.fsum(sum(sent[unit.block]) for unit in profile.units)
        if self._times(profile) is not None:
            assert self._block is not None
            found[:2] = sent[self._block]
            beside = [sent[unit.block] for unit in profile.units if unit.block != self._block]
            found[3:5] = np.sum(beside, axis=0) if beside else 0.0
        return found

    def _times(self, profile: Profile) -> LayerTimes | None:
        """None where its layers aren't the root's."""
        models = self._root.model, profile.model
        if self._block is None or any(self._block >= len(model.blocks) for model in models):
            return None
        names = {model.blocks[self._block].name for model in models}
        return LayerTimes.of(profile, self._block) if len(names) == 1 else None


def thin(key: Key, batch: int) -> Key:
    """As many rows on the tp of ``key`` alone that it can't cut them."""
    rows = max(size for size in range(1, key.tp) if batch % size == 0)
    return Key(rows, 1, 1, key.tp, several=rows < batch, counted=math.inf)


def alone(axis: str, key: Key, batch: int) -> Key:
    """The whole ``batch`` on this axis of ``key``, and on no other."""
    size = getattr(key, axis)
    return Key(batch // (size if axis == "ep" else 1), 1, 1, 1, counted=math.inf if axis == "tp" else 0)._replace(
        **{axis: size}
    )
