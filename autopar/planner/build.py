"""From a captured model to a plan: solve every axis, cut into stages, lay out the schedule, predict the cost.

Reads top to bottom in :func:`build`. What comes out beside the plan is the same model made local (the graph that code
is emitted from) so that what is executed is what was costed.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cluster import Cluster
from autopar.cost_models import collective, step
from autopar.errors import PlanError, ShardingError
from autopar.graph import Block, Call, Model, info, op_name, verify, where
from autopar.mesh import Mesh
from autopar.passes.insert_collectives import insert_collectives
from autopar.passes.localize import localize
from autopar.plan import BlockPlan, CostPlan, InputPlan, NodePlan, Plan, StagePlan
from autopar.planner.block_costs import BlockCost, Machine, block_cost
from autopar.planner.onehot import Solution
from autopar.planner.prices import STATE_COPIES, MicrobatchPrices, RankPrices
from autopar.planner.sharding import AxisProblem, apply_choices, solve_axis
from autopar.planner.stages import Partition, Unit, partition
from autopar.rules import has_rule
from autopar.rules.attention import heads
from autopar.rules.base import Op
from autopar.schedules import Costs, Schedule, Timeline, generate, lower, simulate_timeline


@dataclass(frozen=True)
class Request:
    """What the user pinned or asked for."""

    mesh: Mesh
    microbatches: int
    cluster: Cluster
    schedule: str


@dataclass
class Built:
    """The plan, and what it was made for: the local model, the calls of each stage, the lowered schedule."""

    plan: Plan
    model: Model
    stages: tuple[tuple[int, ...], ...]
    schedule: Schedule
    timeline: Timeline


def build(model: Model, request: Request, pinned: Plan | None = None) -> Built:
    """Plan ``model`` (which becomes local) for ``request``; with ``pinned``, take its decisions instead of solving.

    Raises ShardingError, StageError, ScheduleError or PlanError.
    """
    _check_batch(model, request)
    solutions = [_place(model, problem, pinned) for problem in _axes(request)]
    _check_heads(model, request)
    machine = _machine(request)
    costs = [block_cost(block, machine) for block in model.blocks]
    calls = [i for i, call in enumerate(model.calls) if model.block_of(call).kind != "tables"]
    schedule = lower(generate(request.schedule, request.mesh.pp, request.microbatches))
    inflight = _inflight(schedule)
    units = [_unit(model, model.calls[i], i, costs, machine) for i in calls]
    cut = _cut(units, inflight, request, pinned)
    stages = _stages(calls, cut)
    timeline = simulate_timeline(schedule, _schedule_costs(model, stages, costs, units, calls, machine))
    plan = pinned or _plan(model, request, solutions, stages, cut, costs, timeline, inflight)
    return Built(plan, model, stages, schedule, timeline)


def _check_batch(model: Model, request: Request) -> None:
    parts = request.microbatches * request.mesh.dp
    if model.batch_size % parts:
        fits = [m for m in range(1, model.batch_size + 1) if model.batch_size % (m * request.mesh.dp) == 0]
        hint = f"microbatches may be one of {fits}" if fits else f"make the batch a multiple of {request.mesh.dp}"
        raise ShardingError(
            f"the batch of {model.batch_size} doesn't divide into {request.microbatches} microbatches x dp "
            f"{request.mesh.dp}; {hint}"
        )


def _axes(request: Request) -> list[AxisProblem]:
    """The axes to solve, outermost first: each sees the graph local to those before it."""
    mesh, device = request.mesh, request.cluster.device
    problems: list[AxisProblem] = []
    if request.microbatches > 1:
        problems.append(AxisProblem("mb", request.microbatches, MicrobatchPrices(), True))
    for axis in ("dp", "tp"):
        size = mesh.size(axis)
        if size > 1:
            link = request.cluster.link(size, mesh.stride(axis), mesh.world)
            prices = RankPrices(size, device, link, request.microbatches)
            budget = device.memory_bytes * mesh.pp if axis == "tp" else None
            problems.append(AxisProblem(axis, size, prices, axis == "dp", budget))
    return problems


def _place(model: Model, problem: AxisProblem, pinned: Plan | None) -> Solution:
    """Solve one axis (or take it from a plan) and make the model local to it."""
    solution = apply_choices(model, problem, _pins(pinned, problem.axis)) if pinned else solve_axis(model, problem)
    insert_collectives(model, problem.axis)
    verify(model, f"insert_collectives on {problem.axis}")
    localize(model, problem.axis, problem.size)
    return solution


def _pins(plan: Plan, axis: str) -> dict[tuple[str, str], str]:
    return {(b.name, n.name): n.choices[axis] for b in plan.blocks for n in b.nodes if axis in n.choices}


def _check_heads(model: Model, request: Request) -> None:
    """Attention that tp can't split by heads would be computed whole on every rank: refuse instead."""
    tp = request.mesh.tp
    for node in (n for block in model.blocks for n in block.ops if tp > 1):
        counts = heads(Op.of(node))
        if counts and not info(node).choices["tp"].result.is_shard and any(count % tp for count in counts):
            fits = [t for t in range(1, max(counts) + 1) if all(c % t == 0 for c in counts)]
            raise ShardingError(
                f"{where(node)} has {' and '.join(map(str, dict.fromkeys(counts)))} heads, which tp={tp} doesn't "
                f"divide; tp may be one of {fits}"
            )


