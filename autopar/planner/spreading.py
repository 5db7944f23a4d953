"""What the rules say of a model before an axis is solved: where dims may be split, and where a split goes from there.

One :class:`Spread` holds each op as rules see it, made once, and the split points of every value, carried over ops and
edges until nothing changes; :func:`follow` carries a split of the batch, or of sequences, from call to call, and
:func:`expert_types` finds how parameters of experts are stored on an axis of theirs.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING

from torch import fx

from autopar.errors import ShardingError
from autopar.graph import INPUT_CALL, Choice, Model, info, op_name, operands
from autopar.planner.rulings import Frozen, Rulings, frozen, legal
from autopar.planner.unrolled import repeated
from autopar.rules import lookup
from autopar.rules.base import Op, Rule, Splits
from autopar.spmd import I, R, S, Type

if TYPE_CHECKING:
    from autopar.planner.sharding import Solved

Key = tuple[int, fx.Node | int]
"""(block, node), or (INPUT_CALL, position) for a tensor of the batch."""


@dataclass(frozen=True)
class Known:
    """A node as rules see it: ``operands`` are its tensor operands' keys."""

    node: fx.Node
    op: Op
    rule: Rule
    operands: tuple[Key, ...]


@dataclass
class Spread:
    """``ops`` by key, in order; ``edges`` between calls, (source, target), with how often; ``splits``: split points of
    every value; ``parameters``: keys of parameters, and of what an axis solved before made of them without
    communication in the forward; ``followed`` is what :func:`follow` found out, ``solved`` are problems of axes of this
    model, as it is."""

    model: Model
    ops: dict[Key, Known]
    edges: dict[tuple[Key, Key], int]
    splits: dict[Key, Splits]
    parameters: set[Key]
    rulings: Rulings
    followed: dict[tuple[tuple[tuple[int, int | None], ...], bool], dict[Key, Type]] = field(default_factory=dict)
    solved: list[Solved] = field(default_factory=list)

    @classmethod
    def of(cls, model: Model, rulings: Rulings | None = None) -> Spread:
        """``rulings`` are kept by whoever has several models of the same ops."""
        rulings = rulings or Rulings()
        ops: dict[Key, Known] = {}
        splits: dict[Key, Splits] = {(INPUT_CALL, p): _points(item.meta.shape) for p, item in enumerate(model.inputs)}
        parameters: set[Key] = set()
        for number, block in enumerate(model.blocks):
            for node in block.graph.nodes:
                if node.op == "output":
                    continue
                splits[number, node] = _points(info(node).meta.shape)
                if info(node).role == "parameter":
                    parameters.add((number, node))
                if node.op == "call_function":
                    given = tuple((number, operand) for operand in operands(node))
                    ops[number, node] = Known(node, rulings.op(node), lookup(op_name(node)), given)
                    if op_name(node) == "convert" and given[0] in parameters:
                        parameters.add((number, node))
        spread = cls(model, ops, _edges(model), splits, parameters, rulings)
        _link(spread)
        return spread

    def legal(self, key: Key, size: int) -> Sequence[Choice]:
        """The choices of an op on an axis of ``size``."""
        known = self.ops[key]
        inputs = [self.points[operand] for operand in known.operands]
        return legal(known.rule, known.op, size, inputs, self.points[key])

    @cached_property
    def points(self) -> dict[Key, Frozen]:
        """``splits``, once they no longer change; one object for all that are equal."""
        known = self.rulings.points
        return {key: known.setdefault(points := frozen(splits), points) for key, splits in self.splits.items()}

    @cached_property
    def loops(self) -> list[list[Key]]:
        """Ops that are one op of several iterations: of one line, and of values with as many dims."""
        found: list[list[Key]] = []
        for number in range(len(self.model.blocks)):
            keys = [key for key in self.ops if key[0] == number]
            found += [[keys[place] for place in places] for places in repeated([self._kind(key) for key in keys])]
        return found

    def _kind(self, key: Key) -> Hashable:
        node = self.ops[key].node
        dims = tuple(len(self.splits[other]) for other in (key, *self.ops[key].operands))
        return op_name(node), info(node).source, info(node).module, dims


def _points(shape: Sequence[int]) -> Splits:
    return [{1} for _ in shape]


