"""The plan: every decision about a parallel job, as a frozen value that is JSON both ways.

A plan holds decisions and predictions, no code: loading one executes nothing. The same model, mesh and options give the
same bytes; ``digest`` names them. The emitted programs are derived from a plan and carry its digest.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from autopar.errors import AutoparError, PlanError
from autopar.mesh import Mesh
from autopar.options import Options

VERSION: Final = 4


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class InputPlan(_Value):
    """A tensor of the batch: ``batch_dim`` is what microbatches and dp split; None: every rank takes it whole."""

    name: str
    path: str
    shape: list[int]
    dtype: str
    batch_dim: int | None


class NodePlan(_Value):
    """Types of one op, parameter or input of a block per axis: ``"S(2), S(0) -> P"``; a parameter's is its storage."""

    name: str
    op: str
    source: str
    choices: dict[str, str]


class RecomputePlan(_Value):
    """One choice of what a block recomputes in its backward: ``regions`` by the names of their first and last op; what
    it keeps then (``saved``: the nodes whose memory that is; ``saved_bytes`` per microbatch), the seconds it adds to
    the backward, and the bytes that a region's tensors take again meanwhile."""

    regions: list[list[str]]
    saved: list[str]
    saved_bytes: int
    seconds: float
    transient_bytes: int


class BlockPlan(_Value):
    """One distinct piece of the model; ``paths`` are the modules that are calls of it.

    ``saved_bytes`` is what a call keeps of a microbatch if it recomputes nothing; ``recompute`` what calls recompute.
    """

    name: str
    kind: str
    paths: list[str]
    nodes: list[NodePlan]
    saved_bytes: int = 0
    recompute: list[RecomputePlan] = []


class ExpertsPlan(_Value):
    """The experts of one layer (the module path of its router's choice), of which each token takes ``choices``.

    Each of the ``ranks`` of ``axes`` holds its own ``experts / ranks`` (1: every rank holds all). ``imbalance``: how
    many times its share of the slots the fullest of them is reckoned to get, which no order of experts makes less than
    ``bound``; ``order[p]`` is the expert stored at place ``p`` (empty: p itself). On the axes ``whole`` all ranks have
    the same tokens, and each takes those of its own experts; on the others tokens travel: a rank sends ``sent_bytes``
    to others, of a microbatch and on the average, and gets as much back.
    """

    layer: str
    experts: int
    choices: int
    axes: list[str]
    ranks: int
    imbalance: float
    bound: float
    order: list[int]
    whole: list[str]
    sent_bytes: int


class StagePlan(_Value):
    """One pipeline stage: calls ``first .. last`` of the model, what they are, what they cost a microbatch.

    ``rank`` is the pipeline rank that holds it, which keeps ``inflight`` microbatches of it when it keeps the most.
    ``recompute`` has a number for each unit: 0 where nothing is recomputed, else its place in the block's list, from 1.
    ``offloads``: what is kept goes to the host between forward and backward.
    """

    rank: int
    first: int
    last: int
    units: list[str]
    forward_seconds: float
    backward_seconds: float
    parameter_bytes: int
    saved_bytes: int
    inflight: int
    recompute: list[int] = []
    offloads: bool = False


class RankPlan(_Value):
    """What one pipeline rank holds: its stages, its rows of split vocabulary layers, its device memory at the peak.

    ``kinds`` (:data:`autopar.storages.KINDS`) make up ``peak_bytes``, reached in ``action``; where that is "", they are
    what the solver added up: state and saved activations, no buffers and temporaries. ``host_bytes``: beside it.
    """

    stages: list[int]
    vocabulary_bytes: int
    kinds: dict[str, int]
    action: str
    peak_bytes: int
    host_bytes: int


class CostPlan(_Value):
    """Predicted seconds of one step and where they go, and what is proven of them.

    No placement and no cut has a step below ``bound_seconds``; no order of this cut's passes one below
    ``order_seconds`` (0: not looked for).
    """

    step_seconds: float
    bound_seconds: float
    order_seconds: float
    compute_seconds: float
    bubble_seconds: float
    reduce_seconds: float
    optimizer_seconds: float


