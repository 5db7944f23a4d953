"""The searched space: regions (degrees, and rows of a microbatch), and the points of a region (everything else).

What can't run is left out here, by the sizes that have to divide; what can't fit or isn't worth it is for
:mod:`autopar.search.bounds` to say. Left out as well is what another point equals or beats at every cost:

* ``naive`` and ``gpipe``: 1F1B runs the same passes in no more time and keeps less; ``zb`` without a limit is
  ``zb-1p``;
* ``vocabulary="stage"``: its cut is one of those that ``"redistributed"`` chooses from; ``"naive"`` has one barrier
  more than ``"vocab-1"``;
* sequences over cp and several rows of a microbatch on each rank, where rows could be on ranks of their own instead
  (:func:`undominated`): tokens are as many, and nothing is sent for attention;
* ``offload`` of the optimizer beside that of parameters, which brings it along; of activations where all ranks have
  one stage alone: no time lies between a forward and its backward;
* without a pipeline, several stages with the backward split: nothing waits for what that makes early;
* ``pipedream``, 8-bit activations, PowerSGD, float8: they compute something else.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from torch import fx

from autopar.cluster import Cluster
from autopar.errors import ArgumentError, StageError
from autopar.graph import Block, Model, info, op_name, operands
from autopar.mesh import EXPERTS, Mesh
from autopar.options import Options, activations_on_host, parameters_on_host
from autopar.passes.find_head import find_head
from autopar.passes.pad_head import Table, pad_head, table_of
from autopar.passes.vocabulary import staged_calls
from autopar.planner.modes import MODES, Mode
from autopar.planner.pinned_placements import split_axes
from autopar.planner.spreading import Spread, sequence_lengths
from autopar.rules import lookup
from autopar.rules.attention import heads
from autopar.rules.base import Op
from autopar.schedules.registry import SCHEDULES
from autopar.search.pins import Pins
from autopar.search.profiles import Key

BEATEN: Final = ("naive", "gpipe", "zb", "pipedream", "interlaced")
"""Schedules that aren't tried by themselves; interlaced is, with the vocabulary that it is for."""

_OFFLOADS: Final = (
    ("optimizer",),
    ("parameters",),
    ("activations",),
    ("optimizer", "activations"),
    ("parameters", "activations"),
)
_ROUND: Final = "interleaved"
SPLIT_HEADS: Final = ("vocab-1", "vocab-2")
_HEAD_CHUNKS: Final = (1, 8)
_MOST_CHUNKS: Final = 8
"""Stages per rank of a pipeline that are tried in any case: each halves the bubble that is left, and doubles the
messages."""
_UNITS: Final = (1, 2, 4, 8)
"""Of each stage, about so many are tried: memory comes and goes by stages, gradients go sooner."""
_ENDS: Final = 2  # units that are no layers: the first and the last


class Joined(NamedTuple):
    """Units and layers of a model in which the head and all after it are one, as they are in chunks and with a padded
    ``table`` (None: it can't be padded)."""

    units: int
    layers: int
    table: Table | None

    @classmethod
    def of(cls, model: Model, units: int) -> Joined | None:
        """None where that makes no difference to ``units``."""
        try:
            joined, *_ = find_head(model)
        except StageError:
            return None
        if (left := len(staged_calls(joined))) == units:
            return None
        table = table_of(model)
        pads = table is not None and pad_head(model, table.classes + 1) is not model
        return cls(left, layers_of(joined), table if pads else None)

    def holds(self, tp: int, head_chunks: int) -> bool:
        """Whether the head is computed so."""
        return head_chunks > 1 or (self.table is not None and self.table.padded(tp) != self.table.classes)


def layers_of(model: Model) -> int:
    """How many calls are of layers; all, where none is."""
    kinds = [model.block_of(model.calls[index]).kind for index in staged_calls(model)]
    return kinds.count("layer") or len(kinds)