def _machine(request: Request) -> Machine:
    mesh = request.mesh
    links = {axis: request.cluster.link(mesh.size(axis), mesh.stride(axis), mesh.world) for axis in ("pp", "dp", "tp")}
    return Machine(request.cluster.device, links, {axis: mesh.size(axis) for axis in links})


def _inflight(schedule: Schedule) -> list[int]:
    """How many microbatches each rank keeps between forward and backward at most."""
    peaks = []
    for actions in schedule.lists:
        now = peak = 0
        for action in actions:
            now += {"F": 1, "B": -1}.get(action.kind, 0)
            peak = max(peak, now)
        peaks.append(peak)
    return peaks


def _unit(model: Model, call: Call, index: int, costs: list[BlockCost], machine: Machine) -> Unit:
    cost = costs[call.block]
    crossing = _crossing_bytes(model, index)
    seconds = 2 * collective.seconds("send", crossing, 2, machine.links["pp"]) if machine.sizes["pp"] > 1 else 0.0
    name = call.path or model.block_of(call).name
    return Unit(name, cost.seconds, STATE_COPIES * cost.parameter_bytes, cost.saved_bytes, seconds)


def _crossing_bytes(model: Model, index: int) -> int:
    """Bytes of the values made before call ``index`` and used from it on (what tables make is recomputed)."""
    crossing = {
        value
        for call in model.calls[index:]
        for value in call.operands
        if 0 <= value.call < index and model.block_of(model.calls[value.call]).kind != "tables"
    }
    return sum(info(_block_of(model, v.call).outputs[v.output]).meta.bytes for v in crossing)


def _block_of(model: Model, call: int) -> Block:
    return model.block_of(model.calls[call])


def _cut(units: list[Unit], inflight: list[int], request: Request, pinned: Plan | None) -> Partition:
    if pinned is None:
        return partition(units, inflight, request.cluster.device.memory_bytes)
    starts = []
    position = 0
    for stage in pinned.stage_plans:
        starts.append(position)
        position += len(stage.units)
    if position != len(units) or len(starts) != request.mesh.pp:
        raise PlanError(f"the plan's stages hold {position} units, the model has {len(units)}: plan again")
    slowest = max(stage.forward_seconds + stage.backward_seconds for stage in pinned.stage_plans)
    return Partition(tuple(starts), slowest, slowest)


def _stages(calls: list[int], cut: Partition) -> tuple[tuple[int, ...], ...]:
    ends = [*cut.starts[1:], len(calls)]
    return tuple(tuple(calls[a:b]) for a, b in zip(cut.starts, ends, strict=True))


def _schedule_costs(
    model: Model,
    stages: tuple[tuple[int, ...], ...],
    costs: list[BlockCost],
    units: list[Unit],
    calls: list[int],
    machine: Machine,
) -> Costs:
    per_stage = [[costs[model.calls[i].block] for i in stage] for stage in stages]
    state = [sum(c.parameter_bytes for c in stage) for stage in per_stage]
    elements = [sum(c.parameters for c in stage) for stage in per_stage]
    cut = {i: unit.cut_seconds / 2 for i, unit in zip(calls, units, strict=True)}
    send_backward = tuple(0.0 if k == 0 else cut[stage[0]] for k, stage in enumerate(stages))
    reduce = tuple(collective.seconds("all_reduce", b, machine.sizes["dp"], machine.links["dp"]) for b in state)
    return Costs(
        forward_seconds=tuple(sum(c.forward_seconds for c in s) for s in per_stage),
        backward_seconds=tuple(sum(c.backward_seconds for c in s) for s in per_stage),
        send_forward_seconds=(*send_backward[1:], 0.0),
        send_backward_seconds=send_backward,
        reduce_seconds=reduce,
        activation_bytes=tuple(sum(c.saved_bytes for c in s) for s in per_stage),
        step_seconds=tuple(step.optimizer_seconds(n, machine.device) for n in elements),
    )


