"""What a pipeline rank holds from step to step, by kind, from the plan's decisions: what a solver can add up.

A trained parameter is stored as a *master*: whole, or a part of its rows (ZeRO: Rajbhandari et al., "ZeRO", SC 2020),
in the dtype that is trained. Where what is computed with differs, there is a *working copy* beside it.
:mod:`autopar.simulate.predict` says what ranks hold to the byte, buffers and temporaries included, once there are
programs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from autopar.graph import Info, Meta, Model, ParameterInfo, info
from autopar.mesh import Mesh
from autopar.options import Options, masters_on_host, weights_streamed
from autopar.passes.vocabulary import VOCABULARY, vocabulary_dims
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

    def elements(self, model: Model, calls: Iterable[int], parts: int = 1) -> int:
        """How many elements of the trained parameters that ``calls`` read a rank updates, padding of rows included;
        each of ``parts`` pipeline ranks has its rows of vocabulary tables."""
        dims = table_dims(model) if parts > 1 else {}
        sizes: dict[int, int] = {}  # calls of one block have one node for theirs
        total = 0
        for name, data in _parameters(model, calls).items():
            known = model.parameters[name]
            if id(data) not in sizes:
                shape = rank_shape(data.meta.shape, dims.get(name), parts)
                sizes[id(data)] = stored_elements(known, shape, self.shards(data.types()))
            total += sizes[id(data)] if known.trainable and not known.is_buffer else 0
        return total

    @property
    def copies(self) -> float:
        """Device bytes of a large trained parameter's state, per byte of it."""
        meta = Meta((self.shards({}), 1), torch.float32)
        return parameter_state(ParameterInfo("", meta), meta, self).device_bytes / meta.bytes


def rank_state(model: Model, calls: Iterable[int], storage: Storage, parts: int = 1) -> State:
    """Of all parameters that ``calls`` read, each once; ``parts``: ranks that share what is local to one."""
    counts: Counter[Hashable] = Counter()
    states: dict[Hashable, State] = {}  # by what a state depends on: a model's layers are alike
    for name, data in _parameters(model, calls).items():
        known, split = model.parameters[name], tuple(axis for axis, kind in data.types().items() if kind.is_shard)
        like = known.trainable, known.is_buffer, known.master, bool(known.stacked), data.meta, split
        counts[like] += 1
        if like not in states:
            states[like] = parameter_state(known, data.meta, storage, parts, data.types())
    device, host = Counter[str](), Counter[str]()
    for key, count in counts.items():
        for total, mine in ((device, states[key].device), (host, states[key].host)):
            total.update({kind: count * bytes_ for kind, bytes_ in mine.items()})
    return State(+device, +host)


def stored_elements(known: ParameterInfo, shape: Sequence[int], shards: int) -> int:
    """What a rank stores of a parameter of ``shape`` on it, whose rows are on so many ranks, the last's padded to as
    many as the others' (:func:`autopar.runtime.shards.stored_shape`)."""
    if not shape or shards == 1:
        return math.prod(shape)
    return math.prod(rows_shape(shape, shards, 1 if known.stacked else row_dims(shape, shards)))


def table_dims(model: Model) -> dict[str, int]:
    """By name, the parameters of which pipeline ranks may have rows each, and the dim that these are on."""
    found: dict[str, int] = {}
    for call in model.calls:
        if (block := model.block_of(call)).kind == VOCABULARY:
            dims = vocabulary_dims(block)
            named = zip(call.parameters, block.parameters, strict=True)
            found |= {name: dims[node] for name, node in named if node in dims}
    return found


