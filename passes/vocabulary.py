"""What the layers with the vocabulary's tables are made of, at any stage of lowering, and one rank's part of them.

They are the calls that :mod:`autopar.passes.split_vocabulary` makes. :func:`localize_vocabulary` is to the pipeline
axis what :mod:`autopar.passes.localize` is to the others: shapes become those of one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from torch import fx

from autopar.errors import GraphError
from autopar.graph import Block, Choice, Info, Model, info, op_name, operands, set_info
from autopar.spmd import I, P, R, S, Type, local_shape

VOCABULARY: Final = "vocabulary"
TAIL: Final = "tail"
STAGELESS: Final = frozenset({"tables", VOCABULARY, TAIL})
"""The kinds of blocks whose calls belong to no pipeline stage."""

ENTROPIES: Final = ("aten.cross_entropy_loss.default", "cross_entropy_sharded")
PRODUCTS: Final = {"aten.linear.default": 0, "aten.mm.default": 1}
"""Products of the head -> the dim of their weight that the classes are on."""

ALIGNED_BYTES: Final = 16
"""Of a load of the largest size: rows of a product's matrices should begin at multiples of that."""

CASTS: Final = frozenset({"aten.to.dtype", "aten.to.dtype_layout", "aten._to_copy.default"})


@dataclass(frozen=True)
class VocabularyCalls:
    """The calls without a stage, by what they do; None: there is no such call."""

    embedding: int | None
    head: int
    tail: int | None


@dataclass(frozen=True)
class Head:
    """The ops of a head's block. ``weight`` and ``bias`` are placeholders; ``biased`` is the product with its bias, and
    cast if that comes next (a cast's backward needs no values, unlike that of what may follow).

    ``path`` is all from the product to the logits, in order.
    """

    x: fx.Node
    product: fx.Node
    biased: fx.Node
    logits: fx.Node
    targets: fx.Node
    entropy: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    path: tuple[fx.Node, ...]


def staged_calls(model: Model) -> list[int]:
    """The numbers of the calls that pipeline stages are cut from, in order."""
    return [index for index, call in enumerate(model.calls) if model.block_of(call).kind not in STAGELESS]


def vocabulary_calls(model: Model) -> VocabularyCalls | None:
    """None where the vocabulary is not split off."""
    found = [i for i, call in enumerate(model.calls) if model.block_of(call).kind == VOCABULARY]
    if not found:
        return None
    is_head = {i: op_name(model.block_of(model.calls[i]).outputs[0]) in ENTROPIES for i in found}
    return VocabularyCalls(
        next((i for i in found if not is_head[i]), None),
        next(i for i in found if is_head[i]),
        next((i for i, call in enumerate(model.calls) if model.block_of(call).kind == TAIL), None),
    )


def is_head(block: Block) -> bool:
    return block.kind == VOCABULARY and op_name(block.outputs[0]) in ENTROPIES


def head_of(block: Block) -> Head:
    """The head in its block. Raises GraphError where it isn't as :mod:`autopar.passes.split_vocabulary` left it."""
    entropy = block.outputs[0]
    logits, targets = operands(entropy)[:2]
    path, biased, bias = [logits], logits, None
    while op_name(path[-1]) not in PRODUCTS:
        given = operands(path[-1])
        stored = [node for node in map(stored_in, given) if node is not None]
        before = next((node for node in given if stored_in(node) is None), None)
        if before is None or (stored and bias is not None):
            raise GraphError(f"block {block.name}: {path[-1].name} doesn't lead back to a product with a parameter")
        bias, biased = (stored[0], path[-1]) if stored else (bias, before)
        path.append(before)
    x, factor = operands(path[-1])
    weight = stored_in(factor)
    if weight is None:
        raise GraphError(f"block {block.name}: the head's product {path[-1].name} reads no parameter")
    for node in path[path.index(biased) - 1 :: -1] if biased is not logits else ():
        if op_name(node) not in CASTS:
            break
        biased = node
    return Head(x, path[-1], biased, logits, targets, entropy, weight, bias, tuple(reversed(path)))


def stored_in(node: fx.Node) -> fx.Node | None:
    """The parameter that ``node`` is, or is a mere conversion of: to another type or dtype."""
    while node.op == "call_function" and (op_name(node) == "convert" or op_name(node) in CASTS):
        node = operands(node)[0]
    return node if node.op == "placeholder" and info(node).role == "parameter" else None


def vocabulary_dims(block: Block) -> dict[fx.Node, int]:
    """Of a block of kind "vocabulary": each parameter, and the dim of it that the vocabulary is on."""
    if not is_head(block):
        return dict.fromkeys(block.placeholders("parameter"), 0)
    head = head_of(block)
    dims = {head.weight: PRODUCTS[op_name(head.product)]}
    return dims | ({head.bias: 0} if head.bias is not None else {})


def localize_vocabulary(model: Model, pp: int) -> Model:
    """A copy in which tables, and what is made of them, are those of one of ``pp`` pipeline ranks.

    Their types on pp are written down; the ops stay: a lookup of other ranks' rows, or a sum over all classes, is for
    those who run the copy.
    """
    blocks = [_localized(b, pp) if b.kind == VOCABULARY else b for b in model.blocks]
    return replace(model, blocks=blocks)


def _localized(block: Block, pp: int) -> Block:
    types = dict(_types(block))
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in block.graph.nodes:
        made[node] = graph.node_copy(node, lambda n: made[n])
        if node.op == "output":
            continue
        taken = tuple(types.get(o, R) for o in operands(node)) if node.op == "call_function" else ()
        choice = Choice(taken, types[node]) if node in types else None
        set_info(made[node], _with_choice(info(node), choice, pp))
    return replace(block, graph=graph)


def _with_choice(data: Info, choice: Choice | None, pp: int) -> Info:
    if choice is None:
        return replace(data)
    metas = tuple(replace(m, shape=local_shape(m.shape, choice.result, pp)) for m in data.outputs)
    return replace(data, outputs=metas, choices={"pp": choice, **data.choices})


def _types(block: Block) -> Iterator[tuple[fx.Node, Type]]:
    """The type on pp of every node that the vocabulary runs through."""
    for node, dim in vocabulary_dims(block).items():
        yield from ((n, S(dim)) for n in conversions(node))
    if not is_head(block):
        yield block.outputs[0], P
        return
    head = head_of(block)
    yield from ((node, S(1)) for node in head.path)
    yield head.entropy, I


def lengthen(node: fx.Node, dim: int, multiple: int) -> None:
    """Its ``dim`` becomes the next multiple of that."""
    data = info(node)
    shape = list(data.meta.shape)
    shape[dim] = -(-shape[dim] // multiple) * multiple
    set_info(node, replace(data, outputs=(replace(data.meta, shape=tuple(shape)),)))


def conversions(node: fx.Node) -> Iterator[fx.Node]:
    """The parameter and all that is a mere conversion of it."""
    yield node
    for user in node.users:
        if stored_in(user) is not None:
            yield from conversions(user)