def _plan(
    model: Model,
    request: Request,
    solutions: list[Solution],
    stages: tuple[tuple[int, ...], ...],
    cut: Partition,
    costs: list[BlockCost],
    timeline: Timeline,
    inflight: list[int],
) -> Plan:
    return Plan(
        model_name=model.name,
        model_fingerprint=model.fingerprint,
        cluster=request.cluster.name,
        cluster_toml=str(request.cluster),
        mesh_sizes=request.mesh.to_json(),
        batch_size=model.batch_size,
        microbatches=request.microbatches,
        inputs=[_input_plan(item) for item in model.inputs],
        blocks=[_block_plan(model, i) for i in range(len(model.blocks))],
        stage_plans=[_stage_plan(model, s, costs, inflight[k]) for k, s in enumerate(stages)],
        schedule=request.schedule,
        replicated_ops=_replicated(model),
        cost=_cost_plan(request, solutions, stages, model, costs, cut, timeline),
    ).sealed()


def _input_plan(item) -> InputPlan:  # type: ignore[no-untyped-def]
    dtype = str(item.meta.dtype).removeprefix("torch.")
    return InputPlan(name=item.name, path=item.path, shape=list(item.meta.shape), dtype=dtype, batch_dim=item.batch_dim)


def _block_plan(model: Model, index: int) -> BlockPlan:
    block = model.blocks[index]
    nodes = [
        NodePlan(
            name=node.name,
            op=op_name(node) if node.op == "call_function" else info(node).role,
            source=info(node).source,
            choices={axis: str(choice) for axis, choice in info(node).choices.items()},
        )
        for node in block.graph.nodes
        if node.op != "output"
    ]
    paths = [call.path for call in model.calls if call.block == index]
    return BlockPlan(name=block.name, kind=block.kind, paths=paths, nodes=nodes)


def _stage_plan(model: Model, stage: tuple[int, ...], costs: list[BlockCost], inflight: int) -> StagePlan:
    mine = [costs[model.calls[i].block] for i in stage]
    parameters = sum(c.parameter_bytes for c in mine)
    saved = sum(c.saved_bytes for c in mine)
    return StagePlan(
        first=stage[0],
        last=stage[-1],
        units=[model.calls[i].path or model.block_of(model.calls[i]).name for i in stage],
        forward_seconds=sum(c.forward_seconds for c in mine),
        backward_seconds=sum(c.backward_seconds for c in mine),
        parameter_bytes=parameters,
        state_bytes=STATE_COPIES * parameters,
        saved_bytes=saved,
        inflight=inflight,
        peak_bytes=STATE_COPIES * parameters + inflight * saved,
    )


def _replicated(model: Model) -> list[str]:
    names = {op_name(n): where(n) for block in model.blocks for n in block.ops if not has_rule(op_name(n))}
    return sorted(names.values())


def _cost_plan(
    request: Request,
    solutions: list[Solution],
    stages: tuple[tuple[int, ...], ...],
    model: Model,
    costs: list[BlockCost],
    cut: Partition,
    timeline: Timeline,
) -> CostPlan:
    total = sum(costs[model.calls[i].block].seconds for stage in stages for i in stage)
    ideal = request.microbatches * total / request.mesh.pp
    gap = min((s.bound_seconds / s.seconds for s in solutions if s.seconds > 0), default=1.0)
    bound = max(ideal, request.microbatches * cut.bound_seconds) * gap
    optimizer = max(e.end_seconds - e.start_seconds for e in timeline.events if e.action.kind == "STEP")
    reduce = max((e.end_seconds - e.start_seconds for e in timeline.events if e.action.kind == "REDUCE"), default=0.0)
    compute = request.microbatches * max(sum(costs[model.calls[i].block].seconds for i in stage) for stage in stages)
    bubble = max(0.0, timeline.makespan_seconds - compute - optimizer)
    return CostPlan(
        step_seconds=timeline.makespan_seconds,
        bound_seconds=min(bound + optimizer, timeline.makespan_seconds),
        compute_seconds=compute,
        bubble_seconds=bubble,
        reduce_seconds=reduce,
        optimizer_seconds=optimizer,
    )