class PointPlan(_Value):
    """One point of a search: what was decided of it, and what was predicted. ``why`` says what makes it worse than the
    plan that has it, or better, in one line."""

    gpus: int
    mesh_sizes: dict[str, int]
    microbatches: int
    schedule: str
    chunks: int
    vocabulary: str
    options: Options
    step_seconds: float
    peak_bytes: int
    why: str = ""

    @property
    def mesh(self) -> Mesh:
        return Mesh.from_json(self.mesh_sizes)


class SearchPlan(_Value):
    """What a search looked at, and what it proves.

    ``free`` names what wasn't pinned. Of ``points`` in the searched space, ``laid_out`` were timed action by action,
    and the others were discarded by bounds: none of all has a step below ``bound_seconds``. ``runners_up`` are the next
    best, each of another kind; ``memory_front`` are points that nothing beats in both time and peak memory, by rising
    time; ``gpus_front`` the fastest for other numbers of GPUs.
    """

    free: list[str]
    points: int
    placed: int
    laid_out: int
    bound_seconds: float
    runners_up: list[PointPlan] = []
    memory_front: list[PointPlan] = []
    gpus_front: list[PointPlan] = []


class Plan(_Value):
    """See the module docstring. ``peak_bytes`` has one entry per rank.

    ``chunks`` is how many stages a pipeline rank holds; ``vocabulary`` how embedding and head are computed; ``options``
    what was pinned of memory and precision; ``attention`` how positions attend to those
    of other ranks of ``cp``, by block, ``whole_sequences`` what isn't split on it;
    ``compression`` what is compressed, and what of that is lossy, as text; ``remarks`` how the model was read;
    ``actions`` the list of a schedule that was made for this plan's costs,
    None for one that has a name; ``search`` what else was looked at, None where everything was pinned.
    """

    version: int = VERSION
    model_name: str
    model_fingerprint: str
    cluster: str
    cluster_toml: str
    mesh_sizes: dict[str, int]
    batch_size: int
    microbatches: int
    inputs: list[InputPlan]
    blocks: list[BlockPlan]
    stage_plans: list[StagePlan]
    rank_plans: list[RankPlan]
    schedule: str
    chunks: int
    vocabulary: str
    options: Options
    actions: str | None
    replicated_ops: list[str]
    attention: list[str] = []
    whole_sequences: list[str] = []
    compression: list[str] = []
    experts: list[ExpertsPlan] = []
    remarks: list[str] = []
    cost: CostPlan
    search: SearchPlan | None = None
    digest: str = Field(default="")

    @model_validator(mode="after")
    def _check(self) -> Plan:
        Mesh.from_json(self.mesh_sizes)
        if self.digest and self.digest != _digest(self):
            raise ValueError(f"its digest is {self.digest}, its content's {_digest(self)}: it was changed or damaged")
        return self

    @property
    def mesh(self) -> Mesh:
        return Mesh.from_json(self.mesh_sizes)

    @property
    def stages(self) -> list[list[str]]:
        """Per pipeline stage, the paths of its units."""
        return [list(stage.units) for stage in self.stage_plans]

    @property
    def step_seconds(self) -> float:
        return self.cost.step_seconds

    @property
    def bound_seconds(self) -> float:
        """No placement and no cut on this mesh has a shorter step, under the same cost model."""
        return self.cost.bound_seconds

    @property
    def peak_bytes(self) -> list[int]:
        mesh = self.mesh
        return [self.rank_plans[mesh.coordinate(rank, "pp")].peak_bytes for rank in range(mesh.world)]

    def sealed(self) -> Plan:
        """This plan with its digest filled in."""
        return self.model_copy(update={"digest": _digest(self)})

    def to_json(self) -> str:
        return json.dumps(self.model_dump(), indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str, *, name: str = "plan") -> Plan:
        """Strict inverse of :meth:`to_json`. Raises PlanError where it is cut short, changed or of another version."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"{name} is no complete JSON ({error}); it was cut short or damaged: plan again") from error
        version = data.get("version") if isinstance(data, dict) else None
        if version != VERSION:
            raise PlanError(f"{name} has version {version!r}, this autopar reads version {VERSION}: plan again")
        try:
            return cls.model_validate(data)
        except (ValidationError, AutoparError) as error:
            raise PlanError(f"{name} is not a valid plan: {_first_problem(error)}; plan again") from error

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file (or ``plan.json`` in a directory). Raises PlanError."""
        file = Path(path)
        file = file / "plan.json" if file.is_dir() else file
        try:
            text = file.read_text()
        except OSError as error:
            raise PlanError(f"can't read the plan {file}: {error.strerror or error}") from error
        return cls.from_json(text, name=str(file))

    def diff(self, other: Plan) -> str:
        """What differs, one line each: ``path: this -> other``; empty where nothing does."""
        return "\n".join(_differences("", self.model_dump(exclude={"digest"}), other.model_dump(exclude={"digest"})))

    def explain(self) -> str:
        """Degrees, stages, layouts and costs, as text."""
        return "\n".join(_explain(self))

    def explain_experts(self) -> str:
        """How many experts layers have, where they are and what they are reckoned with; empty where there are none."""
        return "\n".join(_explain_experts(self))

    def __str__(self) -> str:
        return self.explain()


