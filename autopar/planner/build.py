"""From a captured model to a plan: solve every axis, cut into stages, lay out the schedule, predict the cost.

Reads top to bottom in :func:`build`. What comes out beside the plan is the same model made local (the graph that code
is emitted from) so that what is executed is what was costed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.cluster import Cluster
from autopar.errors import ShardingError
from autopar.graph import Model, info, op_name, verify, where
from autopar.mesh import AXES, Mesh
from autopar.options import Options
from autopar.passes.chunk_head import chunk_head
from autopar.passes.compress_activations import compress_activations
from autopar.passes.estimate_statistics import estimate_statistics
from autopar.passes.float8 import check_float8
from autopar.passes.hoist import unhoisted
from autopar.passes.insert_collectives import insert_collectives
from autopar.passes.localize import localize
from autopar.passes.overlap_dispatch import overlap_dispatch
from autopar.passes.pad_head import pad_head
from autopar.passes.selection_bias import selection_bias
from autopar.passes.split_vocabulary import split_vocabulary
from autopar.plan import BlockPlan, ExpertsPlan, InputPlan, Plan, RankPlan, StagePlan
from autopar.planner.activations import Activations
from autopar.planner.block_costs import BlockCost, Computed, Machine, block_cost, reached_results
from autopar.planner.breakdown import Work, cost_plan, model_work
from autopar.planner.budget import Exact, within_budget
from autopar.planner.compression import KeptBytes, check_compression, describe
from autopar.planner.dispatch_forms import dispatch_forms
from autopar.planner.earlier_axes import EarlierAxes
from autopar.planner.exchange_prices import Journeys
from autopar.planner.expert_costs import Load, Reckoning, experts_plans, reckon
from autopar.planner.fitting import Layout
from autopar.planner.modes import mode_of
from autopar.planner.node_plans import node_plans
from autopar.planner.offload import require_host
from autopar.planner.pinned_placements import check_placements
from autopar.planner.pipeline import Pipeline, compute_only, lay_out
from autopar.planner.placement import Solution
from autopar.planner.plan_recompute import pins_of, points_of_call, recompute_plan, used_alternatives
from autopar.planner.prices import MicrobatchPrices, RankPrices
from autopar.planner.rank_memory import Storage, rank_state, vocabulary_state
from autopar.planner.rulings import Rulings
from autopar.planner.sequence import orders, ways_of_attention, whole_sequences
from autopar.planner.sharding import AxisProblem, Chosen, apply_choices, choose
from autopar.planner.spreading import Spread
from autopar.planner.wanted import SYNTHESIZED, Wanted
from autopar.rules import has_rule
from autopar.rules.attention import heads
from autopar.rules.base import Op
from autopar.schedules import Timelines
from autopar.storages import TEMPORARIES

_LEAST_SHARE = 1 / 400  # of the state of parameters that a rank may have on its device, or all is on the host


@dataclass(frozen=True)
class Request:
    """What the user pinned or asked for."""

    mesh: Mesh
    microbatches: int
    cluster: Cluster
    wanted: Wanted
    options: Options = field(default_factory=Options)
    expert_load: Load = field(default_factory=dict)
    state_bytes: int | None = None  # of one pipeline, for parameters with gradients and optimizer; None: by the budget
    is_streamed: bool = False  # over tp, parameters cost what they slow passes by when they move with each microbatch
    counted: float | None = None  # microbatches that share what a step does once, in placing; None: those there are
    prices: type[RankPrices] = RankPrices  # of choices and changes of type on an axis of ranks

    @property
    def shared_by(self) -> float:
        """The microbatches that what a step does once counts as a part of, where tensors are placed."""
        return self.microbatches if self.counted is None else self.counted


@dataclass
class Built:
    """The plan, and what it was made for: the local model and its pipeline, for which solvers spared so many bytes of a
    rank's memory for what they don't count."""

    plan: Plan
    model: Model
    pipeline: Pipeline
    spared_bytes: int


@dataclass(frozen=True)
class _Remarks:
    """What the plan says of the graph: of attention over cp, ops that ranks compute whole, or of whole sequences, what
    is compressed, and of experts."""

    attention: list[str]
    replicated: list[str]
    whole_sequences: list[str]
    compression: list[str]
    experts: list[ExpertsPlan]


@dataclass(frozen=True)
class Placed:
    """A model that is local to every axis of ``request.mesh`` but ``pp``, with the order of sequences chosen there.

    Nothing in ``model`` depends on the sizes of pp and dp nor on how many microbatches there are, but through the rows
    of one: it can be laid out for others, too (:mod:`autopar.search`). Which placement is the best may: what a step
    does once, and weights that move over dp (``is_streamed``), count as they do for ``request``.
    """

    model: Model
    request: Request
    solutions: list[Solution]
    remarks: _Remarks
    work: Work
    rulings: Rulings


def build(model: Model, request: Request, pinned: Plan | None = None, measured: Exact[Built] | None = None) -> Built:
    """Plan ``model`` (which is changed) for ``request``; with ``pinned``, take its decisions instead of solving.
    ``measured`` gives what was built with what its ranks really hold (None: a plan is held to what solvers count).

    Raises ShardingError, StageError, ScheduleError, ArgumentError or PlanError.
    """
    placed = place(model, request, pinned)
    request = placed.request
    machine = Machine.of(request.cluster, request.mesh, request.options.zero_ranks)
    stays, device = unhoisted(placed.model), machine.device
    both = zip(placed.model.blocks, reached_results(placed.model), strict=True)
    costs = [block_cost(b, machine, Computed.of(b, device, stays, results=results)) for b, results in both]
    activations = activations_of(placed.model, costs, machine, request.options)
    return finish(placed, costs, activations, pinned, measured)


def finish(
    placed: Placed,
    costs: list[BlockCost],
    activations: Activations,
    pinned: Plan | None = None,
    measured: Exact[Built] | None = None,
    known: Mapping[int, Layout] | None = None,
    timelines: Timelines | None = None,
) -> Built:
    """:func:`build`, from a model that is placed. ``known`` are layouts of it that were found before, by the bytes that
    they spared; the leanest of them is tried first. ``timelines`` as in :func:`autopar.planner.pipeline.lay_out`."""
    model, request = placed.model, placed.request
    machine = Machine.of(request.cluster, request.mesh, request.options.zero_ranks)
    wanted = replace(request.wanted, head_chunks=request.options.head_chunks)
    pins, found = pins_of(pinned, model) if pinned else None, known or {}

    def laid_out(spared_bytes: int) -> Built:
        spared, before = replace(wanted, spared_bytes=spared_bytes), found.get(spared_bytes)
        given = model, costs, machine, request.microbatches, spared, request.options, activations
        pipeline = lay_out(*given, pins, before, timelines)
        plan = pinned or _plan(placed, pipeline, costs, machine)
        require_host(request.options, machine.device, max(rank.host_bytes for rank in plan.rank_plans))
        return Built(plan, model, pipeline, spared_bytes)

    if pinned is not None or measured is None:
        return laid_out(0)
    budget = request.options.budget_bytes or machine.device.memory_bytes
    return within_budget(laid_out, measured, budget, max(found, default=0))


@dataclass(frozen=True)
class Local:
    """A model that is local to the axes solved so far: others are solved on a copy of it, maybe for several jobs."""

    model: Model
    work: Work
    rulings: Rulings
    solutions: tuple[Solution, ...] = ()

    @cached_property
    def spread(self) -> Spread:
        return Spread.of(self.model, self.rulings)


def place(model: Model, request: Request, pinned: Plan | None = None) -> Placed:
    """Choose the placements of ``model`` (which is changed), or take those of ``pinned``.

    Raises ShardingError, StageError, ArgumentError or PlanError.
    """
    if pinned is not None:
        request = replace(request, mesh=pinned.mesh)  # with its order of sequences
    start = begin(model, request, pinned)
    return place_inner(split_rows(start, request, pinned), request, pinned)


def begin(model: Model, request: Request, pinned: Plan | None = None, rulings: Rulings | None = None) -> Local:
    """``model`` (which is changed) as its axes are solved, with its head as that is computed, and loads of experts;
    ``rulings`` are kept by whoever places several.

    Raises ShardingError, StageError or ArgumentError.
    """
    _check_batch(model, request)
    work = model_work(model)
    check_float8(request.options, request.cluster.device)
    check_compression(request.options)
    check_placements(model, request.options.placements)
    require_host(request.options, request.cluster.device)
    model = cut_head(model, request.mesh, request.wanted.vocabulary, request.options)
    if request.options.expert_bias_rate:
        model = selection_bias(model)
    reckon(model, request.mesh, _reckoning(request, pinned))
    return Local(model, work, rulings or Rulings())


def split_rows(start: Local, request: Request, pinned: Plan | None = None) -> Local:
    """Local to microbatches and to ``dp``: what that is like depends on the rows that are left of a batch alone, and on
    whether there are several of each; or on how many, where rows move over ``dp``.

    Raises ShardingError or PlanError.
    """
    axes = ["mb"] if request.microbatches > 1 else []
    return _solve_axes(start, request, [*axes, *_axes(request, "dp")], pinned)[0]


def place_inner(local: Local, request: Request, pinned: Plan | None = None) -> Placed:
    """Place a copy of what :func:`split_rows` made on the axes within ``dp``.

    Raises ShardingError, ArgumentError or PlanError.
    """
    local, request = _solve_axes(local, request, _axes(request, "ep", "cp", "tp"), pinned)
    model = local.model
    _check_heads(model, request)
    machine = Machine.of(request.cluster, request.mesh, request.options.zero_ranks)
    dispatch_forms(overlap_dispatch(model), machine, request.options.dispatch, pinned)
    experts = experts_plans(model, request.mesh, _reckoning(request, pinned))
    replicated = _replicated(model)
    exact = request.options.activations == "exact"
    replaced = [] if exact else compress_activations(model, KeptBytes(model, request.cluster.device.kind))
    compression = list(describe(model, request.options, replaced))
    remarks = _Remarks(ways_of_attention(model), replicated, whole_sequences(model), compression, experts)
    return Placed(model, request, list(local.solutions), remarks, local.work, local.rulings)


def _reckoning(request: Request, pinned: Plan | None) -> Reckoning:
    rows = tuple(pinned.experts) if pinned is not None else ()
    return Reckoning(request.options.expert_imbalance, request.expert_load, rows)


def activations_of(
    model: Model, costs: list[BlockCost], machine: Machine, options: Options, rulings: Rulings | None = None
) -> Activations:
    """What calls keep; made once, since the choices of what to recompute take a solver's time. ``rulings`` are those
    that the model was placed by."""
    seconds, by_op = [cost.op_seconds for cost in costs], rulings.saved if rulings is not None else None
    return Activations(model, machine.device.kind, seconds, eight_bits=options.activations == "8bit", by_op=by_op)


def cut_head(model: Model, mesh: Mesh, vocabulary: str, options: Options) -> Model:
    """The graph, not solved yet, with its head as that is computed: whole, in chunks, or split over the pipeline; with
    a table of as many rows as suit kernels and tp.

    Raises StageError or ArgumentError where there is no such head.
    """
    if mode_of(vocabulary).head:
        return split_vocabulary(model, mesh.pp, mesh.tp)
    return pad_head(chunk_head(model, options.head_chunks) if options.head_chunks > 1 else model, mesh.tp)


def _check_batch(model: Model, request: Request) -> None:
    replicas = request.mesh.replicas
    if model.batch_size % (request.microbatches * replicas):
        fits = [m for m in range(1, model.batch_size + 1) if model.batch_size % (m * replicas) == 0]
        hint = f"microbatches may be one of {fits}" if fits else f"make the batch a multiple of {replicas}"
        raise ShardingError(
            f"the batch of {model.batch_size} doesn't divide into {request.microbatches} microbatches x dp "
            f"{replicas}; {hint}"
        )


def _axes(request: Request, *axes: str) -> list[str]:
    """Those of them that have several ranks."""
    return [axis for axis in axes if request.mesh.size(axis) > 1]


def _solve_axes(local: Local, request: Request, axes: Sequence[str], pinned: Plan | None) -> tuple[Local, Request]:
    """Solve ``axes``, outermost first, on a copy: each sees the graph local to those before it. With the order of cp
    chosen."""
    model, solutions = local.model.copy(), list(local.solutions)
    for number, axis in enumerate(axes):
        if pinned is None:
            request, chosen = _chosen(Spread.of(model, local.rulings) if number else local.spread, request, axis)
            chosen.write(model, axis)
            solutions.append(chosen.solution)
        else:
            solutions.append(apply_choices(model, _problem(request, axis), _pins(pinned, axis)))
        _localize(model, _problem(request, axis))
    return replace(local, model=model, solutions=tuple(solutions)), request


def _chosen(spread: Spread, request: Request, axis: str) -> tuple[Request, Chosen]:
    """For cp in the order of the sequence in which it costs less."""
    meshes = orders(spread, request.mesh, request.options) if axis == "cp" else [request.mesh]
    tries = [replace(request, mesh=mesh) for mesh in meshes]
    found = [(tried, choose(spread, _problem(tried, axis))) for tried in tries]
    return min(found, key=lambda item: item[1].solution.seconds)


def _problem(request: Request, axis: str) -> AxisProblem:
    options = request.options
    if axis == "mb":
        return AxisProblem(
            axis, request.microbatches, MicrobatchPrices(estimates=options.statistics == "microbatch"), "batch"
        )
    mesh, size = request.mesh, request.mesh.size(axis)
    link = request.cluster.link(size, mesh.stride(axis), mesh.world)
    paired = axis == "cp" and mesh.paired
    moved = moved_seconds(request) if axis == "tp" and request.is_streamed else 0.0
    given = size, request.cluster.device, link, request.shared_by, paired
    others = _earlier(request, axis), _journeys(request, axis)
    prices = request.prices(*given, axis, *others, moved_seconds=moved)
    kind = {"cp": "sequence", "tp": "model"}.get(axis, "batch")
    budget = _state_budget(request) if axis == "tp" else None
    attention, holds_experts = options.attention, axis in mesh.expert_axes
    return AxisProblem(axis, size, prices, kind, budget, holds_experts, paired, attention, mesh.tp, options.placements)


def _journeys(request: Request, axis: str) -> Journeys | None:
    mesh = request.mesh
    return Journeys(request.cluster, mesh, axis, request.options.dispatch) if mesh.experts > 1 else None


def _earlier(request: Request, axis: str) -> EarlierAxes:
    """The axes of ranks that are solved before this one."""
    mesh, cluster = request.mesh, request.cluster
    sizes = {name: mesh.size(name) for name in AXES[1 : AXES.index(axis)]}  # pp is no axis of types
    links = {n: (size, cluster.link(size, mesh.stride(n), mesh.world)) for n, size in sizes.items() if size > 1}
    return EarlierAxes(links)


def moved_seconds(request: Request) -> float:
    """Of an element of a parameter that ranks which split tokens share: gathered for both passes of each microbatch,
    its gradient scattered, and passes slowed by that."""
    mesh, cluster, tp = request.mesh, request.cluster, request.mesh.tp
    ranks, narrow = mesh.zero_shards(0), 2 if request.options.precision in ("bf16", "fp16") else 4
    if ranks == 1:
        return 0.0
    link = cluster.link(ranks, tp, mesh.world)
    bytes_ = 2 * narrow + 4
    return cluster.device.held_share(link) * bytes_ / link.ring_bytes_per_second(ranks)


def _state_budget(request: Request) -> int:
    """Bytes of one pipeline for parameters, gradients and optimizer, each of which counts whole."""
    if request.state_bytes is not None:
        return request.state_bytes
    bytes_ = (request.options.budget_bytes or request.cluster.device.memory_bytes) * request.mesh.pp
    return round(bytes_ / max(Storage(request.options, request.mesh).share, _LEAST_SHARE))


def _localize(model: Model, problem: AxisProblem) -> None:
    """Make the model local to an axis whose choices are written."""
    insert_collectives(model, problem.axis)
    if problem.axis == "mb":
        estimate_statistics(model, problem.size)
    verify(model, f"insert_collectives on {problem.axis}")
    localize(model, problem.axis, problem.size, problem.paired)


def _pins(plan: Plan, axis: str) -> dict[tuple[str, str], str]:
    return {(b.name, n.name): n.choices[axis] for b in plan.blocks for n in b.nodes if axis in n.choices}


def _check_heads(model: Model, request: Request) -> None:
    """Attention that tp can't split by heads would be computed whole on every rank: refuse instead."""
    tp = request.mesh.tp
    for node in (n for block in model.blocks for n in block.ops if tp > 1):
        counts = heads(Op.of(node)) if not info(node).choices["tp"].result.is_shard else None
        if counts and any(count % tp for count in counts):
            fits = [t for t in range(1, max(counts) + 1) if all(c % t == 0 for c in counts)]
            raise ShardingError(
                f"{where(node)} has {' and '.join(map(str, dict.fromkeys(counts)))} heads, which tp={tp} doesn't "
                f"divide; tp may be one of {fits}"
            )