def _edges(model: Model) -> dict[tuple[Key, Key], int]:
    """In order of their sources: of several that reach one input, the last one counts where only one can."""
    inputs, outputs = [block.inputs for block in model.blocks], [block.outputs for block in model.blocks]
    found: dict[tuple[Key, Key], int] = {}
    for (source, output, block, position), count in sorted(model.edges().items()):
        made: Key = (source, output if source == INPUT_CALL else outputs[source][output])
        edge = made, (block, inputs[block][position])
        found[edge] = found.get(edge, 0) + count
    return found


def _link(spread: Spread) -> None:
    """Carry split points over ops and edges until nothing changes: again only where something did."""
    steps: list[tuple[tuple[Key, ...], Callable[[], None]]] = []
    for key, known in spread.ops.items():
        inputs = [spread.splits[operand] for operand in known.operands]
        steps.append(((*known.operands, key), partial(known.rule.link, known.op, inputs, spread.splits[key])))
    for source, target in spread.edges:
        steps.append(((source, target), partial(_join, spread.splits[source], spread.splits[target])))
    about: dict[Key, list[int]] = defaultdict(list)
    for number, (keys, _) in enumerate(steps):
        for key in keys:
            about[key].append(number)
    sizes = {key: len(splits) for key, splits in spread.splits.items()}
    waiting, queued = deque(range(len(steps))), [True] * len(steps)
    while waiting:
        number = waiting.popleft()
        queued[number] = False
        keys, step = steps[number]
        step()
        for key in keys:
            size = sum(map(len, spread.splits[key]))
            if size != sizes[key]:
                sizes[key] = size
                for other in about[key]:
                    if not queued[other]:
                        queued[other] = True
                        waiting.append(other)


def _join(source: Splits, target: Splits) -> None:
    for a, b in zip(source, target, strict=True):
        if a != b:
            a |= b
            b |= a


# --- splits of the batch and of sequences ---------------------------------------------------------


def follow(spread: Spread, dims: Mapping[int, int | None], slices: bool = False) -> Mapping[Key, Type]:
    """The type that a split of the batch's tensors on ``dims`` (by position) gives each value, call by call, as far as
    the rules carry it. With ``slices``, what is not split may be cut to fit what is, and what is split otherwise be
    gathered; and what is shifted or padded along the dim, which is computed whole, still has it.
    """
    key = tuple(dims.items()), slices
    if key not in spread.followed:
        spread.followed[key] = _follow(spread, dims, slices)
    return spread.followed[key]


def _follow(spread: Spread, dims: Mapping[int, int | None], slices: bool) -> dict[Key, Type]:
    found: dict[Key, Type] = {(INPUT_CALL, position): S(dim) for position, dim in dims.items() if dim is not None}
    into: dict[int, list[tuple[Key, Key]]] = defaultdict(list)
    for source, target in spread.edges:
        into[target[0]].append((source, target))
    mine: dict[int, list[Key]] = defaultdict(list)
    for key in spread.ops:
        mine[key[0]].append(key)
    for number in range(len(spread.model.blocks)):
        for source, target in into[number]:
            if source in found:
                found[target] = found[source]
        for key in mine[number]:
            kind = _followed(spread, found, key, slices)
            if kind is not None:
                found[key] = kind
    return found


def _followed(spread: Spread, found: Mapping[Key, Type], key: Key, slices: bool) -> Type | None:
    known = spread.ops[key]
    given = tuple(found.get(operand, R) for operand in known.operands)
    if all(kind == R for kind in given):
        return None
    choices = [c for c in spread.legal(key, 1) if c.result.is_shard]
    exact = [c.result for c in choices if c.operands == given]
    if not slices:
        return next(iter(exact), None)
    fitting = exact or [c.result for c in choices if _sliced_to(given, c.operands)]
    kept = next((kind for kind in given if kind in fitting), None) or _shifted(known.op, given)
    return kept or next(iter(fitting), None) or next((c.result for c in choices if _gathered_to(given, c)), None)


def _sliced_to(given: Sequence[Type], taken: Sequence[Type]) -> bool:
    return all(have in (R, want) for have, want in zip(given, taken, strict=True))


def _gathered_to(given: Sequence[Type], choice: Choice) -> bool:
    """Whether the first operand that is split stays so."""
    first = next(i for i, kind in enumerate(given) if kind.is_shard)
    return choice.operands[first] == given[first]


