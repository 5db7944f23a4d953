"""Published training runs whose configuration is known, each planned as it ran: what the plan predicts of its step.

A :class:`Run` is a row of a measurement file: a model's published sizes and what the row pins (degrees, microbatch,
schedule, recomputation, ZeRO). :func:`predictions` captures that model, plans it and gives step time and peak memory.
Layers of these models are equal: a few are captured, and the call of the middle one is repeated (:func:`deepened`), so
that the plan is that of the full depth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from audited import largest_difference
from processes import in_fork
from published_gpt import GptSizes, gpt_tokens, published_gpt
from published_llama import LlamaSizes, published_llama
from torch import fx

from autopar.api import prepare
from autopar.cluster import Cluster
from autopar.cost_models import step
from autopar.cost_models.compute import ATTENTION
from autopar.errors import BudgetError
from autopar.graph import Block, Call, Choice, Meta, Model, ParameterInfo, Value, info, op_name, operands
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.passes.recompute import groups
from autopar.plan import Plan
from autopar.planner.block_costs import Machine, block_cost
from autopar.planner.build import Built, Request, build
from autopar.planner.op_costs import pass_seconds
from autopar.planner.pipeline import Pipeline, lay_out
from autopar.planner.plan_recompute import pins_of
from autopar.planner.prices import FORBIDDEN_SECONDS, RankPrices
from autopar.planner.transitions import is_parameter
from autopar.planner.wanted import Wanted
from autopar.planner.zero import MoveCosts
from autopar.rules import lookup
from autopar.rules.base import Op
from autopar.schedules import simulate_timeline
from autopar.schedules.weight_moves import MessageSizes
from autopar.spmd import R, Type

Sizes = GptSizes | LlamaSizes

Pair = tuple[str, str]
"""First and last op of what is recomputed, by name."""

CAPTURED_LAYERS = 4
UNBOUNDED_BYTES = 10**12
"""A budget under which nothing is refused or recomputed beyond what the row did."""


@dataclass(frozen=True)
class Run:
    """One row: where and how it ran, and what was measured (``peak_bytes`` None: not published, or of other stages)."""

    name: str
    cluster: str | Cluster
    sizes: Sizes
    degrees: Mapping[str, int] = field(hash=False)
    microbatch: int
    batch: int
    seconds: float
    schedule: str = "1f1b"
    chunks: int | None = None
    vocabulary: str = "redistributed"
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    peak_bytes: float | None = None
    others: tuple[tuple[int, int], ...] = ()
    """Rows of a microbatch and stages per rank that it may have had as well, where that isn't published: the fastest
    that fits counts. Where none does, each recomputes as little as makes it fit."""
    whole_tokens: bool = False
    """Between products that tp splits, each of its ranks computes for all tokens, as before sequence parallelism."""
    late_sums: bool = False
    """Gradients are summed over ranks after the last backward, none of them beside it."""
    copies_gathered: bool | None = None
    """Weights that are gathered for a pass arrive in one buffer, and are all copied to where they are used on the
    stream of passes, as by FSDP2 (``foreach_all_gather_copy_out`` of torch.distributed); or (False) none are, since a
    layer has one flat weight (``FlatParameter`` of FSDP1). None: as by our programs, which copy small ones."""
    waits_for_gathers: bool = False
    """No weights are gathered, or gradients scattered, beside passes, as by DeepSpeed's ZeRO-3 until summer 2021: "each
    all_gather calls torch.cuda.synchronize()" (github.com/deepspeedai/DeepSpeed, pull/1188; issues/1069 has prefetches
    that were skipped). What is computed again is gathered again (arXiv 2104.07857, section 4.1). Weights travel one by
    one, but for the norms and biases of a layer."""
    attention: tuple[float, float] | None = None
    """Shares of the peak rate that its kernels of fused attention reach on long sequences, forward and backward; None:
    those of the cost models, of today's kernels."""
    recomputed: Callable[[Block, int], Sequence[Pair]] | None = field(default=None, hash=False)
    """What of a block the run recomputes, where that is no mode of ours: first and last op of each part, of the call
    with that number."""

    @property
    def mesh(self) -> Mesh:
        return Mesh.of(self.degrees, math.prod(self.degrees.values()))

    @property
    def machine(self) -> Cluster:
        return self.cluster if isinstance(self.cluster, Cluster) else Cluster.load(self.cluster)

    @property
    def request(self) -> Request:
        mesh = self.mesh
        options = {"precision": "bf16", "recompute": "none", "budget_bytes": UNBOUNDED_BYTES, **self.options}
        options |= {"placements": self.sizes.placements} if mesh.tp > 1 else {}
        wanted = Wanted(self.schedule, self.vocabulary, self.chunks)
        count = self.batch // (mesh.replicas * self.microbatch)
        prices = _WholeTokens if self.whole_tokens else RankPrices
        return Request(mesh, count, self.machine, wanted, Options.of(**options), prices=prices)


