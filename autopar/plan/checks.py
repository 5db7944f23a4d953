"""What makes a plan one: its parts fit each other. Each problem names the field it is in."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.mesh import AXES, Mesh
from autopar.plan.parts import PARTS, SCHEDULE_NAMES, VOCABULARY_NAMES, BlockPlan, CostPlan, ExpertsPlan, PointPlan
from autopar.spmd import parse

if TYPE_CHECKING:
    from autopar.plan.plan import Plan

_AXES: Final = ("mb", *AXES)
"""The axes that types of a node are on: microbatches of a step, and those of the mesh."""

_CHOICE: Final = re.compile(r"(?P<operands>.*?) ?-> (?P<result>\S+)( \[\w+\])?")
_EXACT: Final = 1e-6
"""By how much of a step its parts may miss it: they are sums of floating-point numbers."""


def problems(plan: Plan) -> Iterator[str]:
    """``stage_plans[1].rank: …`` for each thing that can't be; the first is what a user is told."""
    mesh = plan.mesh
    yield from _of_names("", plan)
    yield from _of_sizes(plan, mesh)
    yield from _of_stages(plan, mesh)
    yield from itertools.chain.from_iterable(map(_of_block, plan.blocks))
    yield from _of_recomputation(plan)
    yield from itertools.chain.from_iterable(map(_of_experts, plan.experts))
    yield from _of_cost(plan.cost, mesh)
    yield from _of_search(plan)


def _of_names(where: str, named: Plan | PointPlan) -> Iterator[str]:
    for field, known in (("schedule", SCHEDULE_NAMES), ("vocabulary", VOCABULARY_NAMES)):
        if (name := getattr(named, field)) not in known:
            yield f"{where}{field}: {name!r} is unknown; known names are {', '.join(known)}"


def _of_sizes(plan: Plan, mesh: Mesh) -> Iterator[str]:
    rows = plan.microbatches * mesh.replicas
    if plan.batch_size % rows:
        yield f"batch_size: {plan.batch_size} doesn't divide into {plan.microbatches} microbatches x dp {mesh.replicas}"
    try:
        name = Cluster.parse(plan.cluster_toml, origin="cluster_toml").name
    except AutoparError as error:
        yield f"cluster_toml: {error}"
        return
    if name != plan.cluster:
        yield f"cluster: {plan.cluster!r}, but cluster_toml describes {name!r}"


def _of_stages(plan: Plan, mesh: Mesh) -> Iterator[str]:
    if len(plan.rank_plans) != mesh.pp:
        yield f"rank_plans: there are {len(plan.rank_plans)} for pp {mesh.pp}"
    if len(plan.stage_plans) != mesh.pp * plan.chunks:
        yield f"stage_plans: there are {len(plan.stage_plans)} for pp {mesh.pp} x {plan.chunks} chunks"
    held: dict[int, list[int]] = {}
    for number, stage in enumerate(plan.stage_plans):
        held.setdefault(stage.rank, []).append(number)
        if stage.rank >= mesh.pp:
            yield f"stage_plans[{number}].rank: {stage.rank}, but there are {mesh.pp} pipeline ranks"
        if stage.last < stage.first:
            yield f"stage_plans[{number}].last: {stage.last} is before its first call, {stage.first}"
        if stage.recompute and len(stage.recompute) != len(stage.units):
            yield f"stage_plans[{number}].recompute: {len(stage.recompute)} entries for {len(stage.units)} units"
    for number, rank in enumerate(plan.rank_plans):
        if rank.stages != held.get(number, []):
            yield f"rank_plans[{number}].stages: {rank.stages}, but stage_plans put {held.get(number, [])} there"
        if rank.peak_bytes != (total := sum(rank.kinds.values())):
            yield f"rank_plans[{number}].peak_bytes: {rank.peak_bytes}, but its kinds add up to {total}"