def _shifted(op: Op, given: Sequence[Type]) -> Type | None:
    """The type of an operand, where the result has no gradient and the operand's dims, but maybe for the extent of the
    one that is split: a slice or a pad of positions, or one put in another's place.
    """
    for kind, meta in zip(given, op.operands, strict=True):
        pairs = enumerate(zip(meta.shape, op.result.shape, strict=False))
        same = all(d == kind.dim or before == after for d, (before, after) in pairs)
        if kind.is_shard and not op.result.needs_grad and same and len(meta.shape) == len(op.result.shape):
            return kind
    return None


def sequence_lengths(spread: Spread) -> dict[int, fx.Node]:
    """How many positions activations have where they are first made of sequences of the batch, and by which op."""
    types = follow(spread, {p: item.seq_dim for p, item in enumerate(spread.model.inputs)}, slices=True)
    found: dict[int, fx.Node] = {}
    for key, kind in types.items():
        known = spread.ops.get(key)
        if known is None or not known.op.result.needs_grad or kind.outer != 1:
            continue
        before = (o for o, meta in zip(known.operands, known.op.operands, strict=True) if meta.needs_grad)
        if not any(operand in types for operand in before):
            found.setdefault(known.op.result.shape[kind.dim], known.node)
    return found


# --- weights of experts ---------------------------------------------------------------------------


def expert_types(spread: Spread, axis: str, size: int) -> dict[Key, list[Type]]:
    """How parameters of experts may be stored on an axis that holds experts.

    Those that products take with a dim of experts have to be split on it. What else is as long in its first dim (their
    biases) may be; where it was split on an axis of experts before, it is on this one too. Raises ShardingError where
    the model has no experts, or their number doesn't divide.
    """
    model = spread.model
    found: dict[Key, list[Type]] = {}
    extents: set[int] = set()
    for known in spread.ops.values():
        for position in known.rule.expert_operands(known.op):
            source = _source_of_experts(spread, known.operands[position], S(0), size)
            if source is not None:
                key, kind = source
                found[key] = [kind]
                extents.add(_shape(key)[kind.dim])
    if not found and model.remarks:  # it has experts, and the plan says why they stay whole
        return {}
    if not found:
        raise ShardingError(
            f"the mesh splits experts over {axis}, but {model.name} has no product with a weight "
            "per expert; leave ep out of the mesh"
        )
    _check_experts(model, found, axis, size)
    for number, block in enumerate(model.blocks):
        for node in block.placeholders("parameter"):
            shape = info(node).meta.shape
            if (number, node) not in found and shape and shape[0] in extents:
                before = [c.result for other, c in info(node).choices.items() if other in ("ep", "cp")]
                if not before:
                    found[number, node] = [I, S(0)]
                elif any(kind == S(0) for kind in before):
                    found[number, node] = [S(0)]
    return found


def _shape(key: Key) -> tuple[int, ...]:
    node = key[1]
    assert isinstance(node, fx.Node)
    return info(node).meta.shape


def _source_of_experts(spread: Spread, key: Key, kind: Type, size: int) -> tuple[Key, Type] | None:
    """The parameter behind an operand that is split as ``kind``, and how that is split then."""
    while info(key[1]).role != "parameter":  # type: ignore[arg-type]
        known = spread.ops.get(key)
        if known is None:
            return None
        taken = next((c.operands for c in spread.legal(key, size) if c.result == kind), ())
        metas = known.op.operands
        behind = [(o, k) for o, k, m in zip(known.operands, taken, metas, strict=False) if k.is_shard and m.needs_grad]
        if len(behind) != 1:
            return None
        key, kind = behind[0]
    return key, kind


def _check_experts(model: Model, found: Mapping[Key, list[Type]], axis: str, size: int) -> None:
    for (number, node), (kind,) in found.items():
        assert isinstance(node, fx.Node)
        extent = info(node).meta.shape[kind.dim]
        if extent % size:
            fits = [n for n in range(1, extent + 1) if extent % n == 0]
            raise ShardingError(
                f"{model.blocks[number].name}: {info(node).name} holds {extent} experts, which don't divide over "
                f"{axis} {size}; they do over {fits}"
            )
