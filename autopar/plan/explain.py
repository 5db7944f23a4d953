"""What a plan says of itself: a summary, and tables of everything in it, for people and for machines."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from autopar.cluster import Cluster
from autopar.plan import layouts
from autopar.plan.parts import ExpertsPlan, PointPlan, StagePlan
from autopar.plan.tables import Column, Section
from autopar.plan.text import bytes_text, flops_text, offload_text, percent_text, seconds_text, units_text

if TYPE_CHECKING:
    from autopar.plan.plan import Plan


@dataclass(frozen=True)
class Explanation:
    """``summary`` is a screen of text; ``sections`` are everything, in order, each of them a table and lines."""

    digest: str
    summary: str
    sections: tuple[Section, ...]

    def __str__(self) -> str:
        return "\n\n".join([self.summary, *map(str, self.sections)])

    def to_json(self) -> dict[str, Any]:
        """For machines: ``{"digest", "summary": [line, …], "sections": {key: {"title", "lines", "rows"}}}``.

        Rows are objects of raw values: seconds, bytes, and shares from 0 to 1. Keys of sections: "degrees", "time",
        "stages", "memory", "experts", "parameters of BLOCK" and "activations of BLOCK" for each distinct block,
        "search", "runners_up", "memory_front", "gpus_front", "remarks"; those with nothing to say are left out.
        """
        sections = {section.key: section.to_json() for section in self.sections}
        return {"digest": self.digest, "summary": self.summary.splitlines(), "sections": sections}


def explanation(plan: Plan) -> Explanation:
    sections = [_degrees(plan), _time(plan), _stages(plan), _memory(plan)]
    sections.append(Section("experts", "experts", lines=tuple(explain_experts(plan))))
    sections += [section for block in plan.blocks for section in layouts.of_block(block, plan.mesh.pp)]
    sections += _search(plan)
    sections.append(Section("remarks", "remarks", lines=tuple(_remarks(plan))))
    return Explanation(plan.digest, "\n".join(_summary(plan)), tuple(filter(None, sections)))


def _summary(plan: Plan) -> Iterator[str]:
    cost = plan.cost
    yield f"{plan.model_name} on {plan.mesh.world} x {plan.cluster}: {plan.mesh}   (plan {plan.digest})"
    yield from _how(plan)
    yield _proven(plan)
    if plan.mesh.pp > 1 and cost.order_seconds:
        gap = percent_text(1 - min(1.0, cost.order_seconds / cost.step_seconds))
        yield f"  no order of these stages' passes is below {seconds_text(cost.order_seconds)} ({gap} gap)"
    if cost.model_flops:
        peak = f"{plan.mesh.world} x {flops_text(cost.peak_flops_per_second)}/s in {cost.dtype}"
        yield f"MFU {percent_text(plan.mfu)}: {flops_text(cost.model_flops)} a step of the model's own, on {peak}"
    fullest = max(range(len(plan.rank_plans)), key=lambda rank: plan.rank_plans[rank].peak_bytes)
    peak_bytes, budget = plan.rank_plans[fullest].peak_bytes, _budget_bytes(plan)
    share = f"{percent_text(peak_bytes / budget)} of {bytes_text(budget)}"
    yield f"peak memory {bytes_text(peak_bytes)}, {share}, on pipeline rank {fullest}"
    largest = sorted(cost.parts, key=lambda part: -part.exposed_seconds)[:3]
    shares = [(f"{part.name}@{part.axis}" if part.axis else part.name, part.exposed_seconds) for part in largest]
    texts = [f"{name} {seconds_text(s)} ({percent_text(s / cost.step_seconds)})" for name, s in shares if s]
    if texts:
        of = f" of pipeline rank {cost.rank}" if plan.mesh.pp > 1 else ""
        yield f"most time{of}: " + ", ".join(texts)
    if plan.search is not None and plan.search.runners_up:
        other = plan.search.runners_up[0]
        several = "es" if other.microbatches > 1 else ""
        schedule = f", {other.schedule}" if other.mesh.pp > 1 or other.schedule != "1f1b" else ""
        schedule += f", {other.vocabulary}" if other.vocabulary != plan.vocabulary else ""
        yield f"next best: {_degrees_text(other)}, {other.microbatches} microbatch{several}{schedule}: {other.why}"
    remarks = list(_remarks(plan))
    yield from remarks[:_FEW]
    if len(remarks) > _FEW:
        yield f"… and {len(remarks) - _FEW} more remarks"


_FEW: Final = 4  # remarks on the first screen


def _how(plan: Plan) -> Iterator[str]:
    """What was decided beside the degrees."""
    replicas = plan.mesh.replicas
    per_rank = plan.batch_size // plan.microbatches // replicas
    several = "es" if plan.microbatches > 1 else ""
    batch = f"{plan.batch_size} = {plan.microbatches} microbatch{several} x dp {replicas} x {per_rank}"
    chunks = f" of {plan.chunks} chunks a rank" if plan.chunks > 1 else ""
    yield f"batch {batch}, schedule {plan.schedule}{chunks}, vocabulary {plan.vocabulary}"
    if options := str(plan.options):
        yield options
    if plan.options.zero and (shards := plan.mesh.zero_shards(plan.options.zero_ranks)) > 1:
        kinds = ("optimizer state", "optimizer state and gradients", "optimizer state, gradients and parameters")
        everyone = plan.mesh.zero_shards(0)
        copies = f", {everyone // shards} copies" if shards < everyone else ""
        axes = "_".join(plan.mesh.data_axes())
        yield f"{kinds[plan.options.zero - 1]} stored S(0)@{axes} over {shards} neighbouring ranks{copies}"


def _proven(plan: Plan) -> str:
    step, search = plan.cost.step_seconds, plan.search
    bound = search.bound_seconds if search is not None else plan.cost.bound_seconds
    where = "no plan in the searched space" if search is not None else "nothing on this mesh"
    gap = percent_text(max(0.0, 1 - bound / step)) if step else "0.0 %"
    return f"step {seconds_text(step)}; {where} is below {seconds_text(bound)} ({gap} gap)"


def _budget_bytes(plan: Plan) -> int:
    return plan.options.budget_bytes or Cluster.parse(plan.cluster_toml, origin="the plan").device.memory_bytes


_AXES: Final = {
    "pp": "layers, in stages",
    "dp": "rows of the batch",
    "cp": "positions of sequences",
    "tp": "weights and activations inside of layers",
    "ep": "experts, over ranks of other axes",
}


def _degrees(plan: Plan) -> Section:
    columns = (Column("axis", "axis"), Column("size", "ranks", "count"), Column("splits", "splits"))
    sizes = {"pp": 1, "dp": 1, "tp": 1} | plan.mesh.to_json()
    rows = tuple((axis, sizes[axis], what) for axis, what in _AXES.items() if axis in sizes)
    return Section("degrees", f"degrees: {plan.mesh}", columns, rows)


def _time(plan: Plan) -> Section:
    cost = plan.cost
    columns = (
        Column("part", "part"),
        Column("axis", "axis"),
        Column("kind", "kind"),
        Column("exposed_seconds", "time", "seconds"),
        Column("share", "of step", "share"),
        Column("hidden_seconds", "hidden", "seconds"),
    )
    step = cost.step_seconds
    rows: list[tuple[Any, ...]] = [
        (p.name, p.axis, p.kind, p.exposed_seconds, p.exposed_seconds / (step or 1), p.hidden_seconds or None)
        for p in cost.parts
    ]
    rows.append(("step", "", "", cost.step_seconds, 1.0, None))
    title = f"time of pipeline rank {cost.rank}, the busiest" if plan.mesh.pp > 1 else "time"
    return Section("time", title, columns, tuple(rows), tuple(_utilisation(plan)))


def _utilisation(plan: Plan) -> Iterator[str]:
    cost = plan.cost
    if cost.model_flops:
        peak = f"{flops_text(cost.peak_flops_per_second)}/s"
        possible = f"({seconds_text(cost.step_seconds)} x {plan.mesh.world} x {peak})"
        yield f"MFU = model FLOPs / (step x ranks x peak) = {flops_text(cost.model_flops)} / {possible}"
        yield f"  = {percent_text(plan.mfu)}; model FLOPs are those of products, forward and backward, each once"


def _stages(plan: Plan) -> Section:
    columns = (
        Column("stage", "stage"),
        Column("rank", "rank", "count"),
        Column("units", "layers"),
        Column("forward_seconds", "forward", "seconds"),
        Column("backward_seconds", "backward", "seconds"),
        Column("parameter_bytes", "parameters", "bytes", spare=True),
        Column("saved_bytes", "saved", "bytes"),
        Column("inflight", "in flight", "count"),
        Column("offloads", "activations"),
    )
    rows = tuple(
        (
            f"stage {number}",
            stage.rank,
            units_text(stage.units),
            stage.forward_seconds,
            stage.backward_seconds,
            stage.parameter_bytes,
            stage.saved_bytes,
            stage.inflight,
            offload_text(stage.offloads),
        )
        for number, stage in enumerate(plan.stage_plans)
    )
    lines = [line for number, stage in enumerate(plan.stage_plans) for line in _recomputation(plan, number, stage)]
    return Section("stages", "stages, per microbatch", columns, rows, tuple(lines))


def _recomputation(plan: Plan, number: int, stage: StagePlan) -> Iterator[str]:
    """``stage 0: layers.0 … layers.3 (4) recompute softmax … matmul: 12 MiB kept instead of 40 MiB each, +0.8 ms``."""
    block_of = {path: block for block in plan.blocks for path in block.paths}
    taken = [(block_of[unit], point, unit) for unit, point in zip(stage.units, stage.recompute, strict=False) if point]
    for (block, choice), found in itertools.groupby(taken, key=lambda row: (row[0], row[1])):
        units, point = [unit for _, _, unit in found], block.recompute[choice - 1]
        ops = {node.name: node.op.split(".")[1] if "." in node.op else node.op for node in block.nodes}
        spans = [" … ".join(ops[name] for name in dict.fromkeys(region)) for region in point.regions]
        verb = "recomputes" if len(units) == 1 else "recompute"
        yield (
            f"  stage {number}: {units_text(units)} {verb} {', '.join(spans)}: {bytes_text(point.saved_bytes)} kept "
            f"instead of {bytes_text(block.saved_bytes)} each, +{seconds_text(len(units) * point.seconds)}"
        )


def _memory(plan: Plan) -> Section:
    held: Counter[str] = sum((Counter(rank.kinds) for rank in plan.rank_plans), Counter())
    kinds = sorted(held, key=lambda kind: (-held[kind], kind))
    budget = _budget_bytes(plan)
    columns = (
        Column("rank", "rank", "count"),
        *(Column(f"{kind}_bytes", kind, "bytes") for kind in kinds),
        Column("peak_bytes", "peak", "bytes"),
        Column("share", "of budget", "share"),
        Column("action", "reached in"),
        Column("host_bytes", "host", "bytes"),
        Column("vocabulary_bytes", "vocabulary rows", "bytes"),
    )
    rows = tuple(
        (
            number,
            *(rank.kinds.get(kind) for kind in kinds),
            rank.peak_bytes,
            rank.peak_bytes / budget,
            rank.action,
            rank.host_bytes or None,
            rank.vocabulary_bytes or None,
        )
        for number, rank in enumerate(plan.rank_plans)
    )
    added_up = not all(rank.action for rank in plan.rank_plans)
    lines = ("added up by the solvers, without buffers: no rank comes near its budget",) if added_up else ()
    return Section("memory", f"peak memory by pipeline rank, of {bytes_text(budget)}", columns, rows, lines)


def explain_experts(plan: Plan) -> Iterator[str]:
    """``experts of layers.0.mlp … layers.3.mlp (4): 8, of which a token takes 2; 2 on each of ep 4 ranks …``."""

    def alike(row: ExpertsPlan) -> tuple[object, ...]:
        shape = row.experts, row.choices, row.axes, row.ranks, row.whole, row.sent_bytes, row.nodes
        return *shape, round(row.imbalance, 2), bool(row.order)

    for _, group in itertools.groupby(plan.experts, key=alike):
        rows = list(group)
        row = rows[0]
        whole = "all on every rank that has the layer (the mesh has no ep)"
        split = f"{row.experts // row.ranks} on each of {row.ranks} ranks of {' x '.join(row.axes)}, S(0)"
        yield (
            f"experts of {units_text([r.layer for r in rows])}: {row.experts}, of which a token takes {row.choices}; "
            f"{split if row.ranks > 1 else whole}"
        )
        if row.whole:
            yield f"  ranks of {' x '.join(row.whole)} have the same tokens, and each takes those of its own experts"
        if row.sent_bytes:
            what = "a microbatch of a rank" if plan.microbatches > 1 else "a rank"
            sent = bytes_text(row.sent_bytes)
            yield f"  {what} sends tokens of {sent} to experts of other ranks, and gets as much back"
        if row.nodes > 1:
            across = bytes_text(row.across_bytes)
            yield f"  once to each of {row.nodes} nodes that has a token's experts: {across} of that between nodes"
        if row.imbalance > 1:
            order = "; hot ones are stored apart" if row.order else ""
            bound = f" (no placement is below {row.bound:.2f})" if row.bound > 1 else ""
            yield f"  the fullest rank is reckoned with {row.imbalance:.2f} times its share of tokens{bound}{order}"


_POINT: Final = (
    Column("number", "", "count"),
    Column("mesh", "degrees"),
    Column("microbatches", "microbatches", "count"),
    Column("schedule", "schedule"),
    Column("options", "options"),
    Column("step_seconds", "step", "seconds"),
    Column("change", "slower by", "change"),
    Column("peak_bytes", "peak", "bytes"),
    Column("why", ""),
)


def _search(plan: Plan) -> list[Section]:
    search = plan.search
    if search is None:
        return []
    counts = f"{search.points:,} points, of which {search.placed:,} placed and {search.laid_out:,} laid out"
    free = f"searched: {', '.join(search.free)}" if search.free else "everything was pinned"
    bound = f"the others were discarded by bounds: none is below {seconds_text(search.bound_seconds)}"
    return [
        Section("search", "search", lines=(free, f"{counts}; {bound}")),
        _points(plan, "runners_up", "runners-up, and what makes them worse", search.runners_up),
        _points(plan, "memory_front", "time against memory: the fastest for each peak", search.memory_front),
        _points(plan, "gpus_front", "time against GPUs: the fastest for each number", search.gpus_front, gpus=True),
    ]


def _points(plan: Plan, key: str, title: str, points: list[PointPlan], *, gpus: bool = False) -> Section:
    counts = (Column("gpus", "GPUs", "count"),) if gpus else ()
    rows = [(*((p.gpus,) if gpus else ()), *_point(plan, n, p)) for n, p in enumerate(points, 1)]
    reasons = tuple(f"{n}. {_degrees_text(p)}: {p.why}" for n, p in enumerate(points, 1) if p.why)
    return Section(key, title, (*counts, *_POINT), tuple(rows), reasons)


def _point(plan: Plan, number: int, point: PointPlan) -> tuple[Any, ...]:
    chunks = f" x {point.chunks} chunks" if point.chunks > 1 else ""
    vocabulary = f", {point.vocabulary}" if point.vocabulary != plan.vocabulary else ""
    share = point.step_seconds / plan.step_seconds - 1 if plan.step_seconds else 0.0
    return (
        number,
        _degrees_text(point),
        point.microbatches,
        f"{point.schedule}{chunks}{vocabulary}",
        point.options.beside(plan.options) or "as here",
        point.step_seconds,
        share,
        point.peak_bytes,
        point.why,
    )


def _degrees_text(point: PointPlan) -> str:
    """``pp 2 x dp 4, ep 4``: what isn't 1."""
    sizes = {"pp": point.mesh.pp, "dp": point.mesh.replicas, "cp": point.mesh.cp, "tp": point.mesh.tp}
    experts = f", ep {point.mesh.experts}" if point.mesh.experts > 1 else ""
    return (" x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "1 rank") + experts


def _remarks(plan: Plan) -> Iterator[str]:
    """What holds of the model as a whole."""
    if plan.attention:
        order = "in pairs of parts" if plan.mesh.paired else "in neighbouring parts"
        yield f"attention over cp, {order}: " + ", ".join(plan.attention)
    yield from plan.compression
    if plan.replicated_ops:
        yield "computed whole on every rank (autopar has no rule for them): " + ", ".join(plan.replicated_ops)
    if plan.whole_sequences:
        yield "computed of whole sequences on every rank of cp: " + ", ".join(plan.whole_sequences)
    yield from plan.remarks
