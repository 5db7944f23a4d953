"""What a pass of a block holds beside what is kept for its backward: from its graph, as autograd runs it.

A forward holds values as Python does: each under a name, until the function returns or another value takes the name.
Which values share names is reckoned as :mod:`autopar.codegen.names` gives them.

A backward runs the ops in the opposite order. It holds a gradient of each value from the first op that makes a term of
it until the op that made the value is done. Meanwhile what was kept is freed, op by op. Gradients of tensors that an op
made for itself and kept are temporaries of that op. Gradients of weights are temporaries, too, until they are added to
those that count as state. Views share memory, and so do their gradients.

All bytes are relative to a rank that holds everything that the block keeps (:mod:`autopar.planner.saved`), because that
is how microbatches in flight are counted. The backward of a stage's last block begins with that much; those of other
blocks with less. Gradients of weights that are sent on during a pass live longer than their op: so a backward is told
in stretches, each of which ends with some (:mod:`autopar.planner.pass_memory`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import fx

from autopar.graph import Block, RuntimeOp, info, is_getitem, is_view, op_name, operands
from autopar.planner.saved import BlockSaved
from autopar.rules import lookup
from autopar.rules.base import Op
from autopar.rules.chunked import chunk_bytes
from autopar.rules.experts import absent_bytes

_WEIGHTS = ("parameter", "buffer")


class Stretch(NamedTuple):
    """Part of a backward: ``most`` bytes live in it, with the gradients of weights that its last op makes, and
    ``after`` once that op is done, without them. It makes terms of those of the parameters ``begun`` (by their places
    in the block) for the first time, and of those ``ended`` for the last time."""

    most: int
    after: int
    begun: tuple[int, ...] = ()
    ended: tuple[int, ...] = ()


@dataclass(frozen=True)
class Working:
    """What the passes of one microbatch hold: a forward at most, a backward in stretches; what recomputation makes
    again comes on top."""

    forward: int
    backward: tuple[Stretch, ...]

    @property
    def bytes_(self) -> int:
        """Of both passes the most, where gradients of weights are added to others at once."""
        return max(0, self.forward, *(stretch.most for stretch in self.backward))


def working(block: Block, found: BlockSaved) -> Working:
    """Of a block's passes."""
    kept = _Kept.of(block, found)
    return Working(_forward(block, found, kept), tuple(_backward(block, found, kept)))


@dataclass(frozen=True)
class _Kept:
    """What a block keeps: ``memories`` with their bytes; by op, those that no backward after its own needs
    (``goes_after``), and the bytes that it made for itself (``inside``)."""

    memories: dict[fx.Node, int]
    goes_after: dict[fx.Node, list[fx.Node]]
    inside: dict[fx.Node, int]

    @classmethod
    def of(cls, block: Block, found: BlockSaved) -> _Kept:
        first: dict[fx.Node, fx.Node] = {}
        for node in block.ops:
            for owner in found.ops[node].values:
                first.setdefault(owner, node)
        goes: dict[fx.Node, list[fx.Node]] = {}
        for owner, node in first.items():
            goes.setdefault(node, []).append(owner)
        return cls(
            {owner: found.owned_bytes[owner] for owner in first},
            goes,
            {node: found.ops[node].extra_bytes for node in block.ops},
        )

    @property
    def bytes_(self) -> int:
        return sum(self.memories.values()) + sum(self.inside.values())


def _forward(block: Block, found: BlockSaved, kept: _Kept) -> int:
    """Values that are not kept go when their names do; those that are kept come one after the other."""
    owner, sizes, ends = found.owner, found.owned_bytes, len(block.ops)
    last = {owner[n]: k for k, node in enumerate(block.ops) for n in operands(node) if n in owner}
    last |= {owner[n]: ends for n in block.outputs if n in owner}
    named, under = _names(block), defaultdict[str, list[fx.Node]](list)
    live = {n for n in block.inputs if info(n).meta.needs_grad}
    bytes_ = sum(sizes[n] for n in live | (kept.memories.keys() & set(block.inputs))) - kept.bytes_
    most = bytes_
    for k, node in enumerate(block.ops):
        made = [n for n in _made(node, found) if n not in live]
        live.update(made)
        bytes_ += sum(sizes[n] for n in made) + kept.inside[node]
        most = max(most, bytes_)
        for name in {named[n] for n in (node, *made)}:
            gone = [n for n in under[name] if last[n] <= k]
            under[name] = [n for n in under[name] if last[n] > k]
            bytes_ -= sum(sizes[n] for n in gone)
        for n in made:
            if n not in last and n not in kept.memories:
                bytes_ -= sizes[n]  # nobody reads it
            elif n not in kept.memories:
                under[named[n]].append(n)
    return most


def _names(block: Block) -> dict[fx.Node, str]:
    """What values that the text gives one name have in common: the module whose weights made them, or else the op. A
    value that is only changed keeps its name: by a view, a cast, dropout, a sum with a bias."""
    found: dict[fx.Node, str] = {}
    for node in block.ops:
        given = [n for n in operands(node) if info(n).role not in _WEIGHTS]
        weights = len(given) < len(operands(node))
        if is_getitem(node) or (len(given) == 1 and given[0] in found and _is_changed(node, given[0])):
            found[node] = found[given[0]]
        else:
            found[node] = info(node).module if weights else op_name(node)
    return found


def _is_changed(node: fx.Node, value: fx.Node) -> bool:
    same = info(node).meta.numel == info(value).meta.numel
    return same and (is_view(node) or lookup(op_name(node)).is_linear(Op.of(node)))


