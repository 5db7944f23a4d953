"""What autograd keeps from a block's forward to its backward, found by running its ops on fake tensors.

Each op runs once under ``FakeTensorMode`` (shapes and strides, but no memory and no arithmetic) with hooks on what its
backward saves. So there is no table of ops to be kept up to date; only functions of ``autopar.runtime`` that
communicate, which can't run here, state what they keep beside their rules (:mod:`autopar.rules.forms`). A tensor
stands for its *storage*: views, and transitions that copy nothing, are resolved to the node that made the memory. The
bytes of several tensors are then those of the union of these nodes.

Parameters and buffers of the model don't count, because a rank holds them anyway. An *input* of a block that its
backward needs counts for that block. Whoever adds up several calls counts each value once (:func:`kept_storages`):

* a value that another call made counts where it was made, if it is kept there, else where it is first kept;
* a value of the batch never counts: the step holds the batch anyway;
* what blocks of tables make (rotary tables, masks) counts once per stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from autopar.graph import (
    INPUT_CALL,
    AxisRef,
    Block,
    Meta,
    Model,
    RuntimeOp,
    Value,
    info,
    is_getitem,
    op_name,
    operands,
)
from autopar.planner.saved_by_op import Laid, OpCall, SavedByOp, replaced
from autopar.rules.base import Op
from autopar.rules.forms import FORMS, ON_CUDA
from autopar.spmd import Type

_HELD_ANYWAY = ("parameter", "buffer")


@dataclass(frozen=True)
class Saved:
    """What one op keeps: nodes whose memory it needs (operands, itself; each the owner of its storage), and bytes of
    tensors that were made ``inside`` of it and are nobody's value: logsumexp, masks, indices; those of objects are
    ``hidden_bytes``, which can't be moved, nor dropped. ``is_something``: whether its backward needs any other tensor,
    if only a parameter."""

    values: tuple[fx.Node, ...] = ()
    inside: tuple[int, ...] = ()
    is_something: bool = False
    hidden_bytes: int = 0

    @property
    def extra_bytes(self) -> int:
        return sum(self.inside) + self.hidden_bytes


@dataclass(frozen=True)
class BlockSaved:
    """Of a whole block: ``ops`` by node, ``owner`` of every tensor's memory (of a result, an input or a parameter),
    ``owned_bytes`` of every owner. Elements of tuples are owned by the getitem nodes that take them."""

    ops: Mapping[fx.Node, Saved]
    owner: Mapping[fx.Node, fx.Node]
    owned_bytes: Mapping[fx.Node, int]

    def kept(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """The owners that the backward of ``nodes`` needs."""
        return {value for node in nodes for value in self.ops[node].values}

    def bytes_of(self, owners: Iterable[fx.Node], nodes: Iterable[fx.Node] = ()) -> int:
        """Bytes of ``owners``, and of what ``nodes`` made inside."""
        return sum(self.owned_bytes[o] for o in owners) + sum(self.ops[n].extra_bytes for n in nodes)


def saved_tensors(block: Block, device: str = "cpu", by_op: SavedByOp | None = None) -> BlockSaved:
    """What every op of a local block keeps on a device of that kind ("cpu" or "cuda"); ``by_op`` is kept by whoever
    asks for several blocks."""
    run = _Run(device, by_op or SavedByOp())
    for node in block.placeholders():
        run.place(node)
    for node in block.ops:
        run.execute(node)
    return BlockSaved(run.saved, run.owner, run.owned_bytes)


@dataclass
class _Run:
    """Executes nodes; ``values`` are theirs, with :class:`Laid` in place of tensors, in memories that have so many
    ``bytes_`` and were made by ``makers``, or are ``hidden`` in objects."""

    device: str
    by_op: SavedByOp
    values: dict[fx.Node, Any] = field(default_factory=dict)
    saved: dict[fx.Node, Saved] = field(default_factory=dict)
    owner: dict[fx.Node, fx.Node] = field(default_factory=dict)
    owned_bytes: dict[fx.Node, int] = field(default_factory=dict)
    bytes_: list[int] = field(default_factory=list)
    makers: dict[int, fx.Node] = field(default_factory=dict)
    hidden: set[int] = field(default_factory=set)

    def place(self, node: fx.Node) -> None:
        """A tensor from outside."""
        self.values[node] = self._dense(info(node).meta)
        self._own(node, self.values[node])

    def execute(self, node: fx.Node) -> None:
        kept: list[int] = []
        value = self._call(node, kept)
        self.values[node] = _leaves(value, info(node).outputs)
        if isinstance(value, Laid):
            self._own(node, value)
        elif isinstance(value, list | tuple):
            self._own_elements(node, value)
        self.saved[node] = self._told(kept)

    def _call(self, node: fx.Node, kept: list[int]) -> Any:
        """What it returns; memories that its backward needs are added to ``kept``."""
        if is_getitem(node):
            return self.values[operands(node)[0]][node.args[1]]
        if isinstance(node.target, RuntimeOp):
            return self._form(node, node.target, kept)
        args, kwargs = replaced((node.args, dict(node.kwargs)), fx.Node, self.values.__getitem__)
        target: Any = ON_CUDA.get(op_name(node), node.target) if self.device == "cuda" else node.target
        return self._result(target, args, kwargs, kept, trains=_trains(node))

    def _result(self, function: Callable[..., Any], args: Any, kwargs: Any, kept: list[int], *, trains: bool) -> Any:
        """Of a call of torch's own: its memories are numbered as they come in its arguments."""
        numbers: dict[int, int] = {}

        def numbered(laid: Laid) -> Laid:
            return laid.of(numbers.setdefault(laid.memory, len(numbers)), needs_grad=laid.needs_grad)

        args, kwargs = replaced(_on_cpu((args, kwargs)), Laid, numbered)
        found = self.by_op.of(OpCall(function, args, kwargs, [self.bytes_[memory] for memory in numbers], trains))
        memories = [*numbers, *map(self._memory, found.made)]
        kept += [memories[number] for number in found.kept]
        return replaced(found.value, Laid, lambda laid: laid.of(memories[laid.memory], needs_grad=laid.needs_grad))

    def _form(self, node: fx.Node, target: RuntimeOp, kept: list[int]) -> Any:
        """A function of the runtime: a transition keeps nothing, others what they state."""
        meta, given = info(node).meta, [self.values[o] for o in operands(node)]
        if isinstance(node.kwargs.get("src"), Type):
            return self._transition(node, given[0], meta)
        made = self._dense(meta)
        if not _trains(node):
            return made
        state = FORMS.get(str(target))
        stated = state(Op.of(node)) if state is not None else None
        if stated is None:
            kept += [value.memory for value in given if isinstance(value, Laid)]
        else:
            kept += [given[k].memory for k in stated.operands] + ([made.memory] if stated.result else [])
            if stated.extra_bytes:
                kept.append(memory := self._memory(stated.extra_bytes))
                self.hidden |= {memory} if stated.hidden else set()
        return made

    def _transition(self, node: fx.Node, x: Laid, meta: Meta) -> Laid:
        """A collective makes a tensor, and a pair of parts is one; else ``convert`` names the same, or a part of it."""
        dst = node.kwargs["dst"]
        assert isinstance(dst, Type)
        ref = node.args[1]
        if str(node.target) != "convert" or (dst.is_shard and isinstance(ref, AxisRef) and ref.paired):
            return self._dense(meta)
        if not dst.is_shard:
            return x
        made: Laid = self._result(_part, (x, dst.dim, dst.outer, meta.shape[dst.dim]), {}, [], trains=False)
        return made

    def _dense(self, meta: Meta) -> Laid:
        return Laid.dense(meta.shape, meta.dtype, meta.needs_grad, self._memory(meta.bytes))

    def _memory(self, bytes_: int) -> int:
        self.bytes_.append(bytes_)
        return len(self.bytes_) - 1

    def _own(self, node: fx.Node, laid: Laid) -> None:
        known = self.makers.setdefault(laid.memory, node)
        self.owner[node] = known
        if known is node:
            self.owned_bytes[node] = _of_fullest_rank(node, self.bytes_[laid.memory])

    def _own_elements(self, node: fx.Node, value: Sequence[Any]) -> None:
        """New memory in a tuple is that of the node that takes the element."""
        takers = {user.args[1]: user for user in reversed(list(node.users)) if is_getitem(user)}
        for position, element in enumerate(value):
            taker = takers.get(position)
            if isinstance(element, Laid) and taker is not None:
                self._own(taker, element)

    def _told(self, kept: Sequence[int]) -> Saved:
        values: dict[fx.Node, None] = {}
        inside: dict[int, int] = {}
        hidden = sum(self.bytes_[memory] for memory in self.hidden.intersection(kept))
        for memory in (memory for memory in kept if memory not in self.hidden):
            if memory not in self.makers:
                inside[memory] = self.bytes_[memory]
            elif info(owner := self.makers[memory]).role not in _HELD_ANYWAY:
                values[owner] = None
        return Saved(tuple(values), tuple(inside.values()), not self.hidden.issuperset(kept), hidden)


