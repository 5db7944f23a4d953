"""How two plans differ: what a person asks first, in groups, then every other field by its exact path."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final

from autopar.plan.layouts import layout
from autopar.plan.parts import BlockPlan, StagePlan
from autopar.plan.text import (
    bytes_text,
    change_text,
    dispatch_text,
    flops_text,
    offload_text,
    percent_text,
    seconds_text,
    units_text,
)

if TYPE_CHECKING:
    from autopar.plan.plan import Plan

_LONGEST: Final = 60  # characters of a value that is shown
_PREDICTED: Final = "predicted"
_REST: Final = "everything else"
_MOST: Final = 24  # lines of that; all of them are in the JSON


@dataclass(frozen=True)
class Difference:
    """``before`` and ``after`` are values as JSON has them (None: it isn't there); ``text`` is the line for people."""

    group: str
    path: str
    before: Any
    after: Any
    text: str


@dataclass(frozen=True)
class PlanDiff:
    """What differs, in order; nothing where the plans are equal. ``str`` has one line for each."""

    differences: tuple[Difference, ...]

    def __bool__(self) -> bool:
        return bool(self.differences)

    def __str__(self) -> str:
        """Groups are named in brackets, and an empty line apart."""
        groups = []
        for group in dict.fromkeys(item.group for item in self.differences):
            texts = [item.text for item in self.differences if item.group == group]
            left = len(texts) - _MOST if group == _REST else 0
            more = [f"… and {left} more values (--json has them by path)"] if left > 0 else []
            groups.append("\n".join([f"[{group}]", *(texts[:_MOST] if more else texts), *more]))
        return "\n\n".join(groups)

    def to_json(self) -> list[dict[str, Any]]:
        """For machines: ``{"group", "path", "before", "after"}`` of each."""
        return [{name: getattr(d, name) for name in ("group", "path", "before", "after")} for d in self.differences]


def difference(a: Plan, b: Plan) -> PlanDiff:
    """What is other in ``b``; digests don't count."""
    found: list[Difference] = []
    seen: set[str] = set()
    for group, rows in _GROUPS.items():
        for item in (d for row in rows for d in row(a, b, group)):
            seen.add(item.path)
            found.append(item)
    for path, x, y in sorted(_leaves("", _content(a), _content(b)), key=lambda leaf: leaf[0].startswith("blocks")):
        if path not in seen and not any(path.startswith((f"{said}.", f"{said}[")) for said in seen):
            found.append(_line(_REST, path, path, x, y))
    return PlanDiff(tuple(found))


def _content(plan: Plan) -> dict[str, Any]:
    """The plan as JSON has it, the cluster by its keys."""
    return plan.model_dump(mode="json", exclude={"digest"}) | {"cluster_toml": tomllib.loads(plan.cluster_toml)}


def _line(group: str, path: str, name: str, x: Any, y: Any, text: Callable[[Any], str] = str) -> Difference:
    """``step: 4.31 s -> 4.05 s (-6.0 %)``: of predicted figures by how much they differ."""
    change = ""
    if group == _PREDICTED and x and y is not None:
        change = f" ({change_text(y / x - 1)})"
    sides = [_short("none" if value is None else text(value)) for value in (x, y)]
    return Difference(group, path, x, y, f"{name}: {sides[0]} -> {sides[1]}{change}")


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


Rows = Callable[["Plan", "Plan", str], Iterator[Difference]]


def _field(path: str, name: str = "", text: Callable[[Any], str] = str) -> Rows:
    """A row where the value at a dotted ``path`` differs."""

    def rows(a: Plan, b: Plan, group: str) -> Iterator[Difference]:
        x, y = (_at(plan, path) for plan in (a, b))
        if x != y:
            yield _line(group, path, name or path, x, y, text)

    return rows


def _at(value: Any, path: str) -> Any:
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _mesh(a: Plan, b: Plan, group: str) -> Iterator[Difference]:
    if a.mesh.world != b.mesh.world:
        yield _line(group, "gpus", "gpus", a.mesh.world, b.mesh.world)
    for axis in [*a.mesh_sizes, *(axis for axis in b.mesh_sizes if axis not in a.mesh_sizes)]:
        x, y = a.mesh_sizes.get(axis, 1), b.mesh_sizes.get(axis, 1)
        if x != y:
            yield Difference(group, f"mesh_sizes.{axis}", x, y, f"{axis}: {x} -> {y}")


def _cluster(a: Plan, b: Plan, group: str) -> Iterator[Difference]:
    """Figures of one cluster that changed; another cluster has others anyway."""
    if a.cluster == b.cluster:
        mine, theirs = (tomllib.loads(plan.cluster_toml) for plan in (a, b))
        for path, x, y in _leaves("cluster_toml", mine, theirs):
            if not path.startswith("cluster_toml.sources"):
                yield _line(group, path, path.partition(".")[2], x, y)


def _options(a: Plan, b: Plan, group: str) -> Iterator[Difference]:
    mine, theirs = (plan.options.model_dump(mode="json") for plan in (a, b))
    for name, x in mine.items():
        if x != theirs[name]:
            yield _line(group, f"options.{name}", name, x, theirs[name])


def _parts(a: Plan, b: Plan, group: str) -> Iterator[Difference]:
    """The parts of a step, where they are others by a thousandth of it."""
    mine, theirs = ({(p.name, p.axis, p.kind): p for p in plan.cost.parts} for plan in (a, b))
    for key in [*mine, *(key for key in theirs if key not in mine)]:
        x, y = (side[key].exposed_seconds if key in side else 0.0 for side in (mine, theirs))
        name, path = " ".join(filter(None, key)), f"cost.parts[{_part(*key)}]"
        if abs(x - y) > 1e-3 * a.step_seconds:
            yield _line(group, path, name, x, y, seconds_text)


def _placements(a: Plan, b: Plan, group: str) -> Iterator[Difference]:
    """Of blocks with the same calls: parameters that are stored otherwise, and what a call sends."""
    theirs = {(block.name, *block.paths): block for block in b.blocks}
    for block in a.blocks:
        other = theirs.get((block.name, *block.paths))
        if other is not None:
            yield from _parameters(block, other, group)
            yield from _sent(block, other, group)


def _parameters(a: BlockPlan, b: BlockPlan, group: str) -> Iterator[Difference]:
    theirs = {node.name: node for node in b.nodes}
    for node in a.nodes:
        other = theirs.get(node.name)
        if node.op in ("parameter", "buffer") and other is not None and layout(node) != layout(other):
            path, name = f"blocks[{a.name}].nodes[{node.name}].choices", node.source or node.name
            text = f"{units_text(a.paths)} {name}: {layout(node)} -> {layout(other)}"
            yield Difference(group, path, node.choices, other.choices, text)


def _sent(a: BlockPlan, b: BlockPlan, group: str) -> Iterator[Difference]:
    for way, backward in (("forward", False), ("backward", True)):
        mine, theirs = _bytes_sent(a, backward=backward), _bytes_sent(b, backward=backward)
        if mine != theirs:
            texts = [", ".join(f"{w} {bytes_text(count)}" for w, count in side.items()) for side in (mine, theirs)]
            text = f"{units_text(a.paths)} sends {way}: {texts[0] or 'nothing'} -> {texts[1] or 'nothing'}"
            yield Difference(group, f"blocks[{a.name}] sends {way}", mine, theirs, text)


def _bytes_sent(block: BlockPlan, *, backward: bool) -> dict[str, int]:
    """Kind and axis of collectives -> bytes of all of them in a call."""
    found: Counter[str] = Counter()
    for message in (m for node in block.nodes for m in node.messages if m.backward == backward):
        found[f"{message.kind}@{message.axis}"] += message.times * message.bytes
    return dict(sorted(found.items()))


def _dispatch(a: Plan, b: Plan, group: str) -> Iterator[Difference]:
    """Layers whose tokens travel otherwise to their experts."""
    theirs = {row.layer: row for row in b.experts}
    for number, row in enumerate(a.experts):
        other = theirs.get(row.layer)
        if other is not None and row.nodes != other.nodes:
            path = f"experts[{number}].nodes"
            yield _line(group, path, f"{row.layer} sends tokens", row.nodes, other.nodes, dispatch_text)


def _stages(a: Plan, b: Plan, group: str) -> Iterator[Difference]:
    if len(a.stage_plans) != len(b.stage_plans):
        yield _line(group, "stages", "stages", len(a.stage_plans), len(b.stage_plans))
        return
    for number, (x, y) in enumerate(zip(a.stage_plans, b.stage_plans, strict=True)):
        if x.units != y.units:
            sides = units_text(x.units), units_text(y.units)
            path = f"stage_plans[{number}].units"
            yield Difference(group, path, x.units, y.units, f"stage {number}: {sides[0]} -> {sides[1]}")


def _recomputation(a: Plan, b: Plan, group: str) -> Iterator[Difference]:
    for number, (x, y) in enumerate(zip_longest(a.stage_plans, b.stage_plans)):
        mine, theirs = _recomputing(x), _recomputing(y)
        if mine != theirs and any(stage is not None and any(stage.recompute) for stage in (x, y)):
            yield _line(group, f"stage_plans[{number}].recompute", f"stage {number} recomputes in", mine, theirs)


def _recomputing(stage: StagePlan | None) -> str:
    """``5 of 8 units``."""
    if stage is None:
        return "no such stage"
    return f"{sum(map(bool, stage.recompute))} of {len(stage.units)} units"


def _offloads(a: Plan, b: Plan, group: str) -> Iterator[Difference]:
    for number, (x, y) in enumerate(zip_longest(a.stage_plans, b.stage_plans)):
        mine, theirs = (stage.offloads if stage is not None else None for stage in (x, y))
        if mine != theirs and (mine or theirs):
            path, name = f"stage_plans[{number}].offloads", f"stage {number} has its activations"
            yield _line(group, path, name, mine, theirs, lambda share: offload_text(share) or "on the device")


def _bytes(field: str, what: str) -> Rows:
    """Rows where bytes of a pipeline rank differ."""

    def rows(a: Plan, b: Plan, group: str) -> Iterator[Difference]:
        for number, (x, y) in enumerate(zip_longest(a.rank_plans, b.rank_plans)):
            mine, theirs = (getattr(rank, field) if rank is not None else None for rank in (x, y))
            if mine != theirs and (mine or theirs):
                name = f"{what} of pipeline rank {number}"
                yield _line(group, f"rank_plans[{number}].{field}", name, mine, theirs, bytes_text)

    return rows


_GROUPS: Final[dict[str, tuple[Rows, ...]]] = {
    "model and cluster": (
        *(_field("model_name"), _field("model_fingerprint")),
        *(_field("cluster"), _cluster, _field("batch_size")),
    ),
    "degrees": (_mesh, _field("microbatches")),
    "schedule": (_field("schedule"), _field("chunks"), _field("vocabulary"), _stages),
    "options": (_options,),
    "the host": (_offloads,),
    "recomputation": (_recomputation,),
    "placements": (_placements, _dispatch),
    _PREDICTED: (
        _field("cost.step_seconds", "step", seconds_text),
        _field("cost.bound_seconds", "bound on the mesh", seconds_text),
        _field("mfu", "MFU", percent_text),
        _field("cost.model_flops", "model FLOPs of a step", flops_text),
        _parts,
        *(_bytes("peak_bytes", "peak memory"), _bytes("host_bytes", "host memory")),
    ),
}


def _leaves(path: str, a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    """``(path, this, other)`` of each value that differs; entries of lists go by name where they have one."""
    if isinstance(a, list) and isinstance(b, list) and (names := _names(a)) and (others := _names(b)):
        a, b = dict(zip(names, a, strict=True)), dict(zip(others, b, strict=True))
        for name in [*a, *(name for name in b if name not in a)]:
            yield from _leaves(f"{path}[{name}]", a.get(name), b.get(name))
    elif isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys()):
            yield from _leaves(f"{path}.{key}" if path else key, a.get(key), b.get(key))
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _leaves(f"{path}[{i}]", x, y)
    elif a != b:
        yield path, a, b


def _names(values: list[Any]) -> list[str]:
    """Of the entries of a list, if each has its own; else none. Parts of a step have an axis and a kind beside it."""
    named = [value for value in values if isinstance(value, dict) and "name" in value]
    found = [_part(value["name"], value.get("axis"), value["kind"] if "axis" in value else "") for value in named]
    return found if len(set(found)) == len(values) else []


def _part(*words: str | None) -> str:
    return ",".join(filter(None, words))