def _made(node: fx.Node, found: BlockSaved) -> Iterator[fx.Node]:
    """What has memory of its own from ``node`` on: itself, or the nodes that take its elements."""
    if node in found.owner:
        if found.owner[node] is node:
            yield node
        return
    yield from (user for user in node.users if found.owner.get(user) is user)


@dataclass
class _Gradients:
    """The gradients that live: the ``memory`` that a node's lies in, and of each memory its bytes (``sizes``) and how
    many nodes' gradients lie in it (``serves``)."""

    memory: dict[fx.Node, int] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    serves: Counter[int] = field(default_factory=Counter)
    number: int = 0

    @property
    def bytes_(self) -> int:
        return sum(self.sizes.values())

    def add(self, node: fx.Node, memory: int | None) -> int:
        """A term of ``node``'s gradient, in ``memory`` (None: new). Gives the bytes that live until it is added."""
        before = self.memory.get(node)
        if before is not None and self.serves[before] == 1:  # added in place
            return 0 if memory is not None else info(node).meta.bytes
        if before is not None:
            self._leave(before)
            memory = None
        if memory is None:
            self.number, memory = self.number + 1, self.number
            self.sizes[memory] = info(node).meta.bytes
        self.memory[node] = memory
        self.serves[memory] += 1
        return info(node).meta.bytes if before is not None else 0

    def drop(self, node: fx.Node) -> None:
        memory = self.memory.pop(node, None)
        if memory is not None:
            self._leave(memory)

    def _leave(self, memory: int) -> None:
        self.serves[memory] -= 1
        if not self.serves[memory]:
            del self.serves[memory]
            del self.sizes[memory]


def _backward(block: Block, found: BlockSaved, kept: _Kept) -> Iterator[Stretch]:
    gradients, freed, most = _Gradients(), 0, 0
    for node in dict.fromkeys(block.outputs):
        if info(node).meta.needs_grad:
            gradients.add(node, None)
    places = {node: place for place, node in enumerate(block.parameters)}
    runs = [node for node in block.ops[::-1] if not is_getitem(node)]  # whose gradient waits for other elements'
    weights = {node: [places[n] for n in _weights(node)] for node in runs}
    last = {place: node for node in runs for place in weights[node]}
    seen: set[int] = set()
    for node in runs:
        is_run = any(n in gradients.memory for n in _results(node))
        if is_run:
            most = max(most, _through(node, gradients, found, kept) - freed)
        freed += kept.inside[node] + sum(kept.memories[n] for n in kept.goes_after.get(node, ()))
        if is_run and weights[node]:
            begun = tuple(place for place in weights[node] if place not in seen)
            seen.update(begun)
            ended = tuple(place for place in weights[node] if last[place] is node)
            yield Stretch(most, gradients.bytes_ - freed, begun, ended)
            most = gradients.bytes_ - freed
    yield Stretch(max(most, gradients.bytes_ - freed), gradients.bytes_ - freed)


def _weights(node: fx.Node) -> list[fx.Node]:
    """The parameters of which its backward makes gradients."""
    return [n for n in dict.fromkeys(operands(node)) if info(n).meta.needs_grad and info(n).role == "parameter"]


def _through(node: fx.Node, gradients: _Gradients, found: BlockSaved, kept: _Kept) -> int:
    """The backward of one op: the bytes that live at most while it runs. Afterwards its own gradient is gone."""
    weights = passing = 0
    mine = gradients.memory.get(node)
    for operand in dict.fromkeys(operands(node)):
        data = info(operand)
        if not data.meta.needs_grad:
            continue
        if data.role in _WEIGHTS:
            weights += 0 if _passes_on(node, operand, found) else data.meta.bytes
        else:
            passing += gradients.add(operand, mine if _passes_on(node, operand, found) else None)
    held = gradients.bytes_ + passing + weights + _inside(node, kept)
    for result in _results(node):
        gradients.drop(result)
    return held


def _results(node: fx.Node) -> Iterator[fx.Node]:
    """What it makes: itself, or the elements of its tuple."""
    yield node
    yield from (user for user in node.users if is_getitem(user))


def _inside(node: fx.Node, kept: _Kept) -> int:
    """Temporaries of its backward; torch's own ops make a gradient of what they made inside and kept, too."""
    inside = chunk_bytes(node) if isinstance(node.target, RuntimeOp) else kept.inside[node]
    return inside + lookup(op_name(node)).whole_bytes(Op.of(node)) + absent_bytes(node)


def _passes_on(node: fx.Node, operand: fx.Node, found: BlockSaved) -> bool:
    """Whether the operand's gradient is the result's: of a view of all of it, and of a sum."""
    result, given = info(node).meta, info(operand).meta
    if found.owner.get(node) is not None and found.owner.get(node) is found.owner.get(operand):
        return result.numel == given.numel
    terms = [n for n in operands(node) if info(n).meta.needs_grad]
    is_sum = len(terms) > 1 and not found.ops[node].is_something
    return is_sum and result.dtype == given.dtype and _is_part(result.shape, given.shape)


def _is_part(result: Iterable[int], given: Iterable[int]) -> bool:
    """Whether the operand is as large as the result, or (of a concatenation) one of its parts."""
    a, b = tuple(result), tuple(given)
    return len(a) == len(b) and sum(x != y for x, y in zip(a, b, strict=True)) <= 1