def captured(sizes: Sizes, batch: int, *, splits_sequences: bool = False) -> Model:
    """The model that planning starts from; one that cp is to split ``splits_sequences``."""
    few = replace(sizes, layers=CAPTURED_LAYERS)
    model = published_gpt(few) if isinstance(few, GptSizes) else published_llama(few)
    tokens = gpt_tokens(batch, sizes.sequence)
    flat = prepare(model, tokens, device="cuda", precision="bf16", splits_sequences=splits_sequences)[0]
    return deepened(flat, sizes.layers - CAPTURED_LAYERS)


def deepened(model: Model, more: int) -> Model:
    """With the middle one of three equal layers ``more`` times again; layers are numbered as in a model so deep."""
    kinds = [call.block for call in model.calls]
    middle = next(i for i in range(1, len(kinds) - 1) if kinds[i - 1] == kinds[i] == kinds[i + 1])
    original = model.calls[middle]
    calls, parameters = list(model.calls[: middle + 1]), dict(model.parameters)
    later = [_numbered(model, call, more, parameters) for call in model.calls[middle + 1 :]]
    for number in range(1, more + 1):
        again = _numbered(model, original, number, parameters)
        operands = tuple(_moved(value, middle - 1, number) for value in original.operands)
        calls.append(replace(again, operands=operands))
    for call in later:
        calls.append(replace(call, operands=tuple(_moved(value, middle, more) for value in call.operands)))
    return replace(model, calls=calls, parameters=parameters, loss=_moved(model.loss, middle, more))


def _numbered(model: Model, call: Call, more: int, parameters: dict[str, ParameterInfo]) -> Call:
    """The call of a layer with a number so much higher, its weights among ``parameters``; others as they are."""
    container, _, number = call.path.rpartition(".")
    if not number.isdecimal():
        return call
    path = f"{container}.{int(number) + more}"
    names = {name: name.replace(call.path, path, 1) for name in call.parameters if name.startswith(f"{call.path}.")}
    for old, name in names.items():
        parameters[name] = replace(model.parameters[old], name=name)
    return replace(call, path=path, parameters=tuple(names.get(name, name) for name in call.parameters))


def _moved(value: Value, at: int, by: int) -> Value:
    return replace(value, call=value.call + by) if value.call >= at else value


@dataclass(frozen=True)
class Predicted:
    """A run, the plan made of its configuration, and the seconds of a step as the run sums gradients."""

    run: Run
    plan: Plan
    seconds: float
    difference: float | None = None
    """Of the plan's costs from those of its programs, the largest, where that was asked for."""

    @property
    def peak_bytes(self) -> int:
        return max(self.plan.peak_bytes)

    @property
    def error(self) -> float:
        """Of the step; above 0, the run was faster than predicted."""
        return self.seconds / self.run.seconds - 1

    @property
    def memory_error(self) -> float | None:
        """Of the largest rank's peak."""
        return self.peak_bytes / self.run.peak_bytes - 1 if self.run.peak_bytes else None


def predictions(runs: Iterable[Run], *, audit: bool = False) -> Iterator[Predicted]:
    """One after another; runs of one model and batch are captured once, wherever they stand. ``audit``: costs are read
    off the programs, too, which takes longer than planning."""
    alike: dict[tuple[Sizes, int, bool], list[Run]] = {}
    for run in runs:
        alike.setdefault((run.sizes, run.batch, run.mesh.cp > 1), []).append(run)
    for (sizes, batch, splits), same in alike.items():
        model = captured(sizes, batch, splits_sequences=splits)
        for run in same:
            yield Predicted(run, *in_fork(partial(_plan, model, run, audit)))