def _trains(node: fx.Node) -> bool:
    return any(meta.needs_grad for meta in info(node).outputs)


def _of_fullest_rank(node: fx.Node, bytes_: int) -> int:
    """Rows of experts are as many times the mean as the rank with the most of them is reckoned to have."""
    return math.ceil(bytes_ * info(node).row_share)


def _leaves(value: Any, outputs: Sequence[Meta]) -> Any:
    """The same memory, no graph behind it, a gradient where the model has one."""
    if isinstance(value, Laid):
        return value.of(value.memory, needs_grad=outputs[0].needs_grad)
    if not isinstance(value, list | tuple):
        return value
    return [_leaves(v, [m]) for v, m in zip(value, outputs, strict=True)]


def _on_cpu(item: Any) -> Any:
    """Arguments without the places that only a rank has."""
    if isinstance(item, list | tuple):
        return type(item)(_on_cpu(v) for v in item)
    if isinstance(item, dict):
        return {k: _on_cpu(v) for k, v in item.items()}
    return torch.device("cpu") if isinstance(item, torch.device) else item


def _part(x: Tensor, dim: int, outer: int, size: int) -> Tensor:
    """What the first of ranks has of a dim: ``size`` elements, of each of ``outer`` equal parts as many."""
    inner, ranks = size // outer, x.shape[dim] // size
    blocks = x.detach().reshape(*x.shape[:dim], outer, ranks, inner, *x.shape[dim + 1 :])
    return blocks.select(dim + 1, 0).flatten(dim, dim + 1).contiguous()