def _of_block(block: BlockPlan) -> Iterator[str]:
    for node in block.nodes:
        where = f"blocks[{block.name}].nodes[{node.name}]"
        yield from _unknown(f"{where}.choices", node.choices)
        for axis, choice in node.choices.items():
            if not _is_choice(choice):
                yield f"{where}.choices.{axis}: {choice!r} doesn't read as 'S(1), R -> S(1)'"
        for message in node.messages:
            yield from _unknown(f"{where}.messages", message.axis.split("+"))
    known = {node.name for node in block.nodes}
    for number, way in enumerate(block.recompute):
        for name in itertools.chain.from_iterable(way.regions):
            if name not in known:
                yield f"blocks[{block.name}].recompute[{number}].regions: there is no node {name!r}"


def _is_choice(text: str) -> bool:
    match = _CHOICE.fullmatch(text)
    if match is None:
        return False
    try:
        for kind in (*filter(None, match["operands"].split(", ")), match["result"]):
            parse(kind)
    except AutoparError:
        return False
    return True


def _unknown(where: str, axes: Iterable[str]) -> Iterator[str]:
    for axis in axes:
        if axis not in _AXES:
            yield f"{where}: axis {axis!r} is unknown; known axes are {', '.join(_AXES)}"


def _of_recomputation(plan: Plan) -> Iterator[str]:
    offered = {path: len(block.recompute) for block in plan.blocks for path in block.paths}
    for number, stage in enumerate(plan.stage_plans):
        for unit, point in zip(stage.units, stage.recompute, strict=False):
            if point > offered.get(unit, 0):
                yield f"stage_plans[{number}].recompute: {unit!r} takes choice {point} of {offered.get(unit, 0)}"


def _of_experts(row: ExpertsPlan) -> Iterator[str]:
    where = f"experts[{row.layer}]"
    yield from _unknown(f"{where}.axes", row.axes)
    yield from _unknown(f"{where}.whole", row.whole)
    if row.experts % row.ranks:
        yield f"{where}.ranks: {row.ranks} don't divide {row.experts} experts"
    if row.ranks % row.nodes:
        yield f"{where}.nodes: {row.nodes} don't divide the {row.ranks} ranks that experts are split over"
    if row.across_bytes > row.sent_bytes:
        yield f"{where}.across_bytes: {row.across_bytes} are more than all of sent_bytes, {row.sent_bytes}"
    if row.choices > row.experts:
        yield f"{where}.choices: a token takes {row.choices} of {row.experts} experts"
    if row.order and sorted(row.order) != list(range(row.experts)):
        yield f"{where}.order: isn't an order of {row.experts} experts"


def _of_cost(cost: CostPlan, mesh: Mesh) -> Iterator[str]:
    if cost.bound_seconds > cost.step_seconds * (1 + _EXACT):
        yield f"cost.bound_seconds: {cost.bound_seconds} is above step_seconds, {cost.step_seconds}"
    if cost.rank >= mesh.pp:
        yield f"cost.rank: {cost.rank}, but there are {mesh.pp} pipeline ranks"
    for part in cost.parts:
        if part.name not in PARTS:
            yield f"cost.parts: {part.name!r} is unknown; known parts are {', '.join(PARTS)}"
    total = math.fsum(part.exposed_seconds for part in cost.parts)
    if not math.isclose(total, cost.step_seconds, rel_tol=_EXACT):
        yield f"cost.parts: what is exposed adds up to {total}, not to step_seconds, {cost.step_seconds}"


def _of_search(plan: Plan) -> Iterator[str]:
    search = plan.search
    if search is None:
        return
    if search.bound_seconds > plan.step_seconds * (1 + _EXACT):
        yield f"search.bound_seconds: {search.bound_seconds} is above step_seconds, {plan.step_seconds}"
    for name in ("runners_up", "memory_front", "gpus_front"):
        points: list[PointPlan] = getattr(search, name)
        for number, point in enumerate(points):
            yield from _of_names(f"search.{name}[{number}].", point)
            if (world := point.mesh.world) != point.gpus:
                yield f"search.{name}[{number}].mesh_sizes: {point.mesh} is {world} ranks, but gpus is {point.gpus}"