class _Planned(NamedTuple):
    """What was built for a run; the pipeline whose regions are recomputed as it did; seconds of its step."""

    built: Built
    pipeline: Pipeline
    seconds: float


def _plan(model: Model, run: Run, audit: bool) -> tuple[Plan, float, float | None]:
    found = _best(model, run)
    difference = largest_difference(found.built, found.pipeline) if audit else None
    return found.built.plan, found.seconds, difference


def _best(model: Model, run: Run) -> _Planned:
    found = [_planned(model.copy(), tried) for tried in _tried(run)]
    if not run.others:
        return found[0]
    room = run.machine.device.memory_bytes
    fitting = [one for one in found if max(one.built.plan.peak_bytes) <= room]
    return min(fitting or _fitted(model, run, room), key=lambda one: one.seconds)


def _fitted(model: Model, run: Run, room: int) -> Iterator[_Planned]:
    """With what has to be recomputed."""
    options = {**run.options, "recompute": "auto", "budget_bytes": room}
    for tried in _tried(run):
        with suppress(BudgetError):
            yield _planned(model.copy(), replace(tried, options=options))


def _planned(model: Model, run: Run) -> _Planned:
    built = build(model, run.request)
    pipeline = built.pipeline
    if run.recomputed is not None:
        pipeline = recomputing(built, run.request, run.recomputed)
    more = _late_seconds(built, run.request) if run.late_sums else 0.0
    if run.copies_gathered is not None:
        more += _copied_seconds(built, run.request, everything=run.copies_gathered)
    if run.waits_for_gathers:
        more += _waited_seconds(built, run.request)
    if run.attention is not None:
        more += _attention_seconds(built, run.request, run.attention)
    timeline = pipeline.timeline
    return _Planned(built, pipeline, max(timeline.makespan_seconds + more, *timeline.costs.host_seconds))


def layer_ops(block: Block) -> list[fx.Node]:
    """What may stand at the ends of what is recomputed: each op of a block but casts of its weights."""
    first = [group[0] for group in groups(block)]
    return [node for node in first if op_name(node) != "convert" or not is_parameter(operands(node)[0])]


def recomputing(built: Built, request: Request, regions: Callable[[Block, int], Sequence[Pair]]) -> Pipeline:
    """The same stages and placements, with these regions of each call recomputed."""
    model, pipeline = built.model, built.pipeline
    machine = Machine.of(request.cluster, request.mesh)
    costs = [block_cost(block, machine) for block in model.blocks]
    calls = [call for stage in pipeline.stages for call in stage]
    pins = replace(pins_of(built.plan, model), recompute=[regions(model.block_of(model.calls[i]), i) for i in calls])
    given = (request.microbatches, request.wanted, request.options, pipeline.activations, pins)
    return lay_out(model, costs, machine, *given)


class _WholeTokens(RankPrices):
    """Nothing but products' operands may be split: an activation never becomes a part, nor whole again."""

    def change(self, meta: Meta, src: Type, dst: Type, *, per_step: bool, from_tables: bool) -> float | None:
        if src != dst and (src.is_shard or dst.is_shard) and not (per_step or from_tables):
            return FORBIDDEN_SECONDS
        return super().change(meta, src, dst, per_step=per_step, from_tables=from_tables)


def _late_seconds(built: Built, request: Request) -> float:
    """What a step takes longer if no gradient is summed before the last backward has ended."""
    pipeline, machine = built.pipeline, Machine.of(request.cluster, request.mesh)
    schedule, timeline = pipeline.schedule, pipeline.timeline
    moves = MoveCosts(built.model, request.options, machine, pipeline.stages, schedule.placement)
    sums = tuple(map(moves.reduce_seconds, pipeline.stages))
    late = simulate_timeline(schedule, replace(timeline.costs, reduce_seconds=sums))
    return late.makespan_seconds - timeline.makespan_seconds


