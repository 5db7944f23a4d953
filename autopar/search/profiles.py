"""A model placed once for all regions of a search that its placement doesn't tell apart.

Placements depend on what a rank has of a microbatch (its rows), and on the axes within which these are split further;
not on how many stages there are, how many copies, or how many microbatches. So one :class:`Profile` serves all of
those, and what a stage costs is read off it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, Protocol

from torch import fx

from autopar.cluster import Cluster
from autopar.cost_models import step
from autopar.errors import AutoparError, StageError
from autopar.graph import AxisRef, Info, Model, info
from autopar.mesh import AXES, Mesh
from autopar.options import Options
from autopar.passes.expert_roads import exchange_axes, nodes_of, travelling
from autopar.passes.find_head import find_head
from autopar.passes.hoist import parameter_sums, unhoisted
from autopar.passes.pad_head import Table, table_of
from autopar.passes.vocabulary import staged_calls
from autopar.planner.activations import Activations
from autopar.planner.between import least_message
from autopar.planner.block_costs import BlockCost, Computed, Machine, block_cost, reached_results
from autopar.planner.build import Local, Placed, Request, activations_of, begin, place_inner, split_rows
from autopar.planner.dispatch_forms import FLAT
from autopar.planner.pipeline import BOUNDLESS
from autopar.planner.rulings import Rulings
from autopar.planner.vocabulary_passes import op_seconds
from autopar.planner.wanted import Wanted
from autopar.search.gradients import Kind, kinds_by_call
from autopar.search.hulls import Array, hull
from autopar.spmd import Type


class Key(NamedTuple):
    """What a placement depends on: the rows of a microbatch on one rank, the axes within which they are split, and how
    the head is computed (``head``: over so many pipeline ranks, 0: whole; in ``chunks`` of tokens). ``stages``: state
    has to fit in so many ranks (0: it may be as large as it likes). ``several``: a batch is several microbatches, in
    which not every model can be cut; ``copies``: there is a dp, over which gradients are summed (``dp``: of so many
    ranks, where that matters). ``counted``: where tp may leave parameters whole or split them, about how many
    microbatches share what a step does once; without end, passes are the fastest (0: there is no such choice)."""

    rows: int
    ep: int
    cp: int
    tp: int
    borrowed: tuple[str, ...] = ()
    head: int = 0
    chunks: int = 1
    stages: int = 0
    several: bool = False
    copies: bool = False
    streamed: bool = False
    dp: int = 0
    counted: float = 0

    @property
    def plain(self) -> Key:
        """The one that says what the passes of the same ranks cost, whatever else these hold or compute."""
        return self._replace(head=0, chunks=1, stages=0, streamed=False)

    @property
    def inner(self) -> int:
        """Ranks that share the rows of one microbatch."""
        return self.cp * self.tp

    def axes(self) -> list[str]:
        return [axis for axis in ("ep", "cp", "tp") if getattr(self, axis) > 1]


@dataclass(frozen=True)
class Unit:
    """One call that stages are cut between: seconds of its passes of one microbatch, and of its weights' gradients."""

    block: int
    forward: float
    backward: float
    weights: float

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


