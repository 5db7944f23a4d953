"""How tokens travel to experts on other nodes: row by row (``flat``), or once to each ``node``; as is faster.

Where ranks that experts are split over lie in one node, or not alike in all nodes, rows go flat. Else each block takes
the form with which its passes take less (of equal ones the flat one), by the costs that the plan will have, and by what
the host issues in each.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from autopar.cost_models import step
from autopar.errors import PlanError, ShardingError
from autopar.graph import Block, Model, where
from autopar.passes.expert_roads import exchange_axes, expert_roads, nodes_of, travelling
from autopar.passes.routers import router_calls
from autopar.plan import Plan
from autopar.planner.block_costs import Computed, Machine, block_cost, calls_of

FLAT, NODE, AUTO = "flat", "node", "auto"


def dispatch_forms(model: Model, machine: Machine, wanted: str, pinned: Plan | None = None) -> Model:
    """In place, on a model that is local to all axes; ``wanted`` is one of the three, ``pinned`` a plan whose forms are
    taken.

    Raises ShardingError where tokens can't travel once to each node though they shall, PlanError where a plan says so.
    """
    taken, mesh = _taken(model, pinned) if pinned is not None else {}, machine.mesh
    for number, block in enumerate(model.blocks):
        routings = travelling(block)
        if not routings:
            continue
        nodes = min(_nodes(exchange_axes(routing), machine) for routing in routings)
        chosen = taken.get(number)
        if chosen is None:
            if wanted == NODE and _nodes(mesh.expert_axes, machine) == 1:
                raise _refusal(routings[0], machine)
            chosen = nodes if wanted == NODE or (wanted == AUTO and _is_faster(block, nodes, machine)) else 1
        elif chosen not in (1, nodes):
            raise PlanError(
                f"{where(routings[0])}: in the plan tokens go by way of {chosen} nodes, but there are {nodes}"
            )
        expert_roads(block, chosen)
    return model


def _taken(model: Model, plan: Plan) -> dict[int, int]:
    nodes = {row.layer: row.nodes for row in plan.experts}
    return {model.calls[router.call].block: nodes.get(router.layer, 1) for router in router_calls(model)}


def _nodes(axes: Sequence[str], machine: Machine) -> int:
    assert machine.cluster is not None, "nodes are a cluster's"
    return nodes_of(axes, machine.cluster, machine.mesh)


def _is_faster(block: Block, nodes: int, machine: Machine) -> bool:
    if nodes == 1:
        return False
    computed = Computed.of(block, machine.device)
    flat, by_node = (_seconds(block, machine.by_way_of(way), computed) for way in (1, nodes))
    return by_node < flat


def _seconds(block: Block, machine: Machine, computed: Computed) -> float:
    """Of passes, which wait for the host there: by way of nodes, that has more to issue."""
    cost = block_cost(block, machine, computed)
    ahead, back = (step.host_seconds(calls, machine.device) for calls in calls_of(block.ops, by_way_of=machine.nodes))
    return max(cost.forward_seconds, ahead) + max(cost.backward_seconds, back)


def _refusal(routing: fx.Node, machine: Machine) -> ShardingError:
    cluster, ranks = machine.cluster, machine.mesh.group(0, *machine.mesh.expert_axes)
    assert cluster is not None, "nodes are a cluster's"
    homes = {rank // cluster.devices_per_node for rank in ranks}
    lie = "lie in one node" if len(homes) == 1 else "don't lie alike in all nodes"
    return ShardingError(
        f"{where(routing)}: dispatch='node', but the {len(ranks)} ranks that its experts are split over {lie} of "
        f"{cluster.devices_per_node} devices; use dispatch='flat' or 'auto', or an ep that fills several nodes"
    )
