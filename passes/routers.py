"""routers: where a model gives tokens to experts, and which layer of the model that is.

Guarantees of :func:`name_routers`: values and types stay; every ``route`` says which layer it is of, below the module
whose code it is written into, so that ranks can tell the loads of layers apart that share code. Example:
``route(index, 8)`` in ``model.layers.3`` -> ``route(index, 8, layer="mlp.experts")``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from autopar.graph import Block, Model, info, op_name, operands
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
    own = own_modules(model)
    names, nodes = _names(model), [routes(block) for block in model.blocks]
    for index, call in enumerate(model.calls):
        for node in nodes[call.block]:
            path = call.path if index in own else ""
            yield RouterCall(index, node, ".".join(filter(None, (path, names[node]))))


def weights_of(model: Model, router: RouterCall) -> dict[str, fx.Node]:
    """Name -> placeholder of the parameters that hold a row per expert, in the order of their use."""
    call = model.calls[router.call]
    block = model.block_of(call)
    places = dict(zip(block.parameters, call.parameters, strict=True))
    found: dict[str, fx.Node] = {}
    for node in router.node.users:
        for position in lookup(op_name(node)).expert_operands(Op.of(node)):
            source = _stored(operands(node)[position])
            if source in places:
                found[places[source]] = source
    return found


def _stored(node: fx.Node) -> fx.Node:
    """The placeholder behind casts and transitions."""
    while node.op == "call_function" and len(operands(node)) == 1:
        (node,) = operands(node)
    return node


def name_routers(model: Model) -> Model:
    """In place, on a model that nobody else reads: ``layer`` becomes an argument."""
    for node, name in _names(model).items():
        node.kwargs = {**node.kwargs, "layer": name}
    return model


def _names(model: Model) -> dict[fx.Node, str]:
    """Each router's path below the module whose ``forward`` it is written into: its block's, or the whole stage's."""
    own = own_modules(model)
    found: dict[fx.Node, str] = {}
    for number, block in enumerate(model.blocks):
        calls = [index for index, call in enumerate(model.calls) if call.block == number]
        inside = any(index in own for index in calls)
        path = "" if inside or not calls else model.calls[calls[0]].path
        taken: set[str] = set()
        for node in routes(block):
            name = ".".join(filter(None, (path, info(node).module)))
            numbered = (name if k == 1 else f"{name}:{k}" for k in range(1, len(taken) + 2))
            found[node] = next(n for n in numbered if n not in taken)
            taken.add(found[node])
    return found