def _plan(placed: Placed, pipeline: Pipeline, costs: list[BlockCost], machine: Machine) -> Plan:
    model, request, remarks = placed.model, placed.request, placed.remarks
    schedule = pipeline.schedule
    return Plan(
        model_name=model.name,
        model_fingerprint=model.fingerprint,
        cluster=request.cluster.name,
        cluster_toml=str(request.cluster),
        mesh_sizes=request.mesh.to_json(),
        batch_size=model.batch_size,
        microbatches=request.microbatches,
        inputs=[_input_plan(item) for item in model.inputs],
        blocks=[_block_plan(model, i, pipeline, machine) for i in range(len(model.blocks))],
        stage_plans=[_stage_plan(model, k, pipeline, costs) for k in range(schedule.stages)],
        rank_plans=[rank_plan(model, rank, pipeline, request) for rank in range(schedule.ranks)],
        schedule=request.wanted.schedule,
        chunks=schedule.chunks,
        vocabulary=request.wanted.vocabulary,
        options=request.options,
        actions=compute_only(schedule) if request.wanted.schedule == SYNTHESIZED else None,
        replicated_ops=remarks.replicated,
        attention=remarks.attention,
        whole_sequences=remarks.whole_sequences,
        compression=remarks.compression,
        experts=remarks.experts,
        remarks=model.remarks,
        cost=cost_plan(
            model, pipeline, costs, machine, request.options, placed.work, _bound_seconds(placed, pipeline, costs)
        ),
    ).sealed()