@dataclass(frozen=True)
class Sizes:
    """What has to divide: the global batch, positions, heads and experts; and how many units stages are cut between,
    in all and (``inner``) where the head is split over the pipeline.

    ``layers`` of the units have as many on each stage where stages aren't cut by cost. A model without sequences has no
    ``lengths``; ``heads`` and ``experts`` are of all layers that have any. ``widths`` are those of all weights: without
    heads, ``tp`` divides one of them at least, or it would split nothing.
    """

    batch: int
    units: int
    inner: int
    layers: int
    joined: Joined | None
    lengths: tuple[int, ...]
    heads: tuple[int, ...]
    experts: tuple[int, ...]
    widths: tuple[int, ...]

    @classmethod
    def of(cls, model: Model, units: int, inner: int) -> Sizes:
        ops = [node for block in model.blocks for node in block.ops]
        counts = [count for node in ops for count in heads(Op.of(node)) or ()]
        return cls(
            batch=model.batch_size,
            units=units,
            inner=inner,
            layers=layers_of(model),
            joined=Joined.of(model, units),
            lengths=tuple(sequence_lengths(Spread.of(model)))
            if any(i.seq_dim is not None for i in model.inputs)
            else (),
            heads=tuple(sorted(set(counts))),
            experts=tuple(sorted(set(_experts(model)))),
            widths=tuple(sorted(set(_widths(model)))),
        )

    def most_stages(self, tp: int, head_chunks: int, mode: Mode) -> int:
        """That such a model can be cut into."""
        if mode.head:
            return self.inner
        whole = self.units, self.layers
        units, layers = self.joined[:2] if self.joined and self.joined.holds(tp, head_chunks) else whole
        return units if mode.balanced else layers


def _experts(model: Model) -> Iterator[int]:
    """How many experts each layer has, by the weights that its products take."""
    for block in model.blocks:
        yield from (info(node).meta.shape[0] for node in _of_experts(block))


def _widths(model: Model) -> Iterator[int]:
    """Of weights; a convolution's kernel is none."""
    for block in model.blocks:
        for node in block.placeholders("parameter"):
            shape = info(node).meta.shape
            yield from shape[: 2 if len(shape) > 3 else 3] if len(shape) > 1 else ()


def _of_experts(block: Block) -> set[fx.Node]:
    """Parameters that products take with a dim of experts."""
    taken = ((node, lookup(op_name(node)).expert_operands(Op.of(node))) for node in block.ops)
    behind = {_stored(operands(node)[position]) for node, positions in taken for position in positions}
    return {node for node in behind if info(node).role == "parameter"}


def _stored(node: fx.Node) -> fx.Node:
    """The placeholder behind casts."""
    while node.op == "call_function" and len(operands(node)) == 1:
        (node,) = operands(node)
    return node


def expert_share(block: Block) -> float:
    """Of all elements of its parameters, those of experts."""
    experts = sum(info(node).meta.numel for node in _of_experts(block))
    total = sum(info(node).meta.numel for node in block.placeholders("parameter"))
    return experts / total if total else 0.0


TOGETHER: Final = 16
"""Regions that are looked at at once: of more, arrays are large."""


class Region(NamedTuple):
    """Degrees, and how a batch is cut: ``microbatches`` of ``rows`` on each of ``mesh.replicas``."""

    mesh: Mesh
    rows: int
    microbatches: int

    @property
    def key(self) -> Key:
        mesh = self.mesh
        several, copies = self.microbatches > 1, mesh.dp > 1
        counted = _near(self.microbatches) if mesh.tp > 1 else 0
        return Key(self.rows, mesh.ep, mesh.cp, mesh.tp, mesh.borrowed, several=several, copies=copies, counted=counted)


