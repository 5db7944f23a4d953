"""routers: where a model gives tokens to experts, and which layer of the model that is.

Guarantees of :func:`name_routers`: values and types stay; every ``route`` says which layer it is of, below the module
whose code it is written into, so that ranks can tell the loads of layers apart that share code. Example:
``route(index, 8)`` in ``model.layers.3`` -> ``route(index, 8, layer="mlp.experts")``; where that layer is applied
twice, and so written into its stage, ``layer="model.layers.3.mlp.experts"``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import fx

from autopar.graph import Block, Call, Model, copied, info, op_name, operands
from autopar.passes.experts import ROUTE
from autopar.passes.recompute import own_modules
from autopar.rules import lookup
from autopar.rules.base import Op


@dataclass(frozen=True)
class RouterCall:
    """One occurrence of a router: ``node`` in the block of ``call``; ``layer`` is its module's full path."""

    call: int
    node: fx.Node
    layer: str

    @property
    def experts(self) -> int:
        experts = self.node.args[1]
        assert isinstance(experts, int)
        return experts


def routes(block: Block) -> list[fx.Node]:
    return [node for node in block.ops if node.target == ROUTE]


def router_calls(model: Model) -> Iterator[RouterCall]:
    """In the model's order. Calls of a module that is called more than once are of one layer."""
    names = [_names(block) for block in model.blocks]
    for index, call in enumerate(model.calls):
        for node, name in names[call.block].items():
            yield RouterCall(index, node, _joined(call.path, name))


def weights_of(model: Model, router: RouterCall) -> dict[str, fx.Node]:
    """Name -> placeholder of the parameters that hold a row per expert, in the order of their use."""
    call = model.calls[router.call]
    block = model.block_of(call)
    places = dict(zip(block.parameters, call.parameters, strict=True))
    found: dict[str, fx.Node] = {}
    for weight in stacks_of(router.node):
        source = _stored(weight)
        if source in places:
            found[places[source]] = source
    return found


def stacks_of(route: fx.Node) -> Iterator[fx.Node]:
    """The stacks of weights, one per expert along dim 0, that are used for the rows of ``route``, in order."""
    for node in route.users:
        for position in lookup(op_name(node)).expert_operands(Op.of(node)):
            yield operands(node)[position]


def _stored(node: fx.Node) -> fx.Node:
    """The placeholder behind casts and transitions."""
    while node.op == "call_function" and len(operands(node)) == 1:
        (node,) = operands(node)
    return node


def name_routers(model: Model) -> Model:
    """In place, on a model that nobody else reads: ``layer`` becomes an argument. Calls that are written into their
    stage have a block for each layer."""
    own = own_modules(model)
    blocks, calls = list(model.blocks), list(model.calls)
    for number, block in enumerate(model.blocks):
        served = [index for index, call in enumerate(calls) if call.block == number]
        apart = list(dict.fromkeys(calls[index].path for index in served if index not in own))
        if not routes(block) or not apart:
            _name(block, "")
            continue
        keeps = 0 if any(index in own for index in served) else 1
        for path in apart[keeps:]:
            made = replace(block, graph=copied(block.graph)[0])
            _name(made, path)
            calls = [_moved(c, number, path, len(blocks)) if i not in own else c for i, c in enumerate(calls)]
            blocks.append(made)
        _name(block, apart[0] if keeps else "")
    return replace(model, blocks=blocks, calls=calls)


def _moved(call: Call, block: int, path: str, to: int) -> Call:
    return replace(call, block=to) if (call.block, call.path) == (block, path) else call


def _name(block: Block, path: str) -> None:
    for node, name in _names(block).items():
        node.kwargs = {**node.kwargs, "layer": _joined(path, name)}


def _names(block: Block) -> dict[fx.Node, str]:
    """Each router's path below its block's."""
    found: dict[fx.Node, str] = {}
    for node in routes(block):
        name = info(node).module
        numbered = (name if k == 1 else f"{name}:{k}" for k in range(1, len(found) + 2))
        found[node] = next(n for n in numbered if n not in found.values())
    return found


def _joined(*parts: str) -> str:
    return ".".join(filter(None, parts))