@dataclass
class Profile:
    """A placed model, its costs and what it keeps; of these the parts that don't depend on pp and dp."""

    key: Key
    placed: Placed
    costs: list[BlockCost]
    units: list[Unit]
    computed: list[Computed]
    _hulls: dict[tuple[int, str], tuple[Array, Array]] = field(default_factory=dict)
    _costs: dict[Mesh, list[BlockCost]] = field(default_factory=dict)

    @property
    def model(self) -> Model:
        return self.placed.model

    @cached_property
    def shared(self) -> set[str]:
        """Names of the weights that several calls have."""
        counts = Counter(name for call in self.model.calls for name in set(call.parameters))
        return {name for name, count in counts.items() if count > 1}

    @cached_property
    def activations(self) -> Activations:
        """What calls keep; made when bounds by memory ask for it."""
        request = self.placed.request
        machine = Machine.of(request.cluster, request.mesh, request.options.zero_ranks)
        return activations_of(self.model, self.costs, machine, request.options, self.placed.rulings)

    @cached_property
    def is_of_its_dp(self) -> bool:
        """Whether values change between shards and whole ones on dp, so that their shapes depend on its size: rows of
        the batch stay where they are."""
        return _is_of_its_dp(self.model)

    @cached_property
    def further_units(self) -> list[Unit]:
        """What units take at least, of more ranks or of such that are further apart."""
        pairs = ((unit, self.slack[unit.block]) for unit in self.units)
        return [replace(u, forward=u.forward - less[0], backward=u.backward - less[1]) for u, less in pairs]

    @cached_property
    def seconds(self) -> float:
        """Of all calls, forward and backward of one microbatch."""
        return math.fsum(unit.seconds for unit in self.units)

    @cached_property
    def forward_seconds(self) -> float:
        return math.fsum(unit.forward for unit in self.units)

    @cached_property
    def issued_calls(self) -> int:
        """What the host issues for a microbatch's passes."""
        return sum(sum(self.costs[unit.block].passes(split=False)) for unit in self.units)

    def host_passes(self, block: int) -> tuple[float, float]:
        """Seconds that the host needs for the passes of a call of ``block``, forward and backward (of both parts of
        it), where it has no lead; zeros where it has."""
        cost, device = self.costs[block], self.placed.request.cluster.device
        forward, backward = cost.passes(split=True) if cost.reads_counts else (0, 0)
        return step.host_seconds(forward, device), step.host_seconds(backward, device)

    @cached_property
    def host_units(self) -> list[Unit]:
        """Units by what the host needs for them where passes wait for it; all of a backward may be of its weights'
        gradients. None where it has a lead everywhere."""
        each = [(unit.block, *self.host_passes(unit.block)) for unit in self.units]
        return [Unit(*both, both[-1]) for both in each] if any(both[1] for both in each) else []

    @cached_property
    def waiting_units(self) -> list[Unit]:
        """Units whose passes wait for the host, as those of stages of them alone do."""
        each = ((unit, *self.host_passes(unit.block)) for unit in self.units)
        return [replace(u, forward=max(u.forward, ahead), backward=max(u.backward, back)) for u, ahead, back in each]

    @cached_property
    def message_bytes(self) -> tuple[int, int]:
        """Of a microbatch, what any two stages send each other at least: on, and back."""
        return least_message(self.model, self.placed.request.mesh, staged_calls(self.model))

    @cached_property
    def trained(self) -> int:
        """How many parameters it trains."""
        return sum(known.trainable and not known.is_buffer for known in self.model.parameters.values())

    @cached_property
    def inner_calls(self) -> int:
        """What the host issues for a microbatch's passes of all calls but the first and the last, at least."""
        return sum(sum(self.costs[unit.block].passes(split=True)) for unit in self.units[1:-1])

    @cached_property
    def whole_share(self) -> float:
        """Of the trained elements that a rank has, those of parameters that aren't split though there is tp."""
        whole = self.weights[()].elements if () in self.weights else 0
        total = sum(each.elements for each in self.weights.values())
        return whole / total if self.key.tp > 1 and total else 0.0

    def sent_between(self, axis: str, stride: int = 1) -> list[tuple[float, float]]:
        """By block, what the passes of a call would wait for messages along ``axis``, the only one that this placement
        has, if its ranks were ``stride`` apart: forward and backward."""
        request = self.placed.request
        mesh = Mesh(**{axis: getattr(self.key, axis), "cp" if axis == "ep" else "tp": stride}) if stride > 1 else None
        costs = self._costs_apart(Machine.of(request.cluster, self.mesh(mesh))) if mesh else self.costs
        found = []
        for cost in costs:
            sent = [both for (along, _), both in cost.wires.items() if along == axis]
            found.append((math.fsum(both[0] for both in sent), math.fsum(both[1] for both in sent)))
        return found

    def _costs_apart(self, machine: Machine) -> list[BlockCost]:
        """What blocks cost where tokens travel to experts as is faster there."""
        if self.key.ep == 1 or self.placed.request.options.dispatch == FLAT:
            return self.costs_on(machine)
        ways = {1, nodes_of(("ep",), self.placed.request.cluster, machine.mesh)}
        pairs = zip(self.model.blocks, self.computed, strict=True)
        tries = ((block_cost(block, machine.by_way_of(way), computed) for way in ways) for block, computed in pairs)
        return [min(costs, key=lambda cost: cost.seconds) for costs in tries]

    @cached_property
    def slack(self) -> list[tuple[float, float]]:
        """By block, by how much the passes of a call may be shorter, forward and backward, where more ranks share them,
        or ranks are further apart: links within a node may have all of their wires, and tokens travel by way of other
        nodes, at least as many as here, as if all passed on as many rows."""
        request = self.placed.request
        few = request.cluster.intra_node
        near = replace(few, peer_bytes_per_second=0.0)
        machine = Machine.of(replace(request.cluster, intra_node=near), self.mesh(request.mesh))
        found = []
        for block, computed, cost in zip(self.model.blocks, self.computed, self.costs, strict=True):
            along = {axis for routing in travelling(block) for axis in exchange_axes(routing)}
            if along and request.options.dispatch != FLAT:
                ways = list(self._ways_along(along))
            else:
                ways = [] if near == few else [1]
            tries = [block_cost(block, machine.at_least(way), computed) for way in ways]
            forward = min((each.forward_seconds for each in tries), default=math.inf)
            backward = min((each.backward_seconds for each in tries), default=math.inf)
            found.append((max(0.0, cost.forward_seconds - forward), max(0.0, cost.backward_seconds - backward)))
        return found

    def _ways_along(self, axes: Set[str]) -> Iterator[int]:
        """Over how many nodes ranks along ``axes`` may lie: as here, or further apart because of what is inside."""
        request = self.placed.request
        mesh, inner = self.mesh(request.mesh), itertools.takewhile(axes.__contains__, reversed(AXES))
        ranks, stride = math.prod(map(mesh.size, axes)), min(map(mesh.stride, axes))
        most = max(1, request.cluster.devices_per_node // stride)
        on_node = [size for size in range(1, min(ranks, most) + 1) if ranks % size == 0]
        least = min(on_node[-1], math.prod(map(mesh.size, inner)))  # nothing comes between these
        return (ranks // size for size in on_node if size >= least)

    def hull(self, block: int, call: int, recompute: str) -> tuple[Array, Array]:
        """What ``block``, in its ``call``, may keep of a microbatch (bytes, falling) for how many seconds more."""
        if (block, recompute) not in self._hulls:
            choices = self.activations.choices[block]
            options = (choices.none,) if recompute == "none" else choices.frontier
            pairs = [(self.activations.call_bytes(call, each), each.seconds) for each in options]
            self._hulls[block, recompute] = hull(pairs)
        return self._hulls[block, recompute]

    @cached_property
    def fixed_seconds(self) -> float:
        """Of one microbatch, whatever its size: a launch for each op, forward and backward."""
        return math.fsum(sum(self.launches[unit.block]) for unit in self.units)

    @cached_property
    def launches(self) -> list[tuple[float, float]]:
        """By block, seconds of a launch for each op, forward and backward."""
        launch = self.placed.request.cluster.device.launch_seconds
        found = []
        for cost in self.costs:
            ops = [node for node, seconds in cost.op_seconds.items() if seconds >= launch > 0]
            found.append((launch * len(ops), launch * sum(info(node).meta.needs_grad for node in ops)))
        return found

    @cached_property
    def passes(self) -> tuple[float, float, float]:
        """Seconds of a microbatch through all units, with what they wait for the host: forward, backward, and weights'
        gradients of that."""
        each = zip(*((unit.forward, unit.backward, unit.weights) for unit in self.waiting_units), strict=True)
        forward, backward, weights = map(math.fsum, each)
        return forward, backward, weights

    @cached_property
    def unit_parameters(self) -> list[Counter[Kind]]:
        """Elements of the trained parameters of each unit; equal ones are one object."""
        model, kinds = self.model, kinds_by_call(self.model)
        found = [kinds[i] for i in staged_calls(model)]
        one: dict[Hashable, Counter[Kind]] = {}
        return [one.setdefault(frozenset(each.items()), each) for each in found]

    @cached_property
    def layers(self) -> Counter[tuple[str, ...]]:
        """By the axes that trained parameters are split on, how many units have any."""
        return Counter(split for kinds in self.unit_parameters for split in {kind.split for kind in kinds})

    @cached_property
    def _sums(self) -> dict[str, tuple[str, ...]]:
        return parameter_sums(self.model)

    @cached_property
    def weights(self) -> dict[tuple[str, ...], Weights]:
        """Of all trained parameters, by the axes that they are split on."""
        return self._weights(lambda axes, sums: True)

    @cached_property
    def summed(self) -> dict[tuple[str, ...], Weights]:
        """Of those whose gradient is a sum over all ranks that they are whole on."""
        return self._weights(lambda axes, sums: axes <= sums)

    @cached_property
    def summed_partly(self) -> dict[tuple[str, ...], Weights]:
        """Of those whose gradient is a sum over some of them, too: others may have computed the same."""
        return self._weights(lambda axes, sums: axes <= sums or not axes.isdisjoint(sums))

    def _weights(self, counts: Callable[[set[str], set[str]], bool]) -> dict[tuple[str, ...], Weights]:
        """Of those that count, by the axes of ranks that they are whole on, and those over which gradients are sums."""
        model, sums = self.model, self._sums
        found: dict[tuple[str, ...], Weights] = {}
        splits: dict[int, tuple[str, ...]] = {}  # equal layers share what is known of a parameter
        for name, data in _parameters(model).items():
            known = model.parameters[name]
            if known.trainable and not known.is_buffer:
                if id(data) not in splits:
                    splits[id(data)] = tuple(axis for axis, kind in data.types().items() if kind.is_shard)
                split = splits[id(data)]
                if not counts(set(self.placed.request.mesh.data_axes(split)), set(sums[name])):
                    continue
                here = Weights(
                    data.meta.numel, data.meta.bytes, data.meta.numel * (known.master or data.meta.dtype).itemsize
                )
                found[split] = found.get(split, Weights(0, 0, 0)) + here
        return found

    def mesh(self, mesh: Mesh) -> Mesh:
        """``mesh`` in the order of sequences that was chosen."""
        return replace(mesh, paired=self.placed.request.mesh.paired)

    def costs_on(self, machine: Machine) -> list[BlockCost]:
        """What blocks cost there."""
        if machine.mesh not in self._costs:
            pairs = zip(self.model.blocks, self.computed, strict=True)
            self._costs[machine.mesh] = [block_cost(block, machine, computed) for block, computed in pairs]
        return self._costs[machine.mesh]


@dataclass(frozen=True)
class Weights:
    """Of some parameters: their elements, and bytes of the copies that are computed with and of those trained."""

    elements: int
    copies: int
    masters: int

    def __add__(self, other: Weights) -> Weights:
        return Weights(self.elements + other.elements, self.copies + other.copies, self.masters + other.masters)

    def times(self, share: float) -> Weights:
        """That part of each."""
        return Weights(*(round(share * each) for each in (self.elements, self.copies, self.masters)))


def _parameters(model: Model) -> dict[str, Info]:
    return {
        name: info(node)
        for call in model.calls
        for name, node in zip(call.parameters, model.block_of(call).parameters, strict=True)
    }


class _Rows(NamedTuple):
    """A model local to microbatches and dp; ``dp``: the only one that it serves (0: it serves any)."""

    local: Local
    dp: int


class Models(Protocol):
    """A model with sequences whole (``[False]``), and with sequences that ranks share (``[True]``, for ``cp > 1``)."""

    def __getitem__(self, splits_sequences: bool) -> Model: ...


@dataclass
class Profiler:
    """Makes profiles, each once: of ``models`` on ``cluster`` under ``options``. ``refused`` has what can't be
    placed."""

    models: Models
    cluster: Cluster
    options: Options
    expert_load: Mapping[str, Sequence[float]]
    known: dict[Key, Profile] = field(default_factory=dict)
    refused: dict[Key, AutoparError] = field(default_factory=dict)
    _rulings: Rulings = field(default_factory=Rulings)
    _started: dict[tuple[object, ...], Local] = field(default_factory=dict)
    _split: dict[tuple[object, ...], _Rows] = field(default_factory=dict)
    _placed: dict[tuple[Key, Mesh, int], Profile] = field(default_factory=dict)

    def aside(self) -> Profiler:
        """With what is known so far. What either places isn't known to the other, though it needn't be placed twice."""
        return replace(self, known=dict(self.known), refused=dict(self.refused))

    def under(self, options: Options) -> Profiler:
        """Of the same model under other ``options``; what is known stays where these differ in memory alone, but for
        what was placed so that state fits."""
        if options == self.options:
            return self
        if options != self.options.model_copy(update={"budget_bytes": options.budget_bytes}):
            return Profiler(self.models, self.cluster, options, self.expert_load)
        known = {key: profile for key, profile in self.known.items() if not key.stages}
        refused = {key: error for key, error in self.refused.items() if not key.stages}
        placed = {asked: profile for asked, profile in self._placed.items() if not asked[0].stages}
        return replace(self, options=options, known=known, refused=refused, _placed=placed)

    def of(self, key: Key, mesh: Mesh, microbatches: int) -> Profile | None:
        """The profile for ``key``, placed for one of the jobs that it serves; None where that is refused."""
        key = self.key_for(key, mesh)
        if key not in self.known and key not in self.refused:
            try:
                self.known[key] = self._once(key, mesh, microbatches)
            except AutoparError as error:
                self.refused[key] = error
        return self.known.get(key)

    def placed(self, key: Key, mesh: Mesh) -> Profile | None:
        """The same, where there is one yet."""
        return self.known.get(self.key_for(key, mesh))

    def was_tried(self, key: Key, mesh: Mesh) -> bool:
        """Whether it is placed, or refused."""
        key = self.key_for(key, mesh)
        return key in self.known or key in self.refused

    def logits_seconds(self) -> float:
        """Of the product that makes the logits of the whole batch, on one device; 0 without one before a loss."""
        try:
            *_, head = find_head(self.models[False])
        except StageError:
            return 0.0
        forward, _ = op_seconds(head.product, self.cluster.device)
        return forward

    def cuts_rows(self, batch: int) -> bool:
        """Whether a ``batch`` may be cut into microbatches: its rows are computed each by itself, and of the whole
        batch there are but sums."""
        factor = next((n for n in range(2, batch + 1) if batch % n == 0), None)
        if factor is None or self.options.statistics != "batch":
            return False
        return self.of(Key(batch // factor, 1, 1, 1, several=True), Mesh(), factor) is not None

    def key_for(self, key: Key, mesh: Mesh) -> Key:
        """The key of what serves ``mesh``: with its dp where what was placed is for another one."""
        known = self.known.get(key)
        if known is None or known.placed.request.mesh.dp == mesh.dp or not known.is_of_its_dp:
            return key
        return key._replace(dp=mesh.dp)

    def _once(self, key: Key, mesh: Mesh, microbatches: int) -> Profile:
        asked = key, mesh, microbatches
        if asked not in self._placed:
            self._placed[asked] = self._made(*asked)
        return self._placed[asked]

    def _made(self, key: Key, mesh: Mesh, microbatches: int) -> Profile:
        options = self.options.model_copy(update={"head_chunks": key.chunks, "zero_ranks": 0})  # these are a point's
        state = (self.options.budget_bytes or self.cluster.device.memory_bytes) * key.stages or BOUNDLESS
        vocabulary = "vocab-1" if key.head else "redistributed"  # what is placed is the same for all split heads
        wanted, load = Wanted("1f1b", vocabulary), dict(self.expert_load)
        request = Request(
            mesh, microbatches, self.cluster, wanted, options, load, state, key.streamed, key.counted or None
        )
        placed = place_inner(self._rows(key, request), request)
        machine = Machine.of(self.cluster, placed.request.mesh)
        stays = unhoisted(placed.model)
        both = zip(placed.model.blocks, reached_results(placed.model), strict=True)
        computed = [Computed.of(block, machine.device, stays, self._rulings.op, results) for block, results in both]
        pairs = zip(placed.model.blocks, computed, strict=True)
        costs = [block_cost(block, machine, compute) for block, compute in pairs]
        return Profile(key, placed, costs, units_of(placed.model, costs), computed)

    @cached_property
    def _table(self) -> Table | None:
        return table_of(self.models[False])

    def _table_rows(self, tp: int) -> int:
        """Of a whole head's, as that many ranks may split it: where it is longer for them, they start from another
        graph."""
        return self._table.padded(tp) if self._table is not None else 0

    def _rows(self, key: Key, request: Request) -> Local:
        """The model local to microbatches and dp, which profiles have in common that split rows further."""
        uneven = self.options.expert_imbalance != 1.0 or self.expert_load
        head = (key.head, key.tp) if key.head else (0, self._table_rows(key.tp))
        start = (key.cp > 1, *head, key.chunks, request.mesh.experts if uneven else 1)
        if start not in self._started:
            self._started[start] = begin(self.models[key.cp > 1].copy(), request, None, self._rulings)
        rows, dp = (*start, key.rows * key.ep, key.several, key.copies), request.mesh.dp
        found = self._split.get((*rows, dp)) or self._split.get((*rows, 0))
        if found is None:
            local = split_rows(self._started[start], request)
            found = _Rows(local, dp if _is_of_its_dp(local.model) else 0)
            self._split[*rows, found.dp] = found
        return found.local


def _is_of_its_dp(model: Model) -> bool:
    return any(_splits_on_dp(node) for block in model.blocks for node in block.ops)


def _splits_on_dp(node: fx.Node) -> bool:
    """Whether it is a change on dp of what is split there."""
    src, dst = node.kwargs.get("src"), node.kwargs.get("dst")
    axis = node.args[1] if isinstance(src, Type) and isinstance(dst, Type) else None
    if not isinstance(axis, AxisRef) or axis.name != "dp":
        return False
    return src.is_shard or dst.is_shard


def units_of(model: Model, costs: Sequence[BlockCost]) -> list[Unit]:
    """The calls that stages are cut between, in order."""
    calls = [model.calls[i] for i in staged_calls(model)]
    blocks = [(call.block, costs[call.block]) for call in calls]
    return [Unit(block, cost.forward_seconds, cost.backward_seconds, cost.weight_seconds) for block, cost in blocks]
