"""What a pipeline rank holds from step to step, by kind, from the plan's decisions: what a solver can add up.

A trained parameter is stored as a *master*: whole, or a part of its rows (ZeRO: Rajbhandari et al., "ZeRO", SC 2020),
in the dtype that is trained. Where what is computed with differs, there is a *working copy* beside it.
:mod:`autopar.simulate.predict` says what ranks hold to the byte, buffers and temporaries included, once there are
programs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from autopar.graph import Info, Meta, Model, ParameterInfo, info
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.passes.vocabulary import VOCABULARY
from autopar.spmd import Type, row_dims, rows_shape

MOMENTS = 2
"""Tensors of its shape that AdamW keeps of a parameter; others keep at most as many."""


@dataclass(frozen=True)
class State:
    """Bytes that stay from step to step, by kind, on the device and on the host."""

    device: Counter[str]
    host: Counter[str]

    @property
    def device_bytes(self) -> int:
        return self.device.total()

    def __add__(self, other: State) -> State:
        return State(self.device + other.device, self.host + other.host)


@dataclass(frozen=True)
class Storage:
    """How a job stores parameters: its options, and the ranks that share the rows of one."""

    options: Options
    mesh: Mesh

    def shards(self, types: Mapping[str, Type]) -> int:
        """Over how many ranks the rows are stored of a parameter of these types."""
        axes = self.mesh.data_axes([axis for axis, kind in types.items() if kind.is_shard])
        return self.mesh.zero_shards(self.options.zero_ranks, axes) if self.options.zero and axes else 1

    def elements(self, model: Model, calls: Iterable[int]) -> int:
        """How many elements of the trained parameters that ``calls`` read a rank updates."""
        found = _parameters(model, calls)
        kinds = [(model.parameters[name], data) for name, data in found.items()]
        return sum(-(-d.meta.numel // self.shards(d.types())) for k, d in kinds if k.trainable and not k.is_buffer)

    @property
    def copies(self) -> float:
        """Device bytes of a large trained parameter's state, per byte of it."""
        meta = Meta((self.shards({}), 1), torch.float32)
        return parameter_state(ParameterInfo("", meta), meta, self).device_bytes / meta.bytes


def rank_state(model: Model, calls: Iterable[int], storage: Storage, parts: int = 1) -> State:
    """Of all parameters that ``calls`` read, each once; ``parts``: ranks that share what is local to one."""
    total = State(Counter(), Counter())
    for name, data in _parameters(model, calls).items():
        total += parameter_state(model.parameters[name], data.meta, storage, parts, data.types())
    return total


def _parameters(model: Model, calls: Iterable[int]) -> dict[str, Info]:
    return {
        name: info(node)
        for call in (model.calls[index] for index in calls)
        for name, node in zip(call.parameters, model.block_of(call).parameters, strict=True)
    }


def vocabulary_state(model: Model, storage: Storage, ranks: int) -> State:
    """Of the rows of vocabulary layers that each of ``ranks`` pipeline ranks has, where they are split."""
    calls = [i for i, call in enumerate(model.calls) if model.block_of(call).kind == VOCABULARY]
    return rank_state(model, calls, storage, ranks)


def parameter_state(
    known: ParameterInfo, meta: Meta, storage: Storage, parts: int = 1, types: Mapping[str, Type] | None = None
) -> State:
    """Of one parameter or buffer whose local part is ``meta``, split as ``types`` say.

    A gradient that is never held whole (ZeRO 2 and 3) counts as the rank's part of it; what is gathered of ZeRO 3 is
    in no state.
    """
    elements = -(-meta.numel // parts)
    if known.is_buffer or not known.trainable:
        return State(Counter(parameters=elements * meta.dtype.itemsize), Counter())
    options, master = storage.options, known.master or meta.dtype
    shards, dims = storage.shards(types or {}), 1
    if not known.stacked:
        dims = row_dims(meta.shape, shards)
    own = math.prod(rows_shape(meta.shape, shards, dims)) // parts if meta.shape else elements
    moment = getattr(torch, options.state_dtype).itemsize if options.state_dtype else master.itemsize
    away = bool({"optimizer", "parameters"} & set(options.offload))
    state = Counter(parameters=own * master.itemsize, optimizer=MOMENTS * own * moment)
    gradients = Counter(gradients=(own if options.zero >= 2 else elements) * master.itemsize)
    twice = shards > 1 or master != meta.dtype or away
    streamed = options.zero == 3 or "parameters" in options.offload
    copies = Counter(working=elements * meta.dtype.itemsize) if twice and not streamed else Counter()
    if away:
        return State(gradients + copies, state + Counter(gradients=own * master.itemsize))
    return State(state + gradients + copies, Counter())
