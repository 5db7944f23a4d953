"""working_copies: a parameter that is only ever cast is stored in the dtype it is cast to.

Guarantees: equal values. A trained parameter all of whose uses, in every call that reads it (tied weights), are casts
to one narrower dtype becomes a placeholder of that dtype, and :attr:`~autopar.graph.ParameterInfo.master` says what it
was: what is trained. The runtime makes the narrow copy once a step; collectives and products take it as it is.
Example: ``linear(x, to(w f32, bf16))`` everywhere becomes ``linear(x, w bf16)``, with a float32 master.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from autopar.graph import Model, info
from autopar.passes.place_casts import cast_dtype

Slot = tuple[int, int]
"""(block, position among its parameters)."""


def working_copies(model: Model) -> Model:
    """In place, on a graph in which no axis is solved yet."""
    slots = {(b, p): _narrow(node) for b, block in enumerate(model.blocks) for p, node in enumerate(block.parameters)}
    names = _settle(model, slots)
    for (block, position), dtype in slots.items():
        if dtype is not None:
            _store_narrow(model.blocks[block].parameters[position], dtype)
    for name, narrow in names.items():
        if narrow is not None:
            known = model.parameters[name]
            meta = replace(known.meta, dtype=narrow)
            model.parameters[name] = replace(known, meta=meta, master=known.meta.dtype)
    return model


def _narrow(node: fx.Node) -> torch.dtype | None:
    """The one dtype, of fewer bytes, that all uses cast the parameter to."""
    found = {cast_dtype(user) if user.op == "call_function" else None for user in node.users}
    dtype = found.pop() if len(found) == 1 else None
    narrower = dtype is not None and dtype.itemsize < info(node).meta.dtype.itemsize
    return dtype if narrower and info(node).role == "parameter" else None


def _settle(model: Model, slots: dict[Slot, torch.dtype | None]) -> dict[str, torch.dtype | None]:
    """Until all slots of one parameter, and all parameters of one slot, agree; per parameter its narrow dtype."""
    pairs = [(name, (call.block, p)) for call in model.calls for p, name in enumerate(call.parameters)]
    names = {name: slots[slot] if model.parameters[name].trainable else None for name, slot in pairs}
    before = -1
    while before != (before := sum(d is None for d in (*slots.values(), *names.values()))):
        for name, slot in pairs:
            if names[name] != slots[slot]:
                names[name] = slots[slot] = None
    return names


def _store_narrow(node: fx.Node, dtype: torch.dtype) -> None:
    data = info(node)
    data.outputs = (replace(data.meta, dtype=dtype),)
    for user in list(node.users):
        user.replace_all_uses_with(node)
        user.graph.erase_node(user)