def _copied_seconds(built: Built, request: Request, *, everything: bool) -> float:
    """What a step takes longer if each of its forwards and backwards copies ``everything`` that it gathers, or nothing,
    instead of what programs of ours copy, where there is one stage.

    Raises ValueError where there are several: passes of one may wait for others'.
    """
    _check_one_stage(built)
    pipeline, machine = built.pipeline, Machine.of(request.cluster, request.mesh)
    moves = MoveCosts(built.model, request.options, machine, pipeline.stages, pipeline.schedule.placement)
    ours = moves.unpack_seconds(pipeline.stages[0])
    device, known = request.cluster.device, {}
    for call in built.model.calls:
        known |= {
            name: info(node).meta
            for name, node in zip(call.parameters, built.model.block_of(call).parameters, strict=True)
        }
    weights = [meta for meta in known.values() if meta.needs_grad]  # else a buffer
    each = sum(step.copy_seconds(w.numel, w.dtype.itemsize, w.dtype.itemsize, device) for w in weights)
    return 2 * request.microbatches * ((each if everything else 0.0) - ours)


def _waited_seconds(built: Built, request: Request) -> float:
    """What a step takes longer if nothing is gathered or scattered beside a pass, which then nothing slows.

    Raises ValueError where there are several stages.
    """
    _check_one_stage(built)
    pipeline, machine = built.pipeline, Machine.of(request.cluster, request.mesh)
    (stage,), (slowed,), costs = pipeline.stages, pipeline.slowed, pipeline.timeline.costs
    moves = MoveCosts(built.model, request.options, machine, pipeline.stages, pipeline.schedule.placement)
    copied = moves.unpack_seconds(stage)
    moves = replace(moves, sizes=one_by_one(request.mesh.dp))
    alone = replace(
        costs,
        forward_seconds=(costs.forward_seconds[0] - slowed.forward - copied,),
        backward_seconds=(costs.backward_seconds[0] - slowed.backward - copied,),
        gather_seconds=(0.0,),
        scatter_seconds=(0.0,),
    )
    gathers = 3 if request.options.recompute == "full" else 2
    each = gathers * moves.gather_seconds(stage) + moves.scatter_seconds(stage)
    passes = simulate_timeline(pipeline.schedule, alone).makespan_seconds
    return passes + request.microbatches * each - pipeline.timeline.makespan_seconds


def one_by_one(ranks: int) -> MessageSizes:
    """Under which each weight of a MiB or more travels by itself around so many ``ranks``."""
    return MessageSizes(part_bytes=2**20 // ranks)


def _attention_seconds(built: Built, request: Request, shares: tuple[float, float]) -> float:
    """What a step takes longer if fused attention reaches these shares; whole layers that are recomputed compute it
    again, others keep its result.

    Raises ValueError where there are several stages.
    """
    _check_one_stage(built)
    slower = [known / share - 1 for known, share in zip(ATTENTION, shares, strict=True)]
    forwards = 2 if request.options.recompute == "full" else 1
    seconds = 0.0
    for call in built.model.calls:
        for node in built.model.block_of(call).ops:
            op, rule = Op.of(node), lookup(op_name(node))
            if rule.is_fused(op):
                whole = Choice((R,) * len(op.operands), R)
                forward, backward = pass_seconds(node, op, rule, whole, 1, request.cluster.device)
                seconds += forwards * slower[0] * forward + slower[1] * backward
    return request.microbatches * seconds


def _check_one_stage(built: Built) -> None:
    if len(built.pipeline.stages) > 1:
        raise ValueError("what a run's system takes beside its plan is reckoned for one stage")


def _tried(run: Run) -> Iterator[Run]:
    """The run, and what else it may have been; interleaving takes as many microbatches as divide over the ranks."""
    share = run.batch // run.mesh.replicas
    pp = run.degrees.get("pp", 1)
    yield run
    for rows, chunks in run.others:
        if share % rows == 0 and (chunks == 1 or share // rows % pp == 0):
            schedule = {"schedule": "interleaved", "chunks": chunks} if chunks > 1 else {"schedule": "1f1b"}
            yield replace(run, microbatch=rows, **schedule)