def _input_plan(item) -> InputPlan:  # type: ignore[no-untyped-def]
    dtype = str(item.meta.dtype).removeprefix("torch.")
    return InputPlan(name=item.name, path=item.path, shape=list(item.meta.shape), dtype=dtype, batch_dim=item.batch_dim)


def _block_plan(model: Model, index: int, pipeline: Pipeline, machine: Machine) -> BlockPlan:
    block = model.blocks[index]
    nodes = node_plans(block, machine)
    paths = [call.path for call in model.calls if call.block == index]
    saved = pipeline.activations.choices[index].none.saved_bytes
    points = [recompute_plan(pipeline, index, a) for a in used_alternatives(model, index, pipeline)]
    return BlockPlan(name=block.name, kind=block.kind, paths=paths, nodes=nodes, saved_bytes=saved, recompute=points)


def _stage_plan(model: Model, number: int, pipeline: Pipeline, costs: list[BlockCost]) -> StagePlan:
    stage = pipeline.stages[number]
    mine = [costs[model.calls[i].block] for i in stage]
    return StagePlan(
        rank=pipeline.schedule.placement[number],
        first=stage[0],
        last=stage[-1],
        units=[model.calls[i].path or model.block_of(model.calls[i]).name for i in stage],
        forward_seconds=pipeline.timeline.costs.forward_seconds[number],
        backward_seconds=pipeline.timeline.costs.backward_seconds[number],
        parameter_bytes=sum(c.parameter_bytes for c in mine),
        saved_bytes=pipeline.saved_bytes(number),
        inflight=pipeline.inflight[number],
        recompute=[points_of_call(model, i, pipeline) for i in stage],
        offloads=pipeline.layout.away.shares.get(number, 0) if pipeline.layout.away else 0,
    )


