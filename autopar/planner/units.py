"""What stages are cut between: the calls of a model, with what the cut needs to know of each."""

from __future__ import annotations

import itertools
from dataclasses import replace

from autopar.cost_models import collective
from autopar.graph import Block, Model, ParameterInfo, info
from autopar.passes.vocabulary import STAGELESS
from autopar.planner.block_costs import BlockCost, Machine
from autopar.planner.rank_memory import Storage, rank_state
from autopar.planner.stages import Unit


def units_of(model: Model, calls: list[int], costs: list[BlockCost], machine: Machine, storage: Storage) -> list[Unit]:
    """What the cut needs to know of ``calls``. Calls of one block whose parameters are stored alike hold as much."""
    crossing = _crossing_bytes(model)
    link = machine.links["pp"]
    sent = {b: 2 * collective.seconds("send", b, 2, link) for b in set(crossing)} if machine.sizes["pp"] > 1 else {}
    held: dict[tuple[int, tuple[ParameterInfo, ...]], int] = {}
    units = []
    for index in calls:
        call = model.calls[index]
        key = call.block, tuple(replace(model.parameters[name], name="", aliases=()) for name in call.parameters)
        if key not in held:
            held[key] = rank_state(model, [index], storage).device_bytes
        block, seconds = model.block_of(call), sent.get(crossing[index], 0.0)
        layer = block.kind == "layer"
        units.append(Unit(call.path or block.name, costs[call.block].seconds, held[key], 0, seconds, layer))
    return units


def _crossing_bytes(model: Model) -> list[int]:
    """By call, bytes of the values made before it and used from it on (what tables make is recomputed)."""
    last = {value: index for index, call in enumerate(model.calls) for value in call.operands if value.call >= 0}
    outputs = [block.outputs for block in model.blocks]
    changes = [0] * (len(model.calls) + 1)
    for value, index in last.items():
        if _block_of(model, value.call).kind not in STAGELESS:
            bytes_ = info(outputs[model.calls[value.call].block][value.output]).meta.bytes
            changes[value.call + 1] += bytes_
            changes[index + 1] -= bytes_
    return list(itertools.accumulate(changes[:-1]))


def _block_of(model: Model, call: int) -> Block:
    return model.block_of(model.calls[call])