@dataclass(frozen=True)
class Kept:
    """What one call keeps of a microbatch: memory of its block's ops and inputs, and bytes made inside of ops."""

    owners: frozenset[fx.Node]
    extra_bytes: int


Storage = tuple[int, fx.Node, tuple[Type, ...]]
"""Memory in a model: the call that makes it, its owner there, and the types it was changed to on the way, if it was."""


def kept_storages(
    model: Model, found: Sequence[BlockSaved], calls: Collection[int], kept: Mapping[int, Kept]
) -> dict[Storage, int]:
    """Storage -> bytes, of all that ``calls`` keep (by call: ``kept``), each once; what is in the batch left out.

    ``found`` has one entry per block. Bytes made inside of ops are not among them.
    """
    sizes: dict[Storage, int] = {}
    for index in calls:
        bytes_ = found[model.calls[index].block].owned_bytes
        for owner, storage in storages_of(model, found, index, kept[index].owners).items():
            sizes[storage] = storage_bytes(model, found, storage, bytes_[owner], calls)
    return sizes


def storage_bytes(
    model: Model, found: Sequence[BlockSaved], storage: Storage, taken_bytes: int, inside: Collection[int]
) -> int:
    """Of a storage of which a call keeps ``taken_bytes``: all of the memory, if that call has a view of what a call
    ``inside`` of its stage made, or a table, which every stage makes; else what was received."""
    maker, owner, changed = storage
    if changed or (maker not in inside and model.block_of(model.calls[maker]).kind != "tables"):
        return taken_bytes
    return found[model.calls[maker].block].owned_bytes[owner]


def storages_of(
    model: Model, found: Sequence[BlockSaved], index: int, owners: Collection[fx.Node]
) -> dict[fx.Node, Storage]:
    """Where the memory of ``owners`` in the block of a call lies; without what the step holds anyway."""
    places = {node: k for k, node in enumerate(model.block_of(model.calls[index]).inputs)}
    storages: dict[fx.Node, Storage] = {}
    for owner in owners:
        if owner not in places:
            storages[owner] = index, owner, ()
        elif (storage := storage_of_input(model, found, index, places[owner])) is not None:
            storages[owner] = storage
    return storages


def storage_of_input(model: Model, found: Sequence[BlockSaved], index: int, position: int) -> Storage | None:
    """The memory that a call's input lies in; None where the step holds it: the batch's, a parameter's, a total's."""
    call = model.calls[index]
    value, node = call.operands[position], model.block_of(call).inputs[position]
    source = _source(model, found, value)
    if source is None:
        return None
    changed = _changed(model, value, node)
    is_total = changed and model.block_of(model.calls[value.call]).kind == "tables" and not info(node).meta.shape
    return None if is_total else (*source, changed)


def _source(model: Model, found: Sequence[BlockSaved], value: Value) -> tuple[int, fx.Node] | None:
    """Through calls that pass a value on, or a view of it."""
    while value.call != INPUT_CALL:
        call = model.calls[value.call]
        block = model.block_of(call)
        owner = found[call.block].owner[block.outputs[value.output]]
        if owner.op == "call_function":
            return value.call, owner
        if info(owner).role != "input":
            return None
        value = call.operands[block.inputs.index(owner)]
    return None


def _changed(model: Model, value: Value, taken: fx.Node) -> tuple[Type, ...]:
    """The types of ``taken`` where an exchange between the calls makes other memory of the value."""
    made = info(model.block_of(model.calls[value.call]).outputs[value.output]).types()
    wanted = info(taken).types()
    differs = [(made[axis], kind) for axis, kind in wanted.items() if axis in made and made[axis] != kind]
    copies = any(not (before.kind == "I" and after.kind == "R") for before, after in differs)
    return tuple(wanted.values()) if copies else ()
