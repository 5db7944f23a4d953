"""What a pipeline rank holds from step to step, by kind, from the plan's decisions: what a solver can add up.

A trained parameter is stored as a *master*: whole, or a part of its rows (ZeRO: Rajbhandari et al., "ZeRO", SC 2020),
in the dtype that is trained. Where what is computed with differs, there is a *working copy* beside it.
:mod:`autopar.simulate.predict` says what ranks hold to the byte, buffers and temporaries included, once there are
programs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from autopar.graph import Info, Meta, Model, ParameterInfo, info
from autopar.mesh import Mesh
from autopar.options import Options, masters_on_host, weights_streamed
from autopar.passes.vocabulary import VOCABULARY, vocabulary_dims
from autopar.schedules.weight_moves import MESSAGES
from autopar.spmd import Type, row_dims, rows_shape

MOMENTS = 2
"""Tensors of its shape that AdamW keeps of a parameter; others keep at most as many."""


_STATE = 2 + MOMENTS  # tensors: a parameter, its gradient, and those


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
        axes = self.line(types)
        return self.mesh.zero_shards(self.options.zero_ranks, axes) if self.options.zero and axes else 1

    @property
    def streams(self) -> bool:
        """Whether what passes compute with is on the device only while it is used."""
        return weights_streamed(self.options.zero, self.options.offload, self.shards({}))

    def line(self, types: Mapping[str, Type]) -> tuple[str, ...]:
        """The axes that split tokens, and not a parameter of these types."""
        return self.mesh.data_axes([axis for axis, kind in types.items() if kind.is_shard])

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
    def share(self) -> float:
        """What a rank has on its device of the :func:`state_bytes` of a large trained parameter."""
        is_narrow = self.options.precision in ("bf16", "fp16")
        master = torch.float32 if is_narrow else None
        meta = Meta((self.shards({}), 1), torch.bfloat16 if is_narrow else torch.float32)
        known = ParameterInfo("", meta, master=master)
        return parameter_state(known, meta, self).device_bytes / state_bytes(meta, master)


def state_bytes(meta: Meta, master: torch.dtype | None) -> int:
    """Of a parameter, its gradient and moments, all of them whole; and of a copy to compute with, where its ``master``
    has another dtype."""
    own = _STATE * meta.numel * (master or meta.dtype).itemsize
    return own if master is None else meta.bytes + own


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


def is_own_master(shards: int, dtype: torch.dtype, master: torch.dtype, options: Options) -> bool:
    """Whether the optimizer updates what is computed with: there is no copy in ``dtype`` of a master, whose rows are on
    so many ranks."""
    return shards == 1 and dtype == master and not masters_on_host(options.offload)


def parameter_state(
    known: ParameterInfo, meta: Meta, storage: Storage, parts: int = 1, types: Mapping[str, Type] | None = None
) -> State:
    """Of one parameter or buffer whose local part is ``meta``, split as ``types`` say.

    A gradient that is never held whole (ZeRO 2 and 3) counts as the rank's part of it; what is on the device only
    while it is used is in no state. Rows of vocabulary tables, in several ``parts``, are there from step to step.
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
    twice = not is_own_master(shards, meta.dtype, master, options)
    stays = parts > 1 or not storage.streams
    copies = Counter(working=elements * meta.dtype.itemsize) if twice and stays else Counter()
    if away:
        return State(gradients + copies, state + Counter(gradients=own * master.itemsize))
    return State(state + gradients + copies, Counter())


@dataclass(frozen=True)
class Weight:
    """A trained one: ``bytes_`` as it is computed with, ``sent`` of its gradient as it travels, ``shards`` of its rows,
    which ranks share ``along`` these axes. ``copied``: bytes of a copy that is made of its ``master`` (0: it is its
    own), ``coming`` of what holds it on the way: the copy, or the message that it is packed in, and this rank's part.
    ``is_cast``: whether its gradient is sent in another dtype than it is made in, ``is_padded``: whether its rows
    don't divide."""

    bytes_: int
    sent: int
    shards: int
    along: tuple[str, ...]
    master: torch.dtype
    copied: int
    coming: int
    is_cast: bool
    is_padded: bool


@dataclass(frozen=True)
class StageWeights:
    """Of each call of a stage, its weights by their places in its block (``rows``, None for those that aren't
    trained), with their ``names``, those that several of its calls read (``shared``), and with these what a call hands
    on views of (``spanning``)."""

    rows: Sequence[Sequence[Weight | None]]
    names: Sequence[Sequence[str]]
    shared: Mapping[str, Weight]
    spanning: Mapping[str, Weight]

    @classmethod
    def of(cls, model: Model, calls: Sequence[int], storage: Storage, handed_on: Collection[str] = ()) -> StageWeights:
        """``handed_on``: those of the model of which a call hands on views."""
        users = Counter(name for index in calls for name in dict.fromkeys(model.calls[index].parameters))
        known: dict[Hashable, Weight | None] = {}  # by what it depends on: a model's layers are alike
        rows: list[list[Weight | None]] = []
        shared: dict[str, Weight] = {}
        spanning: dict[str, Weight] = {}
        for call in (model.calls[index] for index in calls):
            row: list[Weight | None] = []
            for name, node in zip(call.parameters, model.block_of(call).parameters, strict=True):
                parameter = model.parameters[name]
                key = node, parameter.trainable, parameter.is_buffer, parameter.master, bool(parameter.stacked)
                if key not in known:
                    known[key] = _weight(parameter, info(node), storage)
                row.append(weight := known[key])
                if weight is not None and users[name] > 1:
                    shared[name] = weight
                if weight is not None and (users[name] > 1 or name in handed_on):
                    spanning[name] = weight
            rows.append(row)
        return cls(rows, [model.calls[index].parameters for index in calls], shared, spanning)

    @property
    def own_rows(self) -> list[list[Weight | None]]:
        """:attr:`rows` without those that are :attr:`spanning`."""
        pairs = ([*zip(row, names, strict=True)] for row, names in zip(self.rows, self.names, strict=True))
        return [[weight if name not in self.spanning else None for weight, name in row] for row in pairs]


def _weight(known: ParameterInfo, data: Info, storage: Storage) -> Weight | None:
    """None where it isn't trained."""
    if known.is_buffer or not known.trainable:
        return None
    meta, master, travels = data.meta, known.master or data.meta.dtype, storage.options.reduce_dtype
    sent = getattr(torch, travels) if travels else master
    along, shards = storage.line(data.types()), storage.shards(data.types()) if meta.shape else 1
    is_other = not is_own_master(1, meta.dtype, master, storage.options)
    is_packed = meta.bytes < MESSAGES.large(shards)
    copied = meta.bytes if shards > 1 or is_other else 0
    return Weight(
        bytes_=meta.bytes,
        sent=meta.numel * sent.itemsize,
        shards=shards,
        along=along,
        master=master,
        copied=copied,
        coming=copied + (meta.bytes // shards if shards > 1 and (is_packed or is_other) else 0),
        is_cast=sent != meta.dtype,
        is_padded=shards * stored_elements(known, meta.shape, shards) != meta.numel,
    )