def rank_plan(model: Model, rank: int, pipeline: Pipeline, request: Request) -> RankPlan:
    storage = Storage(request.options, request.mesh)
    stages = [k for k, home in enumerate(pipeline.schedule.placement) if home == rank]
    state = rank_state(model, [i for k in stages for i in pipeline.stages[k]], storage)
    state += vocabulary_state(model, storage, request.mesh.pp)
    saved = pipeline.timeline.peak_activation_bytes[rank]
    beside = max(pipeline.transient_bytes[rank], pipeline.summing_bytes[rank] - saved)
    kinds = {**state.device, "saved": saved, TEMPORARIES: beside}
    return RankPlan(
        stages=stages,
        vocabulary_bytes=pipeline.vocabulary.parameter_bytes if pipeline.vocabulary else 0,
        kinds={kind: bytes_ for kind, bytes_ in kinds.items() if bytes_},
        action="",
        saved_bytes=saved,
        peak_bytes=sum(kinds.values()),
        host_bytes=state.host.total() + pipeline.host_bytes(rank),
    )


def _replicated(model: Model) -> list[str]:
    names = {op_name(n): where(n) for block in model.blocks for n in block.ops if not has_rule(op_name(n))}
    return sorted(names.values())


def _bound_seconds(placed: Placed, pipeline: Pipeline, costs: list[BlockCost]) -> float:
    """No placement and no cut on this mesh has a shorter step: ranks can't share the work better than evenly."""
    model, microbatches = placed.model, placed.request.microbatches
    vocabulary = pipeline.vocabulary.pass_seconds if pipeline.vocabulary else 0.0
    total = sum(costs[model.calls[i].block].seconds for stage in pipeline.stages for i in stage)
    ideal = microbatches * (total / placed.request.mesh.pp + vocabulary)
    gap = min((s.bound_seconds / s.seconds for s in placed.solutions if s.seconds > 0), default=1.0)
    optimizer = max(e.end_seconds - e.start_seconds for e in pipeline.timeline.events if e.action.kind == "STEP")
    return max(ideal, microbatches * (pipeline.bound_seconds + vocabulary)) * gap + optimizer