def _near(microbatches: int) -> int:
    """The power of four within a factor of two: as finely as placements tell apart how many share what a step does
    once."""
    return int(4 ** (microbatches.bit_length() // 2))


def simplicity(region: Region) -> tuple[int, ...]:
    """By which regions are looked at in order, where nothing tells them apart."""
    mesh = region.mesh
    return mesh.cp, mesh.tp, len(mesh.borrowed), mesh.pp, mesh.experts, -region.rows


class Family(NamedTuple):
    """Points of a region that differ in how state is stored and memory saved alone."""

    region: Region
    schedule: str
    chunks: int | None
    vocabulary: str


class Way(NamedTuple):
    """To store weights, and what is on the host."""

    zero: int
    zero_ranks: int
    offload: tuple[str, ...]

    @property
    def of_weights(self) -> Way:
        """The same without what says nothing of weights: activations on the host."""
        return self._replace(offload=tuple(each for each in self.offload if not activations_on_host((each,))))


class Point(NamedTuple):
    """A region, and everything else that is searched."""

    region: Region
    schedule: str
    chunks: int | None
    vocabulary: str
    zero: int
    zero_ranks: int
    offload: tuple[str, ...]
    head_chunks: int

    @property
    def family(self) -> Family:
        return Family(self.region, self.schedule, self.chunks, self.vocabulary)

    @property
    def way(self) -> Way:
        return Way(self.zero, self.zero_ranks, self.offload)

    @property
    def head(self) -> int:
        """Over how many pipeline ranks the head is split; 0: it is whole."""
        return self.region.mesh.pp if MODES[self.vocabulary].head else 0


class Savers(NamedTuple):
    """What saves memory in other ways than these ``points`` of one family; ``away``: with activations on the host."""

    points: tuple[Point, ...]
    away: bool

    @property
    def region(self) -> Region:
        return self.points[0].region

    def all(self, cluster: Cluster, pins: Pins) -> list[Point]:
        _, *ways = savers(self.points[0].family, cluster, pins)
        some = [way for way in ways if activations_on_host(way[0]) == self.away]
        return [
            point._replace(offload=offload, head_chunks=chunks) for offload, chunks in some for point in self.points
        ]


def regions(sizes: Sizes, pins: Pins) -> list[Region]:
    """All that the sizes allow, in a fixed order."""
    return [region for mesh in meshes(sizes, pins) for region in cut(mesh, sizes, pins)]


def cut(mesh: Mesh, sizes: Sizes, pins: Pins) -> Iterator[Region]:
    """Those of a mesh: none where its replicas don't divide the batch."""
    if sizes.batch % mesh.replicas == 0:
        for rows, count in _cuts(sizes.batch // mesh.replicas, pins):
            yield Region(mesh, rows, count)


def undominated(found: Sequence[Region]) -> list[Region]:
    """Those of ``found``, of a model that computes each row by itself, that no other one of them beats.

    With ``rows`` and ``cp`` multiples of g, ranks may have whole rows instead of g-th parts of g times as many: as many
    tokens, whose weights are shared by the same ranks, and cp (with experts over it) is g times as small. Its passes
    take no longer; nor does it keep more, if both are placed alike.
    """
    known, with_less_cp = set(found), functools.cache(_with_less_cp)
    left = []
    for region in found:
        times = math.gcd(region.rows, region.mesh.cp)
        whole = Region(with_less_cp(region.mesh, times), region.rows // times, region.microbatches)
        if times == 1 or whole not in known:
            left.append(region)
    return left


def _with_less_cp(mesh: Mesh, times: int) -> Mesh:
    """With cp so many times as small, and as many times the replicas."""
    cp, dp, ep = mesh.cp // times, mesh.dp, mesh.ep
    dp, ep = (dp, ep * times) if "cp" in mesh.borrowed else (dp * times, ep)
    borrowed = tuple(axis for axis in mesh.borrowed if axis != "cp" or cp > 1)
    return replace(mesh, dp=dp, ep=ep, cp=cp, borrowed=borrowed)


def _cuts(rows: int, pins: Pins) -> Iterator[tuple[int, int]]:
    """``(rows of a microbatch, microbatches)`` that make up ``rows``."""
    for size in divisors(rows):
        if pins.microbatch in (None, size) and pins.microbatches in (None, rows // size):
            yield size, rows // size


def meshes(sizes: Sizes, pins: Pins) -> list[Mesh]:
    """Of all, those whose replicas divide the batch and that suit the options, if there are such."""
    if pins.mesh_is_whole:
        return [pins.fixed_mesh]
    found: dict[Mesh, None] = {}
    for pp, cp, tp in itertools.product(*(_degrees(axis, sizes, pins) for axis in ("pp", "cp", "tp"))):
        dp, left = divmod(pins.gpus, pp * cp * tp)
        if left or pins.mesh.get("dp", dp) != dp:
            continue
        for experts in _expert_degrees(sizes, pins, dp * cp * tp):
            mesh = _mesh({"pp": pp, "dp": dp, "cp": cp, "tp": tp, **experts}, pins.gpus)
            if mesh is not None:
                found[mesh] = None
    suited = [mesh for mesh in found if sizes.batch % mesh.replicas == 0 and not any(lacks(mesh, pins.options))]
    return suited or list(found)


def lacks(mesh: Mesh, options: Options) -> Iterator[str]:
    """What the options need of degrees, and these aren't."""
    if options.powersgd and mesh.dp == 1:
        yield "dp >= 2"
    if options.zero_ranks and mesh.zero_shards(0) % options.zero_ranks:
        yield f"dp x cp = a multiple of {options.zero_ranks}"
    for axis, pattern in split_axes(options.placements).items():
        if mesh.size(axis) == 1:
            yield f"{axis} >= 2, which {pattern!r} is split over"


def _mesh(degrees: Mapping[str, int], gpus: int) -> Mesh | None:
    try:
        return Mesh.of(degrees, gpus)
    except ArgumentError:  # ep can't be borrowed from these
        return None


def _degrees(axis: str, sizes: Sizes, pins: Pins) -> list[int]:
    if axis in pins.mesh:
        return [pins.mesh[axis]]
    return [size for size in divisors(pins.gpus) if divides(axis, size, sizes)]


def divides(axis: str, size: int, sizes: Sizes) -> bool:
    """Whether there is as much for each of ``size`` ranks of pp, ep, cp or tp."""
    if axis == "pp":
        return size <= sizes.units
    if axis == "ep":
        return size == 1 or (bool(sizes.experts) and all(count % size == 0 for count in sizes.experts))
    if axis == "cp":
        return size == 1 or (bool(sizes.lengths) and all(length % size == 0 for length in sizes.lengths))
    if sizes.heads:
        return all(count % size == 0 for count in sizes.heads)
    return size == 1 or any(width % size == 0 for width in sizes.widths)


def _expert_degrees(sizes: Sizes, pins: Pins, ranks: int) -> Iterator[dict[str, int]]:
    """``ep``, and whether one expert is split over tp, where that makes a difference."""
    if "ep" in pins.mesh:
        yield {name: pins.mesh[name] for name in EXPERTS if name in pins.mesh}
        return
    yield {}
    for ep in divisors(ranks)[1:] if sizes.experts else ():
        if divides("ep", ep, sizes):
            yield {"ep": ep}
            yield {"ep": ep, "etp": 1}


def divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def schedules(region: Region, sizes: Sizes, pins: Pins, heads_: Sequence[str]) -> Iterator[tuple[str, int | None, str]]:
    """``(schedule, chunks, vocabulary)`` of a region; ``heads_`` are the split heads that the model has."""
    pp, microbatches = region.mesh.pp, region.microbatches
    if pp == 1:
        yield from _alone(sizes, pins)
        return
    names = [pins.schedule] if pins.schedule else [name for name in SCHEDULES if name not in BEATEN]
    for name in names:
        row = SCHEDULES.get(name)
        if row is not None and microbatches < row.least_per_rank * pp:
            continue
        for chunks in _chunks(name, pp, sizes, pins):
            splits = pp * _stages(name, chunks) <= sizes.inner
            for vocabulary in _vocabularies(name, pins, heads_):
                if pins.vocabulary or splits or not MODES[vocabulary].head:
                    yield name, chunks, vocabulary
    interlaces = pins.schedule is None and pins.chunks in (None, 1) and pins.vocabulary is None
    if interlaces and "vocab-1" in heads_ and pp <= sizes.inner:
        yield "1f1b", pins.chunks, "interlaced"


def _alone(sizes: Sizes, pins: Pins) -> Iterator[tuple[str, int | None, str]]:
    """The same without a pipeline: one stage, or several, whose forwards take turns with backwards of the microbatch
    before."""
    vocabulary = pins.vocabulary or "redistributed"
    if pins.schedule != _ROUND and pins.chunks in (None, 1):
        yield pins.schedule or "1f1b", pins.chunks, vocabulary
    if pins.schedule in (None, _ROUND) and not MODES[vocabulary].head:
        for chunks in _chunks_alone(sizes, pins):
            yield _ROUND, chunks, vocabulary


def _chunks_alone(sizes: Sizes, pins: Pins) -> Sequence[int | None]:
    """Numbers of a rank's stages, the largest first."""
    if pins.chunks is not None:
        least = 1 if pins.schedule else 2
        return [pins.chunks] if least <= pins.chunks <= sizes.units else []
    several = sorted((count for count in _by_units(1, sizes) if count > 1), reverse=True)
    return several or ([None] if pins.schedule else [])


def _by_units(pp: int, sizes: Sizes) -> set[int]:
    """Numbers of a rank's stages of one of ``_UNITS`` each."""
    return {math.ceil((sizes.units - _ENDS) / (pp * units)) for units in _UNITS}


def _chunks(name: str, pp: int, sizes: Sizes, pins: Pins) -> list[int | None]:
    row = SCHEDULES.get(name)
    if pins.chunks is not None:
        other = row is not None and (row.chunks not in (0, pins.chunks) or (not row.chunks and pins.chunks == 1))
        return [] if pins.chunks * pp > sizes.units or (other and pins.schedule is None) else [pins.chunks]
    if row is None:
        return [None]
    if row.chunks:
        return [None] if row.chunks * pp <= sizes.units or pins.schedule else []
    counts = {*range(2, _MOST_CHUNKS + 1), *_by_units(pp, sizes)}
    return sorted(count for count in counts if 1 < count <= sizes.units // pp) or ([None] if pins.schedule else [])


def _vocabularies(name: str, pins: Pins, heads_: Sequence[str]) -> list[str]:
    row = SCHEDULES.get(name)
    having = row.heads if row is not None else ("", *heads_)
    if pins.vocabulary is not None:
        alone = MODES[pins.vocabulary].schedule and name != "1f1b"
        suits = MODES[pins.vocabulary].head in having and not alone
        return [pins.vocabulary] if pins.schedule is not None or suits else []
    split: list[str] = [head for head in SPLIT_HEADS if head in having and head in heads_]
    return ["redistributed", *split] if "" in having else split


def storages(region: Region, cluster: Cluster, pins: Pins) -> Iterator[tuple[int, int]]:
    """``(zero, zero_ranks)``: over all ranks that have the same parameters, or over those of one node."""
    mesh, options = region.mesh, pins.options
    copies, least = mesh.zero_shards(0), int(options.zero_ranks > 0)
    most = least if copies == 1 else 1 if options.powersgd else 3  # PowerSGD sums whole gradients
    stages = [options.zero] if pins.fixes("zero") else range(least, most + 1)
    inner = cluster.devices_per_node // mesh.tp
    for zero in stages:
        yield zero, options.zero_ranks
        within = 1 < inner < copies and copies % inner == 0
        if zero and within and not pins.fixes("zero_ranks") and not options.zero_ranks:
            yield zero, inner


def savers(family: Family, cluster: Cluster, pins: Pins) -> Iterator[tuple[tuple[str, ...], int]]:
    """``(offload, head_chunks)``, first neither: the others save memory and take time."""
    options, kinds = pins.options, offloads(cluster, pins)
    if stages_of(family) == 1:
        kinds = [each for each in kinds if each == options.offload or not activations_on_host(each)]
    yield from itertools.product(kinds, chunks_of_head(pins))


def chunks_of_head(pins: Pins) -> list[int]:
    """That it may be computed in, the fastest first."""
    return [pins.options.head_chunks] if pins.fixes("head_chunks") else list(_HEAD_CHUNKS)


def offloads(cluster: Cluster, pins: Pins) -> list[tuple[str, ...]]:
    """Of any region, first the one that takes no more time."""
    free = not pins.fixes("offload") and cluster.device.host_memory_bytes
    return [pins.options.offload, *(_OFFLOADS if free else ())]


def together(regions_: Iterable[Region]) -> Iterator[list[Region]]:
    """Some at a time that have as many pipeline ranks and microbatches, and so the same schedules."""
    alike: dict[object, list[Region]] = {}
    for region in regions_:
        alike.setdefault(works_of(region), []).append(region)
    for some in alike.values():
        yield from (some[first : first + TOGETHER] for first in range(0, len(some), TOGETHER))


def works_of(region: Region) -> tuple[int, int]:
    """What the schedules of a region depend on: its pipeline ranks and microbatches."""
    return region.mesh.pp, region.microbatches


def stages_of(point: Point | Family) -> int:
    """Of all ranks."""
    return point.region.mesh.pp * _stages(point.schedule, point.chunks)


def _stages(schedule: str, chunks: int | None) -> int:
    """Of one rank; one where that isn't said."""
    row = SCHEDULES.get(schedule)
    return chunks or (row.chunks if row else 0) or 1


def moves_each_time(way: Way) -> bool:
    """Whether weights or their gradients move with each microbatch."""
    return way.zero >= 2 or parameters_on_host(way.offload)


def splits_head(family: Family) -> bool:
    """Whether all pipeline ranks have a part of the vocabulary."""
    return bool(MODES[family.vocabulary].head)


def promise(point: Point) -> float:
    """How many times its estimate a step is likely to take: more complicated ways are estimated worse."""
    row = SCHEDULES.get(point.schedule)
    doubts = [
        (0.02, bool(MODES[point.vocabulary].head)),
        (0.01, row is not None and row.cost_aware),
        (0.01, bool(point.offload)),
        (0.02, point.head_chunks > 1),
        (0.01, point.region.mesh.cp > 1),
    ]
    return 1.0 + sum(share for share, holds in doubts if holds)
