"""Profiles as rows of equal layers (:class:`autopar.search.wholesale.Layers`), and those of others by scaling."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from autopar.graph import Meta, ParameterInfo, info
from autopar.options import Options
from autopar.planner.block_costs import Machine
from autopar.planner.pass_memory import passing_bytes
from autopar.planner.rank_memory import Storage, stored_elements
from autopar.planner.zero import MoveCosts
from autopar.schedules.weight_moves import MESSAGES
from autopar.search.bounds import scaled
from autopar.search.gradients import Kind
from autopar.search.hulls import Array
from autopar.search.profiles import Key, Profile, Unit
from autopar.search.wholesale import Layers


@dataclass(frozen=True)
class LayerTimes:
    """Of a profile, as far as it bounds others, five figures each: seconds of a layer's forward, of the part of its
    backward that the next one waits for, of its weights' gradients; of all other calls' forward and backward.
    ``further`` are those of more ranks or of such that are further apart; ``launches`` is the part that doesn't get
    shorter with the work."""

    key: Key
    seconds: Array
    further: Array
    launches: Array

    @classmethod
    def of(cls, profile: Profile, block: int) -> LayerTimes:
        launches = np.zeros(5)
        for number in (block, *(unit.block for unit in profile.units if unit.block != block)):
            launches[[0, 1] if number == block else [3, 4]] += profile.launches[number]
        return cls(profile.key, figures(profile.units, block), figures(profile.further_units, block), launches)


def figures(units: Sequence[Unit], block: int) -> Array:
    """The five figures of ``units``, whose layers are calls of ``block``: of these, the least."""
    mine = [unit for unit in units if unit.block == block]
    others = [unit for unit in units if unit.block != block]
    layer = [
        min(unit.forward for unit in mine),
        min(unit.backward - unit.weights for unit in mine),
        min(unit.weights for unit in mine),
    ]
    return np.array([*layer, math.fsum(u.forward for u in others), math.fsum(u.backward for u in others)])


def layer_block(profile: Profile) -> int | None:
    """The block that is called most; None where none is called twice."""
    counts = Counter(unit.block for unit in profile.units)
    block = max(counts, key=lambda b: (counts[b], b))
    return block if counts[block] > 1 else None


def layer_weights(profile: Profile, block: int) -> Counter[Kind]:
    """Elements of the trained parameters that each layer has at least."""
    pairs = zip(profile.units, profile.unit_parameters, strict=True)
    every = [kinds for unit, kinds in pairs if unit.block == block]
    least = every[0]
    for kinds in every[1:]:
        least = least & kinds
    return least


class LayerWeight(NamedTuple):
    """A trained weight of a layer: the axes that it is split on, what is known of it, and what a rank has of it, in the
    dtype that is computed with."""

    axes: tuple[str, ...]
    known: ParameterInfo
    meta: Meta

    def is_large(self, shards: int) -> bool:
        """Whether it travels by itself among so many ranks that store rows of it."""
        is_whole = shards * stored_elements(self.known, self.meta.shape, shards) == self.meta.numel
        return is_whole and self.meta.bytes >= MESSAGES.large(shards)


class Messages(NamedTuple):
    """In how many messages at least weights of a layer are gathered, and their gradients scattered."""

    gathers: int
    scatters: int

    @classmethod
    def of(cls, weights: Sequence[LayerWeight], shards: int) -> Messages:
        """Of those whose rows so many ranks store: large ones travel by themselves, of the others' gradients as many
        together as fill a message."""
        small = [weight.meta.bytes for weight in weights if not weight.is_large(shards)]
        large = len(weights) - len(small)
        full = sum(small) / (MESSAGES.of_pass(shards) + max(small)) if small else 0.0
        return cls(large, large + math.ceil(full))


def weights_of_layer(profile: Profile, block: int) -> list[LayerWeight]:
    """Of the first call of ``block``."""
    call = next(call for call in profile.model.calls if call.block == block)
    found = []
    for name, node in zip(call.parameters, profile.model.blocks[block].parameters, strict=True):
        known, data = profile.model.parameters[name], info(node)
        if known.trainable and not known.is_buffer:
            split = tuple(axis for axis, kind in data.types().items() if kind.is_shard)
            found.append(LayerWeight(split, known, data.meta))
    return found


def comes_and_goes(profile: Profile, block: int, options: Options, machine: Machine) -> dict[str, float]:
    """Of the weights of a call of ``block``, as figures of :class:`~autopar.search.wholesale.Stored`: bytes that are
    gathered for each pass, and those of the last messages of its gradients; and where all calls have as many weights of
    their own, what their messages take, and casts and copies in each pass that weights are gathered for. And bytes that
    are gathered of the last call's, if those are its own."""
    calls, storage = profile.model.calls, Storage(options, machine.mesh)
    call = next(i for i, each in enumerate(calls) if each.block == block)
    gathered, flying = passing_bytes(profile.model, call, storage)
    found: dict[str, float] = {"gathered_bytes": gathered, "flying_bytes": flying}
    if storage.streams and calls[-1].block != block and profile.shared.isdisjoint(calls[-1].parameters):
        found["last_bytes"], _ = passing_bytes(profile.model, len(calls) - 1, storage)
    if not _have_own(profile, block):
        return found
    moves = MoveCosts(replace(profile.model, calls=[calls[call]]), options, machine)
    if scatters := moves.scattering((0,)).seconds:
        found |= {"scattered": scatters, "scatter_held": moves.scattering((0,)).held_seconds / scatters}
    if storage.streams:
        found["gathered"] = gathers = moves.gather_seconds((0,))
        found["gather_held"] = moves.gathering((0,)).held_seconds / (gathers or 1.0)
        found["copied"] = moves.cast_seconds((0,)) + moves.unpack_seconds((0,))
    return found