def rank_shape(shape: Sequence[int], dim: int | None, parts: int) -> tuple[int, ...]:
    """Of what each of ``parts`` ranks has of a tensor whose ``dim`` they split; None: all of it."""
    return tuple(extent // parts if place == dim else extent for place, extent in enumerate(shape))


def _parameters(model: Model, calls: Iterable[int]) -> dict[str, Info]:
    found = [model.calls[index] for index in calls]
    nodes = {number: model.blocks[number].parameters for number in {call.block for call in found}}
    return {name: info(node) for call in found for name, node in zip(call.parameters, nodes[call.block], strict=True)}


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
    shards = storage.shards(types or {})
    own = stored_elements(known, meta.shape, shards) // parts if meta.shape else elements
    moment = getattr(torch, options.state_dtype).itemsize if options.state_dtype else master.itemsize
    away = masters_on_host(options.offload)
    state = Counter(parameters=own * master.itemsize, optimizer=MOMENTS * own * moment)
    gradients = Counter(gradients=(own if options.zero >= 2 else elements) * master.itemsize)
    twice = shards > 1 or master != meta.dtype or away
    streamed = weights_streamed(options.zero, options.offload)
    copies = Counter(working=elements * meta.dtype.itemsize) if twice and not streamed else Counter()
    if away:
        return State(gradients + copies, state + Counter(gradients=own * master.itemsize))
    return State(state + gradients + copies, Counter())


@dataclass(frozen=True)
class Passing:
    """Bytes of weights and gradients that come and go: ``always``, when a backward begins (what is gathered for it, and
    what the backward before still sends: ZeRO 3 and 2); ``closing``, when the last of a step ends (sums of the rows
    that are stored here, beside the gradients that they are of). A rank needs its state, ``always``, what a pass
    works with, and the larger of what is saved and ``closing``."""

    always: int
    closing: int


def passing_bytes(model: Model, stages: Iterable[Sequence[int]], storage: Storage) -> Passing:
    """Of a pipeline rank with these ``stages``, each its calls in order."""
    found = [_StageWeights.of(model, calls, storage) for calls in stages]
    streams = weights_streamed(storage.options.zero, storage.options.offload)
    gathered = max((each.gathered_bytes for each in found), default=0) if streams else 0
    flying = sum(each.flying_bytes for each in found) if storage.options.zero >= 2 else 0
    closing = sum(each.part_bytes for each in found) if storage.options.zero == 1 else 0
    return Passing(gathered + flying, closing)


@dataclass(frozen=True)
class _Weight:
    """``bytes_`` of the copy that is computed with, ``sent`` of its gradient as it travels, ``shards`` of its rows."""

    bytes_: int
    sent: int
    shards: int


@dataclass(frozen=True)
class _StageWeights:
    """The trained weights of each call of a stage; those of several calls are ``shared``."""

    calls: Sequence[Sequence[_Weight]]
    shared: Sequence[_Weight]

    @classmethod
    def of(cls, model: Model, calls: Sequence[int], storage: Storage) -> _StageWeights:
        users = Counter(name for index in calls for name in dict.fromkeys(model.calls[index].parameters))
        kept = {
            name: _weight(model.parameters[name], data, storage) for name, data in _parameters(model, calls).items()
        }
        rows = [dict.fromkeys(model.calls[index].parameters) for index in calls]
        own = [[w for name in row if users[name] == 1 and (w := kept[name]) is not None] for row in rows]
        return cls(own, [w for name, w in kept.items() if users[name] > 1 and w is not None])

    @property
    def gathered_bytes(self) -> int:
        """Of the last two calls that have weights (the code behind the last layer, and that; or two layers), and what
        all of a pass needs (:class:`autopar.runtime.streaming.Streaming`)."""
        sizes = [sum(w.bytes_ for w in call if w.shards > 1) for call in self.calls]
        return sum([size for size in sizes if size][-2:]) + sum(w.bytes_ for w in self.shared)

    @property
    def flying_bytes(self) -> int:
        """The last two messages of a backward: large gradients travel alone, the others of a layer together, after
        them (:class:`autopar.runtime.grads.Reducer`)."""
        messages: list[int] = []
        for call in self.calls[:2]:
            weights = [w for w in call if w.shards > 1]
            small = sum(w.sent for w in weights if w.bytes_ < _LARGE_BYTES)
            messages += [small] if small else []
            messages += [w.sent for w in weights if w.bytes_ >= _LARGE_BYTES]
        return sum(messages[:_IN_FLIGHT])

    @property
    def part_bytes(self) -> int:
        return sum(w.sent // w.shards for call in (*self.calls, self.shared) for w in call if w.shards > 1)


_LARGE_BYTES = 2**20
_IN_FLIGHT = 2


def _weight(known: ParameterInfo, data: Info, storage: Storage) -> _Weight | None:
    """None where it isn't trained."""
    if known.is_buffer or not known.trainable:
        return None
    travels = storage.options.reduce_dtype
    dtype = getattr(torch, travels) if travels else known.master or data.meta.dtype
    return _Weight(data.meta.bytes, data.meta.numel * dtype.itemsize, storage.shards(data.types()))
