"""What units of a profile take and hold, for bounds by memory (:class:`autopar.search.bounds.Held`)."""

from __future__ import annotations

import numpy as np

from autopar.passes.recompute import own_modules
from autopar.planner.rank_memory import Storage, rank_state
from autopar.search.bounds import Held
from autopar.search.layers import layer_block
from autopar.search.profiles import Profile


def held_by(profile: Profile, storage: Storage, recompute: str) -> Held | None:
    """What units take and hold; None where no block is called twice."""
    block = layer_block(profile)
    if block is None:
        return None
    first = {unit.block: _first_call(profile, unit.block) for unit in profile.units}
    states = {b: rank_state(profile.model, [i], storage).device_bytes for b, i in first.items()}
    leanest = {b: _least_bytes(profile, i, recompute) for b, i in first.items() if b != block}
    saved, extra = profile.hull(block, first[block], recompute)
    blocks = [unit.block for unit in profile.units]
    return Held(
        seconds=np.array([unit.seconds for unit in profile.units]),
        forward=np.array([unit.forward for unit in profile.units]),
        state=np.array([float(states[b]) for b in blocks]),
        least=np.array([float(leanest.get(b, 0)) for b in blocks]),
        layers=np.array([float(b == block) for b in blocks]),
        working=np.array([float(profile.activations.working_bytes[b]) for b in blocks]),
        saved=saved,
        extra=extra,
    )


def _first_call(profile: Profile, block: int) -> int:
    return next(i for i, call in enumerate(profile.model.calls) if call.block == block)


def _least_bytes(profile: Profile, call: int, recompute: str) -> int:
    """Of a microbatch, with everything recomputed that can be."""
    choices = profile.activations.choices[profile.model.calls[call].block]
    layer = call in own_modules(profile.model)
    return profile.activations.call_bytes(call, choices.whole if layer and recompute == "auto" else choices.none)
