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
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

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
from autopar.rules.base import Op
from autopar.rules.forms import FORMS, ON_CUDA
from autopar.spmd import Type

_HELD_ANYWAY = ("parameter", "buffer")


@dataclass(frozen=True)
class Saved:
    """What one op keeps: nodes whose memory it needs (operands, itself; each the owner of its storage), and bytes of
    tensors that were made inside of it and are nobody's value: logsumexp, masks, indices. ``is_something``: whether
    its backward needs any tensor, if only a parameter."""

    values: tuple[fx.Node, ...] = ()
    extra_bytes: int = 0
    is_something: bool = False


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


def saved_tensors(block: Block, device: str = "cpu") -> BlockSaved:
    """What every op of a local block keeps on a device of that kind ("cpu" or "cuda")."""
    run = _Run(device)
    with FakeTensorMode():
        for node in block.placeholders():
            run.place(node)
        for node in block.ops:
            run.execute(node)
    return BlockSaved(run.saved, run.owner, run.owned_bytes)


@dataclass
class _Run:
    """Executes nodes; ``values`` are their fake tensors, each without a graph behind it."""

    device: str
    values: dict[fx.Node, Any] = field(default_factory=dict)
    saved: dict[fx.Node, Saved] = field(default_factory=dict)
    owner: dict[fx.Node, fx.Node] = field(default_factory=dict)
    owned_bytes: dict[fx.Node, int] = field(default_factory=dict)
    storages: dict[int, tuple[torch.UntypedStorage, fx.Node]] = field(default_factory=dict)

    def place(self, node: fx.Node) -> None:
        """A tensor from outside."""
        self.values[node] = _empty(info(node).meta)
        self._own(node, self.values[node])

    def execute(self, node: fx.Node) -> None:
        found: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            found.append(tensor)
            return tensor

        with saved_tensors_hooks(keep, _same), torch.set_grad_enabled(_trains(node)):
            value = self._call(node, found)
        self.values[node] = _leaves(value, info(node).outputs)
        if isinstance(value, Tensor):
            self._own(node, value)
        elif isinstance(value, list | tuple):
            self._own_elements(node, value)
        self.saved[node] = self._told(node, found)

    def _call(self, node: fx.Node, found: list[Tensor]) -> Any:
        if is_getitem(node):
            return self.values[operands(node)[0]][node.args[1]]
        if isinstance(node.target, RuntimeOp):
            return self._form(node, node.target, found)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self.values[n])
        target = ON_CUDA.get(op_name(node), node.target) if self.device == "cuda" else node.target
        return target(*_on_cpu(args), **_on_cpu(kwargs))  # type: ignore[operator]

    def _form(self, node: fx.Node, target: RuntimeOp, found: list[Tensor]) -> Any:
        """A function of the runtime: a transition keeps nothing, others what they state."""
        meta, given = info(node).meta, [self.values[o] for o in operands(node)]
        if isinstance(node.kwargs.get("src"), Type):
            return _transition(node, given[0], meta)
        state = FORMS.get(str(target))
        op, made = Op.of(node), _empty(meta)
        kept = state(op) if state is not None else None
        if kept is None:
            found += [value for value in given if isinstance(value, Tensor)]
        elif _trains(node):
            found += [given[k] for k in kept.operands] + ([made] if kept.result else [])
            if kept.extra_bytes:
                found.append(torch.empty(kept.extra_bytes, dtype=torch.uint8))
        return made

    def _own(self, node: fx.Node, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        known = self.storages.setdefault(id(storage), (storage, node))[1]
        self.owner[node] = known
        if known is node:
            self.owned_bytes[node] = _of_fullest_rank(node, storage.nbytes())

    def _own_elements(self, node: fx.Node, value: Sequence[Any]) -> None:
        """New memory in a tuple is that of the node that takes the element."""
        takers = {user.args[1]: user for user in reversed(list(node.users)) if is_getitem(user)}
        for position, element in enumerate(value):
            taker = takers.get(position)
            if isinstance(element, Tensor) and taker is not None:
                self._own(taker, element)

    def _told(self, node: fx.Node, found: Sequence[Tensor]) -> Saved:
        values: dict[fx.Node, None] = {}
        inside: dict[int, torch.UntypedStorage] = {}
        for tensor in found:
            storage = tensor.untyped_storage()
            if id(storage) not in self.storages:
                inside[id(storage)] = storage
            elif info(owner := self.storages[id(storage)][1]).role not in _HELD_ANYWAY:
                values[owner] = None
        return Saved(tuple(values), sum(storage.nbytes() for storage in inside.values()), bool(found))


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _trains(node: fx.Node) -> bool:
    return any(meta.needs_grad for meta in info(node).outputs)


def _of_fullest_rank(node: fx.Node, bytes_: int) -> int:
    """Rows of experts are as many times the mean as the rank with the most of them is reckoned to have."""
    is_ragged = any(choice.result.is_ragged for choice in info(node).choices.values())
    return math.ceil(bytes_ * info(node).imbalance) if is_ragged else bytes_


def _empty(meta: Meta) -> Tensor:
    return torch.empty(meta.shape, dtype=meta.dtype).requires_grad_(meta.needs_grad)


def _leaves(value: Any, outputs: Sequence[Meta]) -> Any:
    """The same memory, no graph behind it, a gradient where the model has one."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(outputs[0].needs_grad)
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


def _transition(node: fx.Node, x: Tensor, meta: Meta) -> Tensor:
    """A collective makes a tensor, and a pair of parts is one; else ``convert`` names the same, or a part of it."""
    dst = node.kwargs["dst"]
    assert isinstance(dst, Type)
    ref = node.args[1]
    if str(node.target) != "convert" or (dst.is_shard and isinstance(ref, AxisRef) and ref.paired):
        return _empty(meta)
    if not dst.is_shard:
        return x.detach()
    size = x.shape[dst.dim] // meta.shape[dst.dim]
    inner = x.shape[dst.dim] // (dst.outer * size)
    blocks = x.detach().reshape(*x.shape[: dst.dim], dst.outer, size, inner, *x.shape[dst.dim + 1 :])
    return blocks.select(dst.dim + 1, 0).flatten(dst.dim, dst.dim + 1).contiguous()


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