def _digest(plan: Plan) -> str:
    content = json.dumps(plan.model_dump(exclude={"digest"}), sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _first_problem(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc'])) or 'the plan'}: {first['msg']}"
    return str(error)


def _differences(path: str, a: Any, b: Any) -> Iterator[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys()):
            yield from _differences(f"{path}.{key}" if path else key, a.get(key), b.get(key))
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            label = x.get("name", i) if isinstance(x, dict) else i
            yield from _differences(f"{path}[{label}]", x, y)
    elif a != b:
        yield f"{path}: {_short(a)} -> {_short(b)}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _explain(plan: Plan) -> Iterator[str]:
    cost = plan.cost
    yield f"{plan.model_name} on {plan.mesh.world} x {plan.cluster}: {plan.mesh}   (plan {plan.digest})"
    replicas = plan.mesh.replicas
    per_rank = plan.batch_size // plan.microbatches // replicas
    batch = f"{plan.batch_size} = {plan.microbatches} microbatches x dp {replicas} x {per_rank}"
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
    gap = 100 * (1 - cost.bound_seconds / cost.step_seconds) if cost.step_seconds else 0.0
    bound = f"nothing on this mesh is below {seconds_text(cost.bound_seconds)} ({gap:.1f} % gap)"
    yield f"step {seconds_text(cost.step_seconds)}; {bound}"
    if plan.mesh.pp > 1 and cost.order_seconds:
        gap = 100 * (1 - min(1.0, cost.order_seconds / cost.step_seconds))
        yield f"  no order of these stages' passes is below {seconds_text(cost.order_seconds)} ({gap:.1f} % gap)"
    parts = [("compute and tp", cost.compute_seconds), ("bubble", cost.bubble_seconds)]
    parts += [("gradient reduction", cost.reduce_seconds), ("optimizer", cost.optimizer_seconds)]
    yield "  " + ", ".join(f"{name} {seconds_text(value)}" for name, value in parts)
    yield ""
    for k, stage in enumerate(plan.stage_plans):
        where = f" on pipeline rank {stage.rank}" if plan.chunks > 1 else ""
        yield (
            f"stage {k}{where}: {_units_text(stage.units)}   forward {seconds_text(stage.forward_seconds)}, backward "
            f"{seconds_text(stage.backward_seconds)}, parameters {bytes_text(stage.parameter_bytes)}, "
            f"{stage.inflight} in flight{', activations to the host' if stage.offloads else ''}"
        )
        yield from _explain_recompute(plan, stage)
    for k, rank in enumerate(plan.rank_plans):
        rows = f" (with vocabulary rows of {bytes_text(rank.vocabulary_bytes)})" if rank.vocabulary_bytes else ""
        what = f"peak {bytes_text(rank.peak_bytes)} in {rank.action}"
        if not rank.action:  # far below the budget, it wasn't looked at action by action
            what = f"peak {bytes_text(rank.peak_bytes)} and what passes need while they run"
        yield (
            f"pipeline rank {k}: {what} = "
            + " + ".join(f"{kind} {bytes_text(bytes_)}" for kind, bytes_ in rank.kinds.items() if bytes_)
            + rows
            + (f"; on the host {bytes_text(rank.host_bytes)}" if rank.host_bytes else "")
        )
    yield from _explain_experts(plan)
    for block in plan.blocks:
        yield ""
        yield f"{block.name}: {_units_text(block.paths)}"
        yield from _explain_block(block)
    yield from _explain_remarks(plan)


def _explain_remarks(plan: Plan) -> Iterator[str]:
    """What holds of the model as a whole, each after an empty line."""
    if plan.attention:
        yield ""
        order = "in pairs of parts" if plan.mesh.paired else "in neighbouring parts"
        yield f"attention over cp, {order}: " + ", ".join(plan.attention)
    if plan.compression:
        yield ""
        yield from plan.compression
    if plan.replicated_ops:
        yield ""
        yield "computed whole on every rank (autopar has no rule for them): " + ", ".join(plan.replicated_ops)
    if plan.whole_sequences:
        yield ""
        yield "computed of whole sequences on every rank of cp: " + ", ".join(plan.whole_sequences)
    if plan.remarks:
        yield ""
        yield from plan.remarks


def _explain_recompute(plan: Plan, stage: StagePlan) -> Iterator[str]:
    """``  layers.0 … layers.3 (4) recompute softmax … matmul: keep 12 MiB instead of 40 MiB each, +0.8 ms``."""
    block_of = {path: block for block in plan.blocks for path in block.paths}
    taken = [(block_of[unit], point, unit) for unit, point in zip(stage.units, stage.recompute, strict=False) if point]
    for (block, number), found in itertools.groupby(taken, key=lambda row: (row[0], row[1])):
        units, point = [unit for _, _, unit in found], block.recompute[number - 1]
        ops = {node.name: node.op.split(".")[1] if "." in node.op else node.op for node in block.nodes}
        spans = [" … ".join(ops[name] for name in dict.fromkeys(region)) for region in point.regions]
        verb = "recomputes" if len(units) == 1 else "recompute"
        yield (
            f"  {_units_text(units)} {verb} {', '.join(spans)}: {bytes_text(point.saved_bytes)} kept instead of "
            f"{bytes_text(block.saved_bytes)} each, +{seconds_text(len(units) * point.seconds)}"
        )


def _explain_experts(plan: Plan) -> Iterator[str]:
    """``experts of layers.0.mlp … layers.3.mlp (4): 8, of which a token takes 2; 2 on each of ep 4 ranks …``."""

    def alike(row: ExpertsPlan) -> tuple[object, ...]:
        shape = row.experts, row.choices, row.axes, row.ranks, row.whole, row.sent_bytes
        return *shape, round(row.imbalance, 2), bool(row.order)

    for _, group in itertools.groupby(plan.experts, key=alike):
        rows = list(group)
        row = rows[0]
        whole = "all on every rank that has the layer (the mesh has no ep)"
        split = f"{row.experts // row.ranks} on each of {row.ranks} ranks of {' x '.join(row.axes)}, S(0)"
        yield (
            f"experts of {_units_text([r.layer for r in rows])}: {row.experts}, of which a token takes {row.choices}; "
            f"{split if row.ranks > 1 else whole}"
        )
        if row.whole:
            yield f"  ranks of {' x '.join(row.whole)} have the same tokens, and each takes those of its own experts"
        if row.sent_bytes:
            what = "a microbatch of a rank" if plan.microbatches > 1 else "a rank"
            sent = bytes_text(row.sent_bytes)
            yield f"  {what} sends tokens of {sent} to experts of other ranks, and gets as much back"
        if row.imbalance > 1:
            order = "; hot ones are stored apart" if row.order else ""
            bound = f" (no placement is below {row.bound:.2f})" if row.bound > 1 else ""
            yield f"  the fullest rank is reckoned with {row.imbalance:.2f} times its share of tokens{bound}{order}"


def _explain_block(block: BlockPlan) -> Iterator[str]:
    rows = [n for n in block.nodes if n.choices]
    width = max((len(n.name) for n in rows), default=0)
    for node in rows:
        types = "   ".join(f"{axis}: {choice}" for axis, choice in node.choices.items())
        yield f"  {node.name:<{width}}  {types}   {node.source}".rstrip()


def _units_text(units: list[str]) -> str:
    """``model.layers.0 … model.layers.3``; code between modules has no path."""
    named = [u or "(glue)" for u in units]
    return ", ".join(named) if len(named) <= 3 else f"{named[0]} … {named[-1]} ({len(named)})"


def seconds_text(seconds: float) -> str:
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns" if seconds else "0 s"


def bytes_text(bytes_: float) -> str:
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if bytes_ >= factor:
            return f"{bytes_ / factor:.3g} {unit}"
    return f"{bytes_:.0f} B"