def _have_own(profile: Profile, block: int) -> bool:
    """Whether the calls of ``block`` share no weights, and as many are trained of each."""
    if any(call.block == block and not profile.shared.isdisjoint(call.parameters) for call in profile.model.calls):
        return False
    pairs = zip(profile.units, profile.unit_parameters, strict=True)
    trained = {id(kinds): kinds for unit, kinds in pairs if unit.block == block}  # few: most are alike
    first, *others = trained.values()
    return all(kinds == first for kinds in others)


@dataclass
class Scaler:
    """Layers of any placement. ``root`` is the profile of the whole batch on one rank; ``last`` are the bytes that its
    last call works in, if that is no layer."""

    root: Profile
    block: int
    layers: Layers
    recompute: str
    last: float

    @classmethod
    def of(cls, root: Profile, recompute: str) -> Scaler | None:
        """None where the model has no layers to speak of."""
        block = layer_block(root)
        if block is None:
            return None
        units = [unit.block == block for unit in root.units]
        first = next(i for i, call in enumerate(root.model.calls) if call.block == block)
        saved, extra = root.hull(block, first, recompute)
        times = figures(root.units, block)
        count, ahead, behind = sum(units), units.index(True), units[::-1].index(True)
        between = ahead + count + behind < len(units)
        layers = Layers(
            count=count,
            ahead=ahead,
            behind=len(units) if between else behind,
            forward=float(times[0]),
            inputs=float(times[1]),
            weights=float(times[2]),
            beside=(float(times[3]), float(times[4])),
            saved=saved,
            extra=extra,
            working=float(root.activations.working_bytes[block]),
        )
        last = 0 if units[-1] else root.activations.working_bytes[root.units[-1].block]
        return cls(root, block, layers, recompute, float(last))

    def scaled(self, key: Key, times: Array) -> Layers:
        """Of a placement that isn't made yet, whose passes take these ``times`` at least
        (:class:`autopar.search.scaling.Scaling`)."""
        return _timed(self._kept(key), times)

    def last_bytes(self, key: Key) -> float:
        """Of a placement that may not be made yet, what its last call works in."""
        return (scaled(self.root.key, key) or 0.0) * self.last

    def placed_last_bytes(self, profile: Profile) -> float:
        """Of a placement, the same."""
        return float(profile.activations.working_bytes[profile.units[-1].block]) if self.last else 0.0

    def suits(self, profile: Profile) -> bool:
        """Whether its layers are calls of the same block."""
        blocks = self.root.model.blocks, profile.model.blocks
        return all(self.block < len(each) for each in blocks) and len({each[self.block].name for each in blocks}) == 1

    def timed(self, profile: Profile) -> Layers:
        """Of a placement, whose layers may keep as little as the root's do by scaling."""
        layers, last = _timed(self._kept(profile.key), figures(profile.units, self.block)), profile.units[-1]
        return replace(
            layers,
            last=(0.0, 0.0) if last.block == self.block else (last.forward, last.backward),
            later=float(profile.costs[self.block].later_bytes),
        )

    def alike(self, profile: Profile, share: float) -> Layers:
        """With passes of so many times the rows of ``profile``, which have as many launches."""
        times, launches = figures(profile.units, self.block), LayerTimes.of(profile, self.block).launches
        return _timed(self.layers, share * (times - launches) + launches)

    def placed(self, profile: Profile) -> Layers:
        """Of a placement, with what its own layers keep and work in."""
        first = next(i for i, call in enumerate(profile.model.calls) if call.block == self.block)
        saved, extra = profile.hull(self.block, first, self.recompute)
        layers = self.timed(profile)
        return replace(
            layers, saved=saved, extra=extra, share=1.0, working=float(profile.activations.working_bytes[self.block])
        )

    def _kept(self, key: Key) -> Layers:
        share = scaled(self.root.key, key) or 0.0
        return replace(self.layers, share=share, working=share * self.layers.working)


def _timed(layers: Layers, times: Array) -> Layers:
    forward, inputs, weights, *beside = (float(each) for each in times)
    return replace(layers, forward=forward, inputs=inputs, weights=weights, beside=(beside[0], beside[1]))
